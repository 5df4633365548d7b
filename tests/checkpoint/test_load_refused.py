"""Real ranks refuse to load what does not fit, and nothing changes."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from autopar.distributed.mesh import MPU
from autopar.errors import CheckpointError
from autopar.layout import Block, Layout
from tests.checkpoint.tiny import (
    TinyConfig,
    TinyModel,
    local,
    make_plan,
    same,
    save_alone,
    tiny,
    with_layout,
)
from tests.pool import pooled
from tests.worlds import raises_everywhere


@pooled(world_size=2)
def test_checkpoints_that_do_not_fit_change_nothing(tmp_path):
    mpu = MPU(tensor_parallel_size=2)
    model = tiny(mpu)
    before = local(model)
    if mpu.rank == 0:
        save_alone(tmp_path / "ckpt", 2, seed=1)
        for name, change in {
            "truncated": lambda f: os.truncate(f / "model-tp1-pp0.safetensors", 700),
            "missing": lambda f: os.remove(f / "model-tp1-pp0.safetensors"),
            "swapped": lambda f: [
                shutil.copy(f / a, f / b)
                for a, b in [
                    ("model-tp0-pp0.safetensors", "x"),
                    ("model-tp1-pp0.safetensors", "model-tp0-pp0.safetensors"),
                    ("x", "model-tp1-pp0.safetensors"),
                ]
            ],
            "mixed": lambda f: shutil.copy(
                save_alone(tmp_path / "new", 2, 2, save_id="ff") and tmp_path / "new" / "model-tp1-pp0.safetensors", f
            ),
            "flipped": lambda f: flip(f / "model-tp1-pp0.safetensors"),
            "garbage": lambda f: (f / "autopar.json").write_text("{"),
        }.items():
            shutil.copytree(tmp_path / "ckpt", tmp_path / name)
            change(tmp_path / name)
    dist.barrier()
    cases = [
        ("truncated", "model-tp1-pp0.safetensors is truncated or overwritten: it has 700 bytes"),
        ("missing", "missing is incomplete: 1 of 2 shards found, model-tp1-pp0.safetensors is missing"),
        ("swapped", "model-tp0-pp0.safetensors was saved as model-tp1-pp0.safetensors"),
        ("mixed", "model-tp1-pp0.safetensors belongs to another save"),
        ("flipped", "model-tp1-pp0.safetensors is damaged"),
        ("garbage", "autopar.json is no manifest"),
        ("chkpt", "does not exist. Did you mean 'ckpt'?"),
    ]
    for name, message in cases:
        with raises_everywhere(CheckpointError, message):
            model.from_parallelized(tmp_path / name)
        assert same(local(model), before), name
    if mpu.rank == 1:  # a node with its own disk
        shutil.copytree(tmp_path / "ckpt", tmp_path / "mine")
    dist.barrier()
    model.from_parallelized(tmp_path / "ckpt")
    assert same(local(model), local(tiny(mpu, seed=1)))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 2
    path.write_bytes(data)


@pooled(world_size=2)
def test_checkpoints_of_another_model_change_nothing(tmp_path):
    mpu = MPU(tensor_parallel_size=2)
    tiny(mpu, seed=1).save_parallelized(tmp_path / "ckpt")
    model = tiny(mpu)
    before = local(model)

    def refused(plan, *messages):
        model._autopar_checkpoint = replace(model._autopar_checkpoint, plan=plan)
        with raises_everywhere(CheckpointError, *messages):
            model.from_parallelized(tmp_path / "ckpt")
        assert same(local(model), before)

    plan = make_plan(2)
    model = tiny(mpu)
    model.gate = nn.Parameter(torch.zeros(4 if mpu.tp.rank == 0 else 3, 2, dtype=torch.half))
    before = local(model)
    refused(
        replace(plan, tensors={**plan.tensors, "gate": replace(plan.tensors["gate"], shape=(7, 2))}),
        "gate has shape [7, 3] in",
        "and [7, 2] in the model",
    )
    model = tiny(mpu)
    model.gait, model.gate = model.gate, None
    before = local(model)
    tensors = {
        ("gait" if n == "gate" else n): replace(t, name="gait") if n == "gate" else t for n, t in plan.tensors.items()
    }
    refused(
        replace(plan, tensors=tensors),
        "1 missing, 1 unexpected",
        "Missing in the checkpoint: gait. Did you mean 'gate'?",
        "Unexpected: gate",
    )
    model = tiny(mpu)
    model.step.data = model.step.data.float()
    before = local(model)
    refused(plan, "step is int64 in", "and float32 in the model")


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
