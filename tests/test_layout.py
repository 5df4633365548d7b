import random

import pytest
import torch

from autopar.layout import Block, Layout, aligned_shards, even_shards, replicated_shards


def fused(heads: int, kv_heads: int, width: int, size: int, dim: int = 0) -> Layout:
    kv = replicated_shards(kv_heads, size)
    q = aligned_shards(heads, kv_heads, kv)
    return Layout.of(
        dim, [Block("heads", heads, width, q), Block("kv", kv_heads, width, kv), Block("kv", kv_heads, width, kv)]
    )


def test_share_out_is_even_and_whole():
    assert even_shards(9, 2) == ((0, 5), (5, 9))
    assert even_shards(25, 4) == ((0, 7), (7, 13), (13, 19), (19, 25))
    assert even_shards(3, 4) == ((0, 1), (1, 2), (2, 3), (3, 3))  # a vocabulary may leave a rank empty


def test_query_heads_follow_kv_heads_of_which_some_are_replicated():
    assert aligned_shards(9, 3, replicated_shards(3, 2)) == ((0, 6), (6, 9))  # SmolLM2-135M on two ranks
    assert replicated_shards(2, 4) == ((0, 1), (0, 1), (1, 2), (1, 2))
    assert replicated_shards(2, 3) == ((0, 1), (0, 1), (1, 2))
    assert aligned_shards(8, 2, replicated_shards(2, 4)) == ((0, 2), (2, 4), (4, 6), (6, 8))
    assert aligned_shards(9, 3, replicated_shards(3, 4)) == ((0, 2), (2, 3), (3, 6), (6, 9))
    assert aligned_shards(25, 1, replicated_shards(1, 4)) == ((0, 7), (7, 13), (13, 19), (19, 25))
    with pytest.raises(ValueError, match="10 units cannot follow 3: 10 / 3 is not an integer"):
        aligned_shards(10, 3, even_shards(3, 2))


def test_fused_equal_blocks_are_cut_block_by_block():
    shares = even_shards(4, 2)
    layout = Layout.of(0, [Block("heads", 4, 1, shares)] * 3)
    stored = torch.arange(12)
    assert layout.shard(stored, 0).tolist() == [0, 1, 4, 5, 8, 9]
    assert layout.shard(stored, 1).tolist() == [2, 3, 6, 7, 10, 11]
    assert layout.ranges(1) == ((2, 4), (6, 8), (10, 12))


@pytest.mark.parametrize("seed", range(40))
def test_unshard_is_the_inverse_of_shard(seed: int):
    rng = random.Random(seed)
    size, kv_heads, width = rng.randint(1, 6), rng.choice([1, 2, 3, 5]), rng.choice([1, 3, 4])
    layout = fused(kv_heads * rng.randint(size, size + 2), kv_heads, width, size, dim=rng.randint(0, 1))
    shape = [5, 5]
    shape[layout.dim] = layout.size
    stored = torch.randn(shape)
    shards = [layout.shard(stored, rank) for rank in range(size)]
    assert torch.equal(layout.unshard(shards), stored)
    for rank, shard in enumerate(shards):
        assert tuple(shard.shape) == layout.local_shape(shape, rank)
    # every element is owned exactly once, and owned_local names the same elements
    owned = torch.zeros(layout.size, dtype=torch.int)
    for rank in range(size):
        local = torch.cat([torch.arange(*r) for r in layout.ranges(rank)] or [torch.arange(0)])
        picked = [local[a:b] for a, b in layout.owned_local(rank)]
        assert torch.equal(
            torch.cat(picked) if picked else torch.arange(0),
            torch.cat([torch.arange(*r) for r in layout.owned(rank)] or [torch.arange(0)]),
        )
        for start, stop in layout.owned(rank):
            owned[start:stop] += 1
    assert (owned == 1).all()


def test_empty_shards_and_the_other_dim_of_an_activation():
    layout = Layout.of(0, [Block("vocab", 3, 1, even_shards(3, 4))])
    stored = torch.randn(3, 2)
    assert layout.shard(stored, 3).shape == (0, 2)
    assert torch.equal(layout.unshard([layout.shard(stored, r) for r in range(4)]), stored)
    layout = Layout.of(0, [Block("heads", 4, 2, even_shards(4, 2))] * 2)
    x = torch.randn(2, 3, 16)
    assert torch.equal(layout.unshard([layout.shard(x, rank, dim=-1) for rank in range(2)], dim=-1), x)


def test_wrong_sizes_raise_with_both_numbers():
    layout = Layout.of(0, [Block("heads", 4, 2, even_shards(4, 2))])
    with pytest.raises(ValueError, match="dim 0 must have 8 elements, as in the layout; got 9"):
        layout.shard(torch.zeros(9), 0)
    with pytest.raises(ValueError, match="shard of rank 1 must have 4 elements along dim 0; got 3"):
        layout.write(torch.zeros(8), torch.zeros(3), 1)
    with pytest.raises(ValueError, match="1 shards for an axis of size 2"):
        layout.unshard([torch.zeros(4)])


def test_a_layout_survives_json_and_malformed_json_is_refused():
    layout = fused(9, 3, 4, 2)
    assert Layout.from_json(layout.to_json()) == layout
    bad = layout.to_json()
    bad["blocks"][0]["shares"][0] = [0, 99]
    with pytest.raises(ValueError, match="outside"):
        Layout.from_json(bad)


def test_where_several_ranks_hold_an_element_the_lowest_ones_is_kept():
    layout = Layout.of(0, [Block("kv", 2, 1, replicated_shards(2, 3))])
    assert layout.unshard([torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])]).tolist() == [1.0, 3.0]
