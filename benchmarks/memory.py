"""Peak memory of a training step on every rank, with its parts: weights, gradients, optimizer, logits, activations.

    python -m benchmarks memory --hidden 512

The parts are those of the tensors alive when most are (``benchmarks/tensor_memory.py``), after one step has made the
optimizer's state. ``resident`` is how much the process's resident set grew beyond what it was before the model was
made: allocator, libraries' buffers and what the parts do not see.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.models import build, tokens
from benchmarks.process_memory import forget_high_water, high_water
from benchmarks.ranks import run_ranks
from benchmarks.tensor_memory import PARTS, peak_of
from benchmarks.variants import accepts

MIB = 2**20
TP2: dict[str, Any] = {"model_parallelism": {"tensor_parallel_size": 2}}
CONFIGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "tp 2": TP2,
    "tp 2, recomputed": {**TP2, "activation_checkpointing": {"enable": True}},
    "tp 2, loss in chunks": {**TP2, "loss": {"chunk": 128}},
    "pp 2, 1f1b": {"model_parallelism": {"pipeline_parallel_size": 2}},
    "dp 2, zero 1": {"zero": {"stage": 1}},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--family", choices=("llama", "gpt2"), default="llama")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=16000)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS))


def measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure each configuration in processes of its own."""
    rows = []
    for name in options["configs"]:
        config = CONFIGS[name]
        world = 1 if config is None else 2
        if config is not None and (reason := accepts(config, world)):
            rows.append({"config": name, "missing": reason})
            continue
        ranks = run_ranks("benchmarks.memory:rank_main", {**options, "config": config}, world)
        rows += [{"config": name, "rank": rank, **row} for rank, row in enumerate(ranks)]
    return rows


def rank_main(options: dict[str, Any]) -> dict[str, float]:
    """On every rank: one step to make the optimizer's state, one that is followed, one for the resident set."""
    import autopar

    torch.rand(8, 8).matmul(torch.rand(8, 8))
    before = forget_high_water()
    model = build(options["family"], options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    if options["config"] is not None:
        model, optimizer = autopar.initialize(model, options["config"], optimizer=optimizer)
    ids = tokens(options)

    def step() -> None:
        if "pipeline_parallel_size" in (options["config"] or {}).get("model_parallelism", {}):
            model.execute_pipeline({"input_ids": ids, "labels": ids})
        else:
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    vocab = options["vocab"]
    peak = peak_of(step, model, optimizer, {vocab, vocab // 2})
    forget_high_water()
    step()
    parts = {f"{part}, MiB": round(peak.parts[part] / MIB, 1) for part in PARTS}
    resident = round((high_water() - before) / MIB, 1)
    return {**parts, "sum, MiB": round(peak.total / MIB, 1), "resident, MiB": resident}
