"""``autopar plan --rehearse``: the memory of the meshes shown is counted, and what their ranks send is matched."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import autopar
from autopar.errors import ConfigError
from autopar.tools.cli import app
from autopar.tools.planner.adapted import add_lora, kind_of, mark_quantized
from autopar.tools.planner.estimate import Estimator
from autopar.tools.planner.hardware import find_gpu
from autopar.tools.planner.planned_model import PlannedModel
from autopar.tools.planner.search import Found, Space, search
from autopar.tools.rehearsal import run as rehearsal
from tests.small import llama

RESERVE = 1_500_000_000


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.mark.tier("all")
def test_counted_memory_is_that_of_the_rehearsal(tmp_path: Path) -> None:
    config = llama(num_hidden_layers=4).config
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    sizes = ("--gpus", 2, "--sequence", 64, "--global-batch", 8, "--zero", 1, "--no-checkpointing")
    written = tmp_path / "config.yaml"
    result = run("plan", tmp_path / "model", *sizes, "--rehearse", "--json", "-o", written)
    assert result.exit_code == 0, result.output
    best = json.loads(result.stdout)["best"]
    assert best and all(len(each["memory_counted"]) == each["pp"] for each in best)
    for each in best:
        for counted, memory in zip(each["memory_counted"], each["memory"], strict=True):
            states = memory["total"] - memory["reserve"]
            assert 0.7 * states < counted - memory["reserve"] < 1.05 * states
    first = best[0]
    batch = first["microbatch"] * first["microbatches"]
    more = ("--config", written, "--batch", batch, "--sequence", 64, "--gpu", "h100", "--json")
    held = json.loads(run("rehearse", tmp_path / "model", "--gpus", 2, *more).stdout)["held"]
    peaks = {rank["peak"] + RESERVE for rank in held.values()}
    assert {*first["memory_counted"]} <= peaks and max(first["memory_counted"]) == max(peaks)
    shown = run("plan", tmp_path / "model", *sizes, "--rehearse").stdout
    assert re.search(r"GB, rehearsed +1\.5\b", shown) and "--config" not in shown


def estimator(model: Any) -> Estimator:
    return Estimator(PlannedModel(model, sequence=64, precision="fp32", dry_run=False), find_gpu("h100"))


def found_by(planner: Estimator) -> Found:
    return search(planner, Space(2, 8, 4, 0, False), count=2)


@pytest.mark.tier("test")
def test_what_does_not_fit_when_it_is_counted_falls_out() -> None:
    planner = estimator(llama(num_hidden_layers=2))
    found = found_by(planner)
    planner.gpu = replace(planner.gpu, memory=RESERVE)
    meshes = len(found.best)
    rehearsal.count_found(planner, found)
    assert meshes and found.best == []
    assert [reason for _, reason in found.refused[-meshes:]] == ["needs 1.5 GB, counted in its rehearsal"] * meshes


def test_a_rehearsal_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = estimator(llama(num_hidden_layers=2))
    found = found_by(planner)

    def fail(*_: Any, **more: Any) -> Any:
        if more["batch"] == 4:
            raise ConfigError("two heads\non three ranks")
        raise RuntimeError(
            "rank 1 of 2 fails in its rehearsal:\nTraceback\nValueError: it is odd\nBefore that, all fits"
        )

    monkeypatch.setattr(rehearsal, "rehearse", fail)
    rehearsal.count_found(planner, found)
    assert found.best == []
    assert {reason for _, reason in found.refused} == {"two heads", "fails in its rehearsal: ValueError: it is odd"}


def test_quantized_weights_are_not_rehearsed() -> None:
    with autopar.lazy_init():
        model = LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2))
    mark_quantized(model, kind_of("nf4"))
    with pytest.raises(ConfigError, match="--rehearse: weights in bitsandbytes nf4 are planned, not rehearsed"):
        rehearsal.check_rehearsed(estimator(add_lora(model, 4)))
