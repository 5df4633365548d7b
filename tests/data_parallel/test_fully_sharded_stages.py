"""ZeRO stages 2 and 3 through pipeline stages, over a part of the replicas, and where modules run by themselves."""

import copy
import os
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import OPTConfig, OPTForCausalLM

import autopar
from autopar.compat.tensors import TorchDispatchMode
from autopar.config.sections import SCHEDULES
from autopar.errors import ConfigError, ConsistencyError
from tests.exchange import raises_everywhere
from tests.harness.tiers import mainly
from tests.harness.worlds import pooled, spawn
from tests.parity import close, language_batches
from tests.pipeline_parallel.deep import deep
from tests.pipeline_parallel.oracle import take_step
from tests.small import gpt2, llama

MODELS = {"gpt2": lambda: gpt2(n_layer=4), "llama": lambda: llama(num_hidden_layers=4)}


def _adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def _start(name: str, **config: Any) -> Any:
    model = MODELS[name]()
    return autopar.initialize(model, {"gradient_clipping": 0.5, **config}, optimizer=_adamw(model))


def _mine(model: Any, step: int) -> dict[str, torch.Tensor]:
    dp = model.mpu.dp
    return {name: each[dp.rank :: dp.size] for name, each in _ragged(step).items()}


def _ragged(seed: int) -> dict[str, torch.Tensor]:
    """Return a batch whose samples have different numbers of labels."""
    batch = next(iter(language_batches(131, count=1, batch=8, seq=9, seed=seed)))
    batch = {name: batch[name] for name in ("input_ids", "labels")}
    for sample in range(8):
        batch["labels"][sample, : sample % 4] = -100
    return batch


def _weights_are(model: Any, plain: Any) -> None:
    found = dict(autopar.hf_weights(model))
    for name, parameter in plain.named_parameters():
        close(found[name], parameter.data, name)


def _train(model: Any, optimizer: Any, plain: Any, steps: int = 3) -> None:
    """Train both on the same batches; evaluate between a backward and its step, and drop a forward."""
    reference, mpu = _adamw(plain), model.mpu
    for step in range(steps):
        batch, mine = _ragged(step), _mine(model, step)
        for each in (model.train(), plain.train()):
            if each is model and mpu.pp.size > 1:
                each.execute_pipeline(mine, optimizer=optimizer)
            elif each is model:  # micro-batches, each loss a share of the mean over the labels of all replicas
                counted = (batch["labels"][:, 1:] != -100).sum() / mpu.dp.size
                for ids, labels in zip(mine["input_ids"].chunk(2), mine["labels"].chunk(2), strict=True):
                    each(input_ids=ids, labels=labels, num_items_in_batch=counted).loss.backward()
            else:
                each(**batch).loss.backward()
        losses = []
        for each in (model.eval(), plain.eval()):
            with torch.no_grad():
                losses.append(each(**batch).loss)
        if losses[0] is not None:
            close(losses[0], losses[1], f"evaluation {step}")
        if step == 1 and mpu.pp.size == 1:
            model.train()(**mine)  # its backward never comes
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        take_step(optimizer, reference)
        close(optimizer.gradient_norm, norm, f"norm {step}")


def _cases() -> list[Any]:
    stages = [(2, schedule) for schedule in SCHEDULES] + [(3, "1f1b"), (3, "gpipe"), (3, "interleaved")]
    return [
        pytest.param(name, *case, id=f"{name}-{case[0]}-{case[1]}", marks=[pytest.mark.tier("sweep")] * (place % 2))
        for at, case in enumerate(stages)
        for place, name in enumerate(MODELS, at)
    ]


@pytest.mark.tier("test", only=("gpt2-2-zbv",))
@pytest.mark.parametrize(("name", "stage", "schedule"), _cases())
@pooled(world_size=4)
def test_stages_train_as_the_plain_model(name: str, stage: int, schedule: str) -> None:
    plain = MODELS[name]()
    pipeline = {"schedule": schedule, "num_microbatches": 4}
    model, optimizer = _start(name, pp=2, zero={"stage": stage}, pipeline=pipeline)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    _train(model, optimizer, plain)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    _weights_are(model, plain)


