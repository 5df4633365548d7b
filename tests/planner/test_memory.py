"""Planned memory against what ranks really hold: bytes of states exactly, what autograd saves, and the peak."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from autopar.errors import ConfigError
from tests.pool import pooled
from tests.small import gpt2, llama

BATCH, SEQUENCE = 4, 16


def _config(**sections: Any) -> dict[str, Any]:
    pipeline = {"microbatch_size": 1, "schedule": sections.pop("schedule", "1f1b")}
    sizes = {name: sections.pop(name) for name in list(sections) if name.endswith("_size")}
    return {"model_parallelism": sizes, "pipeline": pipeline, **sections}


def _train(model: Any, config: dict[str, Any], batch: int) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
    ids = torch.randint(0, 131, (batch, SEQUENCE), generator=torch.Generator().manual_seed(1))
    model.execute_pipeline({"input_ids": ids, "labels": ids}, optimizer=optimizer)
    return model, optimizer


def _states_are_as_planned(build: Any, config: dict[str, Any]) -> None:
    world = torch.distributed.get_world_size()
    plan = autopar.plan_memory(build(), config, sequence=SEQUENCE, batch=BATCH, gpus=world, device="cpu")
    model, optimizer = _train(build(), config, BATCH)
    mpu = model.mpu
    gradients = [p.grad for p in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    optimizer.step()
    held = plan.ranks[mpu.pp.rank, mpu.dp.rank, mpu.tp.rank]

    def local(tensor: Any) -> int:
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return tensor.nbytes

    assert held.weights == sum(map(local, model.parameters()))
    assert held.gradients == sum(map(local, gradients))
    states = [entry for state in optimizer.state.values() for entry in state.values()]
    steps = vars(optimizer)["_autopar"]
    masters = [] if steps.masters is None else [steps.masters.of(p) for p in steps.names if steps.owns(p)]
    assert held.optimizer == sum(map(local, [*states, *(m for m in masters if m is not None)]))
    assert held.buffers == sum(map(local, model.buffers()))
    mpu.destroy()


MESHES = {
    "tp 2": {"tensor_parallel_size": 2},
    "pp 2": {"pipeline_parallel_size": 2},
    "pp 2, bf16": {"pipeline_parallel_size": 2, "precision": {"dtype": "bf16"}},
    "dp 2, ZeRO-1": {"zero": {"stage": 1}},
    "dp 2, ZeRO-1, bf16": {"zero": {"stage": 1}, "precision": {"dtype": "bf16"}},
    "dp 2, ZeRO-3, bf16": {"zero": {"stage": 3}, "precision": {"dtype": "bf16"}},
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("build", [gpt2, llama], ids=["gpt2", "llama"])
@pooled(world_size=2)
def test_states_are_those_that_ranks_hold(build: Any, mesh: str) -> None:
    _states_are_as_planned(build, _config(**MESHES[mesh]))


class _Saved:
    """A tensor that waits for the backward pass."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()


class SavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd holds at a time, each storage once, weights not."""

    def __init__(self, model: Any) -> None:
        import weakref

        weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        self.alive: weakref.WeakSet[_Saved] = weakref.WeakSet()
        self.most = 0

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.untyped_storage().data_ptr() in weights:
                return tensor
            saved = _Saved(tensor)
            self.alive.add(saved)
            storages = {s.tensor.untyped_storage().data_ptr(): s.tensor.untyped_storage().nbytes() for s in self.alive}
            self.most = max(self.most, sum(storages.values()))
            return saved

        super().__init__(pack, lambda saved: saved.tensor if isinstance(saved, _Saved) else saved)


@pytest.mark.parametrize("build", [gpt2, llama], ids=["gpt2", "llama"])
def test_saved_activations_are_those_of_a_step(build: Any) -> None:
    plan = autopar.plan_memory(build(), sequence=SEQUENCE, batch=BATCH, device="cpu")
    model = build().train()
    ids = torch.randint(0, 131, (BATCH, SEQUENCE))
    saved = SavedTensors(model)
    with saved:
        out = model(input_ids=ids, labels=ids, use_cache=False)
    assert saved.most == plan.peak.activations + plan.peak.logits
    del out
