"""Reading tensors by the box: every kind equals slicing the whole tensor, and only the needed bytes are read."""

import itertools
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.errors import CheckpointError
from autopar.layout import Block, Layout, even_shards
from autopar.plan.plan import Piece
from autopar.storage import lazy_tensor as lazy_module
from autopar.storage.files import RangeFile
from autopar.storage.hugging_face import Computed, Sketch
from autopar.storage.lazy_tensor import InMemory, Joined, LazyTensor, Stored, lazy_view, narrowed, unsqueezed
from autopar.storage.safetensors_io import SafetensorsReader, SafetensorsWriter


class Counting(RangeFile):
    """Counts the bytes that are read."""

    total = calls = 0

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


@pytest.mark.parametrize("limit", [1, 4, 24, 60, 130, 10**6])
def test_slabs_make_up_a_tensor_in_its_own_order(tmp_path, limit):
    tensor = torch.randn(4, 6, 5)
    base = stored(tmp_path / "file", tensor)
    views = [Joined([base, base], 1), narrowed(base, 2, 1, 4), lazy_view(base, (6, 5), (5, 1), 30), unsqueezed(base, 0)]
    small = [InMemory(tensor) for tensor in (torch.tensor(3), torch.zeros(0, 3), torch.zeros(3, 0))]
    small += [stored(tmp_path / "scalar", torch.tensor(3.5)), stored(tmp_path / "empty", torch.zeros(0, 4))]
    for source in (base, *views, *small):
        slabs = [source.read(box).flatten() for box in source.slabs(limit)]
        assert torch.equal(torch.cat([*slabs, torch.zeros(0, dtype=source.dtype)]), source.read().flatten())
        assert all(slab.nbytes <= max(limit, source.dtype.itemsize) for slab in slabs)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_reads_its_own_bytes(tmp_path, dim):
    tensor = torch.randn(3 * 9 * 64, 3 * 9 * 64)
    layout = Layout.of(dim, [Block("heads", 9, 64, even_shards(9, 2)) for _ in range(3)])
    source = stored(tmp_path / "file", tensor)
    for rank in range(2):
        due = layout.shard(tensor, rank)
        out = torch.nn.Parameter(torch.empty_like(due))
        source.file.total = source.file.calls = 0
        lazy_module.read_shard(source, layout, rank, out)
        assert torch.equal(out, due)
        assert source.file.total == due.numel() * 4
        assert source.file.calls == 3  # one for each block, whatever the number of runs


def test_truncated_and_missing_files_and_another_shape(tmp_path):
    source = stored(tmp_path / "file", torch.randn(40, 6))
    (tmp_path / "file").write_bytes(bytes(100))
    with pytest.raises(CheckpointError, match=r"file is truncated: expected at least 968 bytes, got 100"):
        source.read()
    with pytest.raises(CheckpointError, match="gone cannot be read: No such file"):
        Stored(RangeFile(tmp_path / "gone"), 0, torch.float32, (2,)).read()
    with pytest.raises(ValueError, match=r"the shard's shape \[40, 6\], got \[4, 5\]"):
        lazy_module.read_shard(source, None, 0, torch.empty(4, 5))


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
    for whole, view in viewed_boxes(seed):
        piece = piece_of(view)
        assert torch.equal(piece.of(whole), view)
        lazy = view_of(InMemory(whole), piece)
        assert lazy is not None and torch.equal(lazy.read(), view), (whole.shape, piece)


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
        lazy = view_of(InMemory(whole), piece)
        try:
            view = piece.of(whole)
        except RuntimeError:  # it does not lie inside
            assert lazy is None
            continue
        none += lazy is None
        assert lazy is None or torch.equal(lazy.read(), view), (whole.shape, piece)
    assert 0 < none < 300


