"""Whoever is killed at whatever moment of a save: the last complete checkpoint loads, bit for bit."""

import itertools
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.checkpoint import Manifest, save, staging as folder
from autopar.checkpoint.shards import check_checkpoint
from autopar.checkpoint.staging import Staging, leftovers
from autopar.distributed.mesh import MPU
from autopar.errors import CheckpointError
from autopar.storage.safetensors_io import SafetensorsWriter
from tests.checkpoint.tiny import local, same, state_tensors, tiny, with_moments
from tests.harness.worlds import spawn


def fill(model: Any, number: int) -> torch.optim.Optimizer:
    """Weights and moments that say which save they belong to."""
    mpu = model._autopar_checkpoint.mpu
    with torch.no_grad():
        for tensor, value in zip(model.state_dict().values(), tiny(mpu, number).state_dict().values(), strict=True):
            tensor.copy_(value)
    return with_moments(model, number)


def loads(target: Path, mpu: MPU) -> int:
    """Load it in one process, compare, and save again; the number of the save that it is."""
    assert check_checkpoint(target)["problems"] == []
    model = tiny(mpu, 1000)
    optimizer, extra = with_moments(model, 1000), {}
    model.from_parallelized(target, optimizer=optimizer, extra=extra)
    due = tiny(mpu, extra["number"])
    assert same(local(model), local(due))
    moments = state_tensors(with_moments(due, extra["number"]))
    assert all(torch.equal(*pair) for pair in zip(state_tensors(optimizer), moments, strict=True))
    model.save_parallelized(target, optimizer=optimizer, extra=extra)
    assert leftovers(target) == []
    return extra["number"]


def at_call(owner: Any, name: str, count: int = 1, after: bool = False, half: bool = False) -> None:
    """Die at the ``count``-th call of ``owner.name``: before it, after it, or with half of the manifest written."""
    original, calls = getattr(owner, name), itertools.count(1)

    def deadly(*args: Any, **kwargs: Any) -> Any:
        mine = next(calls) == count
        if mine and not after:
            if half:
                original(*args, **kwargs)
                path = args[1] / "autopar.json"
                os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


def at_the_second_rename(after: bool) -> None:
    """Where the system cannot swap folders."""
    folder._exchange = lambda one, other: False
    at_call(folder.os, "rename", 2, after=after)


# point: (the rank that dies, how, which save is there afterwards)
POINTS: dict[str, tuple[int, Callable[[], None], int]] = {
    "after staging": (0, partial(at_call, Staging, "__init__", after=True), 1),
    "before a shard": (1, partial(at_call, save, "write_shard"), 1),
    "in the middle of a shard": (0, partial(at_call, SafetensorsWriter, "write", 4), 1),
    "in the middle of the other shard": (1, partial(at_call, SafetensorsWriter, "write", 3), 1),
    "between model and optimizer": (1, partial(at_call, save, "write_shard", 2), 1),
    "after the shards": (1, partial(at_call, save, "write_shard", 2, after=True), 1),
    "before the manifest": (0, partial(at_call, Manifest, "write"), 1),
    "in the middle of the manifest": (0, partial(at_call, Manifest, "write", half=True), 1),
    "before syncing": (0, partial(at_call, save, "fsync_files"), 1),
    "before the rename": (0, partial(at_call, Staging, "commit"), 1),
    "before the exchange": (0, partial(at_call, folder, "_exchange"), 1),
    "after the exchange": (0, partial(at_call, folder, "_exchange", after=True), 2),
    "between two renames": (0, partial(at_the_second_rename, after=False), 0),
    "after two renames": (0, partial(at_the_second_rename, after=True), 2),
    "while sweeping": (0, partial(at_call, folder.shutil, "rmtree"), 2),
    "after the commit": (0, partial(at_call, Staging, "commit", after=True), 2),
}


def die_in_the_second_save(target: str, point: str, how: str) -> None:
    mpu = MPU(tensor_parallel_size=2)
    model = tiny(mpu)
    model.save_parallelized(target, optimizer=fill(model, 1), extra={"number": 1})
    dist.barrier()
    victim, arrange, _ = POINTS[point]
    if mpu.rank == victim:
        arrange()
    training = {"optimizer": fill(model, 2), "extra": {"number": 2}} if how != "merge_checkpoints" else {}
    # A rank that dies while another one is saving is named; one that died before does not come to the meeting.
    words = rf"rank {victim} of 2 failed(.|\n)*connection is closed(.|\n)*(unchanged|complete)|but not on rank"
    with pytest.raises(CheckpointError, match=words):
        model.save_parallelized(target, **training, **({how: True} if how else {}), timeout=3)
        fill(model, 3)
        model.wait_for_save()


# The thread does the same, so a third of the points is enough there.
AT_ONCE, IN_THE_BACKGROUND = [(point, "") for point in POINTS], [(point, "async_save") for point in list(POINTS)[::3]]
IN_EVERY_RUN, MERGED = [*AT_ONCE[::5], IN_THE_BACKGROUND[1]], ("in the middle of the other shard", "merge_checkpoints")


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("point", "how"),
    [
        case if case in IN_EVERY_RUN else pytest.param(*case, marks=pytest.mark.tier("all"))
        for case in [*AT_ONCE, *IN_THE_BACKGROUND, MERGED]
    ],
)
def test_killed_at_every_step_of_a_save(tmp_path, alone, point, how):
    victim, _, left = POINTS[point]
    spawn(__name__, "die_in_the_second_save", 2, 60, (str(tmp_path / "ckpt"), point, how), expect_dead=(victim,))
    if left:
        assert loads(tmp_path / "ckpt", alone) == left
        assert os.listdir(tmp_path) == ["ckpt"]
        return
    # Where the system cannot swap folders there is a moment without one; the message says what to rename.
    words = r"interrupted save left the complete checkpoint \.ckpt\.\w+-[\w-]+"
    with pytest.raises(CheckpointError, match=words) as caught:
        check_checkpoint(tmp_path / "ckpt")
    named = str(caught.value).splitlines()[1].split("Rename ")[1].split(" to ")[0]
    assert loads(Path(named), alone) in (1, 2)
    os.rename(named, tmp_path / "ckpt")
    assert loads(tmp_path / "ckpt", alone) in (1, 2)
