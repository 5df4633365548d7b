"""Reading tensors by the box: every kind equals slicing the whole tensor, and only the needed bytes are read."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
import torch

from autopar.errors import CheckpointError
from autopar.layout import Block, Layout, even_shards
from autopar.storage import lazy_tensor as lazy_module
from autopar.storage.lazy_tensor import (
    InMemory,
    Joined,
    LazyTensor,
    RangeFile,
    Stored,
    lazy_view,
    narrowed,
    permuted,
    read_shard,
    unsqueezed,
)


class Counting(RangeFile):
    """Counts the bytes that are read."""

    total = 0

    calls = 0

    def read_runs(self, target: memoryview, places: Iterable[tuple[int, int]], length: int) -> None:
        places = list(places)
        self.total += len(places) * length
        self.calls += 1
        super().read_runs(target, places, length)


def stored(path, tensor: torch.Tensor, before: int = 8) -> Stored:
    path.write_bytes(bytes(before) + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() + b"rest")
    return Stored(Counting(path), before, tensor.dtype, tensor.shape)


def cut(tensor: torch.Tensor, box) -> torch.Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in box)]


def boxes(shape):
    for box in itertools.product(*([(0, n), (0, n // 2), (1, n), (n // 2, n // 2 + 1)] for n in shape)):
        if all(start < stop for start, stop in box):
            yield box


@pytest.mark.parametrize("short", [0, 512])
def test_boxes_of_a_stored_tensor(tmp_path, monkeypatch, short):
    monkeypatch.setattr(lazy_module, "_SHORT", short)
    tensor = torch.randn(4, 6, 5)
    source = stored(tmp_path / "file", tensor)
    for box in boxes(tensor.shape):
        assert torch.equal(source.read(box), cut(tensor, box)), box


def test_a_small_buffer_is_enough(tmp_path, monkeypatch):
    monkeypatch.setattr(lazy_module, "_BOUNCE", 16)
    tensor = torch.randn(4, 6, 5)
    source = stored(tmp_path / "file", tensor)
    for box in boxes(tensor.shape):
        out = torch.empty_like(cut(tensor, box), dtype=torch.float64)
        source.read_into(out, box)
        assert torch.equal(out, cut(tensor, box).double()), box


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_other_strides_and_dtypes(tmp_path, dtype):
    tensor = torch.randn(7, 9)
    source = stored(tmp_path / "file", tensor)
    wide = torch.zeros(9, 20, dtype=dtype).t()[3:10]  # [7, 9], transposed
    wide_before = wide.clone()
    source.read_into(wide, ((0, 7), (0, 9)))
    assert not torch.equal(wide, wide_before)
    assert torch.equal(wide, tensor.to(dtype))


def test_views(tmp_path):
    tensor = torch.randn(4, 6, 5)
    base = stored(tmp_path / "file", tensor)
    kinds: list[tuple[LazyTensor, torch.Tensor]] = [
        (permuted(base, (2, 0, 1)), tensor.permute(2, 0, 1)),
        (narrowed(base, 1, 2, 5), tensor[:, 2:5]),
        (unsqueezed(base, 1), tensor.unsqueeze(1)),
        (lazy_view(base, (6, 5), (5, 1), 30), tensor[1]),
        (Joined([base, InMemory(tensor[:, :2])], 1), torch.cat([tensor, tensor[:, :2]], 1)),
        (permuted(Joined([narrowed(base, 2, 1, 3), base], 2), (1, 2, 0)),
         torch.cat([tensor[..., 1:3], tensor], 2).permute(1, 2, 0)),
    ]  # fmt: skip
    for source, expected in kinds:
        assert source.shape == tuple(expected.shape)
        for box in boxes(expected.shape):
            assert torch.equal(source.read(box), cut(expected, box)), (type(source), box)


@pytest.mark.parametrize("limit", [1, 4, 24, 60, 130, 10**6])
def test_slabs_make_up_a_tensor_in_its_own_order(tmp_path, limit):
    tensor = torch.randn(4, 6, 5)
    base = stored(tmp_path / "file", tensor)
    for source in (
        base,
        Joined([base, base], 1),
        narrowed(base, 2, 1, 4),
        lazy_view(base, (6, 5), (5, 1), 30),
        unsqueezed(base, 0),
        InMemory(torch.tensor(3)),
        InMemory(torch.zeros(0, 3)),
        InMemory(torch.zeros(3, 0)),
    ):
        slabs = [source.read(box).flatten() for box in source.slabs(limit)]
        assert torch.equal(torch.cat([*slabs, torch.zeros(0, dtype=source.dtype)]), source.read().flatten())
        assert all(slab.nbytes <= max(limit, source.dtype.itemsize) for slab in slabs)


def test_a_tensor_that_is_transposed_is_one_slab(tmp_path):
    """Each of its rows lies in every row of the stored one."""
    source = permuted(stored(tmp_path / "file", torch.randn(4, 6)), (1, 0))
    assert list(source.slabs(8)) == [((0, 6), (0, 4))]


def test_scalars_and_empty(tmp_path):
    assert stored(tmp_path / "a", torch.tensor(3.5)).read() == 3.5
    out = torch.zeros((), dtype=torch.float64)
    stored(tmp_path / "b", torch.tensor(3.5)).read_into(out, ())
    assert out == 3.5
    assert stored(tmp_path / "c", torch.zeros(0, 4)).read().shape == (0, 4)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_reads_its_own_bytes(tmp_path, dim):
    """Fused blocks, unevenly sharded: exactly the shard's bytes are read, straight into its place."""
    tensor = torch.randn(3 * 9 * 64, 3 * 9 * 64)
    layout = Layout.of(dim, [Block("heads", 9, 64, even_shards(9, 2)) for _ in range(3)])
    source = stored(tmp_path / "file", tensor)
    for rank in range(2):
        due = layout.shard(tensor, rank)
        out = torch.nn.Parameter(torch.empty_like(due))
        source.file.total = source.file.calls = 0
        read_shard(source, layout, rank, out)
        assert torch.equal(out, due)
        assert source.file.total == due.numel() * 4
        assert source.file.calls == 3  # one for each block, whatever the number of runs


def test_a_shard_of_another_shape(tmp_path):
    source = stored(tmp_path / "file", torch.randn(4, 6))
    with pytest.raises(ValueError, match=r"of shape \[4, 5\] cannot take a shard of shape \[4, 6\]"):
        read_shard(source, None, 0, torch.empty(4, 5))


def test_truncated_and_missing(tmp_path):
    source = stored(tmp_path / "file", torch.randn(40, 6))
    (tmp_path / "file").write_bytes(bytes(100))
    with pytest.raises(CheckpointError, match=r"file is truncated: it ends at byte 100, 968 are needed"):
        source.read()
    with pytest.raises(CheckpointError, match="gone cannot be read: No such file"):
        Stored(RangeFile(tmp_path / "gone"), 0, torch.float32, (2,)).read()
