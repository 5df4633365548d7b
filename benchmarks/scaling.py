"""How the cost of a step grows: with ranks, width, length, and from one type of model to the other.

    python -m benchmarks scaling --what ranks types

Each row: a step (forward, loss, backward) of the plain model in one process with one thread, and of autopar over tp
ranks, interleaved. CPU is the sum over the ranks: with as much work as the plain model, it would be the plain one's.
With more ranks than cores the wall time says little, and the CPU time what it costs.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.models import Size, build, count, tokens
from benchmarks.ranks import run_ranks
from benchmarks.rounds import Turns, Variant, interleave, summary
from benchmarks.variants import first_line

BASE: Size = {"hidden": 256, "layers": 4, "vocab": 8000, "seq": 128, "batch": 2}
SWEEPS: dict[str, list[int]] = {"hidden": [128, 256, 512, 1024], "seq": [32, 128, 512, 1024]}
RANKS = (1, 2, 4)
TYPES = ("llama", "gpt2", "gpt_neox", "opt", "bloom", "falcon", "phi", "qwen3", "gemma2", "mixtral", "mamba2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's arguments."""
    parser.add_argument("--what", nargs="+", choices=["ranks", *SWEEPS, "types"], default=["ranks", *SWEEPS, "types"])
    parser.add_argument("--types", nargs="+", default=list(TYPES), help="model types of transformers")
    parser.add_argument("--values", nargs="+", type=int, help="of hidden and seq, instead of the usual ones")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=BASE["layers"])


def measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure all sweeps, those over as many ranks in one world."""
    base = {**BASE, "layers": options["layers"]}
    tasks = []
    for what in options["what"]:
        if what == "ranks":
            tasks += [{"what": "ranks", "value": tp, "tp": tp, "type": "llama", "size": base} for tp in RANKS]
        elif what == "types":
            tasks += [{"what": "type", "value": name, "tp": 2, "type": name, "size": base} for name in options["types"]]
        else:
            for value in options["values"] or SWEEPS[what]:
                tasks.append({"what": what, "value": value, "tp": 2, "type": "llama", "size": {**base, what: value}})
    rows: list[dict[str, Any]] = []
    for tp, several in groupby(sorted(tasks, key=lambda task: task["tp"]), key=lambda task: task["tp"]):
        given = {"tasks": list(several), "rounds": options["rounds"]}
        rows += run_ranks("benchmarks.scaling:rank_main", given, tp)[0]
    order = [(task["what"], task["value"]) for task in tasks]
    return sorted(rows, key=lambda row: order.index((row["what"], row["value"])))


def rank_main(options: dict[str, Any]) -> list[dict[str, Any]]:
    """On every rank: all tasks; one that fails says why."""
    turns = Turns(options["folder"])
    rows = []
    for task in options["tasks"]:
        row = {"what": task["what"], "value": task["value"], "tp": task["tp"]}
        try:
            rows.append({**row, **_task(task, options["rounds"], turns)})
        except Exception as error:  # the same one on every rank: autopar's checks agree
            rows.append({**row, "missing": first_line(error)})
    return rows


def _task(task: dict[str, Any], rounds: int, turns: Turns) -> dict[str, Any]:
    import autopar

    size, sizes = task["size"], {"model_parallelism": {"tensor_parallel_size": task["tp"]}}
    makes = partial(_of_type, task["type"], size)
    plain, parallel = makes(), autopar.initialize(makes(), sizes)
    ids = tokens(size)

    def step(model: Any) -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    works = {
        "plain": Variant(partial(step, plain), True, partial(plain.zero_grad, set_to_none=True)),
        "autopar": Variant(partial(step, parallel), False, partial(parallel.zero_grad, set_to_none=True)),
    }
    found = summary(interleave(works, rounds, turns, warm_up=1), ["plain"], "plain")
    parallel.mpu.destroy()
    return {
        "M parameters": round(count(plain) / 1e6, 2),
        "plain ms": found["plain"]["ms"],
        "autopar ms": found["autopar"]["ms"],
        "plain / autopar": found["autopar"]["speedup"],
        "CPU of all ranks / plain": round(
            found["autopar"]["cpu_ms"] * dist.get_world_size() / found["plain"]["cpu_ms"], 3
        ),
    }


def _of_type(model_type: str, size: Size) -> Any:
    """A causal language model of a type, of about the base's sizes."""
    if model_type in ("llama", "gpt2"):
        return build(model_type, size)
    from transformers import AutoConfig, AutoModelForCausalLM

    heads = size["hidden"] // 64
    settings: dict[str, Any] = {
        "hidden_size": size["hidden"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": heads,
        "vocab_size": size["vocab"],
    }
    extra: dict[str, dict[str, Any]] = {
        "opt": {"ffn_dim": 4 * size["hidden"], "word_embed_proj_dim": size["hidden"], "dropout": 0.0},
        "falcon": {"num_kv_heads": heads, "new_decoder_architecture": True},
        "mamba2": {
            "num_heads": 2 * heads,
            "head_dim": 64,
            "state_size": 64,
            "n_groups": 2,
            "num_attention_heads": None,
        },
        "mixtral": {"num_key_value_heads": heads, "intermediate_size": size["hidden"], "num_local_experts": 4},
    }
    for name in ("llama", "phi", "gpt_neox"):
        extra[name] = {"intermediate_size": 4 * size["hidden"]}
    for name in ("qwen3", "gemma2"):
        extra[name] = {"intermediate_size": 3 * size["hidden"], "num_key_value_heads": heads, "head_dim": 64}
    settings |= extra.get(model_type, {})
    settings = {key: value for key, value in settings.items() if value is not None}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
