import pytest
import torch
import torch.distributed as dist

from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError
from autopar.features.megatron.toolbox import (
    all_to_all,
    axis_of,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.transports import both_transports


def run(function, x, grad=None):
    """``function(x)`` and the gradient of ``x`` for the gradient ``grad`` of the result; neither may be mutated."""
    x = x.clone().requires_grad_()
    before = x.detach().clone()
    y = function(x)
    grad = torch.ones_like(y) if grad is None else grad
    grad_before = grad.clone()
    y.backward(grad)
    assert torch.equal(x.detach(), before), "the input was mutated"
    assert torch.equal(grad, grad_before), "the incoming gradient was mutated"
    return y.detach(), x.grad


def same(found, wanted):
    assert torch.equal(found, wanted), f"rank {dist.get_rank()}: {found} is not {wanted}"


@both_transports
@pooled(world_size=8)
def test_copy_and_reduce_are_conjugate(transport):
    mpu = MPU(tensor_parallel_size=4, pipeline_parallel_size=2, cpu_transport=transport)
    rank = dist.get_rank()
    mine, total = torch.tensor([float(rank)]), torch.tensor([6.0 if rank < 4 else 22.0])
    for group in (mpu, mpu.get_tensor_parallel_group()):
        y, grad = run(lambda x, g=group: copy_to_tensor_model_parallel_region(x, g), mine, mine)
        same(y, mine)
        same(grad, total)
        y, grad = run(lambda x, g=group: reduce_from_tensor_model_parallel_region(x, g), mine, mine)
        same(y, total)
        same(grad, mine)
    # A group is the one that was passed, whatever its axis.
    y, _ = run(lambda x: reduce_from_tensor_model_parallel_region(x, mpu.get_pipeline_parallel_group()), mine)
    same(y, torch.tensor([float(2 * (rank % 4) + 4)]))


@both_transports
@pooled(world_size=8)
def test_copy_gives_one_gradient_to_two_branches(transport):
    """An in-place all-reduce in backward would be seen by the other branch, which autograd hands the same tensor."""
    mpu = MPU(tensor_parallel_size=4, pipeline_parallel_size=2, cpu_transport=transport)
    _, grad = run(lambda x: copy_to_tensor_model_parallel_region(x, mpu) + x, torch.ones(2))
    same(grad, torch.full((2,), 5.0))


@both_transports
@pooled(world_size=8)
def test_scatter_and_gather_along_the_last_dim(transport):
    mpu = MPU(tensor_parallel_size=4, pipeline_parallel_size=2, cpu_transport=transport)
    rank, t = dist.get_rank(), dist.get_rank() % 4
    shared = torch.arange(32.0).view(8, 4)
    y, grad = run(lambda x: scatter_to_tensor_model_parallel_region(x, mpu), shared, torch.full((8, 1), float(rank)))
    same(y, shared[:, t : t + 1])
    first = rank - t
    columns = torch.arange(first, first + 4.0)
    same(grad, columns.expand(8, 4))

    incoming = torch.arange(32.0) + 100 * rank  # different on the ranks: backward keeps its own, it does not sum
    y, grad = run(lambda x: gather_from_tensor_model_parallel_region(x, mpu), torch.ones(8) * rank, incoming)
    same(y, columns.repeat_interleave(8))
    same(grad, incoming[8 * t : 8 * t + 8])

    y, _ = run(lambda x: gather_from_tensor_model_parallel_region(x, mpu), torch.ones(2, 3, 1) * rank)
    same(y, columns.expand(2, 3, 4))


@both_transports
@pooled(world_size=8)
def test_gather_of_uneven_shards_needs_the_whole_size(transport):
    mpu = MPU(tensor_parallel_size=4, pipeline_parallel_size=2, cpu_transport=transport)
    t = mpu.tp.rank
    full = torch.arange(12.0).view(2, 6)
    low, high = [(0, 2), (2, 4), (4, 5), (5, 6)][t]
    y, grad = run(lambda x: gather_from_tensor_model_parallel_region(x, mpu, size=6), full[:, low:high], full + t)
    same(y, full)
    same(grad, (full + t)[:, low:high])
    with pytest.raises(ConfigError, match=f"expected {high - low} of 6 elements in dim -1 on rank {t} of 4, got 5"):
        gather_from_tensor_model_parallel_region(torch.ones(2, 5), mpu, size=6)


@both_transports
@pooled(world_size=8)
def test_sequence_parallel_regions(transport):
    mpu = MPU(tensor_parallel_size=4, pipeline_parallel_size=2, cpu_transport=transport)
    rank, t = dist.get_rank(), dist.get_rank() % 4
    first = rank - t
    shared = torch.arange(32.0).view(8, 4)
    y, grad = run(lambda x: scatter_to_sequence_parallel_region(x, mpu), shared, torch.full((2, 4), float(rank)))
    same(y, shared[2 * t : 2 * t + 2])
    blocks = torch.arange(first, first + 4.0).repeat_interleave(2)
    same(grad, blocks[:, None].expand(8, 4))

    incoming = torch.arange(8.0)[:, None] + 100 * rank  # [8, 1], different on the ranks
    mine = torch.full((2, 1), float(rank))
    y, grad = run(lambda x: gather_from_sequence_parallel_region(x, group=mpu), mine, incoming)
    same(y, blocks[:, None])
    same(grad, 4 * torch.arange(8.0)[2 * t : 2 * t + 2, None] + 100 * sum(range(first, first + 4)))
    y, grad = run(lambda x: gather_from_sequence_parallel_region(x, False, mpu), mine, incoming)
    same(y, blocks[:, None])
    same(grad, incoming[2 * t : 2 * t + 2])

    rows = torch.vstack([torch.ones(4) * row for row in range(4)])
    y, grad = run(lambda x: reduce_scatter_to_sequence_parallel_region(x, mpu), rows, torch.full((1, 4), float(rank)))
    same(y, torch.ones(1, 4) * 4 * t)
    same(grad, torch.arange(first, first + 4.0)[:, None].expand(4, 4))


@both_transports
@pooled(world_size=8)
def test_all_to_all_even_and_uneven(transport):
    mpu = MPU(tensor_parallel_size=4, pipeline_parallel_size=2, cpu_transport=transport)
    rank, t = dist.get_rank(), dist.get_rank() % 4
    first = rank - t
    # Each row tells where it is from and where it goes. What two ranks send each other is not equally many rows.
    inputs = [(2 * t + to) % 3 for to in range(4)]
    outputs = [(2 * source + t) % 3 for source in range(4)]
    assert inputs != outputs

    def message(source, to):
        return torch.tensor([[10.0 * (first + source) + to]])

    sent = torch.cat([message(t, to).repeat(inputs[to], 1) for to in range(4)])
    received = torch.cat([message(source, t).repeat(outputs[source], 1) for source in range(4)])
    incoming = received + 1000  # the gradient of a row goes back to where the row came from
    y, grad = run(lambda x: all_to_all(mpu, x, outputs, inputs), sent, incoming)
    same(y, received)
    same(grad, sent + 1000)

    even = torch.cat([message(t, to) for to in range(4)])
    y, grad = run(lambda x: all_to_all(mpu, x), even, even)
    same(y, torch.cat([message(source, t) for source in range(4)]))
    same(grad, y)


@both_transports
@pooled(world_size=8)
def test_sizes_that_do_not_divide_are_the_same_error_on_every_rank(transport):
    mpu = MPU(tensor_parallel_size=4, pipeline_parallel_size=2, cpu_transport=transport)
    x = torch.ones(6, 6)
    for function, what in [
        (scatter_to_tensor_model_parallel_region, "last dim"),
        (scatter_to_sequence_parallel_region, "sequence dim"),
        (reduce_scatter_to_sequence_parallel_region, "sequence dim"),
        (lambda x, group: all_to_all(group, x), "dim 0 (without output_split_sizes)"),
        (lambda x, group: group.scatter(x), "dim -1"),
    ]:
        with raises_everywhere(ConfigError, f"{what} of size 6 must be divisible by 4 ranks"):
            function(x, mpu)
    with raises_everywhere(ConfigError, "must add up to the 6 rows of dim 0, got [1, 2, 3, 1] with sum 7"):
        all_to_all(mpu, x, [1, 2, 3, 0], [1, 2, 3, 1])
    with raises_everywhere(ConfigError, "output_split_sizes must have 4 entries, one per rank, got [1, 2, 3]"):
        all_to_all(mpu, x, [1, 2, 3], [1, 2, 3, 0])


@both_transports
@pooled(world_size=8)
def test_the_mpu_has_oslos_operations(transport):
    mpu = MPU(tensor_parallel_size=4, pipeline_parallel_size=2, cpu_transport=transport)
    rank, t = dist.get_rank(), dist.get_rank() % 4
    first = rank - t
    mine, total = torch.tensor([float(rank)]), torch.tensor([4.0 * first + 6])
    y, grad = run(mpu.broadcast, mine, mine)
    same(y, mine)
    same(grad, total)
    y, grad = run(mpu.reduce, mine, mine)
    same(y, total)
    same(grad, mine)
    columns = torch.arange(first, first + 4.0)
    shared = torch.arange(8.0).view(2, 4)
    y, grad = run(mpu.scatter, shared, torch.full((2, 1), float(rank)))
    same(y, shared[:, t : t + 1])
    same(grad, columns.expand(2, 4))
    y, grad = run(mpu.gather, torch.full((2, 1), float(rank)), shared + rank)
    same(y, columns.expand(2, 4))
    same(grad, shared[:, t : t + 1] + rank)
    y, _ = run(lambda x: mpu.gather(x, dim=0), torch.full((1, 2), float(rank)))
    same(y, columns[:, None].expand(4, 2))
    y, _ = run(lambda x: mpu.scatter(x, dim=0), shared.T)
    same(y, shared.T[t : t + 1])


@both_transports
@pooled(world_size=8)
def test_what_a_group_may_be(transport):
    mpu = MPU(tensor_parallel_size=4, pipeline_parallel_size=2, cpu_transport=transport)
    rank = dist.get_rank()
    assert axis_of(mpu) is mpu.tp
    assert axis_of(mpu.pp) is mpu.pp
    axis = axis_of(mpu.get_tensor_parallel_group())
    assert (axis.ranks, axis.rank, axis.size) == (mpu.tp.ranks, rank % 4, 4)
    with pytest.raises(ConfigError, match="group must be a torch ProcessGroup or an MPU, got NoneType"):
        gather_from_sequence_parallel_region(torch.ones(1))
    others = dist.new_group([0, 1])
    if rank > 1:
        with pytest.raises(ConfigError, match=f"global rank {rank} is not a member"):
            copy_to_tensor_model_parallel_region(torch.ones(1), others)