@pytest.mark.tier("test", only=("3-2-tp1",))
@pytest.mark.parametrize(
    ("stage", "size", "tp"),
    [
        pytest.param(*case, id="{}-{}-tp{}".format(*case))
        for case in ((2, 0, 1), (2, 2, 1), (3, 2, 1), (3, 1, 2), (2, 1, 1))
    ],
)
@pooled(world_size=4)
def test_parts_of_the_replicas_shard(stage: int, size: int, tp: int) -> None:
    plain = MODELS["llama"]()
    config: dict[str, Any] = {"tp": tp, "zero": {"stage": stage, "shard_size": size or None}}
    model, optimizer = _start("llama", **config)
    planned = autopar.plan_memory(plain, config, sequence=9, gpus=4, device="cpu")
    here = sum(parameter.to_local().nbytes for parameter in model.parameters())
    assert here == planned.ranks[0, model.mpu.dp.rank, model.mpu.tp.rank].weights
    _train(model, optimizer, plain)
    _weights_are(model, plain)


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_weights_are_gathered_once_a_pass_or_for_each_micro_batch() -> None:
    """A stage has two blocks, and weights around them: three groups, each of them reduced once."""
    for stage in (2, 3):
        model, optimizer = _start("llama", pp=2, zero={"stage": stage}, pipeline={"num_microbatches": 4})
        batch = _mine(model, 0)
        for _ in range(2):  # the first pass looks at forwards
            with Collectives() as sent:
                model.train().execute_pipeline(batch, optimizer=optimizer)
            take_step(optimizer)
        gathered, reduced = (sent.counts[name] for name in ("_allgather_base_", "_reduce_scatter_base_"))
        last = model.mpu.pp.rank  # there every forward comes before its backward; on the first the second one does, too
        gathers = 3 if stage == 2 else 4 * (2 * 2) + 3 + last  # weights around blocks stay from forward to backward
        assert (gathered, reduced) == (gathers, 3), (stage, sent.counts)


class Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


@pooled(world_size=4)
def test_a_pass_that_fails_leaves_no_gradients_behind() -> None:
    for stage in (2, 3):
        plain = MODELS["gpt2"]()
        model, optimizer = _start("gpt2", pp=2, zero={"stage": stage}, pipeline={"num_microbatches": 4})
        batch = _mine(model, 9)
        calls: list[int] = []

        def fails(outputs: Any, inputs: Any, calls: list[int] = calls) -> torch.Tensor:
            calls.append(1)
            if len(calls) == 3:
                raise ValueError("a batch that is not liked")
            loss: torch.Tensor = outputs.loss
            return loss

        with pytest.raises((ValueError, autopar.PipelineError), match="a batch that is not liked"):
            model.train().execute_pipeline(batch, criterion=fails)
        optimizer.zero_grad()
        _train(model, optimizer, plain)
        _weights_are(model, plain)


