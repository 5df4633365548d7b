import pytest
import torch
import torch.distributed as dist

from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError
from autopar.features.megatron import toolbox
from autopar.features.megatron.toolbox import all_to_all, axis_of, broadcast_data, copy_to_tensor_model_parallel_region
from autopar.layout import even_shards
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
    rank, group = dist.get_rank(), mpu.get_tensor_parallel_group()
    mine, total = torch.tensor([float(rank)]), torch.tensor([6.0 if rank < 4 else 22.0])
    for copy, reduce in (
        (lambda x: copy_to_tensor_model_parallel_region(x, mpu), toolbox.reduce_from_tensor_model_parallel_region),
        (lambda x: copy_to_tensor_model_parallel_region(x, group), toolbox.reduce_from_tensor_model_parallel_region),
        (mpu.broadcast, lambda x, _: mpu.reduce(x)),
    ):
        y, grad = run(copy, mine, mine)
        same(y, mine)
        same(grad, total)
        for of in (mpu, group):
            y, grad = run(lambda x, of=of, reduce=reduce: reduce(x, of), mine, mine)
            same(y, total)
            same(grad, mine)
    # A group is the one that was passed, whatever its axis.
    y, _ = run(lambda x: toolbox.reduce_from_tensor_model_parallel_region(x, mpu.get_pipeline_parallel_group()), mine)
    same(y, torch.tensor([float(2 * (rank % 4) + 4)]))
    # An in-place all-reduce in backward would be seen by the other branch, which autograd hands the same tensor.
    _, grad = run(lambda x: copy_to_tensor_model_parallel_region(x, mpu) + x, torch.ones(2))
    same(grad, torch.full((2,), 5.0))


@both_transports
@pooled(world_size=8)
def test_scatter_and_gather(transport):
    mpu = MPU(tensor_parallel_size=4, pipeline_parallel_size=2, cpu_transport=transport)
    rank, t = dist.get_rank(), mpu.tp.rank
    shared, columns = torch.arange(32.0).view(8, 4), torch.arange(rank - t, rank - t + 4.0)
    incoming = torch.arange(32.0) + 100 * rank  # different on the ranks: backward keeps its own, it does not sum
    for scatter, gather in (
        (toolbox.scatter_to_tensor_model_parallel_region, toolbox.gather_from_tensor_model_parallel_region),
        (lambda x, of: of.scatter(x), lambda x, of: of.gather(x)),
    ):
        y, grad = run(lambda x, scatter=scatter: scatter(x, mpu), shared, torch.full((8, 1), float(rank)))
        same(y, shared[:, t : t + 1])
        same(grad, columns.expand(8, 4))
        y, grad = run(lambda x, gather=gather: gather(x, mpu), torch.ones(8) * rank, incoming)
        same(y, columns.repeat_interleave(8))
        same(grad, incoming[8 * t : 8 * t + 8])
        y, _ = run(lambda x, gather=gather: gather(x, mpu), torch.ones(2, 3, 1) * rank)
        same(y, columns.expand(2, 3, 4))
    y, _ = run(lambda x: mpu.gather(x, dim=0), torch.full((1, 2), float(rank)))
    same(y, columns[:, None].expand(4, 2))
    y, _ = run(lambda x: mpu.scatter(x, dim=0), shared[:2].T)
    same(y, shared[:2].T[t : t + 1])

    full = torch.arange(12.0).view(2, 6)
    low, high = [(0, 2), (2, 4), (4, 5), (5, 6)][t]  # uneven shards need the full size
    shard = full[:, low:high]
    y, grad = run(lambda x: toolbox.gather_from_tensor_model_parallel_region(x, mpu, size=6), shard, full + t)
    same(y, full)
    same(grad, (full + t)[:, low:high])
    with pytest.raises(ConfigError, match=f"expected {high - low} of 6 elements in dim -1 on rank {t} of 4, got 5"):
        toolbox.gather_from_tensor_model_parallel_region(torch.ones(2, 5), mpu, size=6)


