"""docs/planner.md, docs/memory.md and docs/start.md: outputs and tables are those of the planner.

UPDATE_DOCS=1 python -m pytest --tier sweep tests/docs/test_planner.py      writes them into the pages
"""

import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.main import get_command
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.tools.commands.models import add_lora
from autopar.tools.planner.candidate import Candidate, Estimate, RankMemory
from autopar.tools.planner.estimate import Estimator
from autopar.tools.planner.hardware import find_node
from autopar.tools.planner.planned_model import PlannedModel
from autopar.tools.planner.search import Space, gigabytes, on_host, rehearsed, search
from tests.docs.pages import DOCS, codes, same
from tests.harness.tiers import in_tier

PAGE = DOCS / "planner.md"
DATA = yaml.safe_load(Path(__file__).with_name("planner.yaml").read_text())
CARDS = [("t4", 2, "fp16"), *(("rtx4090", count, "bf16") for count in (2, 4, 8)), ("h100", 8, "bf16")]
ROWS = ["7 B", *in_tier("sweep", ["1 B", "13 B", "70 B"])]


def llama(size: str, *, lora: bool, dtype: torch.dtype = torch.float32) -> Any:
    with autopar.lazy_init():
        model = AutoModelForCausalLM.from_config(LlamaConfig(**DATA["sizes"][size]), dtype=dtype)
    return add_lora(model, 16) if lora else model


def cells(row: str) -> Iterator[str]:
    """Yield the planner's answers for one row: the mesh, GB of the fullest card, tokens per second and card."""
    plain = llama(row, lora=False)
    for gpu, count, dtype in CARDS:
        planned = PlannedModel(plain, None, sequence=2048, precision=dtype, optimizer="adamw", dry_run=False)
        estimator = Estimator(planned, find_node(gpu))
        found = search(estimator, Space(count, 8, 16), 1)
        rehearsed(estimator, found)
        if not found.best:
            least = min(memory.total for _, memory in found.too_large)
            yield f"no: needs {least / 1e9:.0f} GB"
            continue
        best, chosen = found.best[0], found.best[0].candidate
        mesh = " x ".join(
            f"{axis} {n}" for axis, n in (("tp", chosen.tp), ("pp", chosen.pp), ("dp", chosen.dp)) if n > 1
        )
        zero = f", ZeRO-{chosen.zero}" if chosen.zero else ""
        again = ", recompute" if chosen.checkpointing else ""
        speed = best.tokens_per_second / count
        yield f"{mesh}{zero}{again}: {best.peak.total / 1e9:.0f} GB, {float(f'{speed:.2g}'):,.0f}/s"


@pytest.mark.tier("all")
def test_the_command_prints_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    text = PAGE.read_text()
    (shell,), (shown,) = codes(text, "bash"), codes(text, "text")
    result = CliRunner().invoke(app, shlex.split(shell.text)[1:])
    assert result.exit_code == 0, result.output
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(PAGE.read_text().replace(f"```text\n{shown.text}```", f"```text\n{result.stdout}```"))
    else:
        assert result.stdout == shown.text
    assert autopar.ParallelConfig.parse(tmp_path / "config.yaml", 4)


def test_the_page_lists_every_argument() -> None:
    command = get_command(app).commands["plan"]  # type: ignore[attr-defined]
    options = {max(parameter.opts, key=len) for parameter in command.params if parameter.name != "model"}
    table = "".join(line for line in PAGE.read_text().splitlines() if line.startswith("| `-"))
    named = {"--output" if name == "-o" else name for name in re.findall(r"`(--?[a-z-]+)", table)}
    assert named - {"--no-checkpointing", "--no-sequence-parallel"} == options


@pytest.mark.tier("all")
@pytest.mark.parametrize("row", ROWS)
def test_the_table(row: str) -> None:
    line = f"| {row} | {' | '.join(cells(row))} |"
    text = PAGE.read_text()
    if os.environ.get("UPDATE_DOCS") == "1":
        PAGE.write_text(re.sub(rf"^\| {re.escape(row)} \|.*$", line, text, flags=re.MULTILINE))
    else:
        assert line in text.splitlines()


START = DOCS / "start.md"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # PEFT asks for it
@pytest.mark.tier("all")
def test_seven_billion_parameters_on_small_cards() -> None:
    text, again = " ".join(START.read_text().split()), {"activation_checkpointing": {"enable": True}}
    config = {"tp": 2, "precision": {"dtype": "bf16"}, **again}
    assert f"`{json.dumps(config)}`" in text
    adapters = autopar.plan_memory(llama("7 B", lora=True), config, sequence=2048, gpus=4).peak.total
    assert f"{adapters / 1e9:.0f} GB a card, with" in text
    config = {"tp": 4, **again}
    assert f"`{json.dumps(config)}`" in text
    half = llama("7 B", lora=False, dtype=torch.bfloat16)
    assert f", {autopar.plan_memory(half, config, sequence=2048).peak.total / 1e9:.0f} GB a card" in text


MEMORY = DOCS / "memory.md"
HEAD = "|---|---|---|---|---|---|---|---|---|\n"
BASE = Candidate(1, 1, 8, "1f1b", 4, 2, 0, False)


def _line(lever: str, config: str, memory: RankMemory, seconds: float) -> str:
    kinds = (memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.logits)
    cells = [lever, config, gigabytes(memory.total), *map(gigabytes, kinds), f"{seconds:.1f}"]
    return f"| {' | '.join(cells)} |\n"


def _rows() -> Iterator[str]:
    with autopar.lazy_init():
        model = AutoModelForCausalLM.from_config(LlamaConfig())
    facts = {"sequence": 2048, "precision": "bf16", "dry_run": False}
    plain, chunked = (
        Estimator(PlannedModel(model, **facts, **more), find_node("dgx-h100"))  # type: ignore[arg-type]
        for more in ({}, {"loss_chunk": 2048})
    )

    def row(lever: str, config: str, estimate: Estimate) -> str:
        return _line(lever, config, estimate.peak, estimate.time)

    for at, (lever, config, changes) in enumerate(DATA["levers"]):
        candidate = replace(BASE, **{**changes, "saves": tuple(changes.get("saves", ()))})
        estimate = plain.estimate(candidate)
        yield row(lever, config, estimate)
        if at == 1:
            yield row("chunked loss", "`loss: {chunk: 2048}`", chunked.estimate(BASE))
        if candidate.zero == 1:
            _, left, _, seconds = on_host(candidate, estimate.peak)
            section = "`zero: {stage: 1, optimizer_offload: true}`"
            yield _line("... on the CPU", section, left, estimate.time + seconds)
        if lever == "... keep attention":
            section = "`activation_checkpointing: {every: 2}`"
            yield row("... every second block", section, plain.estimate(replace(BASE, checkpointing=True, every=2)))


@pytest.mark.tier("all")
def test_the_table_is_what_the_planner_counts() -> None:
    same(MEMORY, re.sub(rf"(?<={re.escape(HEAD)})(\|.*\n)*", lambda _: "".join(_rows()), MEMORY.read_text()))
