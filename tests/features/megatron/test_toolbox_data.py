import pytest
import torch
import torch.distributed as dist

from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError
from autopar.features.megatron.toolbox import (
    VocabUtility,
    broadcast_data,
    gather_split_1d_tensor,
    split_tensor_along_last_dim,
    split_tensor_into_1d_equal_chunks,
    vocab_range_from_global_vocab_size,
)
from autopar.layout import even_shards
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled


def batch_of(rank):
    """What rank ``rank`` would read; no two ranks read the same."""
    return {
        "ids": torch.arange(6).view(2, 3) + 100 * rank,
        7: torch.full((2, 2, 2, 2, 2, 2), 10 * rank, dtype=torch.int64),
        "one": torch.tensor(rank),
        "empty": torch.empty(2, 0, 3, dtype=torch.int64),
        "more": torch.full((2, 1 + rank % 2), rank, dtype=torch.int64),  # not even the shapes agree
    }


def same(found, wanted):
    assert list(found) == list(wanted), "keys, in order"
    for key in wanted:
        assert found[key].dtype == wanted[key].dtype, key
        assert found[key].shape == wanted[key].shape, key
        assert torch.equal(found[key], wanted[key]), f"{key!r}: {found[key]} is not {wanted[key]}"


@pooled(world_size=8)
def test_the_first_rank_of_each_group_gives_its_data_to_its_group():
    mpu = MPU(tensor_parallel_size=2, pipeline_parallel_size=4)
    rank = dist.get_rank()
    wanted = batch_of(rank - rank % 2)
    keys = list(wanted)
    same(broadcast_data(keys, batch_of(rank), torch.int64, mpu), wanted)
    same(broadcast_data(keys, batch_of(rank), torch.int64, mpu.get_tensor_parallel_group()), wanted)
    same(mpu.broadcast_data(keys, batch_of(rank), torch.int64), wanted)
    # The others need no data, or may hold nonsense.
    for other in (None, {}, {"ids": "nonsense"}, 5):
        data = batch_of(rank) if rank % 2 == 0 else other
        same(mpu.broadcast_data(["more", 7], data, torch.int64), {key: wanted[key] for key in ("more", 7)})
    assert mpu.broadcast_data([], batch_of(rank), torch.int64) == {}


@pooled(world_size=8)
def test_what_comes_back_is_a_copy_without_gradient_even_on_the_first_rank():
    mpu = MPU(tensor_parallel_size=2, pipeline_parallel_size=4)
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
        (
            (["x"], good),
            "data['x'] must be a dense tensor of torch.int64 with storage, not torch.float32, torch.strided",
        ),
        ((["a"], {"a": [1, 2]}), "with storage, not list"),
        ((["a"], {"a": torch.ones(2, 2).to_sparse()}), "with storage, not torch.float32, torch.sparse_coo"),
        ((["a"], {"a": torch.ones(2, device="meta")}), "data['a'] must be a dense tensor of torch.int64 with storage"),
        ((["a"], None), "data must be a mapping of keys to tensors, not NoneType"),
        (("ids", good), "keys must be a list of keys, not 'ids'"),
        (([2.5], {2.5: good["ids"]}), "a key must be an int or a str, not 2.5"),
        ((["ids", "x"], good, {"ids": torch.int64}), "the dtype of key 'x' must be a torch.dtype, not None"),
        ((["ids"], good, "int64"), "the dtype of key 'ids' must be a torch.dtype, not 'int64'"),
    ]:
        with raises_everywhere(ConfigError, text, f"the data of global rank {mpu.tp.ranks[0]}, the first of"):
            send(*args)

    class Broken(dict):
        def __getitem__(self, key):
            raise RuntimeError("the file is gone")

    with raises_everywhere(ConfigError, "RuntimeError: the file is gone"):
        send(["ids"], Broken(good))
    with raises_everywhere(ConfigError, missing) as info:
        send(["idz", "x"], good)
    assert len(info.value.problems) == 2, "all problems at once"
    found = mpu.broadcast_data(["ids"], good if mpu.tp.rank == 0 else None, torch.int64)  # and the group is in order
    same(found, {"ids": good["ids"]})


@pooled(world_size=8)
def test_flat_chunks_of_a_tensor_and_back():
    mpu = MPU(tensor_parallel_size=2, pipeline_parallel_size=4)
    rank = dist.get_rank()
    x = torch.arange(12).view(3, 4)
    chunk = split_tensor_into_1d_equal_chunks(x, mpu)
    assert chunk.tolist() == ([0, 1, 2, 3, 4, 5] if rank % 2 == 0 else [6, 7, 8, 9, 10, 11])
    assert torch.equal(gather_split_1d_tensor(chunk, mpu).view(3, 4), x)
    assert split_tensor_into_1d_equal_chunks(x.T, mpu).tolist() == x.T.flatten().chunk(2)[rank % 2].tolist()
    flat = gather_split_1d_tensor(torch.ones(2, 4) * rank, mpu)
    base = rank - rank % 2
    assert flat.tolist() == [base] * 8 + [base + 1] * 8
    with raises_everywhere(ConfigError, "flat tensor of size 9 must be divisible by 2 ranks"):
        split_tensor_into_1d_equal_chunks(torch.ones(3, 3), mpu)


def test_split_along_the_last_dim():
    x = torch.arange(24.0).view(2, 3, 4)
    views = split_tensor_along_last_dim(x, 2)
    assert [view.shape for view in views] == [(2, 3, 2)] * 2
    assert torch.equal(views[0], x[..., :2]) and torch.equal(views[1], x[..., 2:])
    assert views[1].untyped_storage().data_ptr() == x.untyped_storage().data_ptr() and not views[1].is_contiguous()
    copies = split_tensor_along_last_dim(x, 2, contiguous_split_chunks=True)
    assert all(copy.is_contiguous() for copy in copies) and torch.equal(copies[1], views[1])
    assert [part.shape for part in split_tensor_along_last_dim(torch.ones(2, 0), 3)] == [(2, 0)] * 3
    for parts in (3, 0):
        with pytest.raises(ConfigError, match=f"last dim of size 4 must be divisible into {parts} partitions"):
            split_tensor_along_last_dim(x, parts)


def test_vocabulary_ranges():
    assert [vocab_range_from_global_vocab_size(100, rank, 4) for rank in range(4)] == [
        (0, 25), (25, 50), (50, 75), (75, 100),
    ]  # fmt: skip
    assert [vocab_range_from_global_vocab_size(50257, rank, 2) for rank in range(2)] == [(0, 25129), (25129, 50257)]
    assert [VocabUtility.vocab_range_from_global_vocab_size(3, rank, 4)[1] for rank in range(4)] == [1, 2, 3, 3]
    assert VocabUtility.vocab_range_from_per_partition_vocab_size(8, 3, 4) == (24, 32)
    assert tuple(vocab_range_from_global_vocab_size(17, rank, 8) for rank in range(8)) == even_shards(17, 8)
