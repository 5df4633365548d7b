"""Steps of data-parallel replicas, against torch's own: DDP, ZeroRedundancyOptimizer, FSDP2.

    python -m benchmarks replicas --rounds 15

Two ranks with one thread each, fp32, AdamW; forward, backward, averaging, step and ``zero_grad``, all ways interleaved
in one run. ``rival / way`` is above 1 where a way is faster than the rival of its row.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.models import Size, build, tokens
from benchmarks.ranks import run_ranks
from benchmarks.rounds import Turns, Variant, interleave, summary

SIZE: Size = {"hidden": 384, "layers": 8, "vocab": 8192, "seq": 64, "batch": 8, "ffn": 1024}
RIVALS = {"dp": "DistributedDataParallel", "ZeRO 1": "ZeroRedundancyOptimizer", "ZeRO 3": "FSDP2"}
_Step = Callable[[], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--rows", nargs="+", choices=RIVALS, default=list(RIVALS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=2)


def measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure all rows in one world."""
    rows: list[dict[str, Any]] = run_ranks("benchmarks.replicas:rank_main", options, options["ranks"])[0]
    return rows


def rank_main(options: dict[str, Any]) -> list[dict[str, Any]]:
    """On every rank: measure; the results are identical on all."""
    turns, rows = Turns(options["folder"]), []
    for row in options["rows"]:
        rival, stage = RIVALS[row], {"dp": 0, "ZeRO 1": 1, "ZeRO 3": 3}[row]
        ways = {rival: _rival(rival), "autopar": _autopar(stage, early=False)}
        if stage < 2:
            ways["autopar, in the backward"] = _autopar(stage, early=True)
        found = summary(
            interleave({name: Variant(way) for name, way in ways.items()}, options["rounds"], turns), (), rival
        )
        for name, entry in found.items():
            rows.append({"row": row, "way": name, "ms": entry["ms"], "rival / way": entry["speedup"]})
    return rows


def _batch() -> dict[str, torch.Tensor]:
    ids = tokens(SIZE, batch=SIZE["batch"] * dist.get_world_size())[dist.get_rank() :: dist.get_world_size()]
    return {"input_ids": ids, "labels": ids}


def _rival(name: str) -> _Step:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model, batch = build("llama", SIZE), _batch()
    if name == "FSDP2":
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    if name == "ZeroRedundancyOptimizer":
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _autopar(stage: int, *, early: bool) -> _Step:
    import autopar

    model, batch = build("llama", SIZE), _batch()
    made = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = autopar.initialize(model, {"zero": {"stage": stage}}, optimizer=made)

    def step() -> None:
        loss = model(**batch).loss
        if early:
            with autopar.average_in_backward(model):
                loss.backward()
        else:
            loss.backward()
            if stage < 2:
                autopar.average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()

    return step
