"""Processes that wait for each other, in memory that they share: here one process writes for all."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from autopar.distributed.trace import Call, Group
from autopar.tools.rehearsal.links import Standstill
from autopar.tools.rehearsal.matching import standing


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


def test_who_takes_a_message_while_others_look_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    standstill, link, looks = Standstill([0, 1, 2]), Standstill._link, list[tuple[int, int]]()
    with ExitStack() as stack, ExitStack() as theirs:
        waiting(standstill, {0: 1, 2: 0}, stack)
        waiting(standstill, {1: 2}, theirs)

        def takes(own: Standstill, origin: int, to: int) -> int:
            looks.append((origin, to))
            if looks.count((2, 1)) == 2:  # in the second look rank 1 takes what rank 2 sent behind the first one
                monkeypatch.undo()
                theirs.close()
                standstill.sends(2, 1)
                standstill.takes(1, 2)
            return link(own, origin, to)

        monkeypatch.setattr(Standstill, "_link", takes)
        assert not standstill.holds(0) and looks.count((2, 1)) == 2


def test_those_are_named_first_of_whom_fewest_wait() -> None:
    one, other = (
        Call(kind, Group("world", (0, 1, 2)), ((3,),), "float32", where="a.py:1") for kind in ("barrier", "gather")
    )
    assert standing({0: one, 1: other, 2: one}) == [
        "rank 1 waits in gather over world [3] float32\n    a.py:1",
        "ranks 0, 2 wait in barrier over world [3] float32\n    a.py:1",
    ]
    assert standing({}) == []
