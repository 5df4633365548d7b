"""Cost of the consistency checks: a training step with them and without, interleaved in one run.

    python -m benchmarks checks --rounds 60

Two processes, tensor-parallel size 2; forward, backward, AdamW step. ``of pairs`` is the median of the ratios of
neighbouring rounds.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.models import Size, build, tokens
from benchmarks.ranks import run_ranks
from benchmarks.rounds import Turns, Variant, interleave, ratio, summary
from benchmarks.step import ROWS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=["llama", "small"])
    parser.add_argument("--rounds", type=int, default=60)


def measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure all rows in one world."""
    rows: list[dict[str, Any]] = run_ranks("benchmarks.checks:rank_main", options, 2)[0]
    return rows


def rank_main(options: dict[str, Any]) -> list[dict[str, Any]]:
    """On every rank: both variants of each row in turn."""
    turns = Turns(options["folder"])
    return [{"row": row, **_row(*ROWS[row], options["rounds"], turns)} for row in options["rows"]]


def _row(family: str, size: Size, rounds: int, turns: Turns) -> dict[str, float]:
    works = {name: Variant(_step(family, size, name == "on")) for name in ("off", "on")}
    samples = interleave(works, rounds, turns, warm_up=5)
    found = summary(samples)
    off, on = ([max(taken.wall for taken in ranks) for ranks in samples[name]] for name in ("off", "on"))
    return {
        "off, ms": found["off"]["ms"],
        "on, ms": found["on"]["ms"],
        "on / off": round(found["on"]["ms"] / found["off"]["ms"], 4),
        "of pairs": round(ratio(on, off), 4),
        "CPU on / off": round(found["on"]["cpu_ms"] / found["off"]["cpu_ms"], 4),
    }


def _step(family: str, size: Size, enable: bool) -> Any:
    import autopar

    config = {"model_parallelism": {"tensor_parallel_size": 2}, "consistency_check": {"enable": enable}}
    model = autopar.initialize(build(family, size), config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = tokens(size)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
