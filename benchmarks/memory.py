"""Peak memory of a training step under each lever, measured and planned, with its parts.

    python -m benchmarks memory --hidden 512

The parts are those of the tensors alive when most are (``benchmarks/tensor_memory.py``), after one step has made the
optimizer's state. ``planned`` is what ``autopar.plan_memory`` says of the rank that holds most. ``resident`` is how
much the process's resident set grew beyond what it was before the model was made: allocator, libraries' buffers and
what the parts do not see.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.models import build, tokens
from benchmarks.process_memory import forget_high_water, high_water
from benchmarks.ranks import run_ranks
from benchmarks.tensor_memory import PARTS, peak_of
from benchmarks.variants import accepts

MIB = 2**20
PP2: dict[str, Any] = {"pp": 2, "pipeline": {"microbatch_size": 1}}
CONFIGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "tp 2": {"tp": 2},
    "tp 2, recomputed": {"tp": 2, "activation_checkpointing": {"enable": True}},
    "tp 2, recomputed but attention, collectives": {
        "tp": 2,
        "activation_checkpointing": {"save": ["attention", "collectives"]},
    },
    "tp 2, every second block recomputed": {"tp": 2, "activation_checkpointing": {"every": 2}},
    "tp 2, loss in chunks": {"tp": 2, "loss": {"chunk": 128}},
    "pp 2": PP2,
    "dp 2, zero 1": {"zero": {"stage": 1}},
    "dp 2, zero 2": {"zero": {"stage": 2}},
    "dp 2, zero 3": {"zero": {"stage": 3}},
    "pp 2 x dp 2, zero 2": {**PP2, "zero": {"stage": 2}},
    "pp 2 x dp 2, zero 3": {**PP2, "zero": {"stage": 3}},
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
        world = 1 if config is None else 4 if " x " in name else 2
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
    model, config = build(options["family"], options), options["config"]
    sizes = {"sequence": options["seq"], "batch": options["batch"], "device": "cpu"}
    planned = autopar.plan_memory(model, config, gpus=dist.get_world_size() if config else 1, **sizes).peak
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    if config is not None:
        model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
    ids = tokens(options)

    def step() -> None:
        if config is not None:
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
    total = {"sum, MiB": round(peak.total / MIB, 1), "planned, MiB": round(planned.total / MIB, 1)}
    return {**parts, **total, "resident, MiB": resident}
