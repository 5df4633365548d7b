"""Quantized weights that are loaded in shards, from any folder, and what else is done with such models."""

import contextlib
import copy
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.cli.split import split_checkpoint
from autopar.errors import CheckpointError, ConfigError
from autopar.storage.files import RangeFile
from autopar.stored import as_plain, stored_weights
from tests.exchange import by_rank_0, raises_everywhere
from tests.features.peft.adapted import randomise_adapters, whole_of, with_lora
from tests.features.quantized.models import FAMILIES, FORMS, adapted, batches, bitsandbytes, how, quantized, write
from tests.features.quantized.test_training import gradients
from tests.harness.worlds import pooled
from tests.parity import all_close, close

peft = pytest.importorskip("peft")
FILE = "model.safetensors"


def saved(folder: Path, form: str, family: str = "llama") -> Any:
    """Write what ``save_pretrained`` of a quantized model does; returns the model's class."""
    by_rank_0(lambda: quantized(form, family).save_pretrained(folder))()
    return FAMILIES.get(family, FAMILIES["llama"])[0]


def same_numbers(model: Any, whole: Any) -> None:
    """The weights of a rank, dequantized, are its part of the whole ones, and its bytes are in proportion."""
    for path, stored in stored_weights(model).items():
        layout, due = model._autopar.plan.tensors[f"{path}.weight"].layout, stored_weights(whole)[path]
        part = due.dequantized() if layout is None else layout.shard(due.dequantized(), model.mpu.tp.rank)
        assert torch.equal(stored.dequantized(), part), path
        held, every = (module.get_submodule(path).weight for module in (model, whole))
        if layout is not None and held.shape[-1] == every.shape[-1]:  # int8 has columns of zeros where inputs are cut
            assert held.nbytes * layout.size == every.nbytes * layout.local_size(model.mpu.tp.rank)


@pooled(world_size=2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.tier("test", only=("nf4-llama",))
def test_shards_are_those_of_the_whole(form: str, family: str, tmp_path: Path) -> None:
    kind = saved(tmp_path, form, family)
    for config in MESHES:
        whole = kind.from_pretrained(tmp_path)
        model = autopar.from_pretrained(AutoModelForCausalLM, tmp_path, config)
        same_numbers(model, whole)
        same(model, autopar.initialize(whole, config))
        assert model.is_quantized and not any(parameter.is_meta for parameter in model.parameters())


@pooled(world_size=2)
@pytest.mark.parametrize("form", ["nf4 nested", "int8"])
def test_a_rank_reads_its_share_and_no_more(form: str, tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1024}
        LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=100)).save_pretrained(tmp_path / "plain")
        LlamaForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=how(form)).save_pretrained(tmp_path)
    dist.barrier()
    read: list[int] = []
    real = RangeFile.read_runs

    def counting(self: RangeFile, target: memoryview, places: Iterable[tuple[int, int]], length: int) -> None:
        places = list(places)
        real(self, target, places, length)
        read.append(len(places) * length)

    for config in ({"tp": 2}, {"pp": 2}):
        read.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RangeFile, "read_runs", counting)
            model = autopar.from_pretrained(LlamaForCausalLM, tmp_path, config)
        assert sum(read) < 0.55 * (tmp_path / FILE).stat().st_size, config
        assert max(read) <= max(parameter.nbytes for parameter in model.parameters())


