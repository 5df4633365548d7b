"""docs/memory.md: the rows of its table are what the planner counts.

UPDATE_DOCS=1 python -m pytest tests/docs/test_memory_page.py      writes them
"""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

import autopar
from autopar.tools.planner.candidate import Candidate, Estimate, RankMemory
from autopar.tools.planner.estimate import Estimator
from autopar.tools.planner.hardware import find_node
from autopar.tools.planner.planned_model import PlannedModel
from autopar.tools.planner.search import gigabytes, on_host
from tests.docs.pages import DOCS, same

PAGE = DOCS / "memory.md"
HEAD = "|---|---|---|---|---|---|---|---|---|\n"
BASE = Candidate(1, 1, 8, "1f1b", 4, 2, 0, False)
ROWS = [
    ("replicas alone", "`{}`", BASE),
    ("smaller micro-batches", "`pipeline: {microbatch_size: 1}`", replace(BASE, microbatch=1, microbatches=8)),
    ("ZeRO 1", "`zero: {stage: 1}`", replace(BASE, zero=1)),
    ("ZeRO 2", "`zero: {stage: 2}`", replace(BASE, zero=2)),
    ("ZeRO 3", "`zero: {stage: 3}`", replace(BASE, zero=3)),
    ("recomputed blocks", "`activation_checkpointing: {enable: true}`", replace(BASE, checkpointing=True)),
    (
        "... but attention",
        "`activation_checkpointing: {save: [attention]}`",
        replace(BASE, checkpointing=True, saves=("attention",)),
    ),
    ("tensor parallel", "`tp: 2`", replace(BASE, tp=2, dp=4, microbatches=4)),
    (
        "... with rows",
        "`tp: 2`, `sequence_parallel: true`",
        replace(BASE, tp=2, dp=4, microbatches=4, sequence_parallel=True),
    ),
    ("two stages", "`pp: 2`", replace(BASE, pp=2, dp=4, microbatches=4)),
    ("two stages, ZeRO 2", "`pp: 2`, `zero: {stage: 2}`", replace(BASE, pp=2, dp=4, microbatches=4, zero=2)),
    ("two stages, ZeRO 3", "`pp: 2`, `zero: {stage: 3}`", replace(BASE, pp=2, dp=4, microbatches=4, zero=3)),
    (
        "ZeRO 3, recomputed, micro-batches of 1",
        "all of these",
        replace(BASE, zero=3, checkpointing=True, microbatch=1, microbatches=8),
    ),
]


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

    for at, (lever, config, candidate) in enumerate(ROWS):
        estimate = plain.estimate(candidate)
        yield row(lever, config, estimate)
        if at == 1:
            yield row("loss in chunks", "`loss: {chunk: 2048}`", chunked.estimate(BASE))
        if candidate.zero == 1:
            _, left, _, seconds = on_host(candidate, estimate.peak)
            section = "`zero: {stage: 1, optimizer_offload: true}`"
            yield _line("... in the CPU's memory", section, left, estimate.time + seconds)
        if lever == "... but attention":
            section = "`activation_checkpointing: {every: 2}`"
            yield row("every second block", section, plain.estimate(replace(BASE, checkpointing=True, every=2)))


@pytest.mark.tier("all")
def test_the_table_is_what_the_planner_counts() -> None:
    same(PAGE, re.sub(rf"(?<={re.escape(HEAD)})(\|.*\n)*", lambda _: "".join(_rows()), PAGE.read_text()))