@pytest.mark.tier("sweep")
@pooled(world_size=4)
def test_half_precision_accumulates_gradients_of_micro_batches_in_fp32() -> None:
    for schedule, stage in (("1f1b", 3), ("zbv", 2)):
        losses: list[list[torch.Tensor]] = []
        for zero in (1, stage):
            model = MODELS["llama"]()
            pipeline = {"schedule": schedule, "num_microbatches": 4}
            config = {"pp": 2, "zero": {"stage": zero}, "precision": {"dtype": "bf16"}, "pipeline": pipeline}
            model, optimizer = autopar.initialize(model, config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
            losses.append([])
            for step in range(3):
                out = model.train().execute_pipeline(_mine(model, step), optimizer=optimizer, broadcast_loss=True)
                losses[-1].append(out.loss)
                gradients = [p.grad for p in model.parameters() if isinstance(p, DTensor) and p.grad is not None]
                assert zero == 1 or {gradient.dtype for gradient in gradients} == {torch.float32}
                take_step(optimizer)
        for one, other in zip(*losses, strict=True):
            close(other, one, f"loss with stage {stage}", 2e-3)


@pooled(world_size=4)
def test_checkpoints_of_any_of_these_meshes_load_into_the_others(tmp_path: Path) -> None:
    pipeline = {"num_microbatches": 2}
    configs: list[dict[str, Any]] = [
        {"pp": 2, "zero": {"stage": 3}, "pipeline": pipeline},
        {"zero": {"stage": 3, "shard_size": 2}},
        {"tp": 2, "zero": {"stage": 2}},
        {"pp": 2, "tp": 2, "pipeline": pipeline},
        {"pp": 2, "zero": {"stage": 2}, "pipeline": pipeline},
    ]
    before: dict[str, torch.Tensor] = {}
    for number, config in enumerate(configs):
        model, optimizer = _start("gpt2", **config)
        if number:
            model.from_parallelized(tmp_path / str(number - 1), optimizer=optimizer)
            for name, value in autopar.hf_weights(model):
                assert torch.equal(value, before[name]), name
        else:
            _train(model, optimizer, MODELS["gpt2"](), steps=2)
            before = {name: value.clone() for name, value in autopar.hf_weights(model)}
        model.save_parallelized(tmp_path / str(number), optimizer=optimizer)


IDS = torch.arange(40).view(4, 10)


def opt(**changes: Any) -> OPTForCausalLM:
    sizes = {"num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 6, "ffn_dim": 37, "vocab_size": 131}
    return OPTForCausalLM(
        OPTConfig(**sizes, word_embed_proj_dim=24, max_position_embeddings=64, dropout=0.0, **changes)
    )


@pooled(world_size=2)
def test_layer_drop_is_refused() -> None:
    for stage in (2, 3):
        model = opt(layerdrop=0.5)
        before = copy.deepcopy(model.state_dict())
        with raises_everywhere(ConfigError, f"zero.stage={stage} is not supported with config.layerdrop=0.5, which"):
            autopar.initialize(model, {"zero": {"stage": stage}})
        assert all(torch.equal(now, before[name]) for name, now in model.state_dict().items())
    encoder_only = deep("bart", 2)
    encoder_only.model.encoder.layerdrop = 0.25
    with raises_everywhere(ConfigError, "BartEncoder.layerdrop=0.25, which skips blocks at random"):
        autopar.initialize(encoder_only, {"zero": {"stage": 3}})
    autopar.initialize(opt(layerdrop=0.5), {"tp": 2, "zero": {"stage": 3}})


def leave_out(model: Any, *numbers: int) -> None:
    layers = model.model.layers
    model.model.layers = nn.ModuleList(layer for place, layer in enumerate(layers) if place not in numbers)
    model.config.num_hidden_layers = len(model.model.layers)


def loss_of(model: Any) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    return loss


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pooled(world_size=2)
def test_replicas_that_run_different_modules_raise(compiled: bool) -> None:
    compiling = {"enable": compiled, "backend": "eager"}
    model = autopar.initialize(llama(num_hidden_layers=3), {"zero": {"stage": 3}, "compile": compiling})
    for _ in range(2):
        loss_of(model).backward()
    leave_out(model, *range(model.mpu.rank + 1))  # rank 0 begins with layer 1, rank 1 with layer 2
    said = "rank 0 reads the weights of model.layers.1 (block 0 of a forward, sharded by zero.stage 3); rank 1 reads"
    with raises_everywhere(ConsistencyError, said, "must run the same modules in the same order"):
        loss_of(model)


def one_leaves_out_the_last_block() -> None:
    model = autopar.initialize(llama(num_hidden_layers=3), {"zero": {"stage": 2}, "pipeline": {"timeout": 2}})
    loss_of(model).backward()
    if model.mpu.rank == 0:
        leave_out(model, 2)
    said = r"rank 0 reads no more weights in .*:\d+, and rank 1 did not within 2 s"
    alone = model.mpu.rank == 0
    with pytest.raises(
        ConsistencyError if alone else RuntimeError, match=said if alone else "onnection closed by peer"
    ):
        loss_of(model).backward()
    if alone:
        os._exit(0)


@pytest.mark.tier("test")
def test_a_replica_that_runs_fewer_modules_does_not_hang() -> None:
    spawn(__name__, "one_leaves_out_the_last_block", 2, expect_dead=(0,))


class FailsOnce:
    def __init__(self, *, fails: bool = True) -> None:
        self.fails = fails

    def __call__(self, *_: Any) -> None:
        if self.fails:
            self.fails = False
            raise ValueError("out of memory")


@pooled(world_size=2)
def test_a_first_forward_that_fails() -> None:
    expected = loss_of(llama()).detach()
    for stage in (2, 3):
        for path, everywhere in (("lm_head", False), ("model.layers.0.mlp", True)):
            model = autopar.initialize(llama(), {"zero": {"stage": stage}})
            fails = everywhere or model.mpu.rank == 0
            model.get_submodule(path).register_forward_hook(FailsOnce(fails=fails))
            with pytest.raises(ValueError, match="out of memory") if fails else nullcontext():
                loss_of(model)
            for _ in range(2):
                loss = loss_of(model)
                loss.backward()
                close(loss.detach(), expected, f"loss after a failure in {path}")


def embedded(model: Any) -> torch.Tensor:
    table = model.get_input_embeddings()
    loss: torch.Tensor = (
        model(inputs_embeds=table(IDS) * 2, labels=IDS, use_cache=False).loss + table(IDS).square().mean()
    )
    return loss


def headed(model: Any) -> torch.Tensor:
    states = model.model(input_ids=IDS).last_hidden_state
    return model.lm_head(states[:, -1]).square().mean() + states.mean()


def one_block(model: Any) -> torch.Tensor:
    states = model.model.embed_tokens(IDS)
    place = model.model.rotary_emb(states, torch.arange(10)[None])
    return model.model.norm(model.model.layers[1](states, position_embeddings=place)).square().mean()


def encoded(model: Any) -> torch.Tensor:
    states = model.get_encoder()(IDS).last_hidden_state
    return model.model.decoder(IDS, encoder_hidden_states=states).last_hidden_state.square().mean()


def from_encoder(model: Any) -> torch.Tensor:
    states = model.get_encoder()(IDS)
    loss: torch.Tensor = model(encoder_outputs=states, labels=IDS).loss + states.last_hidden_state.mean()
    return loss


def bart() -> Any:
    return deep("bart", 2)


PARTS = [(llama, embedded), (llama, headed), (llama, one_block), (bart, encoded), (bart, from_encoder)]


@pytest.mark.parametrize("stage", mainly(3, 2, later="all"))
@pooled(world_size=2)
def test_parts_that_are_called_by_themselves(stage: int) -> None:
    for build, loss_of_parts in PARTS:
        plain = build().train()
        model = copy.deepcopy(plain)
        model, optimizer = autopar.initialize(
            model, {"zero": {"stage": stage}}, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
        )
        reference = torch.optim.SGD(plain.parameters(), lr=0.1)
        for _ in range(2):
            loss, expected = loss_of_parts(model), loss_of_parts(plain)
            close(loss.detach(), expected.detach(), f"loss of {loss_of_parts.__name__}")
            loss.backward()
            expected.backward()
            for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                if other.grad is not None:
                    close(parameter.grad.full_tensor(), other.grad, f"{loss_of_parts.__name__}: gradient of {name}")
            take_step(optimizer, reference)
            with torch.no_grad():
                close(loss_of_parts(model), loss_of_parts(plain), f"{loss_of_parts.__name__} without gradients")
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            close(parameter.data.full_tensor(), other.data, f"{loss_of_parts.__name__}: {name}")
