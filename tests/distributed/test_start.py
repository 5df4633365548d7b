"""All ranks of an attempt agree on a name that no earlier attempt has used, whatever it has left in the store."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from autopar.distributed.process import name_of_attempt


def agreed(store: HashStore, ranks: list[int], late: int | None = None) -> list[str]:
    """The names that ranks get; ``late`` starts when the others have been looking for a while."""
    names: dict[int, str] = {}

    def join(rank: int) -> None:
        names[rank] = name_of_attempt(store, rank, len(ranks))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks if rank != late]
    for thread in threads:
        thread.start()
    if late is not None:
        threads[0].join(0.2)
        assert not names.keys() & {0}
        join(late)
    for thread in threads:
        thread.join(20)
    assert sorted(names) == ranks
    return [names[rank] for rank in ranks]


@pytest.mark.parametrize("late", [None, 0, 2])
def test_each_attempt_gets_its_own_name(late: int | None) -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    seen = set()
    for _ in range(3):  # in the later ones the store is full of the words of ranks that are gone
        (name,) = set(agreed(store, [0, 1, 2], late if late != 0 else None))
        assert name not in seen
        seen.add(name)
    (name,) = set(agreed(store, [0, 1]))  # and with fewer ranks
    assert name not in seen


def test_one_rank_waits_for_nobody() -> None:
    store = HashStore()
    assert name_of_attempt(store, 0, 1) != name_of_attempt(store, 0, 1)


def test_a_rank_that_does_not_come_is_an_error() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    agreed(store, [0, 1])
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(dist.DistStoreError, match="2 ranks should start, and not all did within"):
        name_of_attempt(store, 0, 2)  # the other one's word is there, of an earlier attempt