@both_transports
@pooled(world_size=8)
def test_sequence_parallel_regions(transport):
    mpu = MPU(tensor_parallel_size=4, pipeline_parallel_size=2, cpu_transport=transport)
    rank, t = dist.get_rank(), dist.get_rank() % 4
    first = rank - t
    shared = torch.arange(32.0).view(8, 4)
    y, grad = run(lambda x: toolbox.scatter_to_sequence_parallel_region(x, mpu), shared, torch.full((2, 4), 1.0 * rank))
    same(y, shared[2 * t : 2 * t + 2])
    blocks = torch.arange(first, first + 4.0).repeat_interleave(2)
    same(grad, blocks[:, None].expand(8, 4))

    incoming = torch.arange(8.0)[:, None] + 100 * rank  # [8, 1], different on the ranks
    mine = torch.full((2, 1), float(rank))
    y, grad = run(lambda x: toolbox.gather_from_sequence_parallel_region(x, group=mpu), mine, incoming)
    same(y, blocks[:, None])
    same(grad, 4 * torch.arange(8.0)[2 * t : 2 * t + 2, None] + 100 * sum(range(first, first + 4)))
    y, grad = run(lambda x: toolbox.gather_from_sequence_parallel_region(x, False, mpu), mine, incoming)
    same(y, blocks[:, None])
    same(grad, incoming[2 * t : 2 * t + 2])

    rows = torch.vstack([torch.ones(4) * row for row in range(4)])
    incoming = torch.full((1, 4), float(rank))
    y, grad = run(lambda x: toolbox.reduce_scatter_to_sequence_parallel_region(x, mpu), rows, incoming)
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
def test_sizes_that_do_not_divide_and_groups_are_the_same_error_on_every_rank(transport):
    mpu = MPU(tensor_parallel_size=4, pipeline_parallel_size=2, cpu_transport=transport)
    x = torch.ones(6, 6)
    for function, what in [
        (toolbox.scatter_to_tensor_model_parallel_region, "last dim"),
        (toolbox.scatter_to_sequence_parallel_region, "sequence dim"),
        (toolbox.reduce_scatter_to_sequence_parallel_region, "sequence dim"),
        (lambda x, group: all_to_all(group, x), "dim 0 (without output_split_sizes)"),
        (lambda x, group: group.scatter(x), "dim -1"),
    ]:
        with raises_everywhere(ConfigError, f"{what} of size 6 must be divisible by 4 ranks"):
            function(x, mpu)
    with raises_everywhere(ConfigError, "must add up to the 6 rows of dim 0, got [1, 2, 3, 1] with sum 7"):
        all_to_all(mpu, x, [1, 2, 3, 0], [1, 2, 3, 1])
    with raises_everywhere(ConfigError, "output_split_sizes must have 4 entries, one per rank, got [1, 2, 3]"):
        all_to_all(mpu, x, [1, 2, 3], [1, 2, 3, 0])

    mpu = MPU(tensor_parallel_size=4, pipeline_parallel_size=2, cpu_transport=transport)
    rank, axis = dist.get_rank(), axis_of(mpu.get_tensor_parallel_group())
    assert axis_of(mpu) is mpu.tp and axis_of(mpu.pp) is mpu.pp
    assert (axis.ranks, axis.rank, axis.size) == (mpu.tp.ranks, rank % 4, 4)
    with pytest.raises(ConfigError, match="group must be a torch ProcessGroup or an MPU, got NoneType"):
        toolbox.gather_from_sequence_parallel_region(torch.ones(1))
    others = dist.new_group([0, 1])
    if rank > 1:
        with pytest.raises(ConfigError, match=f"global rank {rank} is not a member"):
            copy_to_tensor_model_parallel_region(torch.ones(1), others)


def batch_of(rank):
    """What rank ``rank`` would read; no two ranks read the same_data."""
    return {
        "ids": torch.arange(6).view(2, 3) + 100 * rank,
        7: torch.full((2, 2, 2, 2, 2, 2), 10 * rank, dtype=torch.int64),
        "one": torch.tensor(rank),
        "empty": torch.empty(2, 0, 3, dtype=torch.int64),
        "more": torch.full((2, 1 + rank % 2), rank, dtype=torch.int64),  # not even the shapes agree
    }


def same_data(found, wanted):
    assert list(found) == list(wanted), "keys, in order"
    for key in wanted:
        assert (found[key].dtype, found[key].shape) == (wanted[key].dtype, wanted[key].shape), key
        assert torch.equal(found[key], wanted[key]), f"{key!r}: {found[key]} is not {wanted[key]}"


@pooled(world_size=8)
def test_the_first_rank_of_each_group_gives_its_data_to_its_group():
    mpu = MPU(tensor_parallel_size=2, pipeline_parallel_size=4)
    rank = dist.get_rank()
    wanted = batch_of(rank - rank % 2)
    keys = list(wanted)
    same_data(broadcast_data(keys, batch_of(rank), torch.int64, mpu), wanted)
    same_data(broadcast_data(keys, batch_of(rank), torch.int64, mpu.get_tensor_parallel_group()), wanted)
    same_data(mpu.broadcast_data(keys, batch_of(rank), torch.int64), wanted)
    # The others need no data, or may hold nonsense.
    for other in (None, {}, {"ids": "nonsense"}, 5):
        data = batch_of(rank) if rank % 2 == 0 else other
        same_data(mpu.broadcast_data(["more", 7], data, torch.int64), {key: wanted[key] for key in ("more", 7)})
    assert mpu.broadcast_data([], batch_of(rank), torch.int64) == {}
    # A copy without a gradient comes back, also on the first rank.
    x = torch.arange(6.0).view(2, 3).T.requires_grad_()  # not contiguous
    found = mpu.broadcast_data(["x"], {"x": x} if mpu.tp.rank == 0 else None, torch.float32)["x"]
    assert torch.equal(found, x) and found.is_contiguous() and not found.requires_grad
    found.zero_()
    assert x.sum() == 15
    found = mpu.broadcast_data(["x", "y"], {"x": x, "y": x[:1]} if mpu.tp.rank == 0 else None, torch.float32)
    assert found["y"].untyped_storage().nbytes() == 8, "of its own, not a part of the batch that it would keep alive"


