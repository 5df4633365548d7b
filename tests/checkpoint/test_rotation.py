"""``rotate`` deletes old checkpoints of one series, and nothing else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from autopar.checkpoint import rotation
from autopar.checkpoint.rotation import check_keep_last, is_checkpoint, rotate, series
from autopar.errors import CheckpointError


def sharded(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("autopar.json", "config.json", "model-tp0-pp0.safetensors"):
        (folder / name).write_text(name)
    return folder


def merged(folder: Path, weights: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", weights):
        (folder / name).write_text(name)
    return folder


def test_a_name_is_a_stem_and_a_number():
    assert series("runs/step-100") == ("step-", 100)
    assert series(Path("checkpoint-7")) == ("checkpoint-", 7)
    assert series("epoch3") == ("epoch", 3)
    assert series("step-0020") == ("step-", 20)
    assert series("1000") == ("", 1000)
    assert series("step-1-5") == ("step-1-", 5)
    for name in ("last", "step-100.bak", "step-1/best", "step-²"):
        with pytest.raises(CheckpointError, match=r"does not end in a number(.|\n)*step-100, checkpoint-7 or epoch3"):
            series(name)


def test_arguments_are_checked_before_anything_is_written(tmp_path):
    for wrong in (0, -1, True, False, 1.0, "3", None):
        with pytest.raises(CheckpointError, match=r"keep_last=.* must be a whole number of at least 1"):
            check_keep_last(tmp_path / "step-1", wrong)
        with pytest.raises(CheckpointError, match="keep_last="):
            rotate(tmp_path / "step-1", wrong)
    with pytest.raises(CheckpointError, match="'last' does not end in a number"):
        check_keep_last(tmp_path / "last", 2)
    check_keep_last(tmp_path / "step-1", 1)
    os.symlink("step-7", tmp_path / "latest")
    check_keep_last(tmp_path / "latest", 1)
    assert os.listdir(tmp_path) == ["latest"]


def test_the_lowest_numbers_go(tmp_path):
    for number in (100, 20, 3):
        sharded(tmp_path / f"step-{number}")
    sharded(tmp_path / "step-0050")
    assert rotate(tmp_path / "step-100", 2) == [tmp_path / "step-3", tmp_path / "step-20"]
    assert sorted(os.listdir(tmp_path)) == ["step-0050", "step-100"]
    assert rotate(tmp_path / "step-100", 2) == []
    assert rotate(tmp_path / "step-100", 1) == [tmp_path / "step-0050"]
    assert rotate(tmp_path / "step-100", 1) == rotate(tmp_path / "step-100", 9) == []
    assert sorted(os.listdir(tmp_path / "step-100")) == ["autopar.json", "config.json", "model-tp0-pp0.safetensors"]


def test_one_save_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(8, 13):
        rotate(sharded(Path(f"epoch{number}")), 3)
    assert sorted(os.listdir(tmp_path)) == ["epoch10", "epoch11", "epoch12"]


def test_the_target_stays_even_with_the_lowest_number(tmp_path):
    for number in (10, 20, 30):
        sharded(tmp_path / f"step-{number}")
    assert rotate(tmp_path / "step-10", 2) == [tmp_path / "step-20"]
    assert rotate(tmp_path / "step-10", 1) == [tmp_path / "step-30"]
    assert os.listdir(tmp_path) == ["step-10"]


def test_everything_else_is_left_alone(tmp_path):
    target = sharded(tmp_path / "run" / "step-9")
    sharded(tmp_path / "run" / "best-step-1")
    sharded(tmp_path / "run" / "step-1-old")
    sharded(tmp_path / "run" / "steps-1")
    sharded(tmp_path / "run" / "Step-1")
    sharded(tmp_path / "step-1")
    sharded(tmp_path / "run" / "nested" / "step-1")
    sharded(tmp_path / "elsewhere" / "step-1")
    os.symlink("../elsewhere/step-1", tmp_path / "run" / "step-2")
    os.symlink("nowhere", tmp_path / "run" / "step-3")
    (tmp_path / "run" / "step-4").mkdir()
    (tmp_path / "run" / "step-4" / "photo.jpg").write_text("mine")
    (tmp_path / "run" / "step-5").write_text("a file")
    (tmp_path / "run" / "step-6").mkdir()
    (tmp_path / "run" / "step-6" / "config.json").write_text("no weights")
    (tmp_path / "run" / "step-7").mkdir()
    (tmp_path / "run" / "step-7" / "model.safetensors").write_text("no config")
    sharded(tmp_path / "run" / ".step-8.tmp-0123456789abcdef")
    sharded(tmp_path / "run" / "10")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    assert rotate(target, 1) == []
    assert before == sorted(str(path) for path in tmp_path.rglob("*"))


def test_links_inside_a_checkpoint_are_not_followed(tmp_path):
    sharded(tmp_path / "run" / "step-2")
    old = sharded(tmp_path / "run" / "step-1")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").write_text("mine")
    os.symlink(tmp_path / "data", old / "data")
    os.symlink(tmp_path / "data" / "precious", old / "tokenizer.json")
    assert rotate(tmp_path / "run" / "step-2", 1) == [old]
    assert (tmp_path / "data" / "precious").read_text() == "mine"


def test_a_target_that_is_a_link_stands_for_what_it_points_to(tmp_path):
    for number in (1, 2, 3):
        sharded(tmp_path / "run" / f"step-{number}")
    os.symlink("run/step-3", tmp_path / "latest")
    assert rotate(tmp_path / "latest", 2) == [tmp_path / "run" / "step-1"]
    assert (tmp_path / "latest" / "autopar.json").is_file()


@pytest.mark.parametrize("make", [sharded])
def test_killed_at_any_moment_nothing_half_looks_whole(tmp_path, monkeypatch, make):
    """Every system call of the deletion is once the last one; then the next rotation cleans up."""

    class Killed(BaseException):
        pass

    for moment in range(100):
        folder = tmp_path / str(moment)
        folder.mkdir()
        old, target = make(folder / "step-1"), make(folder / "step-2")
        whole, left = sorted(os.listdir(old)), moment
        with monkeypatch.context() as patched:
            for name in ("rename", "unlink", "rmdir", "fsync"):
                real = getattr(os, name)

                def call(*args, _real=real, **kwargs):
                    nonlocal left
                    if left == 0:
                        raise Killed
                    left -= 1
                    return _real(*args, **kwargs)

                patched.setattr(os, name, call)
            try:
                rotate(target, 1)
                done = True
            except Killed:
                done = False
        for entry in folder.iterdir():
            if is_checkpoint(entry) or (entry / "autopar.json").exists():
                assert sorted(os.listdir(entry)) == whole, (moment, entry)
        if done:
            break
        rotate(target, 1)
        left_over = [entry for entry in folder.iterdir() if entry != target]
        # Killed between the renaming and the first deletion: still whole, so it might be somebody's only copy.
        assert all(sorted(os.listdir(entry)) == whole for entry in left_over), moment
        assert len(left_over) <= 1 and is_checkpoint(target)
    assert done and moment > 5 and os.listdir(folder) == ["step-2"]


def test_what_a_killed_rotation_left_goes_and_a_replaced_checkpoint_does_not(tmp_path):
    target = sharded(tmp_path / "step-5")
    half, whole, other = (tmp_path / f".{name}.old-{'0' * 16}" for name in ("step-1", "step-2", "best-1"))
    sharded(whole)  # an interrupted save that replaces step-2 leaves the old one like this
    for folder in (half, other):
        sharded(folder)
        for name in ("autopar.json", "config.json"):
            (folder / name).unlink()
    assert rotate(target, 3) == []
    assert not half.exists() and whole.exists() and other.exists()


def test_what_cannot_be_deleted_is_a_warning(tmp_path, monkeypatch):
    for number in (1, 2, 3):
        sharded(tmp_path / f"step-{number}")
    real = os.rename

    def rename(source, destination):
        if Path(source).name == "step-1":
            raise PermissionError(13, "Permission denied")
        real(source, destination)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.warns(UserWarning, match="step-1 could not be deleted: Permission denied"):
        assert rotate(tmp_path / "step-3", 1) == [tmp_path / "step-2"]
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-3"]


def test_two_rotations_at_once(tmp_path, monkeypatch):
    for number in (1, 2, 3):
        sharded(tmp_path / f"step-{number}")
    real = rotation._remove

    def remove(path):
        if path.name == "step-1":
            shutil.rmtree(path)  # the other one was faster
        real(path)

    monkeypatch.setattr(rotation, "_remove", remove)
    assert rotate(tmp_path / "step-3", 1) == [tmp_path / "step-2"]
    assert os.listdir(tmp_path) == ["step-3"]


def test_only_complete_checkpoints_count(tmp_path):
    for name in ("model.safetensors", "pytorch_model.bin"):  # could be anybody's
        assert not is_checkpoint(merged(tmp_path / name, name))
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-0").write_text("a file")
    assert not any(is_checkpoint(tmp_path / name) for name in ("step-0", "step-1", "absent"))
    sharded(tmp_path / "step-2")
    sharded(tmp_path / "step-3")
    assert rotate(tmp_path / "step-3", 2) == []
