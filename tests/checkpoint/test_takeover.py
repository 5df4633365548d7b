"""Weights that lie in maps of files when a model is loaded, and in memory of the process's own once it is used."""

from __future__ import annotations

import copy
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from autopar.errors import CheckpointError
from autopar.storage import range_file, takeover
from autopar.storage.lazy_conversion import Sketch
from autopar.storage.lazy_tensor import Joined, Stored
from autopar.storage.private_map import pages_can_be_replaced, replace_pages
from autopar.storage.range_file import Access, RangeFile
from autopar.storage.takeover import Takeover
from autopar.storage.views import Converted, Narrowed, Permuted, Squeezed, Unsqueezed
from tests.checkpoint.loading import overwrite

pytestmark = pytest.mark.skipif(not pages_can_be_replaced(), reason="Linux since 5.7 replaces the pages of a map")


@pytest.fixture
def file(tmp_path):
    """Numbers 0 to 8191 from byte 8 on."""
    path = tmp_path / "numbers"
    path.write_bytes(bytes(8) + torch.arange(8192.0).numpy().tobytes())
    return path


def taken_over(file: Path) -> tuple[torch.Tensor, Takeover]:
    opened = RangeFile(file, Access.OWN)
    view = opened.view(8, torch.float32, (8192,))
    taken = Takeover([opened])
    assert opened.maps == []
    return view, taken


@pytest.mark.parametrize("truncated", [False, True])
def test_memory_is_the_processs_own_afterwards(file, truncated):
    view, taken = taken_over(file)
    place = view.data_ptr()
    taken.wait()
    overwrite(file)
    if truncated:  # Linux takes away pages of a map of it, those that were written as well
        file.write_bytes(bytes(32776))
    assert torch.equal(view, torch.arange(8192.0)) and view.data_ptr() == place
    assert str(file) not in Path("/proc/self/maps").read_text()
    taken.wait()  # the file may change now
    view.mul_(2)
    assert view[-1] == 2 * 8191


def test_large_ones_are_moved_piece_by_piece(tmp_path, monkeypatch):
    count = 3 * takeover._PIECE // 4 + 5000
    values = torch.arange(count, dtype=torch.int32)
    (tmp_path / "large").write_bytes(bytes(4) + values.numpy().tobytes())
    opened = RangeFile(tmp_path / "large", Access.OWN)
    view = opened.view(4, torch.int32, (count,))
    moved = []

    def noted(address: int, length: int) -> int:
        moved.append((address, length))
        return replace_pages(address, length)

    monkeypatch.setattr(takeover, "replace_pages", noted)
    Takeover([opened], threads=3).wait()
    assert torch.equal(view, values)
    assert max(length for _, length in moved) <= takeover._PIECE and len(moved) in (4, 5)
    assert sum(length for _, length in moved) == 4 + 4 * count
    assert all(address % takeover._PIECE == 0 for address, _ in moved[1:])


def test_what_is_written_meanwhile_stays(file):
    view, taken = taken_over(file)
    view[:4000] = 1
    taken.wait()
    assert torch.equal(view[:4000], torch.ones(4000)) and torch.equal(view[4000:], torch.arange(4000, 8192.0))


def test_a_file_that_changes_meanwhile_is_an_error_that_stays(file):
    _view, taken = taken_over(file)
    overwrite(file)
    for _ in range(2):
        with pytest.raises(CheckpointError) as raised:
            taken.wait()
        assert str(raised.value) == (
            f"{file} was written to while it was being loaded: the weights may be of both files.\n"
            "  Load it again once nothing writes to it; write checkpoints to another file, and rename that."
        )


def test_a_file_that_is_cut_off_meanwhile_does_not_end_the_process(file):
    _view, taken = taken_over(file)
    os.truncate(file, 100)
    with pytest.raises(CheckpointError, match=r"while it was being loaded \(it had 32776 bytes, now 100\)"):
        taken.wait()


