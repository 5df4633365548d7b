"""Time of planning and of ``initialize``, without weights: on the meta device, up to 405 B parameters and 1,024 ranks.

    python -m benchmarks planning --models 405b

One process plays rank 0 of a world whose process groups are torch's fake ones, which send nothing; so what is measured
is the work of one rank. ``plan`` is :func:`autopar.plan.make_plan.make_plan` alone, ``initialize`` the whole call on a
model made in ``autopar.lazy_init``, without the weights of its shard being drawn.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.models import Size, llama_config
from benchmarks.process_memory import forget_high_water, high_water
from benchmarks.ranks import run_ranks
from benchmarks.variants import first_line

MODELS: dict[str, Size] = {
    "1b": {"hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 128256},
    "8b": {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256},
    "70b": {"hidden": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 128256},
    "405b": {"hidden": 16384, "layers": 126, "heads": 128, "kv_heads": 8, "ffn": 53248, "vocab": 128256},
}
MESHES: dict[str, tuple[int, int, int]] = {  # tp, pp, world
    "1b": (2, 1, 8),
    "8b": (8, 1, 64),
    "70b": (8, 4, 256),
    "405b": (8, 16, 1024),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)


def measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure each model in a process of its own; the median of several."""
    rows = []
    for name in options["models"]:
        given = {"model": name, "rounds": options["rounds"]}
        try:
            rows += run_ranks("benchmarks.planning:rank_main", given, 1, backend="")
        except RuntimeError as error:
            rows.append({"model": name, "missing": str(error).strip().splitlines()[-1][:200]})
    return rows


def rank_main(options: dict[str, Any]) -> dict[str, Any]:
    """Plan and initialize one model."""
    import statistics

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

    from autopar.plan.make_plan import make_plan
    from autopar.policy.match import find_policy

    tp, pp, world = MESHES[options["model"]]
    size = MODELS[options["model"]]
    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=world)
    new_group = dist.new_group
    dist.new_group = lambda *args, **kwargs: new_group(*args, **{**kwargs, "backend": "fake"})  # also those over gloo
    forget_high_water()
    config = llama_config(size, size["heads"], 8192)
    times: dict[str, list[float]] = {"build": [], "plan": []}
    for _ in range(options["rounds"]):
        start = time.perf_counter()
        with torch.device("meta"):
            from transformers import LlamaForCausalLM

            model = LlamaForCausalLM(config)
        built = time.perf_counter()
        make_plan(model, find_policy(model, None), tp)
        times["build"].append(built - start)
        times["plan"].append(time.perf_counter() - built)
    row = {
        "model": options["model"],
        "B parameters": round(sum(parameter.numel() for parameter in model.parameters()) / 1e9, 1),
        "tp x pp x dp": f"{tp} x {pp} x {world // tp // pp}",
        "build on meta, s": round(statistics.median(times["build"]), 2),
        "plan, s": round(statistics.median(times["plan"]), 2),
    }
    row["initialize, s"] = _initialize(config, tp, pp)
    return {**row, "most memory, MiB": round(high_water() / 2**20)}


def _initialize(config: Any, tp: int, pp: int) -> Any:
    """Time the call on a model without memory; the reason where it cannot be."""
    import torch
    from transformers import LlamaForCausalLM

    import autopar

    autopar.initialize  # noqa: B018  (imports what it needs)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    start = time.perf_counter()
    try:
        autopar.initialize(model, {"model_parallelism": {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}})
    except Exception as error:
        return f"{first_line(error)} (after {time.perf_counter() - start:.1f} s)"
    return round(time.perf_counter() - start, 2)
