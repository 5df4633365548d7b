import os
import subprocess
import time

import pytest

from autopar.checkpoint import staging as folder
from autopar.checkpoint.staging import Staging, leftovers
from autopar.errors import CheckpointError


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


def test_a_symbolic_link_goes_on_pointing_to_the_checkpoint(tmp_path):
    make(tmp_path / "step1")
    os.symlink("step1", tmp_path / "latest")
    make(tmp_path / "latest", "new")
    assert (tmp_path / "latest").is_symlink()
    assert (tmp_path / "step1" / "autopar.json").read_text() == "new"


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
