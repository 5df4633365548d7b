"""Folders of checkpoints: ``rotate`` deletes old ones of one series and nothing else; ``Staging`` replaces them."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from autopar import latest
from autopar.checkpoint import rotation, staging as folder
from autopar.checkpoint.format import FileRecord, Manifest, PartFiles
from autopar.checkpoint.rotation import check_keep_last, is_checkpoint, next_order, rotate, series
from autopar.checkpoint.staging import Staging, leftovers
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


def merged(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text(name)
    return folder


def test_a_name_is_a_stem_and_a_number_and_arguments_are_checked(tmp_path):
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
    for number in (100, 200, 300, 400, 300, 250):  # it goes back: the order of saves counts
        rotate(saved(Path(f"run/step-{number}")), 2)
    assert sorted(os.listdir("run")) == ["step-250", "step-300"]


def test_everything_else_is_left_alone(tmp_path):
    run = tmp_path / "run"
    target = sharded(run / "step-9")
    for name in ("best-step-1", "step-1-old", "steps-1", "Step-1", ".step-8.tmp-0123456789abcdef", "10"):
        sharded(run / name)
    for name in ("step-1", "run/nested/step-1", "elsewhere/step-1"):
        sharded(tmp_path / name)
    os.symlink("../elsewhere/step-1", run / "step-2")
    os.symlink("nowhere", run / "step-3")
    (run / "step-5").write_text("a file")
    for step, name in ((4, "photo.jpg"), (6, "config.json"), (7, "model.safetensors")):  # with one of these and no more
        (run / f"step-{step}").mkdir()
        (run / f"step-{step}" / name).write_text("mine")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    assert rotate(target, 1) == []
    assert before == sorted(str(path) for path in tmp_path.rglob("*"))


def test_files_of_others_stay(tmp_path):
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
    for place in (half, other):
        sharded(place)
        for name in ("autopar.json", "config.json"):
            (place / name).unlink()
    assert rotate(target, 3) == []
    assert not half.exists() and whole.exists() and other.exists()


def test_what_cannot_be_deleted_is_a_warning_and_what_another_rotation_deletes_is_not(tmp_path, monkeypatch):
    for number in (1, 2, 3):
        sharded(tmp_path / f"step-{number}")
    rename, remove = os.rename, rotation._try_to_remove

    def denied(source, destination):
        if Path(source).parent.name == "step-1":
            raise PermissionError(13, "Permission denied")
        rename(source, destination)

    def slower(path):
        if path.name == "step-1":
            shutil.rmtree(path)  # the other one was faster
        return remove(path)

    monkeypatch.setattr(os, "rename", denied)
    with pytest.warns(UserWarning, match="step-1 could not be deleted: Permission denied"):
        assert rotate(tmp_path / "step-3", 1) == [tmp_path / "step-2"]
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-3"]
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(rotation, "_try_to_remove", slower)
    assert rotate(tmp_path / "step-3", 1) == []
    assert os.listdir(tmp_path) == ["step-3"]
    monkeypatch.undo()
    old, older, target = (saved(tmp_path / "other" / f"step-{number}") for number in (2, 1, 3))
    (old / "autopar.json").write_bytes((old / "autopar.json").read_bytes().replace(b"gpt2", b"gpt3"))
    with pytest.warns(UserWarning, match="step-2 could not be deleted: .*was changed after the save"):
        assert rotate(target, 1) == [older]
    assert sorted(os.listdir(old)) == OURS


def test_the_order_of_saves_counts(tmp_path: Path) -> None:
    merged(tmp_path / "step-3")
    (tmp_path / ".step-7.tmp-0123456789abcdef").mkdir()
    (tmp_path / "step-8").mkdir()
    os.mkfifo(tmp_path / "step-8" / "autopar.json")  # keeps nobody waiting
    (tmp_path / "notes.txt").write_text("")
    for nothing in (tmp_path, tmp_path / "run", tmp_path / "run" / "step-"):
        assert latest(nothing) is None
    saved(tmp_path / "step-200")
    assert latest(tmp_path) == tmp_path / "step-200"
    saved(tmp_path / "step-400")
    saved(tmp_path / "step-300")  # went back
    assert latest(tmp_path) == latest(tmp_path / "step-") == tmp_path / "step-300"
    assert latest(os.fspath(tmp_path / "step-400")) == tmp_path / "step-400"  # it is one itself
    saved(tmp_path / "best-2")  # the user tells several series apart
    with pytest.raises(CheckpointError) as caught:
        latest(tmp_path)
    assert str(caught.value) == (
        f'{tmp_path} holds checkpoints of 2 series: best-*, step-*\n  Choose one: autopar.latest("{tmp_path}/best-")'
    )
    assert latest(tmp_path / "best-") == tmp_path / "best-2"


def fill(staging: Staging, text: str) -> None:
    (staging.temp / "autopar.json").write_text(text)


def make(target, text="old"):
    staging = Staging(target)
    fill(staging, text)
    staging.commit()


@pytest.fixture(params=["exchange", "renames"])
def swap(request, monkeypatch):
    if request.param == "renames":
        monkeypatch.setattr(folder, "_exchange", lambda one, other: False)


def test_a_new_target_and_a_replaced_one(tmp_path, swap):
    target = tmp_path / "a" / "b"
    make(target)
    assert (target / "autopar.json").read_text() == "old"
    make(target, "new")
    assert (target / "autopar.json").read_text() == "new"
    assert os.listdir(tmp_path / "a") == ["b"]
    os.symlink(target, tmp_path / "latest")  # it goes on pointing to the checkpoint
    make(tmp_path / "latest", "newest")
    assert (tmp_path / "latest").is_symlink() and (target / "autopar.json").read_text() == "newest"


def test_the_users_files_stay_and_those_of_the_old_checkpoint_go(tmp_path, swap):
    target = tmp_path / "ckpt"
    make(target)
    (target / "tokenizer.json").write_text("mine")
    (target / "model-tp7-pp0.safetensors").write_text("stale")
    stale = ("optimizer-tp0-pp0", "optimizer-tp1-pp0-dp3", "extra-tp0-pp0", "base-tp1-pp0")
    for name in (*(f"{name}.safetensors" for name in stale), "pytorch_model-00001-of-00002.bin"):
        (target / name).write_text("stale")
    (target / "runs").mkdir()
    (target / "runs" / "log").write_text("deep")
    os.symlink("runs/log", target / "latest")
    make(target, "new")
    assert (target / "tokenizer.json").read_text() == "mine"
    assert (target / "latest").is_symlink() and (target / "latest").read_text() == "deep"
    assert sorted(os.listdir(target)) == ["autopar.json", "latest", "runs", "tokenizer.json"]


def test_exchange_is_really_used_here_or_reports_that_it_cannot(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if folder._exchange(tmp_path / "one", tmp_path / "other"):
        assert os.listdir(tmp_path / "one") == ["other"]
    assert not folder._exchange(tmp_path / "one", tmp_path / "nowhere")


def test_leftovers_of_killed_saves_go_with_the_next_one_and_nothing_else_does(tmp_path):
    for name in (".ckpt.tmp-0123456789abcdef", ".ckpt.old-0123456789abcdef"):
        (tmp_path / name).mkdir()
    keep = [".ckpt.tmp-mine", ".ckpt2.tmp-0123456789abcdef", "ckpt.tmp-0123456789abcdef"]
    for name in keep:
        (tmp_path / name).mkdir()
    assert len(leftovers(tmp_path / "ckpt")) == 2
    make(tmp_path / "ckpt")
    assert sorted(os.listdir(tmp_path)) == sorted([*keep, "ckpt"])


def test_two_jobs_that_save_into_one_folder_leave_each_others_files_alone(tmp_path, swap):
    target, other = tmp_path / "ckpt", Staging(tmp_path / "ckpt")
    fill(other, "other")
    (_, pid, host) = other.temp.name.rsplit("-", 2)
    assert int(pid) == os.getpid()
    ended = subprocess.Popen(["true"])
    ended.wait()

    def left(token: str, pid: int, host: str, days: int = 0) -> str:
        path = tmp_path / f".ckpt.tmp-{token * 16}-{pid}-{host}"
        path.mkdir()
        os.utime(path, (time.time() - days * 86400 - 60,) * 2)
        return path.name

    kept = [left("1", os.getppid(), host), left("2", ended.pid, "0" * 8), other.temp.name]
    left("3", ended.pid, host), left("4", os.getppid(), host, days=1), left("5", 1, "0" * 8, days=1)
    make(target, "mine")
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "ckpt"])
    other.commit()
    assert sorted(os.listdir(tmp_path)) == sorted([*kept[:2], "ckpt"])
    assert (target / "autopar.json").read_text() == "other"


def test_what_cannot_be_replaced(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file must be a folder, got a file"):
        Staging(tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot make"):
        Staging(tmp_path / "file" / "below")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("x")
    (tmp_path / "photos" / "model.safetensors").write_text("x")
    with pytest.raises(CheckpointError, match=r"photos holds model\.safetensors without autopar\.json"):
        Staging(tmp_path / "photos")
    assert sorted(os.listdir(tmp_path / "photos")) == ["cat.jpg", "model.safetensors"]
    make(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match="--force"):
        Staging(tmp_path / "ckpt", replace=False)
    monkeypatch.chdir(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match="current working directory"):
        Staging(tmp_path / "ckpt")
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    with pytest.raises(CheckpointError, match="mount point"):
        Staging(tmp_path / "ckpt")
    (tmp_path / "empty").mkdir()
    monkeypatch.undo()
    make(tmp_path / "empty")  # an empty folder is nobody's
    assert not leftovers(tmp_path / "file")