@pooled(world_size=8, timeout=60)
def test_bad_data_on_the_first_rank_is_the_same_error_on_all_ranks():
    mpu = MPU(tensor_parallel_size=2, pipeline_parallel_size=4)
    good = {"ids": torch.ones(2, dtype=torch.int64), "x": torch.ones(2)}

    def send(keys, data, dtype=torch.int64):
        mpu.broadcast_data(keys, data if mpu.tp.rank == 0 else good, dtype)

    missing = "key 'idz' is missing; the data has 'ids', 'x'. Did you mean 'ids'?"
    for args, text in [
        ((["idz"], good), missing),
        ((["x"], good), "data['x'] must be a dense tensor of torch.int64 with storage, not torch.float32, torch.str"),
        ((["a"], {"a": [1, 2]}), "with storage, not list"),
        ((["a"], {"a": torch.ones(2, 2).to_sparse()}), "with storage, not torch.float32, torch.sparse_coo"),
        ((["a"], {"a": torch.ones(2, device="meta")}), "data['a'] must be a dense tensor of torch.int64 with storage"),
        ((["a"], None), "TypeError: "),
        ((["ids", "x"], good, {"ids": torch.int64}), "data['x'] must be a dense tensor of None with storage, not"),
    ]:
        with raises_everywhere(ConfigError, text, f"the data of global rank {mpu.tp.ranks[0]}, the first of"):
            send(*args)

    class Broken(dict):
        def __getitem__(self, key):
            raise RuntimeError("the file is gone")

    with raises_everywhere(ConfigError, "RuntimeError: the file is gone"):
        send(["ids"], Broken(good))
    found = mpu.broadcast_data(["ids"], good if mpu.tp.rank == 0 else None, torch.int64)  # and the group is in order
    same_data(found, {"ids": good["ids"]})


@pooled(world_size=8)
def test_flat_chunks_of_a_tensor_and_back():
    mpu = MPU(tensor_parallel_size=2, pipeline_parallel_size=4)
    rank = dist.get_rank()
    x = torch.arange(12).view(3, 4)
    chunk = toolbox.split_tensor_into_1d_equal_chunks(x, mpu)
    assert chunk.tolist() == ([0, 1, 2, 3, 4, 5] if rank % 2 == 0 else [6, 7, 8, 9, 10, 11])
    assert torch.equal(toolbox.gather_split_1d_tensor(chunk, mpu).view(3, 4), x)
    assert toolbox.split_tensor_into_1d_equal_chunks(x.T, mpu).tolist() == x.T.flatten().chunk(2)[rank % 2].tolist()
    flat = toolbox.gather_split_1d_tensor(torch.ones(2, 4) * rank, mpu)
    base = rank - rank % 2
    assert flat.tolist() == [base] * 8 + [base + 1] * 8
    with raises_everywhere(ConfigError, "flat tensor of size 9 must be divisible by 2 ranks"):
        toolbox.split_tensor_into_1d_equal_chunks(torch.ones(3, 3), mpu)


def test_splits_of_the_last_dim_and_of_vocabularies():
    x = torch.arange(24.0).view(2, 3, 4)
    views = toolbox.split_tensor_along_last_dim(x, 2)
    assert [view.shape for view in views] == [(2, 3, 2)] * 2
    assert torch.equal(views[0], x[..., :2]) and torch.equal(views[1], x[..., 2:])
    assert views[1].untyped_storage().data_ptr() == x.untyped_storage().data_ptr() and not views[1].is_contiguous()
    copies = toolbox.split_tensor_along_last_dim(x, 2, contiguous_split_chunks=True)
    assert all(copy.is_contiguous() for copy in copies) and torch.equal(copies[1], views[1])
    assert [part.shape for part in toolbox.split_tensor_along_last_dim(torch.ones(2, 0), 3)] == [(2, 0)] * 3
    for parts in (3, 0):
        with pytest.raises(ConfigError, match=f"last dim of size 4 must be divisible into {parts} partitions"):
            toolbox.split_tensor_along_last_dim(x, parts)

    ranges = toolbox.vocab_range_from_global_vocab_size
    assert [ranges(50257, rank, 2) for rank in range(2)] == [(0, 25129), (25129, 50257)]
    assert [toolbox.VocabUtility.vocab_range_from_global_vocab_size(3, rank, 4)[1] for rank in range(4)] == [1, 2, 3, 3]
    assert toolbox.VocabUtility.vocab_range_from_per_partition_vocab_size(8, 3, 4) == (24, 32)
    assert tuple(ranges(17, rank, 8) for rank in range(8)) == even_shards(17, 8)