@pooled(world_size=2)
@pytest.mark.parametrize("form", ["nf4 nested", "int8"])
def test_copies(form: str, tmp_path: Path) -> None:
    kind = saved(tmp_path, form)
    ids = batches(1)[0]["input_ids"]
    plain, due = kind.from_pretrained(tmp_path).train(), kind.from_pretrained(tmp_path).train()
    model: Any = autopar.initialize(copy.deepcopy(plain), {"tp": 2})
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, due(ids).logits)  # it has its own weights and scales
    assert model.num_parameters() == plain.num_parameters()
    with autopar.lazy_init():
        lazy = copy.deepcopy(kind.from_pretrained(tmp_path))
    for other in (copy.deepcopy(model), autopar.initialize(lazy, {"tp": 2})):
        same(other, model)
        with torch.no_grad():
            close(other.train()(ids).logits[:], due(ids).logits, "logits of a copy", 1e-6)
    assert all(weight.module is layer for weight, layer in weights_of(lazy))
    copied = copy.deepcopy(model)
    model(ids)
    autopar.deparallelize(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    state, whole = model.state_dict(), plain.state_dict()
    assert set(state) == set(whole) and all(torch.equal(state[name], whole[name]) for name in whole)
    with torch.no_grad():
        close(copied(ids).logits[:], due(ids).logits, "logits of a copy of what is whole again", 1e-6)


def weights_of(model: Any) -> list[tuple[Any, Any]]:
    layers = [model.get_submodule(path) for path in stored_weights(model)]
    return [(layer.weight, layer) for layer in layers if hasattr(layer.weight, "module")]


@pooled(world_size=2)
def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    saved(tmp_path, "nf4 nested")
    name = "model.layers.1.mlp.up_proj.weight"
    for change, said in (
        ({f"{name}.absmax": None, f"{name}.quant_map": None}, f"does not hold {name} as bitsandbytes nf4"),
        ({f"{name}.absmax": torch.zeros(7, dtype=torch.uint8)}, "for a weight of [320, 192], got [7]"),
    ):
        files = by_rank_0(load_file)(tmp_path / FILE)
        kept = {key: value for key, value in (files | change).items() if value is not None}
        by_rank_0(save_file)(kept, tmp_path / FILE, {"format": "pt"})
        with raises_everywhere(CheckpointError, said):
            autopar.from_pretrained(AutoModelForCausalLM, tmp_path, {"tp": 2})
        by_rank_0(save_file)(files, tmp_path / FILE, {"format": "pt"})

    folder = written(tmp_path)
    with pytest.raises(ConfigError, match="does not support load_in_4bit: write quantization_config=BitsAndBytesConf"):
        autopar.from_pretrained(AutoModelForCausalLM, folder, {"tp": 2}, load_in_4bit=True)


MESHES: list[dict[str, Any]] = [{"tp": 2}, {"pp": 2}, {}]


def written(folder: Path, family: str = "llama") -> Path:
    by_rank_0(write)(folder, family)
    return folder


def same(model: Any, other: Any) -> None:
    one, two = model.state_dict(), other.state_dict()
    assert set(one) == set(two)
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype and torch.equal(tensor, two[name]), name
    held = stored_weights(model)
    assert held and all(stored.shape == stored_weights(other)[path].shape for path, stored in held.items())


@pooled(world_size=2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.tier("test", only=("nf4 nested",))
def test_shards_are_quantized_to_the_same_bytes(form: str, tmp_path: Path) -> None:
    folder = written(tmp_path)
    for config in MESHES:
        due = autopar.initialize(quantized(form), config)
        settings = how(form)
        kept: dict[str, Any] = {"quantization_config": settings, "dtype": torch.float32}
        model = autopar.from_pretrained(AutoModelForCausalLM, folder, config, **kept)
        same(model, due)
        assert model.is_quantized and model.config.quantization_config.quant_method == settings.quant_method
        ids = batches(1)[0]["input_ids"]
        if config.get("pp", 1) == 1:
            close(model.train()(ids).logits[:], due.train()(ids).logits[:], "logits")


@pooled(world_size=2)
@pytest.mark.parametrize("form", ["nf4 nested", "int8"])
def test_adapters_of_a_model_that_no_process_holds(form: str, tmp_path: Path) -> None:
    folder = written(tmp_path)
    with autopar.lazy_init():
        model: Any = LlamaForCausalLM.from_pretrained(folder, quantization_config=how(form), dtype=torch.float32)
    assert all(parameter.is_meta for parameter in model.parameters())
    settings = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "target_modules": "all-linear"}
    model = autopar.initialize(peft.get_peft_model(model, peft.LoraConfig(**settings)).train(), {"tp": 2})
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    with autopar.full_params(model, trained):  # PEFT begins with zeros
        randomise_adapters(model)
    plain = with_lora(quantized(form), target_modules="all-linear").train()
    start = whole_of(model, {name: model.get_parameter(name) for name in trained})
    plain.load_state_dict(start, strict=False)
    batch = batches(1)[0]
    losses = [each(**batch).loss for each in (plain, model)]
    for loss in losses:
        loss.backward()
    close(losses[1].detach(), losses[0].detach(), "loss")
    all_close(whole_of(model, gradients(model)), gradients(plain), "{}")


IDS = batches(1)[0]["input_ids"]


def packing(model: Any) -> list[bool]:
    kinds = bitsandbytes.nn.Linear4bit
    return [bool(module.support_avx512bf16_for_cpu) for module in model.modules() if isinstance(module, kinds)]


def let_pack(model: Any) -> Any:
    """Let evaluation pack weights, as a model does that was just loaded, on a CPU that has AVX512-BF16."""
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = True
    return model


@pooled(world_size=2)
@pytest.mark.parametrize("config", [{"tp": 2}, {}], ids=str)
def test_weights_are_not_packed_and_go_on_training(config: dict[str, Any]) -> None:
    model = autopar.initialize(let_pack(adapted("nf4 nested")), config)
    assert not any(packing(model))
    with torch.no_grad():
        evaluated = model.eval()(IDS).logits[:]
    plain = adapted("nf4 nested")
    close(evaluated, plain(IDS).logits, "logits")
    same(model, autopar.initialize(adapted("nf4 nested"), config))
    model.train()(**batches(1)[0]).loss.backward()
    assert len(gradients(model)) == 28
    autopar.deparallelize(model)
    assert len(set(packing(model))) == 1  # as the machine has it


@pooled(world_size=2)
def test_merged_adapters_and_sizes_of_weights() -> None:
    plain, model = adapted("nf4"), autopar.initialize(adapted("nf4"), {"tp": 2})
    with raises_everywhere(ConfigError, "deparallelize(model).merge_and_unload(...)", "on the full model."):
        model.merge_and_unload()
    plain.merge_adapter(), model.merge_adapter()
    close(model(IDS).logits[:], plain(IDS).logits, "logits")
    plain.unmerge_adapter(), model.unmerge_adapter()
    logits = autopar.deparallelize(model).merge_and_unload()(IDS).logits  # as the error says
    close(logits, plain.merge_and_unload()(IDS).logits, "logits of the merged model")

    plain, model = quantized("nf4"), autopar.initialize(quantized("nf4"), {"tp": 2})
    assert model.num_parameters() == plain.num_parameters()
    shown = [192, 192] if model.mpu.tp.rank == 0 else [128, 192]
    assert f"weight {shown} of [320, 192]" in repr(model.model.layers[0].mlp.up_proj)
    with contextlib.redirect_stdout(io.StringIO()):
        text = autopar.summary(model)
    held = sum(p.numel() * (2 if p.dtype == torch.uint8 else 1) for p in model.parameters())
    assert f"this rank: {held:,} parameters, 0." in text
    name = "model.layers.0.mlp.up_proj.weight"
    words = f" is not supported with quantized weights, got {name} (bitsandbytes nf4)"
    with raises_everywhere(ConfigError, f"full_params{words}"):
        autopar.full_params(model, name).__enter__()
    with raises_everywhere(ConfigError, f"full_tensor{words}"):
        autopar.full_tensor(model.model.layers[0].mlp.up_proj.weight)
    assert isinstance(model.lm_head, nn.Linear) and autopar.full_tensor(model.lm_head.weight).shape == (131, 192)


@pooled(world_size=2)
def test_half_precision_and_all_parameters_in_the_optimizer() -> None:
    model: Any = adapted("nf4")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"tp": 2, "precision": {"dtype": "bf16"}, "gradient_clipping": 1.0}
    model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
    losses = []
    for _ in range(3):
        loss = model(**batches(1)[0]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    assert model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight.dtype == torch.uint8


@pytest.mark.tier("all")
@pytest.mark.parametrize("form", ["nf4-double", "int8"])
def test_verify_command(form: str) -> None:
    arguments = ["verify", "llama", "--tp", "2", "--quantization", form, "--lora", "4"]
    result = CliRunner().invoke(app, [*arguments, "--checks", "forward,backward,step"])
    assert result.exit_code == 0, result.output
    assert "worst gradient" in result.stdout and "all checks pass" in result.stdout
    allowed = {"2e-02" if form == "int8" else "1e-04"}  # inputs of int8 layers are rounded
    assert allowed == {line.split()[-2] for line in result.stdout.splitlines() if line.strip().startswith("forward")}


def test_what_is_refused_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = let_pack(quantized("nf4"))
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ConfigError, match="holds 14 quantized weights, which are not split"):
        split_checkpoint(tmp_path / "saved", tmp_path / "shards", tp=2)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="cannot send 14 quantized weights to new processes"):
        autopar.verify(model, {"tp": 2})
    state = model.model.layers[1].mlp.up_proj.weight.quant_state
    state.packing_format_for_cpu = True  # as on a CPU that has AVX512-BF16
    with pytest.raises(ConfigError) as caught, as_plain(model):
        pass
    assert str(caught.value).startswith("a Linear4bit must not be evaluated before initialize, since bitsandbytes")
    assert "Load the model again, and call autopar.initialize before evaluating it" in str(caught.value)
