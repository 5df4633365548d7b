"""Processes that wait for each other, in memory that they share: here one process writes for all."""

from collections.abc import Iterator

from autopar.tools.rehearsal.cast import Standstill
from autopar.tools.rehearsal.matching import standing
from autopar.tools.rehearsal.trace import Call, Group


def test_all_wait_for_ever_while_nothing_is_on_its_way() -> None:
    standstill = Standstill([0, 4, 8])
    with standstill.waits(0), standstill.waits(4):
        assert not standstill.holds(), "8 goes on"
        with standstill.waits(8):
            assert standstill.holds()
            standstill.sends(8)
            assert not standstill.holds(), "somebody will take it"
            standstill.takes(4)
            assert standstill.holds()


def test_who_takes_a_message_while_others_look_goes_on() -> None:
    standstill = Standstill([0, 1])

    class Looked(list[int]):
        def __iter__(self) -> Iterator[int]:  # behind the first look at the counts, while 1 is seen to wait
            standstill.sends(0)
            standstill.takes(1)
            return super().__iter__()

    standstill._waiting = Looked([1, 1])  # type: ignore[assignment]
    assert not standstill.holds()


def test_those_are_named_first_of_whom_fewest_wait() -> None:
    one, other = (
        Call(kind, Group("world", (0, 1, 2)), ((3,),), "float32", where="a.py:1") for kind in ("barrier", "gather")
    )
    assert standing({0: one, 1: other, 2: one}) == [
        "rank 1 waits in gather over world [3] float32\n    a.py:1",
        "ranks 0, 2 wait in barrier over world [3] float32\n    a.py:1",
    ]
    assert standing({}) == []
