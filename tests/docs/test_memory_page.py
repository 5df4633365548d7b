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
SMALL = replace(BASE, microbatch=1, microbatches=8)
CKPT = replace(BASE, checkpointing=True)
TP = replace(BASE, tp=2, dp=4, microbatches=4)
ROWS = [
    ("replicas only", "`{}`", BASE),
    ("smaller micro-batches", "`pipeline: {microbatch_size: 1}`", SMALL),
    ("ZeRO 1", "`zero: {stage: 1}`", replace(BASE, zero=1)),
    ("ZeRO 2", "`zero: {stage: 2}`", replace(BASE, zero=2)),
    ("ZeRO 3", "`zero: {stage: 3}`", replace(BASE, zero=3)),
    ("recomputation", "`activation_checkpointing: {enable: true}`", CKPT),
    ("... keep attention", "`activation_checkpointing: {save: [attention]}`", replace(CKPT, saves=("attention",))),
    ("tensor parallel", "`tp: 2`", TP),
    ("... with sequence parallelism", "`tp: 2`, `sequence_parallel: true`", replace(TP, sequence_parallel=True)),
    ("two stages", "`pp: 2`", replace(BASE, pp=2, dp=4, microbatches=4)),
    ("ZeRO 3, recomputation, micro-batches of 1", "the three settings", replace(SMALL, zero=3, checkpointing=True)),
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
            yield row("chunked loss", "`loss: {chunk: 2048}`", chunked.estimate(BASE))
        if candidate.zero == 1:
            _, left, _, seconds = on_host(candidate, estimate.peak)
            section = "`zero: {stage: 1, optimizer_offload: true}`"
            yield _line("... on the CPU", section, left, estimate.time + seconds)
        if lever == "... keep attention":
            section = "`activation_checkpointing: {every: 2}`"
            yield row("... every second block", section, plain.estimate(replace(CKPT, every=2)))


@pytest.mark.tier("all")
def test_the_table_is_what_the_planner_counts() -> None:
    same(PAGE, re.sub(rf"(?<={re.escape(HEAD)})(\|.*\n)*", lambda _: "".join(_rows()), PAGE.read_text()))
