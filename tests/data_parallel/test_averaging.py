import pytest
import torch
import torch.distributed as dist

from autopar.data_parallel.grad_sync import sum_gradients
from autopar.distributed.axis import Axis
from tests.harness.worlds import pooled


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
    strides = parameters[4].grad.stride()
    sum_gradients([parameters], axis.group, 1 / axis.size)
    assert parameters[4].grad.stride() == strides
    assert torch.equal(parameters[0].grad, torch.full((2, 3), 2.0))
    assert parameters[1].grad == 4.0 and parameters[2].grad[0] == 60000.0
    assert torch.equal(parameters[4].grad, torch.arange(6.0).view(2, 3).t() * 1.5)