def test_a_file_that_another_takes_the_place_of_may_be_gone(file, tmp_path):
    """A checkpoint that appears by renaming leaves the old file to those who have it open."""
    view, taken = taken_over(file)
    (tmp_path / "new").write_bytes(bytes(40000))
    os.replace(tmp_path / "new", file)
    taken.wait()
    assert torch.equal(view, torch.arange(8192.0))


def test_no_memory_is_an_error(file, monkeypatch):
    monkeypatch.setattr(takeover, "replace_pages", lambda address, length: errno.ENOMEM)
    view, taken = taken_over(file)
    with pytest.raises(CheckpointError, match="weights that lie in a map of it cannot be copied: Cannot allocate"):
        taken.wait()
    assert view[5] == 5


def test_ctrl_c_loses_nothing(file, monkeypatch, request):
    view, taken = taken_over(file)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    monkeypatch.setattr(takeover, "replace_pages", lambda address, length: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        taken.wait()
    monkeypatch.undo()
    taken.wait()
    file.write_bytes(b"")
    assert torch.equal(view, torch.arange(8192.0))


def test_a_tensor_that_is_gone_is_not_copied(file, monkeypatch):
    opened = RangeFile(file, Access.OWN)
    opened.view(8, torch.float32, (8192,))
    assert len(opened.maps) == 1
    monkeypatch.setattr(takeover, "replace_pages", lambda address, length: pytest.fail("copied"))
    Takeover([opened]).wait()
    opened.view(8, torch.float32, (8192,), kept=False)
    assert opened.maps == []


def test_a_file_that_no_weight_lies_in_any_more_may_change(file):
    """They were converted, or moved to a GPU."""
    view, taken = taken_over(file)
    moved = view.double()
    del view
    overwrite(file)
    taken.wait()
    assert moved[5] == 5


def test_a_copy_that_keeps_the_time_is_noticed_and_a_new_name_is_none(file):
    for name in ("name", "time"):
        view, taken = taken_over(file)
        then = os.stat(file)
        if name == "name":
            os.link(file, file.with_name("other"))
            file.chmod(0o600)
            taken.wait()
        else:
            overwrite(file)
            os.utime(file, ns=(then.st_atime_ns, then.st_mtime_ns))
            with pytest.raises(CheckpointError, match="was written to while it was being loaded"):
                taken.wait()
        del view


@pytest.mark.parametrize("threads", [1, 2])
def test_a_signal_that_uses_the_model_meanwhile_does_not_wait_for_itself(file, monkeypatch, threads):
    """A handler that saves before a job is taken from its machine."""
    opened = RangeFile(file, Access.OWN)
    view, *_others = (opened.view(8, torch.float32, (8192,)) for _ in range(4))
    taken = Takeover([opened], threads=threads)
    before = signal.signal(signal.SIGUSR1, lambda *_: taken.wait())
    try:

        def interrupted(address: int, length: int) -> int:
            monkeypatch.setattr(takeover, "replace_pages", replace_pages)
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.05)
            return replace_pages(address, length)

        monkeypatch.setattr(takeover, "replace_pages", interrupted)
        taken.wait()
    finally:
        signal.signal(signal.SIGUSR1, before)
    file.write_bytes(b"")
    assert torch.equal(view, torch.arange(8192.0))


