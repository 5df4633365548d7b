"""``rotate`` deletes old checkpoints of one series, and nothing else."""

import os
import shutil
from pathlib import Path

import pytest

from autopar import latest
from autopar.checkpoint import rotation
from autopar.checkpoint.format import FileRecord, Manifest, PartFiles
from autopar.checkpoint.rotation import check_keep_last, is_checkpoint, next_order, rotate, series
from autopar.checkpoint.staging import Staging
from autopar.distributed.axis import MeshSizes
from autopar.errors import CheckpointError
from autopar.plan.plan import TensorPlan

OURS = ["autopar.json", "config.json", "model-tp0-pp0.safetensors"]


def sharded(folder: Path, order: int = 0) -> Path:
    folder.mkdir(parents=True)
    for name in OURS[1:]:
        (folder / name).write_text(name)
    record = FileRecord(0, 0, 0, len(OURS[2]), "0" * 16, {"weight": "0" * 16})
    part = PartFiles("model", {"weight": TensorPlan("weight", (1,), "float32", saved_as="weight")}, {OURS[2]: record})
    Manifest("0" * 16, MeshSizes(1, 1, 1), "gpt2", "gpt2.yaml", "", {"model": part}, frozenset(["weight"]), 1,
             {"config.json": "0" * 16}, order=order).write(folder)  # fmt: skip
    return folder


