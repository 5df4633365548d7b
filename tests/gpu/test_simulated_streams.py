"""Side streams, asynchronous copies and collectives on the simulated device: each use is behind a wait.

autopar itself begins collectives and messages that run beside what follows, and copies that the host does not wait for;
FSDP2 (ZeRO's stages 2 and 3) gathers and reduces on streams of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.checkpoint import save as snapshot
from tests.gpu import simulated
from tests.gpu.device_ranks import needs_compiler, on_device
from tests.gpu.host_waits import waits
from tests.gpu.stream_order import Orders, orders
from tests.gpu.test_simulated_memory import averages, started
from tests.gpu.test_simulated_training import MESHES, UNCHECKED, share, step
from tests.small import llama
from tests.tiers import mainly

pytestmark = needs_compiler

COPIES, BEGUN, WAITS = "asynchronous copies", "asynchronous collectives", "waits of streams"
EVENTS, BESIDE = "events", "operations on side streams"
BY_FSDP = {EVENTS, WAITS, BESIDE}
KINDS: dict[str, set[str]] = {
    "tp": {COPIES, BEGUN, WAITS},
    "dp, zero 3": BY_FSDP,
    "pp, micro-batches": {BEGUN, WAITS},
    "tp, offloaded": {COPIES, BEGUN, WAITS},
    "cp, states": {BEGUN, WAITS},
    "pp, interleaved": {BEGUN, WAITS},
    "cp": set(),
    "dp, zero 2": BY_FSDP,
    "dp, optimizer on the host": set(),
    "tp, zero 1": {COPIES, BEGUN, WAITS},
    "sequence": {COPIES, BEGUN, WAITS},
    "tp, bf16": {COPIES, BEGUN, WAITS},
    "tp, recomputed": {COPIES, BEGUN, WAITS},
}


def steps_of(case: str) -> Callable[[], None]:
    """Return a training step; two have been made."""
    model, optimizer = started(case)
    ids = share(model) % model.config.vocab_size

    def run() -> None:
        step(model, optimizer, ids, average=averages(case))

    run()
    run()
    return run


@pytest.mark.parametrize("case", mainly(*KINDS, later="all"))
@on_device(world_size=2)
def test_steps_use_nothing_before_its_wait(case: str) -> None:
    run = steps_of(case)
    with orders() as log:
        run()
    assert log.faults == [], log.faults
    assert set(log.counted) == KINDS[case], log.counted


@pytest.mark.parametrize("case", mainly("tp", "pp, micro-batches", "cp, states", "tp, offloaded", later="all"))
@on_device(world_size=2)
def test_each_wait_of_a_step_is_missed_where_it_is_left_out(case: str) -> None:
    run = steps_of(case)
    with orders() as log:
        run()
    assert log.counted[WAITS] > 3
    for number in range(1, log.counted[WAITS] + 1):
        with orders(forget=number) as log:
            run()
        assert log.faults, f"wait {number} of {log.counted[WAITS]}"


@on_device(world_size=2)
def test_saved_activations_travel_while_the_host_goes_on() -> None:
    run = steps_of("tp, offloaded")
    with orders() as log, waits() as found:
        run()
    assert log.counted[COPIES] >= 2 * llama().config.num_hidden_layers, log.counted  # each block's input, both ways
    assert [wait for wait in found if wait.own or "copy" in wait.what] == [], found


@pytest.mark.parametrize("mesh", ["pp", "tp"])
@on_device(world_size=2)
def test_decoded_tokens_use_nothing_before_its_wait(mesh: str) -> None:
    model = autopar.initialize(llama().eval(), {"model_parallelism": MESHES[mesh], **UNCHECKED})
    ids, settings = share(model), {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    model.generate(ids, **settings)
    with orders() as log:
        model.generate(ids, **settings)
    assert log.faults == [], log.faults
    assert (log.counted[BEGUN] > 0) == (mesh == "pp")


@on_device(world_size=2)
def test_a_save_in_the_background_has_copied_when_it_returns(tmp_path: Any) -> None:
    model, optimizer = started("tp")
    step(model, optimizer, share(model))
    folder = [tmp_path] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(folder)

    def save(name: str) -> Orders:
        with orders() as log:
            model.save_parallelized(folder[0] / name, timeout=60, optimizer=optimizer, async_save=True)
        model.wait_for_save()
        return log

    assert save("waits").faults == []
    kept: list[Any] = []  # else the memory may be free again, for which the allocator waits

    def hasty(self: Any) -> Any:
        copies = {
            part: {name: x.detach().to("cpu", non_blocking=True) for name, x in tensors.items()}
            for part, tensors in self.tensors.items()
        }
        kept.extend(x for tensors in copies.values() for x in tensors.values())
        return replace(self, tensors=copies)

    snapshot.Snapshot.copied = hasty  # type: ignore[method-assign]
    log = save("hasty")
    assert log.counted[COPIES] > 10
    assert "the host has not waited for a copy from sim to cpu in " in log.faults[-1]


# -- what the log finds --------------------------------------------------------------------------------------------


def _ones() -> torch.Tensor:
    return torch.ones(100, device=simulated.start())


def _beside(wait_before: bool, wait_behind: bool) -> None:
    x, stream, now = _ones(), torch.sim.Stream(), torch.sim.current_stream()
    if wait_before:
        stream.wait_stream(now)
    with torch.sim.stream(stream):
        y = x * 2
        done = stream.record_event()
    if wait_behind:
        done.wait()
    y + 1


def _freed(lend: bool) -> None:
    x, stream = _ones(), torch.sim.Stream()
    stream.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(stream):
        y = x * 2
    if lend:
        x.record_stream(stream)
    del x
    _ones()  # may lie there
    torch.sim.current_stream().wait_stream(stream)
    y + 1


def _to_host(wait: bool) -> None:
    x = _ones().to("cpu", non_blocking=True)
    if wait:
        torch.sim.current_stream().synchronize()
    x.sum()


def _from_host(pinned: bool, wait: bool) -> None:
    x = torch.ones(100).pin_memory() if pinned else torch.ones(100)
    y = x.to(simulated.start(), non_blocking=True)
    if wait:
        y.sum().item()
    x.zero_()


def _collective(wait: bool) -> None:
    x = _ones()
    work = dist.all_reduce(x, async_op=True)
    if wait:
        work.wait()
    x + 1
    work.wait()


def _not_read(wait: bool) -> None:
    x = _ones()
    work = dist.all_reduce(x, async_op=True)
    if wait:
        work.wait()


PROGRAMS: list[tuple[Callable[..., None], tuple[bool, ...], str]] = [
    (_beside, (True, True), ""),
    (_beside, (False, True), "fill_ on stream 0 writes what mul on stream {} reads without a wait"),
    (_beside, (True, False), "mul on stream {} writes what add on stream 0 reads without a wait"),
    (_freed, (True,), ""),
    (_freed, (False,), "memory that mul on stream {} uses was freed, and stream 0 may get it for 400 bytes"),
    (_to_host, (True,), ""),
    (_to_host, (False,), "copy from sim to cpu on stream 0 writes what aten.sum.default on the host reads"),
    (_from_host, (True, True), ""),
    (_from_host, (False, False), ""),  # torch has read it when the call returns
    (_from_host, (True, False), "copy from cpu to sim on stream 0 reads what aten.zero_.default on the host writes"),
    (_collective, (True,), ""),
    (_collective, (False,), "all_reduce on nccl's stream of 0 writes what add on stream 0 reads without a wait"),
    (_not_read, (True,), ""),
    (_not_read, (False,), "nobody has waited for all_reduce"),
]


@on_device(world_size=1)
def test_a_wait_that_a_program_forgets_is_found_where_it_is_missed() -> None:
    for program, settings, text in PROGRAMS:
        with orders() as log:
            program(*settings)
        expected = text.format(torch.sim.Stream().number - 1)
        found = log.faults[:1] or [""]
        assert found[0].startswith(expected) and bool(found[0]) == bool(expected), f"{program} {settings}: {log.faults}"
        assert not expected or expected.startswith("nobody") or f"{program.__name__}'" in found[0], found
