"""Plan the smallest meshes that train and serve well-known checkpoints, for the table in docs/models.md.

python docs/figures/checkpoints.py Qwen/Qwen3-8B      prints its row

``tests/docs/test_checkpoints.py`` compares the page with it and writes the rows. ``checkpoints.yaml`` holds the sizes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import AutoConfig

from autopar.errors import AutoparError
from autopar.policy.load import own_policies
from autopar.tools.planner.candidate import Candidate
from autopar.tools.planner.estimate import Estimator
from autopar.tools.planner.hardware import Node, find_node
from autopar.tools.planner.planned_model import PlannedModel
from autopar.tools.planner.search import Space, rehearsed, search

DATA: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
CHECKPOINTS: dict[str, dict[str, Any]] = DATA["checkpoints"]
NODES = [find_node("rtx4090"), find_node("h100")]  # cards of 24 and 80 GB
SEQUENCE, SAMPLES = 2048, 16  # of a training step; with more than 16 cards, a step has one sample for each card
CACHED = 8  # sequences in the cache of a mesh that serves
MOST = 128  # cards
_ABOUT = ("type", "head", "parameters", "source")  # the keys of a checkpoint that are not part of its config
_STATE, _HALF = 16, 2  # bytes of a parameter: with AdamW in mixed precision, and in bf16


def config_of(name: str) -> Any:
    """Return the config of a checkpoint."""
    checkpoint = CHECKPOINTS[name]
    sizes = {key: value for key, value in checkpoint.items() if key not in _ABOUT}
    return AutoConfig.for_model(checkpoint["type"], **sizes)


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Build the model of a checkpoint on the meta device."""
    head = getattr(transformers, CHECKPOINTS[name].get("head", "AutoModelForCausalLM"))
    with torch.device("meta"):
        return head.from_config(config_of(name), dtype=dtype)


def row(name: str) -> str:
    """Return the row of a checkpoint: for each card the smallest mesh that trains, and the one that serves."""
    sequence = min(SEQUENCE, getattr(config_of(name), "max_position_embeddings", SEQUENCE))
    frozen = build(name, torch.bfloat16).requires_grad_(False)
    trained, served = (PlannedModel(model, sequence=sequence, dry_run=False) for model in (build(name), frozen))
    cached = CACHED * cache_bytes(frozen, sequence)
    bytes_of = CHECKPOINTS[name]["parameters"]
    cells = []
    for node in NODES:
        cells += [training(trained, bytes_of * _STATE, node), serving(served, bytes_of * _HALF, cached, node)]
    return f"| [{name}](../policies/{policy_of(name)}) | {' | '.join(cells)} |"


def policy_of(name: str) -> str:
    """Return the file of the policy for a checkpoint."""
    kind = CHECKPOINTS[name]["type"]
    return next(Path(policy.where.file).name for policy in own_policies().values() if kind in policy.model_types)


def training(planned: PlannedModel, least: int, node: Node) -> str:
    """Return the fastest mesh of the smallest number of cards that trains all weights."""
    estimator = Estimator(planned, node)
    for cards in _counts(least, node):
        found = search(estimator, Space(cards, node.gpus, max(SAMPLES, cards)), 1)
        rehearsed(estimator, found)
        if found.best:
            return _mesh(found.best[0].candidate)
    return "-"


def serving(planned: PlannedModel, least: int, cached: int, node: Node) -> str:
    """Return the smallest mesh that holds the weights, one forward and the cache: tp within a node, then pp."""
    estimator, config = Estimator(planned, node), planned.inner.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for cards in _counts(least, node):
        tp = min(cards, node.gpus)
        candidate = Candidate(tp, cards // tp, 1, "1f1b", 1, cards // tp, 0, False)
        try:
            held = max(memory.total for memory in estimator.memory(candidate))
        except AutoparError:  # fewer heads than ranks
            continue
        if held + cached * math.ceil(heads / tp) / heads / candidate.pp <= node.gpu.memory:
            return _mesh(candidate)
    return "-"


def cache_bytes(model: Any, sequence: int) -> int:
    """Return the bytes that one sequence leaves in the KV cache; 0 for an encoder."""
    ids = torch.zeros(1, sequence, dtype=torch.long, device="meta")
    with torch.no_grad():
        cache = model(input_ids=ids).get("past_key_values")
    layers = [] if cache is None else cache.layers
    return sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))


def _counts(least: int, node: Node) -> Iterator[int]:
    """Yield the powers of two whose cards have more than so many bytes together."""
    for cards in (2**power for power in range(MOST.bit_length())):
        if cards * node.gpu.memory > least:
            yield cards


def _mesh(candidate: Candidate) -> str:
    sizes = {"tp": candidate.tp, "pp": candidate.pp, "dp": candidate.dp}
    mesh = "×".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "1"
    return mesh + f",ep{candidate.ep}" * (candidate.ep > 1)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for given in sys.argv[1:] or CHECKPOINTS:
        print(row(given), flush=True)
