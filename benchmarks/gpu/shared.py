"""Sections on two processes that share one GPU: tensor parallelism, a pipeline, and replicas.

What counts is that they compute the same. Two processes take turns on a GPU, so the times say what sharing costs.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.device import Device, Notes
from benchmarks.gpu.single import TINY
from benchmarks.models import Size, build, tokens
from benchmarks.pipeline import efficiency, one_process
from benchmarks.replicas import RIVALS, ways_of
from benchmarks.rounds import Turns, Variant, interleave, summary

MEDIUM: Size = {"hidden": 1024, "layers": 8, "heads": 16, "ffn": 2816, "vocab": 32000, "seq": 512, "batch": 8}
TINY_PIPELINE: Size = {**TINY, "layers": 2, "batch": 2}


def tensor_parallel(options: dict[str, Any], device: Device, notes: Notes) -> None:
    """Compare loss and gradients of tp 2 with the plain model in fp32, and time a step."""
    import autopar

    size = TINY if options["tiny"] else MEDIUM
    plain = build("llama", size).to(device.torch)
    ids = tokens(size).to(device.torch)
    ours = autopar.initialize(copy.deepcopy(plain), {"model_parallelism": {"tensor_parallel_size": 2}})
    notes("device of the mesh", str(ours.mpu.device))
    notes("device of the shards", str(next(ours.parameters()).device))
    expected = plain(input_ids=ids, labels=ids).loss
    found = ours(input_ids=ids, labels=ids).loss
    notes("loss", {"plain": float(expected), "tp 2": float(found)})
    expected.backward()
    found.backward()
    worst = {
        name: relative_error(mine.grad, theirs.grad)
        for (name, mine), (_, theirs) in zip(ours.named_parameters(), plain.named_parameters(), strict=True)
        if mine.shape == theirs.shape and theirs.grad is not None
    }
    notes("worst relative error of replicated gradients", max(worst.items(), key=lambda item: item[1]))
    notes("tp 2", _timed(plain, partial(_step, ours, ids), partial(_step, plain, ids), options, device, alone=True)[1])


def pipeline(options: dict[str, Any], device: Device, notes: Notes) -> None:
    """Run 2 stages, compare the loss with the plain model, and the time with m / (m + p - 1).

    Both stages share the GPU: at best both keep it busy at the same time, which is no speed-up over one process.
    """
    import autopar

    size = TINY_PIPELINE if options["tiny"] else MEDIUM
    plain = build("llama", size).to(device.torch)
    ids = tokens(size).to(device.torch)
    for schedule in ("1f1b",) if options["tiny"] else ("1f1b", "zero-bubble"):
        with notes.part(schedule):
            settings = {"schedule": schedule, "microbatch_size": 1}
            config = {"model_parallelism": {"pipeline_parallel_size": 2}, "pipeline": settings}
            piped = autopar.initialize(copy.deepcopy(plain), config)
            batch = {"input_ids": ids, "labels": ids}
            result = piped.execute_pipeline(batch)
            loss = getattr(result, "loss", result)
            expected = plain(input_ids=ids, labels=ids).loss
            notes(f"{schedule}, loss", {"plain": float(expected), "pipeline": None if loss is None else float(loss)})
            work, alone = partial(piped.execute_pipeline, batch), partial(one_process, plain, ids)
            samples, found = _timed(plain, work, alone, options, device, alone=True)
            textbook = efficiency(samples["plain"], samples["parallel"], len(ids), 2)
            notes(schedule, {**found["parallel"], **textbook})


def replicas(options: dict[str, Any], device: Device, notes: Notes) -> None:
    """Time a step of two replicas, and of torch's own data parallelism."""
    turns = Turns(options["folder"])
    for row, rival in RIVALS.items():
        with notes.part(row):
            ways = ways_of(row, TINY if options["tiny"] else MEDIUM, device.torch)
            variants = {name: Variant(device.synced(way)) for name, way in ways.items()}
            taken = interleave(variants, 1 if options["tiny"] else 7, turns, warm_up=2)
            found = summary(taken, base=rival)
            notes(row, {name: {"ms": e["ms"], "rival / way": e["speedup"]} for name, e in found.items()})
            device.release()


def _step(model: Any, ids: torch.Tensor) -> None:
    model(input_ids=ids, labels=ids).loss.backward()


def _timed(plain: Any, work: Any, base: Any, options: dict[str, Any], device: Device, *, alone: bool) -> Any:
    turns = Turns(options["folder"] + "/turns")
    turns.folder.mkdir(exist_ok=True)
    for old in turns.folder.iterdir() if dist.get_rank() == 0 else ():
        old.unlink()
    dist.barrier()
    variants = {"plain": Variant(device.synced(base), alone), "parallel": Variant(device.synced(work))}
    samples = interleave(variants, 1 if options["tiny"] else 7, turns, warm_up=1)
    return samples, summary(samples, ["plain"], "plain")


def relative_error(found: torch.Tensor | None, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest value; infinite if there is none."""
    if found is None:
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
