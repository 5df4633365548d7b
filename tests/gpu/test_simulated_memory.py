"""Live bytes and allocations of steps and tokens on the simulated device: the same from the fourth step on."""

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import StaticCache

import autopar
from tests.gpu.device_ranks import needs_compiler, on_device
from tests.gpu.test_simulated_training import MESHES, UNCHECKED, share, step
from tests.harness.tiers import mainly
from tests.rehearsal.programs import mamba
from tests.small import llama

pytestmark = needs_compiler

CLIPPED: dict[str, Any] = {"gradient_clipping": 1.0}


def _on(mesh: str, **sections: Any) -> dict[str, Any]:
    return {"model_parallelism": MESHES[mesh], **sections}


CASES: dict[str, dict[str, Any]] = {
    "tp": _on("tp", **CLIPPED),
    "pp, micro-batches": _on("pp", pipeline={"microbatch_size": 1}, **CLIPPED),
    "dp, zero 1": _on("dp", zero={"stage": 1}, **CLIPPED),
    "tp, zero 1": _on("tp", zero={"stage": 1}, **CLIPPED),
    "dp": _on("dp", **CLIPPED),
    "tp, bf16": _on("tp", precision={"dtype": "bf16"}, **CLIPPED),
    "sequence": _on("sequence", **CLIPPED),
    "cp": _on("cp", **CLIPPED),
    "tp, recomputed": _on("tp", activation_checkpointing={"enable": True}),
    "tp, offloaded": _on("tp", activation_checkpointing={"enable": True, "cpu_checkpointing": True}),
    "dp, optimizer on the host": _on("dp", zero={"stage": 1, "optimizer_offload": True}, **CLIPPED),
    "pp, interleaved": _on("pp", pipeline={"microbatch_size": 1, "schedule": "interleaved"}),
    "cp, states": _on("cp"),
    "dp, zero 2": _on("dp", zero={"stage": 2}),
    "dp, zero 3": _on("dp", zero={"stage": 3}),
}
BUILDS: dict[str, Callable[[], Any]] = {
    "pp, interleaved": functools.partial(llama, num_hidden_layers=4),
    "cp, states": mamba,
}


def started(case: str) -> tuple[Any, Any]:
    """Return the model of a case, and its optimizer."""
    model = BUILDS.get(case, llama)().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return autopar.initialize(model, {**CASES[case], **UNCHECKED}, optimizer=optimizer)


def averages(case: str) -> bool:
    return int(CASES[case].get("zero", {}).get("stage", 0)) < 2


def sample(model: Any) -> list[torch.Tensor]:
    return [x for x in model._autopar.dp.steps.last_shard or () if isinstance(x, torch.Tensor)]


def live(model: Any, least: int, patience: float = 5.0) -> int:
    """Bytes that are live on the device, without those of the check's sample."""
    own, end = sum(x.nbytes for x in sample(model)), time.monotonic() + patience
    while torch.ops.sim.memory()[0] - own > least and time.monotonic() < end:
        time.sleep(0.01)
    return torch.ops.sim.memory()[0] - own


def steps_of(case: str) -> list[tuple[int, int]]:
    """Return live bytes behind each of six steps, and its allocations."""
    model, optimizer = started(case)
    ids, found = share(model) % model.config.vocab_size, list[tuple[int, int]]()
    gc.collect()
    gc.disable()  # what only the collector frees would be counted as live
    try:
        for _ in range(6):
            before = torch.ops.sim.memory()[2]
            step(model, optimizer, ids, average=averages(case))
            made = torch.ops.sim.memory()[2] - before - len(sample(model))
            least = min((held for held, _ in found), default=1 << 40)
            found.append((live(model, least), made))
    finally:
        gc.enable()
    model.mpu.destroy()
    return found


@pytest.mark.parametrize("case", mainly(*CASES, later="all"))
@on_device(world_size=2)
def test_steps_behind_the_third_hold_and_allocate_the_same(case: str) -> None:
    found = steps_of(case)
    assert found[2][0] > 0 and found[2][1] > 100
    assert found[3:] == [found[2]] * 3, found


@on_device(world_size=2)
def test_tokens_behind_the_third_hold_and_allocate_the_same() -> None:
    model = autopar.initialize(llama().eval(), {"model_parallelism": MESHES["tp"], **UNCHECKED})
    cache = StaticCache(config=model.config, max_cache_len=16)
    ids, found = share(model), list[tuple[int, int]]()
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
        token = ids[:, :1]
        for _ in range(6):
            before = torch.ops.sim.memory()[2]
            logits = model(token, past_key_values=cache, use_cache=True).logits
            token = logits[:, -1].argmax(-1, keepdim=True)
            del logits
            made, least = torch.ops.sim.memory()[2] - before, min((held for held, _ in found), default=1 << 40)
            found.append((live(model, least), made))
    assert found[3:] == [found[2]] * 3, found
