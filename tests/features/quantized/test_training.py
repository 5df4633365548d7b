"""QLoRA over ranks: loss, every gradient, weights after steps and tokens are those of one process."""

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.errors import CheckpointError, ConfigError
from autopar.plan.make_plan import make_plan
from autopar.policy.match import find_policy
from autopar.stored import as_plain
from tests.exchange import raises_everywhere
from tests.features.peft.adapted import whole_of
from tests.features.quantized.models import FAMILIES, FORMS, adapted, batches, bitsandbytes, quantized
from tests.harness.worlds import pooled
from tests.parity import all_close, close

peft = pytest.importorskip("peft")
functional = pytest.importorskip("bitsandbytes.functional")


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def train(model: Any, parts: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    losses = [model(**part).loss for part in parts]
    for loss in losses:
        loss.backward()
    return [loss.detach() for loss in losses]


def check_training(
    form: str, family: str, config: dict[str, Any], trains: tuple[Any, Any] = (train, train), **settings: Any
) -> Any:
    plain, model = adapted(form, family, **settings), adapted(form, family, **settings)
    model = autopar.initialize(model, config)
    parts = batches(2)
    for one, other in zip(trains[0](plain, parts), trains[1](model, parts), strict=True):
        close(other, one, "loss")
    found, due = whole_of(model, gradients(model)), gradients(plain)
    assert set(found) == set(due)
    all_close(found, due, "{}")
    return plain, model


class RoundedAlike:
    """Inputs of 8-bit products: the parallelized model takes the numbers of the plain one, which runs first.

    A sum in another order moves an input by its last bit, and so, now and then, to the next of 255 numbers.
    """

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self.count = 0

    @contextmanager
    def plain(self) -> Iterator[None]:
        def keep(inputs: torch.Tensor, threshold: float = 0.0) -> Any:
            self._kept.append(quantize(inputs, threshold=threshold))
            return self._kept[-1]

        quantize = functional.int8_vectorwise_quant
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(functional, "int8_vectorwise_quant", keep)
            yield

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Two ranks, whose own numbers may be one step away, now and then."""
        moved: list[int] = []

        def follow(inputs: torch.Tensor, threshold: float = 0.0) -> Any:
            numbers, scales, outliers = quantize(inputs, threshold=threshold)
            due, due_scales, _ = self._kept.pop(0)
            if numbers.shape != due.shape:  # inputs of a row layer, and four columns for their scale
                cut = numbers.shape[1] - 4
                due = torch.cat([due[:, :cut] if dist.get_rank() == 0 else due[:, -cut:], numbers[:, cut:]], 1)
            steps = (numbers.int() - due).abs()
            moved.append(int(steps.sum()))
            close(scales, due_scales, "scales", 1e-3)  # of fp16
            assert steps.max() <= 1, "another number, and not the next one"
            return due, due_scales, outliers

        quantize = functional.int8_vectorwise_quant
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(functional, "int8_vectorwise_quant", follow)
            yield
        assert not self._kept and sum(moved) <= 20  # of some 100,000
        self.count += len(moved)


@pooled(world_size=2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.tier("test", only=("nf4 nested-llama",))
def test_losses_and_gradients(form: str, family: str) -> None:
    plain, model = check_training(form, family, {"tp": 2})
    held = sum(p.numel() for p in model.parameters() if p.dtype in (torch.uint8, torch.int8))
    whole = sum(p.numel() for p in plain.parameters() if p.dtype in (torch.uint8, torch.int8))
    assert whole * 0.3 < held < whole * 0.7  # 3 heads, 5 blocks of 64
    plain.eval(), model.eval()
    ids = batches(1)[0]["input_ids"][1:]
    alike, tokens = RoundedAlike(), {"max_new_tokens": 4, "do_sample": False}
    with torch.no_grad(), alike.plain():
        due, chosen = plain(ids).logits, plain.generate(input_ids=ids, **tokens)
    with torch.no_grad(), alike.ours():
        close(model(ids).logits[:], due, "logits")
        assert torch.equal(model.generate(input_ids=ids, **tokens), chosen)
    assert bool(alike.count) is (form == "int8")


@pooled(world_size=2)
def test_int8_is_trained_by_the_product_of_gpus() -> None:
    functions, alike = pytest.importorskip("bitsandbytes.autograd._functions"), RoundedAlike()

    def train_as(quantized: Any, model: Any, parts: Any) -> Any:
        with quantized():
            return train(model, parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "MatMul8bitFp", functions.MatMul8bitLt)  # a CPU multiplies unrounded inputs
        both = functools.partial(train_as, alike.plain), functools.partial(train_as, alike.ours)
        check_training("int8", "llama", {"tp": 2}, trains=both)
    assert alike.count == 2 * 14


@pooled(world_size=2)
def test_dora() -> None:  # PEFT loses the scales of int8 in the second forward on a CPU
    check_training("nf4 nested", "llama", {"tp": 2}, use_dora=True)


@pooled(world_size=3)
@pytest.mark.parametrize("form", ["nf4 nested", "int8"])
def test_three_ranks_hold_whole_blocks(form: str) -> None:
    _, model = check_training(form, "llama", {"tp": 3})
    layer = model.get_base_model().model.layers[0].mlp.down_proj.base_layer
    each = 64 if form != "int8" else 1
    assert layer.in_features % each == 0 and layer.in_features in (128, 64, 107, 106)


@pytest.mark.tier("all")
@pooled(world_size=4)
@pytest.mark.parametrize("form", ["nf4 nested", "int8"])
def test_steps_on_meshes_and_on_another_one(form: str, tmp_path: Path) -> None:
    plain = adapted(form)
    steps = [torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-3)]
    rows = batches(4)
    meshes: list[dict[str, Any]] = [
        {"tp": 2, "pp": 2, "pipeline": {"num_microbatches": 2}},
        {"tp": 2, "zero": {"stage": 1}},
        {"model_parallelism": {"tensor_parallel_size": 2, "sequence_parallel": True}},
        {"cp": 2, "tp": 2},
    ]
    folder = None
    for number, config in enumerate(meshes):
        model: Any = adapted(form)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
        if folder is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # of another base
                model.from_parallelized(folder, optimizer=optimizer)
        batch = rows[number]
        mine = {name: x.chunk(model.mpu.dp.size)[model.mpu.dp.rank] for name, x in batch.items()}
        if model.mpu.pp.size > 1:
            loss = model.execute_pipeline(mine, broadcast_loss=True).loss
        else:
            loss = model(**mine).loss
            loss.backward()
        autopar.average_gradients(model)
        optimizer.step()
        parts = zip(*(x.chunk(model.mpu.dp.size) for x in batch.values()), strict=True)
        expected = torch.stack([plain(**dict(zip(batch, part, strict=True))).loss for part in parts]).mean()
        expected.backward()
        steps[0].step()
        steps[0].zero_grad()
        if model.mpu.dp.size == 1:
            close(loss.detach(), expected.detach(), "loss")
        folder = str(tmp_path / f"{number}")
        model.save_parallelized(folder, optimizer=optimizer)
        model.save_parallelized(f"{folder} adapters", adapter_only=True)
        dist.barrier()
        loaded = peft.PeftModel.from_pretrained(quantized(form), f"{folder} adapters")
        all_close(dict(loaded.named_parameters()), {n: p for n, p in plain.named_parameters() if p.requires_grad}, "{}")


@pooled(world_size=2)
def test_refusals_and_layers_inside_a_region(tmp_path: Path) -> None:
    model = autopar.initialize(adapted("nf4"), {"tp": 2})
    with raises_everywhere(CheckpointError, "merge_checkpoints=True would leave out 14 quantized weights, such as bas"):
        model.save_parallelized(str(tmp_path / "merged"), merge_checkpoints=True)
    with raises_everywhere(CheckpointError, "hf_weights would leave out 14 quantized weights, such as"):
        list(autopar.hf_weights(model))
    with autopar.full_params(model), torch.no_grad():
        model.get_base_model().lm_head.weight.norm()
    with raises_everywhere(ConfigError, "zero.stage=3 is not supported with quantized weights", "Use zero.stage 1"):
        autopar.initialize(adapted("nf4"), {"zero": {"stage": 3}})
    staged = autopar.initialize(adapted("nf4"), {"pp": 2})
    with raises_everywhere(ConfigError, "deparallelize is not supported with quantized weights"):
        autopar.deparallelize(staged)

    check_region("nf4")
    text = "does not fit mlp.down_proj.weight: its weight (bitsandbytes int8) is 'sharded' inside a region, where ranks"
    sizes = "would hold [160, 160] of 320 inputs with one scale (policy dict:bloc"
    with raises_everywhere(ConfigError, text, sizes, "Use a 'row' rule, quantize it in 4 bits, or exclude it from"):
        check_region("int8")


def test_sizes_that_do_not_fit() -> None:
    sizes = {"hidden_size": 192, "num_attention_heads": 6, "head_dim": 32, "num_key_value_heads": 6}
    model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=320, num_hidden_layers=1, vocab_size=8))
    layer = model.model.layers[0].self_attn
    nf4 = {"quant_type": "nf4", "compress_statistics": False}
    layer.o_proj = bitsandbytes.nn.Linear4bit(192, 192, bias=False, **nf4).to("cpu")
    with as_plain(model), pytest.raises(ConfigError) as error:
        make_plan(model, find_policy(model), 2)
    assert str(error.value) == (
        "tensor_parallel_size=2 does not fit self_attn.o_proj: its weight (bitsandbytes nf4) has blocks of 64 inputs, "
        "and ranks would hold [96, 96] of 192.\n  Use a size that fits this layer: 1, 3."
    )
    assert isinstance(layer.o_proj, nn.Linear)


REGION: dict[str, Any] = {"mlp": {"region": "ffn"}, "mlp.down_proj": {"sharded": "ffn", "dim": 1}}
REGION |= {f"mlp.{name}_proj": {"sharded": "ffn", "dim": 0} for name in ("gate", "up")}


def check_region(form: str) -> None:
    """Layers inside a region that a policy names are as they are outside."""
    plain, model = quantized(form), quantized(form)
    model = autopar.initialize(model, {"tp": 2}, policy={"extends": "llama", "blocks": {"modules": REGION}})
    batch = batches(1)[0]
    close(model(**batch).loss, plain(**batch).loss, "loss")
    assert model.model.layers[0].mlp.down_proj.in_features < 320
