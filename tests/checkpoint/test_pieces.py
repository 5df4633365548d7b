"""A piece of a stored tensor that is read by ranges equals the view that ``as_strided`` gives."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from autopar.plan.plan import Piece
from autopar.storage.lazy_tensor import InMemory, LazyTensor, Stored, lazy_view
from autopar.storage.safetensors_io import SafetensorsReader, SafetensorsWriter
from tests.checkpoint.test_lazy import Counting

SHAPES = [(4, 3, 5), (3, 1, 4), (1, 1, 6), (2, 2, 2, 2), (7,), (5, 5), (1,)]


def view_of(full: LazyTensor, piece: Piece) -> LazyTensor | None:
    return lazy_view(full, piece.shape, piece.stride, piece.offset)


def piece_of(view: torch.Tensor) -> Piece:
    return Piece("piece", tuple(view.shape), view.stride(), view.storage_offset())


def boxes(seed: int):
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


@pytest.mark.parametrize("seed", range(10))
def test_random_boxes_also_transposed_ones(seed):
    read = 0
    for whole, view in boxes(seed):
        piece = piece_of(view)
        assert torch.equal(piece.of(whole), view)
        lazy = view_of(InMemory(whole), piece)
        assert lazy is not None, (whole.shape, piece)
        assert lazy.shape == view.shape
        assert torch.equal(lazy.read(), view), (whole.shape, piece)
        read += 1
    assert read > 30


@pytest.mark.parametrize("seed", range(5))
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
