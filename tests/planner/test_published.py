"""The planner against what others have published.

UPDATE_DOCS=1 python -m pytest --tier sweep tests/planner/test_published.py -k next_to      writes the table
"""

import os
import re

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar.tools.planner.candidate import Candidate, Rows
from autopar.tools.planner.estimate import Estimator
from autopar.tools.planner.planned_model import PlannedModel
from autopar.tools.planner.search import Space, search
from benchmarks.published_runs import RUNS, estimator_of, outcome, row
from tests.docs.pages import DOCS, ROOT

PAGE = ROOT / "benchmarks" / "results" / "published_runs.md"


def estimator(model: str, sequence: int, **figures: float) -> Estimator:
    return estimator_of(model, "dgx-h100", tuple(figures.items()), sequence, 0)


def _gpt(batch: int, sequence: int, hidden: int, heads: int, attention: str) -> PlannedModel:
    config = GPT2Config(
        n_embd=hidden, n_head=heads, n_layer=2, vocab_size=1024, n_positions=sequence, dtype=torch.bfloat16,
        attn_implementation=attention,
    )  # fmt: skip
    with autopar.lazy_init():
        model = GPT2LMHeadModel._from_config(config)
    return PlannedModel(model, sequence=sequence)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_activations_of_a_layer_are_korthikantis(tp: int) -> None:
    """Korthikanti et al., 2022, table 2: sbh (10 + 24 / t + 5as / ht) bytes, the last term without fused attention."""
    batch, sequence, hidden, heads = 4, 2048, 6144, 64
    unit = sequence * batch * hidden
    fused, plain = (
        sum(_gpt(batch, sequence, hidden, heads, attention).count(Rows(tp), batch).elements[1].saved.values()) / unit
        for attention in ("sdpa", "eager")
    )
    assert fused == pytest.approx(10 + 48 / tp, rel=1e-3)
    assert plain - fused == pytest.approx(5 * heads * sequence / hidden / tp, rel=0.01)


@pytest.mark.tier("sweep")
def test_llama_405b_in_less_than_a_minute() -> None:
    """Llama Team, 2024, table 4: tp 8, pp 16 at 8,192 tokens on 80 GB."""
    of_405b = estimator("llama-405b", 8192)
    found = search(of_405b, Space(16384, 8, 2048))
    assert (8, 16) in [(best.candidate.tp, best.candidate.pp) for best in found.best]
    assert all(best.peak.total <= 80e9 for best in found.best)
    four = of_405b.memory(Candidate(8, 4, 512, "1f1b", 1, 4, 1, True))  # without ZeRO 3, which the paper has not
    assert max(rank.weights + rank.gradients for rank in four) > 70e9  # 405 B / 32 x 6 bytes


@pytest.mark.tier("all")
def test_llama_405b_with_131072_tokens_fits_over_16_ranks_alone() -> None:
    """The same table: 131,072 tokens were split over 16 ranks (context parallelism)."""
    of_405b = estimator("llama-405b", 131072)
    full, split = (
        max(rank.total for rank in of_405b.memory(Candidate(8, 16, 8, "1f1b", 1, 16, 1, True, cp=cp))) for cp in (1, 16)
    )
    assert split < 80e9 and full > 200e9


def test_llama_8b_takes_about_as_long_as_torchtitans() -> None:
    """torchtitan, benchmarks/llama3_h100_202412: 8 H100, batch 2, selective checkpointing: 5,762 tokens/s a GPU."""
    of_8b = estimator("llama-8b", 8192, gpu_memory=96, memory_bandwidth=2400, tflops=835)
    whole, none = (
        of_8b.estimate(Candidate(1, 1, 8, "1f1b", 2, 1, 3, checkpointing)).tokens_per_second / 8
        for checkpointing in (True, False)
    )
    assert whole < none and 0.8 * 5762 < (whole + none) / 2 < 1.2 * 5762


def test_replicas_win_over_wide_tensor_parallelism() -> None:
    """accelerate#4193: a 14 B model on 8 H100: tp 4 x 2 replicas 4,067 tokens/s, tp 8 2,822."""
    of_14b = estimator("llama-14b", 2048)
    four, eight = (of_14b.estimate(Candidate(tp, 1, 8 // tp, "1f1b", 1, tp // 2, 1, True)) for tp in (4, 8))
    assert four.time < eight.time


@pytest.mark.tier("sweep")
@pytest.mark.parametrize("name", RUNS)
def test_runs_next_to_their_publication(name: str) -> None:
    run, found = RUNS[name], outcome(name)
    text, line = PAGE.read_text(), row(name, found)
    shown = re.search(rf"^\| {re.escape(name)} \|.*$", text, re.MULTILINE)
    assert shown is not None, f"{PAGE.name} has no row for {name}"
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(text.replace(shown[0], line))
    else:
        assert shown[0] == line
    ratio = found.estimate.tokens_per_second / run["gpus"] / found.published
    assert (0.75 <= ratio <= 1.25) is ("misses" not in run), f"{ratio:.2f} of the published speed"
    slower = found.mesh.time / found.best.time
    assert (slower <= 1.15) is ("slower" not in run), f"{slower:.2f} times as long as the best proposal"


def test_every_row_of_the_table_is_a_run() -> None:
    rows = re.findall(r"^\| (.*?) \| \d+ x \d+ x \d+ x \d+ \|", PAGE.read_text(), re.MULTILINE)
    assert rows == list(RUNS)
    close = sum("misses" not in run for run in RUNS.values())
    assert f"{close} of {len(RUNS)} published runs" in (DOCS / "planner.md").read_text()


@pytest.mark.tier("sweep")
def test_llama_405b_on_8192_gpus_is_not_planned_with_a_perfect_network() -> None:
    """ZeRO-3 over 2,048 replicas was proposed, with no time for their exchange."""
    best = outcome("Llama 3 405B, 8k GPUs").best
    assert best.candidate.replicas < 2048 and dict(best.parts)["dp"] > 0.3
