"""``zero: {optimizer_offload: true}``: the optimizer's state and fp32 weights lie in the CPU's memory."""

from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.checkpoint.dtensor import to_dtensor_training_state
from autopar.errors import CheckpointError, ConfigError
from tests.gpu.device_ranks import needs_compiler, on_device
from tests.gpu.test_simulated_training import MESHES, UNCHECKED, share, step
from tests.harness.tiers import in_tier
from tests.small import llama

pytestmark = needs_compiler

CASES = {f"{mesh}-{dtype}": (mesh, dtype) for mesh in ("tp", "dp", "pp") for dtype in ("fp32", "bf16", "fp16")}
FIRST = ["tp-fp16", "dp-bf16", "pp-fp32"]
del CASES["pp-fp16"]  # its loss is scaled by execute_pipeline


def _config(mesh: str, dtype: str, *, offload: bool) -> dict[str, Any]:
    config: dict[str, Any] = {"model_parallelism": MESHES[mesh], "gradient_clipping": 1.0, **UNCHECKED}
    config["zero"] = {"stage": 1 if mesh == "dp" else 0, "optimizer_offload": offload}
    if dtype != "fp32":
        config["precision"] = {"dtype": dtype}
    return config


def _started(mesh: str, dtype: str, *, offload: bool) -> tuple[Any, Any]:
    model = llama().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    return autopar.initialize(model, _config(mesh, dtype, offload=offload), optimizer=optimizer)


def _states(optimizer: Any) -> list[torch.Tensor]:
    return [v for entries in optimizer.state.values() for v in entries.values() if torch.is_tensor(v) and v.dim()]


def _equal(one: Any, other: Any) -> None:
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert mine.device == theirs.device and torch.equal(mine.cpu(), theirs.cpu()), name


@pytest.mark.parametrize("case", [*FIRST, *in_tier("sweep", sorted(set(CASES) - set(FIRST)))])
@on_device(world_size=2)
def test_steps_are_those_of_the_device_and_state_lies_on_the_host(case: str) -> None:
    runs = [_started(*CASES[case], offload=offload) for offload in (False, True)]
    for number in range(3):
        for model, optimizer in runs:
            step(model, optimizer, share(model))
        _equal(runs[1][0], runs[0][0])
        if number == 1:  # a state dict goes on, on the host as before
            runs[1][1].load_state_dict(runs[1][1].state_dict())
    (model, optimizer), stepped = runs[1], runs[1][1]._autopar
    assert {value.device.type for value in _states(optimizer)} == {"cpu"}
    assert {p.device for p in model.parameters() if p.numel()} == {model.mpu.device}
    masters = [stepped.master(p) for p in stepped.names if p.requires_grad and stepped.owns(p)]
    kept = {weight.device.type for weight in masters if weight is not None}
    mpu, lies = model.mpu, [v for entries in optimizer.state.values() for v in entries.values() if torch.is_tensor(v)]
    config = _config(*CASES[case], offload=True)
    planned = autopar.plan_memory(llama(), config, sequence=9, batch=4 // mpu.dp.size, gpus=2)
    held = planned.ranks[mpu.pp.rank, mpu.dp.rank, mpu.tp.rank]
    assert held.host == sum(x.nbytes for x in (*lies, *masters) if x is not None) and held.optimizer == 0
    assert kept == (set() if CASES[case][1] == "fp32" else {"cpu"})
    if CASES[case][0] != "pp":
        plain = [autopar.deparallelize(each) for each, _ in runs]
        _equal(plain[1], plain[0])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@on_device(world_size=2)
def test_a_checkpoint_goes_on_with_and_without(dtype: str, tmp_path: Path) -> None:
    model, optimizer = _started("tp", dtype, offload=True)
    for _ in range(2):
        step(model, optimizer, share(model))
    model.save_parallelized(tmp_path, optimizer=optimizer)
    step(model, optimizer, share(model))
    for mesh, offload in (("tp", False), ("tp", True)):
        other, theirs = _started(mesh, dtype, offload=offload)
        other.from_parallelized(tmp_path, optimizer=theirs)
        assert {value.device.type for value in _states(theirs)} == {"cpu" if offload else model.mpu.device.type}
        step(other, theirs, share(other))
        _equal(other, model)
    with pytest.raises(CheckpointError, match=r"does not support precision.dtype .* or zero.optimizer_offload"):
        to_dtensor_training_state(model, optimizer)


@on_device(world_size=2)
def test_state_that_is_there_moves_and_whole_matrices_are_refused() -> None:
    model = llama().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(18).view(2, 9)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    config = {"tp": 2, "zero": {"optimizer_offload": True}}
    model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
    assert len(_states(optimizer)) and {value.device.type for value in _states(optimizer)} == {"cpu"}
    step(model, optimizer, ids.to(model.mpu.device))
    other = llama()
    matrices = [p for p in other.model.layers.parameters() if p.ndim == 2]
    with pytest.raises(ConfigError, match=r"zero.optimizer_offload is not supported with Muon"):
        autopar.initialize(other, config, optimizer=torch.optim.Muon(matrices))
