"""Checkpoints that an earlier version wrote load on any mesh, merge and reshard, and training goes on as it did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel
from typer.testing import CliRunner

from autopar.checkpoint import check_checkpoint, merge_checkpoint, reshard_checkpoint
from autopar.tensor_parallel import manual_seed
from autopar.tools.cli import app
from tests.checkpoint.kept import MESHES, Run, batch, extra, unpack
from tests.checkpoint.test_plain_data import same
from tests.pool import pooled

EVERY = pytest.mark.parametrize("name", MESHES)


def unpacked(name: str, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """As :func:`unpack`, one folder for all ranks; every rank calls it."""
    if dist.get_rank() == 0:
        unpack(name, folder)
    dist.barrier()
    return folder / name, load_file(folder / f"{name}.safetensors")


def assert_weights(weights: dict[str, torch.Tensor], kept: dict[str, torch.Tensor], when: str, atol: float = 0) -> None:
    due = {key.removeprefix(f"{when} "): value for key, value in kept.items() if key.startswith(f"{when} ")}
    assert weights.keys() == due.keys() and len(due) == 28
    for name, tensor in due.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


@EVERY
def test_it_is_whole_and_merges_into_the_plain_model(tmp_path, name):
    folder, kept = unpack(name, tmp_path)
    assert check_checkpoint(folder)["problems"] == []
    merge_checkpoint(folder, tmp_path / "merged")
    plain = GPT2LMHeadModel.from_pretrained(tmp_path / "merged", dtype="auto").eval()
    assert plain.lm_head.weight is plain.transformer.wte.weight
    state = plain.state_dict()
    del state["lm_head.weight"]
    assert_weights(state, kept, "saved")
    with torch.no_grad():
        logits = plain(input_ids=batch(9)["input_ids"]).logits
    torch.testing.assert_close(logits, kept["logits"], rtol=0, atol=1e-5 if name.startswith("fp32") else 2e-3)


@EVERY
def test_inspect_reads_it(tmp_path, name):
    folder, _ = unpack(name, tmp_path)
    shown = CliRunner().invoke(app, ["inspect", str(folder)])
    assert shown.exit_code == 0 and "transformer.h.0-1.attn.c_attn.weight" in shown.stdout
    summary = json.loads(CliRunner().invoke(app, ["inspect", "--json", str(folder)]).stdout)
    assert all(file["state"] == "ok" for file in summary["files"])
    assert {"optimizer", "lr_scheduler", "extra", "random_states"} <= set(summary["training_state"])


def dirty(tp: int, pp: int, precision: str = "fp32") -> Run:
    """Another model, of which nothing shall be left."""
    run = Run(tp, pp, precision, seed=5)
    manual_seed(77, run.model.mpu)
    run.step(7)
    return run


def check_resumed(run: Run, folder: Path, kept: dict[str, torch.Tensor], tmp: Path, atol: float) -> None:
    """Load, compare everything, and take the next step."""
    received: dict[Any, Any] = {}
    run.model.from_parallelized(folder, optimizer=run.optimizer, lr_scheduler=run.scheduler, extra=received)
    assert same(received, extra())
    assert_weights(run.weights(tmp / "saved"), kept, "saved")
    run.step(2)
    assert_weights(run.weights(tmp / "next"), kept, "next", atol)
    assert torch.tensor(run.scheduler.get_last_lr(), dtype=torch.float64).equal(kept["lr"])
    assert run.optimizer.loss_scale == kept["loss_scale"]


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_fp32_goes_on_on_its_own_mesh_and_on_others(tmp_path):
    folder, kept = unpacked("fp32-tp2-pp2", tmp_path)
    if dist.get_rank() == 0:
        for tp, pp in ((1, 1), (3, 2)):
            reshard_checkpoint(folder, tmp_path / f"{tp}-{pp}", tp=tp, pp=pp)
    dist.barrier()
    run = dirty(2, 2)
    run.model.from_parallelized(folder, optimizer=run.optimizer)
    torch.testing.assert_close(run.draws(), kept["draws"][dist.get_rank()], rtol=0, atol=0)
    check_resumed(run, folder, kept, tmp_path / "same", 2e-6)
    run.model.mpu.destroy()
    run = dirty(2, 1)  # and two replicas
    for name in (folder.name, "1-1", "3-2"):
        check_resumed(run, tmp_path / name, kept, tmp_path / f"of-{name}", 2e-6)
    run.model.mpu.destroy()


@pooled(world_size=2)
def test_fp16_with_zero_goes_on_and_becomes_fp32(tmp_path):
    folder, kept = unpacked("fp16-zero1", tmp_path)
    run = dirty(1, 1, "fp16")
    check_resumed(run, folder, kept, tmp_path / "same", 5e-4)
    run.model.mpu.destroy()
    run = dirty(2, 1)
    run.model.from_parallelized(folder, optimizer=run.optimizer)
    masters = run.weights(tmp_path / "masters")
    assert_weights({name: master.half() for name, master in masters.items()}, kept, "saved")
    assert any(not master.equal(master.half().float()) for master in masters.values())
    run.model.mpu.destroy()


@EVERY
@pooled(world_size=1)
def test_it_goes_on_on_one_rank(tmp_path, name):
    folder, kept = unpacked(name, tmp_path)
    precision = name.partition("-")[0]
    run = dirty(1, 1, precision)
    run.model.from_parallelized(folder, optimizer=run.optimizer)
    torch.testing.assert_close(run.draws(), kept["draws"][0], rtol=0, atol=0)
    check_resumed(run, folder, kept, tmp_path, 2e-6 if precision == "fp32" else 5e-4)
    run.model.mpu.destroy()
