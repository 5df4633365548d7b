"""Side streams, asynchronous copies and collectives on the simulated device: each use is behind a wait."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import autopar
from autopar.checkpoint import save as snapshot
from tests.gpu.device_ranks import needs_compiler, on_device
from tests.gpu.host_waits import waits
from tests.gpu.stream_order import Orders, orders
from tests.gpu.test_simulated_memory import averages, started
from tests.gpu.test_simulated_training import MESHES, UNCHECKED, share, step
from tests.harness.tiers import mainly
from tests.small import llama

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

    def save(name: str) -> Orders:
        with orders() as log:
            model.save_parallelized(tmp_path / name, timeout=60, optimizer=optimizer, async_save=True)
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
