"""Processes that wait for each other, in memory that they share: here one process writes for all."""

from collections.abc import Iterator

from autopar.tools.rehearsal.matching import blocked_calls
from autopar.tools.rehearsal.simulated_ranks import DeadlockDetector
from autopar.tools.rehearsal.trace import Call, Group


def test_all_wait_for_ever_while_nothing_is_on_its_way() -> None:
    deadlock = DeadlockDetector([0, 4, 8])
    with deadlock.waits(0), deadlock.waits(4):
        assert not deadlock.detected(), "8 still runs"
        with deadlock.waits(8):
            assert deadlock.detected()
            deadlock.sends(8)
            assert not deadlock.detected(), "a message is in transit"
            deadlock.takes(4)
            assert deadlock.detected()


def test_who_takes_a_message_while_others_look_goes_on() -> None:
    deadlock = DeadlockDetector([0, 1])

    class Looked(list[int]):
        def __iter__(self) -> Iterator[int]:  # behind the first look at the counts, while 1 is seen to wait
            deadlock.sends(0)
            deadlock.takes(1)
            return super().__iter__()

    deadlock._waiting = Looked([1, 1])  # type: ignore[assignment]
    assert not deadlock.detected()


def test_those_are_named_first_of_whom_fewest_wait() -> None:
    one, other = (
        Call(kind, Group("world", (0, 1, 2)), ((3,),), "float32", where="a.py:1") for kind in ("barrier", "gather")
    )
    assert blocked_calls({0: one, 1: other, 2: one}) == [
        "rank 1 waits in gather over world [3] float32\n    a.py:1",
        "ranks 0, 2 wait in barrier over world [3] float32\n    a.py:1",
    ]
    assert blocked_calls({}) == []
