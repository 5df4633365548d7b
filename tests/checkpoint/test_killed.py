"""Whoever is killed at whatever moment of a save: the last complete checkpoint loads, bit for bit."""

import itertools
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.checkpoint import Manifest, save, staging as folder
from autopar.checkpoint.rotation import is_checkpoint
from autopar.checkpoint.shards import check_checkpoint
from autopar.checkpoint.staging import Staging, leftovers
from autopar.distributed.mesh import MPU
from autopar.errors import CheckpointError
from autopar.storage.safetensors_io import SafetensorsWriter
from tests.checkpoint.tiny import local, same, state_tensors, tiny, with_moments
from tests.harness.worlds import PRELOAD, join

RANKS = 2


class World:
    """Ranks that save again and again until they are killed; what they say arrives here."""

    def __init__(self, body: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._folder = tempfile.TemporaryDirectory(prefix="autopar-world-")
        self.said, there = context.Pipe(duplex=False)
        self.ranks = [
            context.Process(target=_main, args=(body, rank, self._folder.name, there, args), daemon=True)
            for rank in range(RANKS)
        ]
        for process in self.ranks:
            process.start()
        there.close()

    def close(self, patience: float = 20.0) -> list[int]:
        """Wait for the survivors, which notice the death of a peer by themselves; the numbers that were said."""
        numbers = []
        deadline = time.monotonic() + patience
        try:
            while self.said.poll(max(0.0, deadline - time.monotonic())):
                numbers.append(self.said.recv())
        except (EOFError, ConnectionResetError):
            pass
        stuck = [process for process in self.ranks if process.is_alive() and process.join(5) is None]
        hang = [process.pid for process in stuck if process.is_alive()]
        for process in self.ranks:
            process.kill()
            process.join()
        self._folder.cleanup()
        assert not hang, "a survivor waits for a dead rank"
        return numbers


def _main(body: Callable[..., None], rank: int, world: str, pipe: Any, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    join(rank, RANKS, world, 60)
    code = 1
    try:
        body(MPU(tensor_parallel_size=RANKS), pipe if rank == 0 else None, *args)
    except CheckpointError as error:
        # A rank that dies while another one is saving is named; one that died before does not come to the meeting.
        code = 0 if "connection is closed" in str(error) or "but not on rank" in str(error) else 1
    finally:
        pipe.close()
        os._exit(code)


def fill(model: Any, number: int) -> torch.optim.Optimizer:
    """Weights and moments that say which save they belong to."""
    mpu = model._autopar_checkpoint.mpu
    with torch.no_grad():
        for tensor, value in zip(model.state_dict().values(), tiny(mpu, number).state_dict().values(), strict=True):
            tensor.copy_(value)
    return with_moments(model, number)


def save_for_ever(mpu: MPU, pipe: Any, target: str, keep_last: int | None, async_save: bool) -> None:
    model = tiny(mpu)
    for number in itertools.count(1):
        optimizer = fill(model, number)
        where = target if keep_last is None else f"{target}-{number}"
        model.save_parallelized(
            where, optimizer=optimizer, extra={"number": number}, keep_last=keep_last, async_save=async_save, timeout=3
        )
        if not async_save:
            say(pipe, number)
        elif number > 1:
            say(pipe, number - 1)  # this call has waited for the one before


def say(pipe: Any, number: int) -> None:
    if pipe is not None:
        pipe.send(number)


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


@pytest.mark.tier("all")
@pytest.mark.parametrize("point", range(10))
def test_killed_at_a_random_moment(tmp_path, alone, point):
    draw = random.Random(point)
    victims = [draw.randrange(RANKS)] if point % 2 else list(range(RANKS))
    keep_last = (None, None, 2)[point % 3]
    async_save = point % 4 >= 2
    world = World(save_for_ever, str(tmp_path / "ckpt"), keep_last, async_save)
    assert world.said.poll(60), "no save was completed"
    time.sleep(draw.uniform(0, 0.3))
    for rank in victims:
        os.kill(world.ranks[rank].pid, signal.SIGKILL)
    numbers = world.close()
    codes = [process.exitcode for process in world.ranks]
    assert codes == [-signal.SIGKILL if rank in victims else 0 for rank in range(RANKS)]
    assert numbers == list(range(1, len(numbers) + 1))
    if keep_last is None:
        assert numbers[-1] <= loads(tmp_path / "ckpt", alone) <= numbers[-1] + 2
        assert os.listdir(tmp_path) == ["ckpt"]
        return
    # A rotation that was killed leaves a folder without its manifest, which is a checkpoint no more.
    whole = {int(path.name.rpartition("-")[2]): path for path in tmp_path.glob("ckpt-*") if is_checkpoint(path)}
    rest = [path for path in tmp_path.glob("ckpt-*") if not is_checkpoint(path)]
    assert len(rest) <= 1 and all(int(path.name.rpartition("-")[2]) < min(whole) for path in rest)
    assert numbers[-1] in whole or numbers[-1] + 1 in whole
    assert 2 <= len(whole) <= 3 or numbers[-1] == 1  # a third one if the rotation was yet to come
    for number, path in whole.items():
        assert loads(path, alone) == number


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


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
            die()
        result = original(*args, **kwargs)
        if mine:
            die()
        return result

    setattr(owner, name, deadly)


def without_exchange() -> None:
    folder._exchange = lambda one, other: False


def between_the_renames() -> None:
    without_exchange()
    at_call(folder.os, "rename", 2)


def after_the_renames() -> None:
    without_exchange()
    at_call(folder.os, "rename", 2, after=True)


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
    "between two renames": (0, between_the_renames, 0),
    "after two renames": (0, after_the_renames, 2),
    "while sweeping": (0, partial(at_call, folder.shutil, "rmtree"), 2),
    "after the commit": (0, partial(at_call, Staging, "commit", after=True), 2),
}


def die_in_the_second_save(mpu: MPU, pipe: Any, target: str, point: str, async_save: bool) -> None:
    model = tiny(mpu)
    model.save_parallelized(target, optimizer=fill(model, 1), extra={"number": 1})
    dist.barrier()
    victim, arrange, _ = POINTS[point]
    if mpu.rank == victim:
        arrange()
    model.save_parallelized(target, optimizer=fill(model, 2), extra={"number": 2}, async_save=async_save)
    fill(model, 3)
    model.wait_for_save()
    raise AssertionError("nobody died")


# The thread does the same, so a third of the points is enough there.
AT_ONCE, IN_THE_BACKGROUND = [(point, False) for point in POINTS], [(point, True) for point in list(POINTS)[::3]]
IN_EVERY_RUN = [*AT_ONCE[::5], IN_THE_BACKGROUND[1]]


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("point", "async_save"),
    [
        case if case in IN_EVERY_RUN else pytest.param(*case, marks=pytest.mark.tier("all"))
        for case in [*AT_ONCE, *IN_THE_BACKGROUND]
    ],
)
def test_killed_at_every_step_of_a_save(tmp_path, alone, point, async_save):
    world = World(die_in_the_second_save, str(tmp_path / "ckpt"), point, async_save)
    world.close()
    victim, _, left = POINTS[point]
    codes = [process.exitcode for process in world.ranks]
    assert codes == [-signal.SIGKILL if rank == victim else 0 for rank in range(RANKS)]
    if left:
        assert loads(tmp_path / "ckpt", alone) == left
        assert os.listdir(tmp_path) == ["ckpt"]
        return
    # Where the system cannot swap folders there is a moment without one; the message says what to rename.
    with pytest.raises(
        CheckpointError, match=r"interrupted save left the complete checkpoint \.ckpt\.\w+-[\w-]+"
    ) as caught:
        check_checkpoint(tmp_path / "ckpt")
    named = str(caught.value).splitlines()[1].split("Rename ")[1].split(" to ")[0]
    assert loads(Path(named), alone) in (1, 2)
    os.rename(named, tmp_path / "ckpt")
    assert loads(tmp_path / "ckpt", alone) in (1, 2)
