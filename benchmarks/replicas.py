"""Steps of replicas and of stages, against torch's own: DDP, ZeroRedundancyOptimizer, FSDP2, pipelining.

    python -m benchmarks replicas --rounds 15

Two ranks with one thread each, fp32, AdamW; forward, backward, averaging, step and ``zero_grad``, all ways interleaved
in one run. Stages run 1F1B with 8 micro-batches. ``rival / way`` is above 1 where a way is faster than the rival of
its row.
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
from benchmarks.variants import torch_pipelining

SIZE: Size = {"hidden": 384, "layers": 8, "vocab": 8192, "seq": 64, "batch": 8, "ffn": 1024}
RIVALS = {"dp": "DistributedDataParallel", "ZeRO 1": "ZeroRedundancyOptimizer", "ZeRO 3": "FSDP2"}
PIPELINE, OF_STAGES = "pp", "torch.distributed.pipelining"
_Step = Callable[[], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--rows", nargs="+", choices=[*RIVALS, PIPELINE], default=[*RIVALS, PIPELINE])
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
        made = _stages(SIZE) if row == PIPELINE else ways_of(row, SIZE, torch.device("cpu"))
        taken = interleave({name: Variant(way) for name, way in made.items()}, options["rounds"], turns)
        for name, entry in summary(taken, base=next(iter(made))).items():
            rows.append({"row": row, "way": name, "ms": entry["ms"], "rival / way": entry["speedup"]})
    return rows


def ways_of(row: str, size: Size, device: torch.device) -> dict[str, _Step]:
    """Return the ways of a row, the rival first: a call is a training step."""
    stage = {"dp": 0, "ZeRO 1": 1, "ZeRO 3": 3}[row]
    ways = {RIVALS[row]: _rival(RIVALS[row], size, device), "autopar": _autopar(stage, size, device, early=False)}
    if stage < 2:
        ways["autopar, in the backward"] = _autopar(stage, size, device, early=True)
    return ways


def _made(size: Size, device: torch.device) -> tuple[Any, dict[str, torch.Tensor]]:
    ids = tokens(size, batch=size["batch"] * dist.get_world_size())[dist.get_rank() :: dist.get_world_size()]
    return build("llama", size).to(device), {"input_ids": ids.to(device), "labels": ids.to(device)}


def _rival(name: str, size: Size, device: torch.device) -> _Step:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model, batch = _made(size, device)
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


def _autopar(stage: int, size: Size, device: torch.device, *, early: bool) -> _Step:
    import autopar

    model, batch = _made(size, device)
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


def _stages(size: Size) -> dict[str, _Step]:
    import autopar

    ranks, ids = dist.get_world_size(), tokens(size, batch=size["batch"])
    plain = build("llama", size)
    ways = {OF_STAGES: torch_pipelining(plain, ids, len(ids))}
    made = torch.optim.AdamW(plain.parameters(), lr=1e-4)
    config = {"model_parallelism": {"pipeline_parallel_size": ranks}, "pipeline": {"microbatch_size": 1}}
    model, optimizer = autopar.initialize(plain, config, optimizer=made)

    def step() -> None:
        model.execute_pipeline({"input_ids": ids, "labels": ids}, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return ways | {"autopar": step}
