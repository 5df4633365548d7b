"""What real ranks merge is what ``save_pretrained`` writes, for types whose files join several tensors of the model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from typer.testing import CliRunner

import autopar
from autopar.tools.cli import app
from tests.checkpoint.test_saved_form import JOINED, assert_same_tensors
from tests.checkpoint.tiny import assert_same_files
from tests.pool import pooled
from tests.random_models import build, cases
from tests.tiers import mainly

SIZE = 40_000  # bytes: several files


def check(folder: Path, plain: PreTrainedModel, tp: int, pp: int) -> None:
    """Merged at once, and offline from shards, in one file and in several; then read again in every way."""
    config = {"model_parallelism": {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}}
    if dist.get_rank() == 0:
        copy.deepcopy(plain).save_pretrained(folder / "plain")
        copy.deepcopy(plain).save_pretrained(folder / "several", max_shard_size=SIZE)
    dist.barrier()
    model = autopar.initialize(copy.deepcopy(plain), config)
    model.save_parallelized(folder / "shards")
    model.save_parallelized(folder / "merged", merge_checkpoints=True)
    model.save_parallelized(folder / "merged several", merge_checkpoints=True, max_shard_size=SIZE)
    if dist.get_rank() == 0:
        offline = CliRunner().invoke(app, ["merge", str(folder / "shards"), str(folder / "offline")])
        assert offline.exit_code == 0, offline.output
        for name in ("merged", "offline"):
            assert_same_files(folder / name, folder / "plain")
        assert_same_tensors(folder / "merged several", folder / "several")
        same(type(plain).from_pretrained(folder / "merged several", dtype=plain.dtype), plain)
    dist.barrier()
    kind: Any = type(plain)
    for source in ("shards", "merged several"):
        loaded = autopar.from_pretrained(kind, folder / source, config)
        same(loaded, model)
        loaded.mpu.destroy()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.from_parallelized(folder / "shards")
    loaded = autopar.from_pretrained(kind, folder / "plain", config)
    same(model, loaded)
    for either in (model, loaded):
        either.mpu.destroy()


def same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    assert not [name for name in theirs if not torch.equal(mine[name], theirs[name])]


@pooled(world_size=4, timeout=300)
def test_at_tp_2_and_pp_2(tmp_path: Path) -> None:
    check(tmp_path, build(cases("nomic_bert")[0], 6, 3), 2, 2)


@pytest.mark.parametrize("model_type", mainly(*JOINED, later="sweep"))
@pooled(world_size=2, timeout=300)
def test_at_tp_2(tmp_path: Path, model_type: str) -> None:
    check(tmp_path, build(cases(model_type)[0], 6, 3), 2, 1)
