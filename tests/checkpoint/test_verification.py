"""Who verifies what, for many meshes: everything once, evenly, and by a rank that reads it anyway where that is so."""

from __future__ import annotations

import random

import pytest

from autopar.checkpoint.shards import StoredShard, assign_verification
from autopar.distributed.mesh_sizes import MeshSizes

MESHES = [MeshSizes(*sizes) for sizes in ((1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 3), (3, 2, 2))]


def stored(mesh: MeshSizes, seed: int) -> list[StoredShard]:
    """Shared-out and whole tensors of random sizes, empty ones among them."""
    draw = random.Random(seed)
    held = []
    for number in range(40):
        size = draw.choice([0, 1, 7, 4096, draw.randrange(1 << 20)])
        stage = draw.randrange(mesh.pp)
        for tp in range(mesh.tp) if number % 3 else [0]:
            held.append(StoredShard("model", f"w{number}", tp, f"model-tp{tp}-pp{stage}.safetensors", size))
    return held


@pytest.mark.parametrize("now", MESHES, ids=str)
@pytest.mark.parametrize("saved", MESHES, ids=str)
def test_everything_is_verified_once_and_no_rank_does_more_than_one_item_above_another(saved, now):
    held = stored(saved, seed=3)
    shares = [assign_verification(held, saved, now, rank) for rank in range(now.tp * now.pp * now.dp)]
    assert sorted(item for share in shares for item in share) == sorted(held)
    largest = max(item.bytes for item in held)
    groups = [shares]
    if saved.tp == now.tp:  # the whole tensors lie with tensor-parallel rank 0: only its replicas can share them
        groups = [shares[t :: now.tp] for t in range(now.tp)]
    for group in groups:
        loads = [sum(item.bytes for item in share) for share in group]
        assert max(loads) - min(loads) <= largest


def test_on_the_same_size_a_rank_verifies_what_it_is_going_to_read():
    for saved, now in [((2, 1, 1), (2, 1, 2)), ((3, 2, 1), (3, 1, 1))]:
        sizes = MeshSizes(*now)
        for rank in range(sizes.tp * sizes.pp * sizes.dp):
            share = assign_verification(stored(MeshSizes(*saved), 1), MeshSizes(*saved), sizes, rank)
            assert share and {item.tp for item in share} == {rank % sizes.tp}


def test_the_order_in_which_it_is_asked_decides_nothing():
    held = stored(MESHES[-1], seed=5)
    shuffled = list(held)
    random.Random(0).shuffle(shuffled)
    for rank in range(4):
        one, other = (assign_verification(items, MESHES[-1], MeshSizes(2, 1, 2), rank) for items in (held, shuffled))
        assert one == other


def test_nothing_to_verify():
    assert assign_verification([], MESHES[0], MESHES[-1], 5) == []
