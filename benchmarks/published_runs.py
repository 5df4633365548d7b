"""Published training runs (``published_runs.yaml``) next to what ``autopar plan`` says of them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

import autopar
from autopar.tools.commands.models import add_lora
from autopar.tools.planner.candidate import Candidate, Estimate
from autopar.tools.planner.estimate import Estimator
from autopar.tools.planner.hardware import find_node
from autopar.tools.planner.planned_model import PlannedModel
from autopar.tools.planner.search import Mesh, Space, search

_DATA: Any = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
RUNS: dict[str, Any] = _DATA["runs"]


class Outcome(NamedTuple):
    """What the planner says of a published run."""

    published: float
    estimate: Estimate
    mesh: Estimate
    best: Estimate


@dataclass(frozen=True)
class _OneMesh(Space):
    """A space with one mesh, and one size of micro-batches."""

    mesh: Mesh = (1, 1, 1, 1)
    microbatch: int | None = None

    def meshes(self, sequence: int) -> Iterator[Mesh]:
        yield self.mesh

    def candidates(self, mesh: Mesh) -> Iterator[list[Candidate]]:
        for batch in super().candidates(mesh):
            if self.microbatch is None or not batch or batch[0].microbatch == self.microbatch:
                yield batch


@cache
def estimator_of(model: str, node: str, figures: tuple[tuple[str, float], ...], sequence: int, lora: int) -> Estimator:
    row = _DATA["models"][model]
    with autopar.lazy_init():
        built = AutoModelForCausalLM.from_config(_config(row, sequence), dtype=torch.bfloat16)
    built = add_lora(built, lora) if lora else built
    return Estimator(PlannedModel(built, sequence=sequence, dry_run=False), find_node(node, **dict(figures)))


def _config(row: dict[str, Any], sequence: int) -> Any:
    hidden, layers, heads, words = (row[key] for key in ("hidden", "layers", "heads", "vocabulary"))
    common = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": words}
    common["max_position_embeddings"] = sequence
    if row["kind"] == "gpt":
        sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": sequence, "vocab_size": words}
        drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return AutoConfig.for_model("gpt2", **sizes, **drops, activation_function="gelu_pytorch_tanh")
    if row["kind"] == "bloom":
        return AutoConfig.for_model("bloom", hidden_size=hidden, n_layer=layers, n_head=heads, vocab_size=words)
    if row["kind"] == "opt":
        return AutoConfig.for_model("opt", **common, ffn_dim=4 * hidden, word_embed_proj_dim=hidden, dropout=0.0)
    return AutoConfig.for_model(
        row["kind"],
        **common,
        intermediate_size=row["ffn"],
        num_key_value_heads=row["kv_heads"],
        head_dim=hidden // heads,
    )


def flops_of_token(run: dict[str, Any]) -> float:
    """Return the operations of a token as papers count them: products, with all of attention, not its causal half."""
    row, sequence = _DATA["models"][run["model"]], run["sequence"]
    hidden, layers = row["hidden"], row["layers"]
    kv = row.get("kv_heads", row["heads"]) / row["heads"]
    ffn = row.get("ffn", 4 * hidden) * (3 if row["kind"] == "llama" else 2) * hidden
    return (
        6 * (layers * (hidden**2 * (2 + 2 * kv) + ffn) + row["vocabulary"] * hidden) + 12 * layers * hidden * sequence
    )


def tokens_per_second(run: dict[str, Any]) -> float:
    """Return the published tokens a second of a GPU."""
    said = run["published"]
    if "tokens_per_second" in said:
        return float(said["tokens_per_second"])
    if "seconds" in said:
        return float(run["batch"] * run["sequence"] / said["seconds"] / run["gpus"])
    flops = said["tflops"] * 1e12 if "tflops" in said else said["mfu"] * find_node(run["node"]).gpu.flops
    again = 4 / 3 if run.get("counts") == "recomputation" else 1.0
    return float(flops / flops_of_token(run) / again)


def outcome(name: str) -> Outcome:
    """Plan a published run."""
    run = RUNS[name]
    figures = tuple(run.get("figures", {}).items())
    estimator = estimator_of(run["model"], run["node"], figures, run["sequence"], run.get("lora", 0))
    recompute = {"full": True, "none": False}.get(run.get("recompute", ""))
    sizes = (run["gpus"], estimator.node.gpus, run["batch"])
    tp, cp, pp, dp = run["mesh"]
    mesh = _OneMesh(*sizes, cp=cp, mesh=(tp, cp, pp, dp))
    asked = replace(mesh, zero=run.get("zero"), checkpointing=recompute, microbatch=run.get("microbatch"))
    own, free, best = (search(estimator, space, 1).best[0] for space in (asked, mesh, Space(*sizes)))
    if recompute:  # all of a block
        own = estimator.estimate(replace(own.candidate, saves=()))
    return Outcome(tokens_per_second(run), own, free, best)


def row(name: str, found: Outcome) -> str:
    """Return the row of the page: what was published, and what is planned."""
    gpus = RUNS[name]["gpus"]
    low, high = (
        found.estimate.tokens_per_second * found.estimate.time / time / gpus for time in found.estimate.time_range[::-1]
    )
    own = found.estimate.tokens_per_second / gpus
    mesh, best = ((c.tp, c.cp, c.pp, c.dp) for c in (found.estimate.candidate, found.best.candidate))
    cells = [name, _sizes(mesh), f"{found.published:,.0f}", f"{own:,.0f}", f"{own / found.published:.2f}"]
    cells += [f"{low:,.0f} to {high:,.0f}", f"{found.estimate.mfu:.0%}"]
    cells += [f"{found.mesh.time / found.best.time:.2f}", _sizes(best)]
    return f"| {' | '.join(cells)} |"


def _sizes(mesh: Mesh) -> str:
    return " x ".join(map(str, mesh))
