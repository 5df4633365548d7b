"""Real ranks refuse to load what does not fit, and nothing changes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autopar.distributed.mesh import MPU
from autopar.layout import Block, Layout
from autopar.plan.plan import TensorPlan
from tests.checkpoint.refusals import refusals
from tests.checkpoint.tiny import TinyConfig, TinyModel, local, make_plan, same, save_alone, tiny, with_layout
from tests.pool import pooled

Tensors = Mapping[str, TensorPlan]


SHARD = "model-tp1-pp0.safetensors"


def _swap(folder: Path) -> None:
    other = folder / SHARD.replace("tp1", "tp0")
    content = other.read_bytes()
    shutil.copy(folder / SHARD, other)
    (folder / SHARD).write_bytes(content)


def _mix(folder: Path) -> None:
    new = folder.with_name("of another save")
    save_alone(new, 2, 2, save_id="ff")
    shutil.copy(new / SHARD, folder)


def _flip(folder: Path) -> None:
    data = bytearray((folder / SHARD).read_bytes())
    data[-5] ^= 2
    (folder / SHARD).write_bytes(data)


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [  # name of the folder, what is done to it, what is said
    ("truncated", lambda f: os.truncate(f / SHARD, 700), f"{SHARD} is truncated or overwritten: it has 700 bytes"),
    (
        "missing",
        lambda f: os.remove(f / SHARD),
        f"missing is incomplete: 1 of 2 shards found, {SHARD} is missing",
    ),
    ("swapped", _swap, f"model-tp0-pp0.safetensors was saved as {SHARD}"),
    ("mixed", _mix, f"{SHARD} belongs to another save"),
    ("flipped", _flip, f"{SHARD} is damaged"),
    ("garbage", lambda f: (f / "autopar.json").write_text("{"), "autopar.json is no manifest"),
    ("chkpt", shutil.rmtree, "does not exist. Did you mean 'ckpt'?"),
]


def _other_shape(model: Any, tensors: Tensors) -> Tensors:
    model.gate = nn.Parameter(torch.zeros(4 if model._autopar_checkpoint.mpu.tp.rank == 0 else 3, 2, dtype=torch.half))
    return {**tensors, "gate": replace(tensors["gate"], shape=(7, 2))}


def _other_name(model: Any, tensors: Tensors) -> Tensors:
    model.gait, model.gate = model.gate, None
    return {("gait" if n == "gate" else n): replace(t, name="gait") if n == "gate" else t for n, t in tensors.items()}


def _other_type(model: Any, tensors: Tensors) -> Tensors:
    model.step.data = model.step.data.float()
    return tensors


MODELS: list[tuple[Callable[[Any, Tensors], Tensors], tuple[str, ...]]] = [
    (_other_shape, ("gate has shape [7, 3] in", "and [7, 2] in the model")),
    (
        _other_name,
        ("1 missing, 1 unexpected", "Missing in the checkpoint: gait. Did you mean 'gate'?", "Unexpected: gate"),
    ),
    (_other_type, ("step is int64 in", "and float32 in the model")),
]


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_checkpoints_that_do_not_fit_change_nothing(tmp_path):
    mpu = MPU(tensor_parallel_size=2)
    model = tiny(mpu)
    before = local(model)
    tiny(mpu, seed=1).save_parallelized(tmp_path / "ckpt")
    if mpu.rank == 0:
        for name, damage, _ in DAMAGES:
            damage(Path(shutil.copytree(tmp_path / "ckpt", tmp_path / name)))
    dist.barrier()
    with refusals(lambda: same(local(model), before)) as refuse:
        for name, _, message in DAMAGES:
            refuse(name, message, model.from_parallelized, tmp_path / name)
    if mpu.rank == 1:  # a node with its own disk
        shutil.copytree(tmp_path / "ckpt", tmp_path / "mine")
    dist.barrier()
    model.from_parallelized(tmp_path / "ckpt")
    assert same(local(model), local(tiny(mpu, seed=1)))
    with refusals(lambda: same(local(model), before)) as refuse:
        for change, messages in MODELS:
            model, plan = tiny(mpu), make_plan(2)
            plan = replace(plan, tensors=change(model, plan.tensors))
            model._autopar_checkpoint = replace(model._autopar_checkpoint, plan=plan)
            before = local(model)
            refuse(change.__name__, messages, model.from_parallelized, tmp_path / "ckpt")


@pooled(world_size=2)
def test_a_model_that_is_shared_out_differently_takes_its_own_ranges(tmp_path):
    """Even where the local shapes are the same and the units are others: interleaved instead of side by side."""
    mpu = MPU(tensor_parallel_size=2)
    tiny(mpu, seed=1).save_parallelized(tmp_path / "ckpt")
    full = TinyModel(TinyConfig(), seed=1).proj.weight.data
    uneven = Layout.of(1, [Block("heads", 6, 2, ((0, 2), (2, 6)))])
    interleaved = Layout.of(1, [Block("heads", 2, 3, ((0, 1), (1, 2))), Block("heads", 2, 3, ((0, 1), (1, 2)))])
    for layout in (uneven, interleaved):
        model = tiny(mpu)
        plan = with_layout(make_plan(2), "proj.weight", layout)
        model.proj.weight.data = layout.shard(torch.zeros_like(full), mpu.tp.rank)
        model._autopar_checkpoint = replace(model._autopar_checkpoint, plan=plan)
        model.from_parallelized(tmp_path / "ckpt")
        assert torch.equal(model.proj.weight, layout.shard(full, mpu.tp.rank))
        assert torch.equal(model.gate, tiny(mpu, seed=1).gate)
    assert full[:, :6].shape == model.proj.weight.shape and not torch.equal(full[:, :6], model.proj.weight)