@pytest.mark.tier("all")
def test_it_happens_at_exit_too(tmp_path):
    """Python starts no threads by then."""
    code = f"""
import atexit, torch
from pathlib import Path
from autopar.storage.range_file import Access, RangeFile
from autopar.storage.takeover import Takeover
from autopar.storage.views import Converted, Narrowed, Permuted, Squeezed, Unsqueezed
path = Path({str(tmp_path / "numbers")!r})
path.write_bytes(torch.arange(8192.0).numpy().tobytes())
opened = RangeFile(path, Access.OWN)
views = [opened.view(0, torch.float32, (8192,)) for _ in range(3)]
taken = Takeover([opened], threads=2)
atexit.register(lambda: (taken.wait(), print(views[2][-1].item())))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "8191.0\n"


def test_a_file_that_is_rewritten_all_the_time_never_ends_the_process(file):
    """Also between the look at it and the copy."""
    content, stop, ends = file.read_bytes(), threading.Event(), {"fine": 0, "changed": 0}

    def rewrite() -> None:
        while not stop.is_set():
            file.write_bytes(content)

    thread = threading.Thread(target=rewrite)
    thread.start()
    try:
        for _ in range(300):
            opened = RangeFile(file, Access.OWN)
            try:
                view = opened.view(8, torch.float32, (8192,))
                Takeover([opened]).wait()
                ends["fine"] += int(torch.equal(view, torch.arange(8192.0)))
            except CheckpointError:
                ends["changed"] += 1
    finally:
        stop.set()
        thread.join()
    assert sum(ends.values()) == 300 and ends["changed"]


def test_copies_of_a_model_share_it(file):
    _view, taken = taken_over(file)
    assert copy.deepcopy({"of a model": taken})["of a model"] is taken


def test_a_fork_waits_for_it(file):
    view, taken = taken_over(file)
    child = os.fork()
    if child == 0:
        os._exit(0 if taken._ended else 1)
    assert os.waitpid(child, 0)[1] == 0
    file.write_bytes(b"")
    assert view[8191] == 8191


def test_who_asks_for_what_gets_it(monkeypatch):
    assert [Access.of(value) for value in (None, True, False)] == [Access.OWN, Access.READ, Access.MAP]
    monkeypatch.setattr(range_file, "pages_can_be_replaced", lambda: False)  # another system
    assert [Access.of(value) for value in (None, True, False)] == [Access.READ, Access.READ, Access.MAP]


def test_a_file_system_in_user_space_is_read(file, monkeypatch):
    """hf-mount hangs when threads wait for pages; transformers reads there, too."""
    device = os.stat(file).st_dev
    line = f"36 35 {os.major(device)}:{os.minor(device)} / /data rw,noatime shared:1 - fuse.hf-mount hf-mount rw"
    monkeypatch.setattr(range_file, "_file_systems", lambda: range_file._mounts(line))
    stored = Stored(RangeFile(file, Access.OWN), 8, torch.float32, (8192,))
    assert stored.file.access is Access.READ
    assert RangeFile(file, Access.MAP).mapped  # who asks for it gets it
    monkeypatch.setattr(range_file, "_file_systems", lambda: range_file._mounts(line.replace("fuse.hf-mount", "ext4")))
    assert RangeFile(file, Access.OWN).mapped
    assert not RangeFile(file.parent / "gone", Access.READ).mapped


def test_a_file_that_is_read_must_not_change_either(file):
    opened = RangeFile(file)
    stored = Stored(opened, 8, torch.float32, (8192,))
    assert list(Joined([stored, stored], 0).files()) == [opened, opened]
    stored.read()
    opened.check_unchanged()
    overwrite(file)
    with pytest.raises(CheckpointError, match="was written to while it was being loaded"):
        opened.check_unchanged()


@pytest.mark.parametrize("kind", ["narrowed", "moved", "joined", "converted", "computed"])
def test_the_files_of_views_are_known(file, kind):
    """Of weights that transformers splits, stacks or converts: their pages are replaced, their files compared, too."""
    stored = Stored(RangeFile(file, Access.OWN), 8, torch.float32, (64, 128))
    lazy = {
        "narrowed": lambda: Narrowed(stored, 0, 3, 40),
        "moved": lambda: Squeezed(Unsqueezed(Permuted(stored, (1, 0)), 0), 0),
        "joined": lambda: Joined([Unsqueezed(stored, 0), Unsqueezed(stored, 0)], 0),
        "converted": lambda: Converted(stored, torch.float64),
        "computed": lambda: (Sketch(stored) * 2).lazy,
    }[kind]()
    assert set(lazy.files()) == {stored.file}