def test_one_expert_of_many_is_read_alone(tmp_path):
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


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "slice": lambda x: x[1:3, :, 2:],
    "select": lambda x: x[:, 1],
    "last": lambda x: x[..., -1],
    "negative": lambda x: x[-3:-1],
    "past the end": lambda x: x[2:99],
    "empty": lambda x: x[2:2],
    "narrow": lambda x: x.narrow(2, 1, 3),
    "chunk": lambda x: x.chunk(3, dim=2),
    "split": lambda x: x.split([1, 4, 1], dim=2),
    "unbind": lambda x: x.unbind(1),
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose": lambda x: x.transpose(0, -1)[2],
    "t": lambda x: x[0].t(),
    "unsqueeze": lambda x: x.unsqueeze(1).unsqueeze(-1),
    "squeeze": lambda x: x[:, :1].squeeze(),
    "folded": lambda x: x.view(12, 6),
    "split rows": lambda x: x.view(2, 2, 3, 6)[1, 0, 1:],
    "flat": lambda x: x.reshape(-1)[5:17],
    "half": lambda x: x.to(torch.bfloat16)[1],
    "half, folded": lambda x: x.to(torch.bfloat16).view(12, 6)[3:5],
    "cat": lambda x: torch.cat([x[:1], x[3:]], 0),
    "stack": lambda x: torch.stack([x[0], x[2]], 1),
    "folded after a transposition": lambda x: x.transpose(0, 1).reshape(-1, 6)[1:4],
    "heads that were interleaved": lambda x: x.view(2, 2, 3, 6).transpose(1, 2).reshape(1, 12, 2, 3)[:, 2:9, 1:, :2],
    "expert by expert": lambda x: torch.stack([x[0].t(), x[1].t()]).transpose(1, 2),
}
OTHERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda x: x + x,
    "step": lambda x: x[:, :, ::2],
    "expanded": lambda x: x[:, :1].expand(4, 3, 6),
    "another dtype's bits": lambda x: x.view(torch.int32),
    "roll": lambda x: x.roll(1, 0),
}


def lazily(folder: Path) -> tuple[torch.Tensor, Sketch]:
    full = torch.arange(72, dtype=torch.float32).reshape(4, 3, 6)
    (folder / "file").write_bytes(b"head" + full.numpy().tobytes())
    return full, Sketch(Stored(RangeFile(folder / "file"), 4, full.dtype, full.shape))


def computed(lazy: Any) -> bool:
    return isinstance(lazy, Computed) or any(map(computed, lazy.bases))


@pytest.mark.parametrize("name", [*VIEWS, *OTHERS])
def test_values_and_what_is_read(tmp_path, name):
    full, sketch = lazily(tmp_path)
    operation = (VIEWS | OTHERS)[name]
    due, got = operation(full), operation(sketch)
    assert isinstance(got, tuple | list) == isinstance(due, tuple | list)
    for one, other in zip(
        *(value if isinstance(value, tuple | list) else [value] for value in (due, got)), strict=True
    ):
        assert other.dtype == one.dtype and other.shape == one.shape
        for box in (None, *(boxes(one.shape) if one.ndim < 4 and one.numel() else ())):
            assert torch.equal(other.lazy.read(box), one if box is None else cut(one, box)), box
        assert computed(other.lazy) == (name in OTHERS)


@pytest.mark.parametrize("box", [((0, 8), (0, 12)), ((2, 5), (0, 12)), ((3, 8), (5, 7)), ((4, 4), (0, 12))])
def test_of_a_weight_with_scales_of_blocks_only_the_blocks_of_a_shard_are_read(tmp_path, monkeypatch, box):
    """As transformers makes plain weights of FP8: 8 x 12 of them, blocks of 2 x 3."""
    packed = (torch.arange(96) % 13 - 6.0).view(8, 12).to(torch.float8_e4m3fn)
    scales = torch.arange(1.0, 17.0).view(4, 4)
    (tmp_path / "file").write_bytes(bytes(packed.view(torch.uint8).flatten().tolist()) + scales.numpy().tobytes())
    file, read = RangeFile(tmp_path / "file"), []
    original = RangeFile.read_runs

    def read_runs(self: RangeFile, target: memoryview, places: Any, length: int) -> None:
        places = list(places)
        read.extend(there + at for _, there in places for at in range(length) if there < 96)
        original(self, target, places, length)

    monkeypatch.setattr(RangeFile, "read_runs", read_runs)

    def plain(weight: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        blocks = weight.to(torch.float32).reshape(-1, 4, 2, 4, 3)
        made = blocks * by.to(torch.float32).reshape(-1, 4, 4).unsqueeze(-1).unsqueeze(2)
        return made.to(torch.bfloat16).reshape(8, 12)

    sketches = [Sketch(Stored(file, at, t.dtype, t.shape)) for at, t in ((0, packed), (96, scales))]
    lazy = plain(*sketches).lazy  # type: ignore[attr-defined]
    (top, bottom), (left, right) = box
    assert torch.equal(lazy.read(box), plain(packed, scales)[top:bottom, left:right])
    rows, columns = (range(low // n * n, -(-high // n) * n) for (low, high), n in zip(box, (2, 3), strict=True))
    assert sorted(read) == ([12 * row + column for row in rows for column in columns] if top < bottom else [])


def test_what_cannot_be_followed(tmp_path):
    _, sketch = lazily(tmp_path)
    with pytest.raises(CheckpointError, match="writes into a tensor of the checkpoint"):
        sketch.mul_(2)
    assert sketch[1, 1, 1].item() == 25.0
    with pytest.raises(IndexError):
        sketch[:, 7]
