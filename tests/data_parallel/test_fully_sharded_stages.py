"""ZeRO stages 2 and 3 through pipeline stages, over a part of the replicas, and beside forwards without a backward."""

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import autopar
from autopar.compat.tensors import TorchDispatchMode
from autopar.config.sections import SCHEDULES
from tests.harness.worlds import pooled
from tests.parity import close, language_batches
from tests.small import gpt2, llama

MODELS = {"gpt2": lambda: gpt2(n_layer=4), "llama": lambda: llama(num_hidden_layers=4)}


def _adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def _ragged(model: Any, seed: int) -> dict[str, torch.Tensor]:
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
        batch = _ragged(model, step)
        mine = {name: value[mpu.dp.rank :: mpu.dp.size] for name, value in batch.items()}
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
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
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
    model = copy.deepcopy(plain)
    pipeline = {"schedule": schedule, "num_microbatches": 4}
    config = {"pp": 2, "zero": {"stage": stage}, "gradient_clipping": 0.5, "pipeline": pipeline}
    model, optimizer = autopar.initialize(model, config, optimizer=_adamw(model))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    _train(model, optimizer, plain)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    _weights_are(model, plain)
    model.mpu.destroy()


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
    model = copy.deepcopy(plain)
    config = {"tp": tp, "zero": {"stage": stage, "shard_size": size or None}, "gradient_clipping": 0.5}
    model, optimizer = autopar.initialize(model, config, optimizer=_adamw(model))
    planned = autopar.plan_memory(plain, config, sequence=9, gpus=4, device="cpu")
    here = sum(parameter.to_local().nbytes for parameter in model.parameters())
    assert here == planned.ranks[0, model.mpu.dp.rank, model.mpu.tp.rank].weights
    _train(model, optimizer, plain)
    _weights_are(model, plain)
    model.mpu.destroy()


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_weights_are_gathered_once_a_pass_or_for_each_micro_batch() -> None:
    """A stage has two blocks, and weights around them: three groups, each of them reduced once."""
    for stage in (2, 3):
        model = MODELS["llama"]()
        config = {"pp": 2, "zero": {"stage": stage}, "pipeline": {"num_microbatches": 4}}
        model, optimizer = autopar.initialize(model, config, optimizer=_adamw(model))
        batch = {name: each[model.mpu.dp.rank :: 2] for name, each in _ragged(model, 0).items()}
        for _ in range(2):  # the first pass looks at forwards
            with Collectives() as sent:
                model.train().execute_pipeline(batch, optimizer=optimizer)
            optimizer.step()
            optimizer.zero_grad()
        gathered, reduced = (sent.counts[name] for name in ("_allgather_base_", "_reduce_scatter_base_"))
        last = model.mpu.pp.rank  # there every forward comes before its backward; on the first the second one does, too
        gathers = 3 if stage == 2 else 4 * (2 * 2) + 3 + last  # weights around blocks stay from forward to backward
        assert (gathered, reduced) == (gathers, 3), (stage, sent.counts)
        model.mpu.destroy()


class Collectives(TorchDispatchMode):
    """Counts the collectives that torch sends, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


@pooled(world_size=4)
def test_a_pass_that_fails_leaves_no_gradients_behind() -> None:
    """Of its first micro-batches, on the last stage; the batch is skipped, and training goes on."""
    for stage in (2, 3):
        plain = MODELS["gpt2"]()
        model = copy.deepcopy(plain)
        config = {"pp": 2, "zero": {"stage": stage}, "gradient_clipping": 0.5, "pipeline": {"num_microbatches": 4}}
        model, optimizer = autopar.initialize(model, config, optimizer=_adamw(model))
        batch = {name: each[model.mpu.dp.rank :: 2] for name, each in _ragged(model, 9).items()}
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
        model.mpu.destroy()


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
                batch = {name: each[model.mpu.dp.rank :: 2] for name, each in _ragged(model, step).items()}
                out = model.train().execute_pipeline(batch, optimizer=optimizer, broadcast_loss=True)
                losses[-1].append(out.loss)
                gradients = [p.grad for p in model.parameters() if isinstance(p, DTensor) and p.grad is not None]
                assert zero == 1 or {gradient.dtype for gradient in gradients} == {torch.float32}
                optimizer.step()
                optimizer.zero_grad()
            model.mpu.destroy()
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
        model = MODELS["gpt2"]()
        model, optimizer = autopar.initialize(model, {**config, "gradient_clipping": 0.5}, optimizer=_adamw(model))
        if number:
            model.from_parallelized(tmp_path / str(number - 1), optimizer=optimizer)
            for name, value in autopar.hf_weights(model):
                assert torch.equal(value, before[name]), name
        else:
            _train(model, optimizer, MODELS["gpt2"](), steps=2)
            before = {name: value.clone() for name, value in autopar.hf_weights(model)}
        model.save_parallelized(tmp_path / str(number), optimizer=optimizer)
        model.mpu.destroy()