def saved(folder: Path) -> Path:
    """As ``save_parallelized`` does it: counted, and replaces what is there."""
    order = next_order(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return sharded(folder, order)


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
        assert series(name) is None
        with pytest.raises(CheckpointError, match=r"needs a folder name(.|\n)*step-100, checkpoint-7 or epoch3"):
            check_keep_last(name, 1)


def test_arguments_are_checked_before_anything_is_written(tmp_path):
    for wrong in (0, -1, True, False, 1.0, "3", None):
        with pytest.raises(CheckpointError, match=r"keep_last=.* must be a positive integer"):
            check_keep_last(tmp_path / "step-1", wrong)
    with pytest.raises(CheckpointError, match="ends in a number; got 'last'"):
        check_keep_last(tmp_path / "last", 2)
    check_keep_last(tmp_path / "step-1", 1)
    os.symlink("step-7", tmp_path / "latest")
    check_keep_last(tmp_path / "latest", 1)
    assert os.listdir(tmp_path) == ["latest"]


def test_of_those_that_were_not_counted_the_lowest_numbers_go(tmp_path):
    for number in (100, 20, 3):
        sharded(tmp_path / f"step-{number}")
    sharded(tmp_path / "step-0050")
    assert rotate(tmp_path / "step-100", 2) == [tmp_path / "step-3", tmp_path / "step-20"]
    assert sorted(os.listdir(tmp_path)) == ["step-0050", "step-100"]
    assert rotate(tmp_path / "step-100", 2) == []
    assert rotate(tmp_path / "step-100", 1) == [tmp_path / "step-0050"]
    assert rotate(tmp_path / "step-100", 1) == rotate(tmp_path / "step-100", 9) == []
    assert sorted(os.listdir(tmp_path / "step-100")) == OURS


def test_one_save_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(8, 13):
        rotate(saved(Path(f"epoch{number}")), 3)
    assert sorted(os.listdir(tmp_path)) == ["epoch10", "epoch11", "epoch12"]


def test_after_going_back_the_order_of_saves_counts(tmp_path):
    for number in (100, 200, 300, 400):
        saved(tmp_path / f"step-{number}")
    for number in (300, 250):
        last = saved(tmp_path / f"step-{number}")
        rotate(last, 2)
    assert sorted(os.listdir(tmp_path)) == ["step-250", "step-300"]


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


def test_files_of_others_stay(tmp_path):
    """Links are not followed, folders are not entered, and what has a name of ours but is a folder is not ours."""
    saved(tmp_path / "run" / "step-1")
    old = saved(tmp_path / "run" / "step-2")
    last = saved(tmp_path / "run" / "step-3")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").write_text("mine")
    os.symlink(tmp_path / "data", old / "data")
    os.symlink(tmp_path / "data" / "precious", old / "tokenizer.json")
    (old / "notes.md").write_text("mine")
    (old / "model-tp7-pp0.safetensors").write_text("not of this save")
    (old / "config.json").unlink()
    os.symlink(tmp_path / "data" / "precious", old / "config.json")
    (old / "model-tp0-pp0.safetensors").unlink()
    (old / "model-tp0-pp0.safetensors").mkdir()
    message = (
        f"the checkpoint {old} was deleted, but the folder stays: the save did not write data, "
        "model-tp0-pp0.safetensors, model-tp7-pp0.safetensors, notes.md, tokenizer.json"
    )
    with pytest.warns(UserWarning) as caught:
        assert rotate(last, 1) == [tmp_path / "run" / "step-1", old]
    assert [str(warning.message) for warning in caught] == [message]
    left = ["data", "model-tp0-pp0.safetensors", "model-tp7-pp0.safetensors", "notes.md", "tokenizer.json"]
    assert sorted(os.listdir(old)) == left
    assert (tmp_path / "data" / "precious").read_text() == (old / "notes.md").read_text() == "mine"
    assert rotate(last, 1) == [] and sorted(os.listdir(old)) == left  # and it is not spoken of again


def test_what_cannot_be_read_is_left_alone(tmp_path):
    old, older = saved(tmp_path / "step-2"), saved(tmp_path / "step-1")
    (old / "autopar.json").write_bytes((old / "autopar.json").read_bytes().replace(b"gpt2", b"gpt3"))
    target = saved(tmp_path / "step-3")
    with pytest.warns(UserWarning, match="step-2 could not be deleted: .*was changed after the save"):
        assert rotate(target, 1) == [older]
    assert sorted(os.listdir(old)) == OURS


@pytest.mark.parametrize("others", [[], ["notes.md"]])
@pytest.mark.filterwarnings("ignore:the checkpoint .* was deleted, but")
def test_killed_at_any_moment_nothing_half_looks_whole(tmp_path, monkeypatch, others):
    """Every system call of the deletion is once the last one; then the next rotation goes on, in another order too."""

    class Killed(BaseException):
        pass

    for moment in range(100):
        folder = tmp_path / str(moment)
        folder.mkdir()
        old, target = saved(folder / "step-1"), saved(folder / "step-2")
        for name in others:
            (old / name).write_text(name)
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
                assert sorted(os.listdir(entry)) in (whole, OURS), (moment, entry)
        if done:
            break
        rotate(target, 2 if (old / ".autopar.json.removed").exists() else 1)
        assert not old.exists() or os.listdir(old) == others, moment
        assert sorted(os.listdir(target)) == OURS
    assert done and moment >= 5 and (sorted(os.listdir(folder)) == ["step-1", "step-2"] if others else not old.exists())


def test_a_half_deleted_checkpoint_can_be_saved_again(tmp_path):
    old = saved(tmp_path / "step-1")
    os.rename(old / "autopar.json", old / ".autopar.json.removed")
    with pytest.raises(CheckpointError, match=r"has no autopar.json: a process ended while it deleted"):
        Manifest.read(old)
    (old / "config.json").unlink()
    (old / "notes.md").write_text("mine")
    staging = Staging(old)
    (staging.temp / "autopar.json").write_text("new")
    staging.commit()
    assert sorted(os.listdir(old)) == ["autopar.json", "notes.md"]


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
        if Path(source).parent.name == "step-1":
            raise PermissionError(13, "Permission denied")
        real(source, destination)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.warns(UserWarning, match="step-1 could not be deleted: Permission denied"):
        assert rotate(tmp_path / "step-3", 1) == [tmp_path / "step-2"]
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-3"]


def test_two_rotations_at_once(tmp_path, monkeypatch):
    for number in (1, 2, 3):
        sharded(tmp_path / f"step-{number}")
    real = rotation._try_to_remove

    def remove(path):
        if path.name == "step-1":
            shutil.rmtree(path)  # the other one was faster
        return real(path)

    monkeypatch.setattr(rotation, "_try_to_remove", remove)
    assert rotate(tmp_path / "step-3", 1) == [tmp_path / "step-2"]
    assert os.listdir(tmp_path) == ["step-3"]


# -- the checkpoint to go on from --------------------------------------------------------------------------------------


def test_there_is_none_yet(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "run") is None
    assert latest(tmp_path / "run" / "step-") is None
    merged(tmp_path / "step-3")
    (tmp_path / ".step-7.tmp-0123456789abcdef").mkdir()
    (tmp_path / "step-8").mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert latest(tmp_path) is None


def test_the_order_of_saves_counts(tmp_path: Path) -> None:
    saved(tmp_path / "step-200")
    assert latest(tmp_path) == tmp_path / "step-200"
    saved(tmp_path / "step-400")
    saved(tmp_path / "step-300")  # went back
    assert latest(tmp_path) == latest(tmp_path / "step-") == tmp_path / "step-300"
    assert latest(os.fspath(tmp_path / "step-400")) == tmp_path / "step-400"  # it is one itself


def test_several_series_are_told_apart_by_the_user(tmp_path: Path) -> None:
    saved(tmp_path / "step-1")
    saved(tmp_path / "best-2")
    with pytest.raises(CheckpointError) as caught:
        latest(tmp_path)
    assert str(caught.value) == (
        f'{tmp_path} holds checkpoints of 2 series: best-*, step-*\n  Choose one: autopar.latest("{tmp_path}/best-")'
    )
    assert latest(tmp_path / "best-") == tmp_path / "best-2"
