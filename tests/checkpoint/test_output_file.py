from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from autopar.storage import files
from autopar.storage.files import OutputFile

CONTENT = random.Random(0).randbytes(1000)


def write(path, sizes):
    file = OutputFile(path)
    at = 0
    for size in sizes:
        file.append(CONTENT[at : at + size])
        at += size
    file.sync()
    file.close()
    assert path.read_bytes() == CONTENT[:at]


@pytest.mark.parametrize("sizes", [[], [0], [1000], [1, 0, 37, 600, 8, 354], [100] * 10, [1] * 40])
def test_the_disk_gets_all_but_the_end_early_once_each_in_whole_pieces(tmp_path, monkeypatch, sizes):
    begun: list[tuple[int, int]] = []

    def begin(handle, offset, count, advice):
        assert advice == os.POSIX_FADV_DONTNEED
        assert os.fstat(handle).st_size >= offset + count
        begun.append((offset, count))

    monkeypatch.setattr(files, "_PIECE", 16)
    monkeypatch.setattr(files, "_EARLY", 64)
    monkeypatch.setattr(os, "posix_fadvise", begin)
    write(tmp_path / "file", sizes)
    reached = 0
    for offset, count in begun:
        assert offset == reached and offset % 16 == count % 16 == 0 and count >= 48
        reached += count
    assert sum(sizes) - reached < 64 + 16


def test_calls_are_small(tmp_path, monkeypatch):
    file = OutputFile(tmp_path / "file")
    raw = file._file
    sizes = []

    class Recording:
        def write(self, data):
            sizes.append(len(data))
            return raw.write(data)

        def __getattr__(self, name):
            return getattr(raw, name)

    monkeypatch.setattr(file, "_file", Recording())
    file.append(bytes(5 * 2**20 + 3))
    file.close()
    assert sum(sizes) == (tmp_path / "file").stat().st_size == 5 * 2**20 + 3
    assert max(sizes) == 2**17


def test_a_system_that_takes_part_of_what_it_is_given(tmp_path, monkeypatch):
    file = OutputFile(tmp_path / "file")
    raw = file._file

    class Reluctant:
        def write(self, data):
            return raw.write(data[:7])

        def __getattr__(self, name):
            return getattr(raw, name)

    monkeypatch.setattr(file, "_file", Reluctant())
    file.append(CONTENT)
    file.close()
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_systems_that_cannot_begin_early(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_PIECE", 16)
    monkeypatch.setattr(files, "_EARLY", 64)
    monkeypatch.delattr(os, "posix_fadvise")
    write(tmp_path / "file", [500, 500])


def test_errors_are_the_systems():
    file = OutputFile(Path("/dev/full"))
    with pytest.raises(OSError, match="No space left"):
        file.append(b"1")
    file.close()
