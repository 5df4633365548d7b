"""Step, forward, prefill and greedy decoding of tensor parallelism, against its limit and its rivals.

    python -m benchmarks step --rows llama --kinds step decode --rounds 20

2 ranks with one thread each, fp32, all variants interleaved in one run:

* ``plain``: the unmodified model in one process with one thread, while the other one sleeps;
* ``autopar``, and ``autopar`` with options that change how it computes, where the installed one knows them;
* ``limit``: the same shards without collectives and checks, on both cores at once;
* ``collectives``: those of ``autopar`` alone, back to back, on gloo, and on autopar's own transport;
* ``DTensor``: ``parallelize_module`` and ``loss_parallel`` (Llama);
* ``transformers``: its ``tp_plan``, which needs accelerate.

A step is forward, loss and backward. Decoding feeds one token at a time to a KV cache, greedily.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import traffic, variants
from benchmarks.models import Size, build, count, tokens
from benchmarks.ranks import run_ranks
from benchmarks.rounds import Turns, Variant, interleave, summary
from benchmarks.variants import LIMIT, OPTIONS, Made, Missing

ROWS: dict[str, tuple[str, Size]] = {
    "llama": ("llama", {"hidden": 512, "layers": 8, "vocab": 32000, "seq": 128, "batch": 4}),
    "gpt2": ("gpt2", {"hidden": 512, "layers": 8, "vocab": 32000, "seq": 128, "batch": 4}),
    "small": ("llama", {"hidden": 256, "layers": 12, "vocab": 1024, "seq": 32, "batch": 1}),
    "tiny": ("llama", {"hidden": 64, "layers": 2, "heads": 4, "vocab": 132, "seq": 8, "batch": 1}),
}
KINDS = ("step", "forward", "prefill", "decode")
WORLD = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=["llama", "gpt2", "small"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=15, help="of a step of a large row; a small one gets five times")
    parser.add_argument("--decode-tokens", type=int, default=48)
    parser.add_argument("--decode-rounds", type=int, default=7)
    parser.add_argument("--without", nargs="*", default=[], help="variants to leave out")


def measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure all rows and kinds in one world."""
    rows: list[dict[str, Any]] = run_ranks("benchmarks.step:rank_main", options, WORLD)[0]
    return rows


def rank_main(options: dict[str, Any]) -> list[dict[str, Any]]:
    """On every rank: measure; the results are the same on all."""
    turns = Turns(options["folder"])
    rows = []
    for row in options["rows"]:
        family, size = ROWS[row]
        plain = build(family, size)
        for kind in options["kinds"]:
            if kind == "decode" and row not in ("llama", "tiny"):
                continue
            rows.append({"row": row, "kind": kind, **_measure(plain, size, kind, options, turns)})
    return rows


def _measure(plain: Any, size: Size, kind: str, options: dict[str, Any], turns: Turns) -> dict[str, Any]:
    """One kind of work on one model, by all variants."""
    found = make_all(plain, kind, options["without"])
    made = {name: entry for name, entry in found.items() if isinstance(entry, Made)}
    call = partial(_call, kind, size, options["decode_tokens"])
    works = {name: Variant(call(entry), name == "plain", _clear(entry)) for name, entry in made.items()}
    collectives = traffic.record(call(made[LIMIT])) if LIMIT in made else []
    if collectives:
        works["collectives, gloo"] = Variant(traffic.replay(collectives))
        axis = made["autopar"].model.mpu.tp
        works["collectives, autopar"] = Variant(traffic.replay_on_axis(collectives, axis))
    rounds = options["decode_rounds"] if kind == "decode" else options["rounds"] * (1 if size["hidden"] >= 512 else 5)
    result = {
        "size": size,
        "parameters": count(plain),
        "collectives": traffic.described(collectives),
        "variants": summary(interleave(works, rounds, turns), ["plain"], "plain"),
        "missing": {name: entry.reason for name, entry in found.items() if isinstance(entry, Missing)},
    }
    if kind == "decode":
        for row in result["variants"].values():
            row["tokens_per_s"] = round(options["decode_tokens"] / row["ms"] * 1e3, 2)
    for entry in made.values():
        if hasattr(entry.model, "mpu"):
            entry.model.mpu.destroy()
    return result


def make_all(plain: Any, kind: str, without: list[str]) -> dict[str, Made | Missing]:
    """Make every variant that this kind of work can have; the same ones on every rank."""
    world = dist.get_world_size()
    makers: dict[str, Callable[[], Made | Missing]] = {"plain": partial(variants.plain_model, plain)}
    for name in OPTIONS:
        if name == "autopar" or "loss" not in OPTIONS[name] or kind in ("step", "forward"):
            makers[name] = partial(variants.autopar_model, plain, name, world)
    makers[LIMIT] = partial(variants.limit, plain, world)
    makers["DTensor"] = partial(variants.dtensor, plain, world, whole_logits=kind in ("prefill", "decode"))
    makers["transformers"] = partial(variants.transformers_model, plain, world)
    return {name: variants.agreed(maker()) for name, maker in makers.items() if name not in without}


def _call(kind: str, size: Size, decode_tokens: int, made: Made) -> Callable[[], Any]:
    """What is timed."""
    ids = tokens(size)
    if kind == "step":
        return partial(made.loss, ids)
    if kind == "forward":
        return torch.no_grad()(partial(made.loss, ids))
    if kind == "prefill":
        return torch.no_grad()(partial(made.model, input_ids=ids, use_cache=True, logits_to_keep=1))
    return torch.no_grad()(partial(greedy, made.model, ids[:1, :16], decode_tokens))


def greedy(model: Any, ids: torch.Tensor, number: int) -> torch.Tensor:
    """Decode ``number`` tokens [1, number] after a prompt, with a KV cache."""
    cache, found = None, []
    for _ in range(number):
        output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, ids = output.past_key_values, output.logits[:, -1:].argmax(-1)  # [1, 1]
        found.append(ids)
    return torch.cat(found, 1)


def _clear(made: Made) -> Callable[[], None]:
    return partial(made.model.zero_grad, set_to_none=True)
