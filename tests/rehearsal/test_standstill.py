"""Processes that wait for each other, in memory that they share: here one process writes for all."""

from __future__ import annotations

from contextlib import ExitStack

from autopar.tools.rehearsal.standstill import Standstill


def waiting(standstill: Standstill, pairs: dict[int, int], stack: ExitStack) -> None:
    for rank, origin in pairs.items():
        stack.enter_context(standstill.waits(rank, origin))


def test_a_ring_holds_until_something_is_on_its_way() -> None:
    standstill = Standstill([0, 4, 8])
    with ExitStack() as stack:
        waiting(standstill, {0: 4, 4: 8}, stack)
        assert not any(standstill.holds(rank) for rank in (0, 4)), "8 goes on"
        waiting(standstill, {8: 0}, stack)
        assert all(standstill.holds(rank) for rank in (0, 4, 8))
        standstill.sends(8, 4)
        assert not any(standstill.holds(rank) for rank in (0, 4, 8))
        standstill.takes(4, 8)
        standstill.sends(4, 0)  # who is not waited for
        standstill.sends(0, 4)
        assert not standstill.holds(0), "4 has sent what it waits for"
        standstill.takes(0, 4)
        assert all(standstill.holds(rank) for rank in (0, 4, 8)), "4 does not wait for 0"
    assert not any(standstill.holds(rank) for rank in (0, 4, 8))


def test_who_waits_for_a_ring_is_not_in_it() -> None:
    standstill = Standstill([0, 1, 2])
    with ExitStack() as stack:
        waiting(standstill, {0: 1, 1: 2, 2: 1}, stack)
        assert not standstill.holds(0) and standstill.holds(1) and standstill.holds(2)
