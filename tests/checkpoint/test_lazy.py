"""Reading tensors by the box: every kind equals slicing the whole tensor, and only the needed bytes are read."""

import itertools
import random
from collections.abc import Iterable

import pytest
import torch

from autopar.errors import CheckpointError
from autopar.layout import Block, Layout, even_shards
from autopar.plan.plan import Piece
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
from autopar.storage.safetensors_io import SafetensorsReader, SafetensorsWriter


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


def test_a_small_buffer_is_enough(tmp_path, monkeypatch):
    monkeypatch.setattr(lazy_module, "_BOUNCE", 16)
    tensor = torch.randn(4, 6, 5)
    source = stored(tmp_path / "file", tensor)
    for box in boxes(tensor.shape):
        out = torch.empty_like(cut(tensor, box), dtype=torch.float64)
        source.read_into(out, box)
        assert torch.equal(out, cut(tensor, box).double()), box


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
    with pytest.raises(ValueError, match=r"the shard's shape \[4, 6\], got \[4, 5\]"):
        read_shard(source, None, 0, torch.empty(4, 5))


def test_truncated_and_missing(tmp_path):
    source = stored(tmp_path / "file", torch.randn(40, 6))
    (tmp_path / "file").write_bytes(bytes(100))
    with pytest.raises(CheckpointError, match=r"file is truncated: expected at least 968 bytes, got 100"):
        source.read()
    with pytest.raises(CheckpointError, match="gone cannot be read: No such file"):
        Stored(RangeFile(tmp_path / "gone"), 0, torch.float32, (2,)).read()


# -- views, and pieces that are such views -----------------------------------------------------------------------------


SHAPES = [(4, 3, 5), (3, 1, 4), (1, 1, 6), (2, 2, 2, 2), (7,), (5, 5), (1,)]


def view_of(full: LazyTensor, piece: Piece) -> LazyTensor | None:
    return lazy_view(full, piece.shape, piece.stride, piece.offset)


def piece_of(view: torch.Tensor) -> Piece:
    return Piece("piece", tuple(view.shape), view.stride(), view.storage_offset())


def viewed_boxes(seed: int):
    """Random boxes of random tensors, with dims of size 1 dropped or kept, and the dims in another order."""
    draw = random.Random(seed)
    for _ in range(60):
        whole = torch.randn(draw.choice(SHAPES))
        view = whole
        for dim, size in enumerate(whole.shape):
            start = draw.randrange(size)
            view = view.narrow(dim, start, draw.randrange(start, size) + 1 - start)
        for dim in reversed(range(view.ndim)):
            if view.shape[dim] == 1 and draw.random() < 0.7:
                view = view.squeeze(dim)
        order = list(range(view.ndim))
        draw.shuffle(order)
        yield whole, view.permute(order)


@pytest.mark.parametrize("seed", range(3))
def test_random_boxes_also_transposed_ones(seed):
    read = 0
    for whole, view in viewed_boxes(seed):
        piece = piece_of(view)
        assert torch.equal(piece.of(whole), view)
        lazy = view_of(InMemory(whole), piece)
        assert lazy is not None, (whole.shape, piece)
        assert lazy.shape == view.shape
        assert torch.equal(lazy.read(), view), (whole.shape, piece)
        read += 1
    assert read > 30


@pytest.mark.parametrize("seed", range(2))
def test_any_strides_are_read_right_or_refused(seed):
    """Views that are no box: steps of two, windows that overlap, one element several times."""
    draw = random.Random(seed)
    none = 0
    for _ in range(300):
        whole = torch.arange(60.0).reshape(draw.choice([(60,), (4, 15), (3, 4, 5), (5, 1, 12)]))
        shape = [draw.randrange(1, 5) for _ in range(draw.randrange(1, 4))]
        stride = [draw.choice([0, 1, 2, 3, 5, 12, 15, 20]) for _ in shape]
        piece = Piece("piece", tuple(shape), tuple(stride), draw.randrange(60))
        try:
            view = piece.of(whole)
        except RuntimeError:  # it does not lie inside
            lazy = view_of(InMemory(whole), piece)
            assert lazy is None
            continue
        lazy = view_of(InMemory(whole), piece)
        none += lazy is None
        assert lazy is None or torch.equal(lazy.read(), view), (whole.shape, piece)
    assert 0 < none < 300


def test_one_expert_of_many_is_read_alone(tmp_path):
    """Stacked experts ``[experts, 2 * ffn, hidden]`` that are saved one by one, gate and up by themselves."""
    whole = torch.randn(4, 2 * 6, 200)
    with SafetensorsWriter(tmp_path / "f", {"w": (whole.dtype, tuple(whole.shape))}, {}) as writer:
        writer.write("w", whole)
    with SafetensorsReader(tmp_path / "f") as reader:
        entry = reader.entries["w"]
    for expert, half in itertools.product(range(4), range(2)):
        view = whole[expert, half * 6 : half * 6 + 6]
        file = Counting(tmp_path / "f")
        lazy = view_of(Stored(file, entry.start, entry.dtype, entry.shape), piece_of(view))
        assert lazy is not None and torch.equal(lazy.read(), view)
        assert file.total == view.numel() * 4
    turned = whole[2].t()
    lazy = view_of(InMemory(whole), piece_of(turned))
    assert lazy is not None and torch.equal(lazy.read(), turned)
