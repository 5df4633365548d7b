"""Saving while training goes on: the values are those of the call, and errors come at the next one."""

import copy
import multiprocessing
import os
import tempfile
import threading
import time
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import autopar
from autopar.checkpoint import Manifest, save as snapshot
from autopar.checkpoint.shards import ShardReader, check_checkpoint
from autopar.distributed.mesh import MPU
from autopar.errors import CheckpointError
from tests.checkpoint.tiny import (
    FULL_DISK,
    TinyConfig,
    TinyModel,
    before_each_write,
    local,
    raising,
    same,
    saved_state,
    state_tensors,
    stored_is,
    tiny,
    with_moments,
)
from tests.exchange import raises_everywhere
from tests.harness.worlds import PRELOAD, join, pooled
from tests.small import gpt2, parallel


@contextmanager
def held_up():
    """Writing waits until the event that this gives is set."""
    go = threading.Event()
    with before_each_write(lambda _: go.wait(60)):
        try:
            yield go
        finally:
            go.set()


def scramble(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
        for state in optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_training_goes_on_and_what_is_saved_is_what_was_there_at_the_call(tmp_path):
    mpu = MPU(tensor_parallel_size=2)
    model = tiny(mpu, 0)
    optimizer = with_moments(model)
    weights, moments, lr = local(model), state_tensors(optimizer), optimizer.param_groups[0]["lr"]
    extra = {"ema": torch.ones(3), "list": [1], "tensors": [torch.zeros(2)]}
    with held_up() as go:
        model.save_parallelized(tmp_path / "ckpt", optimizer=optimizer, extra=extra, async_save=True)
        assert not (tmp_path / "ckpt").exists()
        scramble(model, optimizer)
        optimizer.param_groups[0]["lr"] = 77.0
        extra["ema"].zero_()
        extra["list"].append(2)
        extra["tensors"][0].add_(1)
        numbers = torch.ones(3)
        dist.all_reduce(numbers)  # training has the default group for itself
        assert numbers.tolist() == [2, 2, 2] and not (tmp_path / "ckpt").exists()
        go.set()
        model.wait_for_save()
    assert os.listdir(tmp_path) == ["ckpt"]
    found: dict[str, Any] = {}
    model.from_parallelized(tmp_path / "ckpt", optimizer=optimizer, extra=found)
    assert same(local(model), weights) and optimizer.param_groups[0]["lr"] == lr
    assert all(torch.equal(*pair) for pair in zip(state_tensors(optimizer), moments, strict=True))
    assert found["ema"].tolist() == [1, 1, 1] and found["list"] == [1] and found["tensors"][0].tolist() == [0, 0]
    model.wait_for_save()  # nothing to wait for


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_an_error_comes_at_the_next_call_once_and_on_every_rank(tmp_path):
    mpu = MPU(tensor_parallel_size=2)
    model = tiny(mpu)
    model.save_parallelized(tmp_path / "ckpt")
    first = Manifest.read(tmp_path / "ckpt").save_id
    what = "the save in the background failed: cannot write model-tp1-pp0.safetensors"
    said = (what, "No space left", "by rank 1 of 2")
    calls = {
        "wait": model.wait_for_save,
        "save": lambda: model.save_parallelized(tmp_path / "ckpt"),
        "async": lambda: model.save_parallelized(tmp_path / "ckpt", async_save=True),
        "load": lambda: model.from_parallelized(tmp_path / "ckpt"),
    }
    for name, call in calls.items():
        with before_each_write(raising(FULL_DISK)) if mpu.rank == 1 else nullcontext():
            model.save_parallelized(tmp_path / "ckpt", async_save=True)
            while model._autopar_checkpoint.background._thread.is_alive():
                time.sleep(0.01)
        with raises_everywhere(CheckpointError, *said):
            call()
        assert os.listdir(tmp_path) == ["ckpt"], name
        assert Manifest.read(tmp_path / "ckpt").save_id == first, name
        dist.barrier()
        model.wait_for_save()  # it is said once
    (tmp_path / "file").write_text("x")
    with pytest.MonkeyPatch.context() as patch:
        if mpu.rank == 1:
            patch.setattr(snapshot.Snapshot, "copied", lambda _: raising(MemoryError("no memory"))(""))
        with raises_everywhere(CheckpointError, "MemoryError: no memory", "by rank 1 of 2"):
            model.save_parallelized(tmp_path / "copy", async_save=True)
        assert not (tmp_path / "copy").exists()
    with raises_everywhere(CheckpointError, "cannot make", "below"):  # no folder can be made there: said at once
        model.save_parallelized(tmp_path / "file" / "below", async_save=True)
    model.wait_for_save()
    model.save_parallelized(tmp_path / "ckpt", async_save=True)
    model.wait_for_save()
    assert Manifest.read(tmp_path / "ckpt").save_id != first


@pooled(world_size=2)
def test_several_in_a_row_merged_ones_too_the_last_ones_remain_and_a_copy_does_not_wait(tmp_path):
    mpu = MPU(tensor_parallel_size=2)
    model = tiny(mpu)
    for number in range(5):
        with torch.no_grad():
            model.norm.weight.fill_(number)
        model.save_parallelized(tmp_path / f"step-{number}", keep_last=2, async_save=True)
    model.save_parallelized(tmp_path / "merged", merge_checkpoints=True, async_save=True)
    model.wait_for_save()
    assert sorted(os.listdir(tmp_path)) == ["merged", "step-3", "step-4"]
    dist.barrier()
    for number in (3, 4):
        model.from_parallelized(tmp_path / f"step-{number}")
        assert (model.norm.weight == number).all()
    assert set(load_file(tmp_path / "merged" / "model.safetensors")) == set(saved_state(model))
    with held_up() as go:
        model.save_parallelized(tmp_path / "ckpt", async_save=True)
        twin = copy.deepcopy(model)
        twin.wait_for_save()  # it has nothing to wait for
        assert not (tmp_path / "ckpt").exists()
        go.set()
        model.wait_for_save()
    twin.save_parallelized(tmp_path / "twin", async_save=True)
    twin.wait_for_save()
    assert (tmp_path / "ckpt").exists() and (tmp_path / "twin").exists()


@pooled(world_size=2)
def test_deparallelize_waits(tmp_path):
    model = parallel(gpt2(), 2)
    plain = gpt2()
    with held_up() as go:
        model.save_parallelized(tmp_path / "ckpt", async_save=True)
        timer = threading.Timer(0.5, go.set)
        timer.start()
        start = time.monotonic()
        autopar.deparallelize(model)
        assert time.monotonic() - start > 0.3
    with ShardReader(tmp_path / "ckpt") as shards:
        for name in shards.manifest.tensors:
            assert torch.equal(shards.lazy(name).read(), plain.state_dict()[name]), name
    parallel(model, 1).save_parallelized(tmp_path / "again", async_save=True)
    autopar.deparallelize(model)
    assert Manifest.read(tmp_path / "again")


SLOW = before_each_write(lambda _: time.sleep(0.05))


def script(rank: int, world: str, folder: str, how: str) -> None:
    torch.set_num_threads(1)
    join(rank, 2, world, 60)
    model = tiny(MPU(tensor_parallel_size=2), seed=4)
    SLOW.__enter__()  # until the process ends
    model.save_parallelized(folder, optimizer=with_moments(model, seed=4), async_save=True)
    if how == "destroys":
        dist.destroy_process_group()
    if how == "raises":
        raise SystemExit(3)


@pytest.mark.tier("all")
@pytest.mark.parametrize("how", ["ends", "raises", "destroys"])
def test_a_script_that_ends_without_waiting_leaves_a_whole_checkpoint(tmp_path, how):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="autopar-world-") as world:
        ranks = [
            context.Process(target=script, args=(rank, world, str(tmp_path / "ckpt"), how), daemon=True)
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
            if process.is_alive():
                process.kill()
        assert [process.exitcode for process in ranks] == [3 if how == "raises" else 0] * 2
    assert check_checkpoint(tmp_path / "ckpt")["problems"] == []
    stored_is(tmp_path / "ckpt", TinyModel(TinyConfig(), 4).state_dict(), 4)
