"""Columns of tensors in files: whole rows are read, and what is not wanted is put aside."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import CheckpointError
from autopar.storage import range_file
from autopar.storage.lazy_tensor import Stored, memory
from autopar.storage.range_file import Access, RangeFile

SHAPE = (5, 400, 7)


@pytest.fixture
def values(tmp_path):
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    (tmp_path / "f").write_bytes(bytes(16) + memory(values).tobytes())
    return values


@pytest.mark.parametrize("box", [((0, 5), (0, 400), (2, 5)), ((0, 5), (0, 400), (0, 3)), ((1, 4), (0, 400), (6, 7))])
@pytest.mark.parametrize("share", [1.0, 0.37, 0.999])
def test_they_are_those_that_single_reads_give(tmp_path, values, box, share, monkeypatch):
    whole = range_file._preadv

    def some(handle: int, places: int, count: int, offset: int) -> int:
        return int(whole(handle, places, count, offset) * share)  # the rest counts as not read

    monkeypatch.setattr(range_file, "_preadv", some)
    stored = Stored(RangeFile(tmp_path / "f", Access.OWN), 16, torch.float32, SHAPE)
    assert stored._in_columns(box, 2)
    found = stored.read(box)
    assert torch.equal(found, values[tuple(slice(*part) for part in box)])


def test_rows_that_lie_apart_and_long_gaps_are_read_one_by_one(tmp_path, values, monkeypatch):
    stored = Stored(RangeFile(tmp_path / "f", Access.OWN), 16, torch.float32, SHAPE)
    assert not stored._in_columns(((0, 5), (3, 300), (2, 5)), 2)
    assert not Stored(RangeFile(tmp_path / "f"), 16, torch.float32, SHAPE)._in_columns(((0, 5), (0, 400), (2, 5)), 2)
    assert torch.equal(stored.read(((0, 5), (3, 300), (2, 5))), values[:, 3:300, 2:5])
    assert not Stored(RangeFile(tmp_path / "f", Access.OWN), 16, torch.float32, (2, 7000))._in_columns(
        ((0, 2), (0, 100)), 1
    )


def test_a_file_that_ends_before_is_an_error(tmp_path, values):
    opened = RangeFile(tmp_path / "f", Access.OWN)
    stored = Stored(opened, 16, torch.float32, SHAPE)
    with open(tmp_path / "f", "r+b") as file:
        file.truncate(20000)
    with pytest.raises(CheckpointError, match="is truncated: it ends at byte 20000"):
        stored.read(((0, 5), (0, 400), (2, 5)))
    with pytest.raises(CheckpointError, match="cannot be read: "):
        RangeFile(tmp_path / "gone", Access.OWN).read_columns(memoryview(bytearray(8)), 0, 4, 0, 2)
