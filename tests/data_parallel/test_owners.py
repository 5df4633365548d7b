from __future__ import annotations

import random

import torch
import torch.distributed as dist
from torch import nn

from autopar.data_parallel.grad_sync import buckets
from autopar.data_parallel.zero1 import OwnedParameters, assign, broadcast_from_owners
from autopar.distributed.axis import Axis
from tests.pool import pooled


def test_no_rank_owns_more_than_the_mean_and_the_largest_size():
    draw = random.Random(0)
    for _ in range(200):
        sizes = [draw.randrange(1, 1000) for _ in range(draw.randrange(1, 40))]
        ranks = draw.randrange(1, 9)
        owners = assign(sizes, ranks)
        loads = [sum(s for s, o in zip(sizes, owners, strict=True) if o == rank) for rank in range(ranks)]
        assert sum(loads) == sum(sizes) and len(owners) == len(sizes)
        assert max(loads) <= sum(sizes) / ranks + max(sizes)
        assert assign(sizes, ranks) == owners


def test_what_is_owned_already_counts():
    assert assign([], 3) == []
    assert assign([5, 5, 5], 1) == [0, 0, 0]
    assert assign([4, 1, 3, 2], 2) == [0, 0, 1, 1]
    assert assign([3, 2], 2, loads=[4, 0]) == [1, 1]


def test_frozen_parameters_are_dealt_by_themselves():
    model = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in (90, 50, 3, 3, 2, 2)])
    for frozen in model[:2]:
        frozen.requires_grad_(False)
    axis = Axis("dp", None, range(2), 0)
    steps = OwnedParameters(torch.optim.SGD(model.parameters(), lr=1.0), model, lambda name: axis, sharded=True)
    assert [steps.owner(parameter) for parameter in model] == [0, 1, 0, 1, 0, 1]


def test_buckets_hold_at_most_the_limit_or_one_tensor():
    tensors = [torch.zeros(size) for size in (3, 3, 9, 1, 4, 4)]
    found = [[tensor.numel() for tensor in bucket] for bucket in buckets(tensors, 6 * 4)]
    assert found == [[3, 3], [9], [1, 4], [4]]
    assert list(buckets([], 6)) == []


@pooled(world_size=3)
def test_every_rank_gets_each_tensor_as_its_owner_has_it():
    rank = dist.get_rank()
    axis = Axis.of(dist.group.WORLD, "dp")
    shapes = [(2, 3), (), (5,), (4,), (1, 2)]
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.float16, torch.bfloat16]
    owners = [0, 2, 2, 1, 2]
    tensors = [torch.full(s, rank * 10.0 + i, dtype=d) for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))]
    tensors[0] = tensors[0].t()  # not contiguous
    broadcast_from_owners(tensors, owners, axis)
    for index, (tensor, owner) in enumerate(zip(tensors, owners, strict=True)):
        assert torch.equal(tensor, torch.full_like(tensor, owner * 10.0 + index))
