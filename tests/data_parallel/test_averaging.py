from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autopar.data_parallel.grad_sync import sum_gradients
from autopar.distributed.axis import Axis
from tests.pool import pooled


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_the_mean_over_the_axis_in_pieces_of_each_dtype():
    rank = dist.get_rank()
    axis = Axis.of(dist.group.WORLD, "dp")
    shapes = [(2, 3), (), (5,), (0,), (3, 2)]
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.float32]
    parameters = [torch.nn.Parameter(torch.zeros(s, dtype=d)) for s, d in zip(shapes, dtypes, strict=True)]
    for index, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, 2.0 * index + 4 * rank)
    parameters[2].grad.fill_(60000.0)  # the sum of two overflows, the mean does not
    parameters[4].grad = torch.arange(6.0).view(2, 3).t() * (1 + rank)  # not contiguous
    sum_gradients([parameters], axis.group, 1 / axis.size)
    assert torch.equal(parameters[0].grad, torch.full((2, 3), 2.0))
    assert parameters[1].grad == 4.0 and parameters[2].grad[0] == 60000.0
    assert torch.equal(parameters[4].grad, torch.arange(6.0).view(2, 3).t() * 1.5)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_a_gradient_that_one_replica_lacks_counts_as_zero():
    rank = dist.get_rank()
    axis = Axis.of(dist.group.WORLD, "dp")
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(4)]
    parameters[3].requires_grad_(False)
    parameters[0].grad = torch.full((3,), 1.0 + rank)
    if rank == 1:
        parameters[1].grad = torch.full((3,), 4.0)
    sum_gradients([parameters], axis.group, 1 / axis.size)
    assert torch.equal(parameters[0].grad, torch.full((3,), 1.5))
    assert torch.equal(parameters[1].grad, torch.full((3,), 2.0))
    assert parameters[2].grad is None and parameters[3].grad is None
    sum_gradients([], axis.group)
