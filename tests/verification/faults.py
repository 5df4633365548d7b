"""Faults that are planted into a parallelized model, where such mistakes are made, and which module is to blame.

All of them hit both ranks alike, so that no rank waits for another.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.policy.files import policy_folder
from tests.verification import planting as p
from tests.verification.planting import After, Before, and_then, at, forward_of, patched

H0, H1 = "transformer.h.0", "transformer.h.1"
TP, PP, DP, CP = ({f"{kind}_parallel_size": 2} for kind in ("tensor", "pipeline", "data", "context"))
SP = {**TP, "sequence_parallel": True}


@dataclass(frozen=True, eq=False)
class Fault:
    """One fault.

    Attributes:
        name: what is wrong.
        modules: paths, each of which is a right answer to the question where; ``""``: it is no module's fault.
        after, before: plant it.
        model: ``gpt2``, ``llama``, ``mqa`` or ``qwen3``.
        mesh: sizes.
        checks: that run.
        policy: changes of the policy's text.
        refused: words of the error with which ``initialize`` refuses it.
    """

    name: str
    modules: tuple[str, ...] = ()
    after: After | None = None
    before: Before | None = None
    model: str = "gpt2"
    mesh: dict[str, Any] = field(default_factory=lambda: TP)
    checks: tuple[str, ...] = ("forward", "backward")
    policy: tuple[tuple[str, str], ...] = ()
    refused: str = ""


def in_forward(name: str, path: str, forward: Any, *others: str, **settings: Any) -> Fault:
    """Plant a forward of one module; ``others`` are right answers, too."""
    return Fault(name, (path, *others), forward_of(path, forward), **settings)


def changed(name: str, path: str, change: Any, *others: str, **settings: Any) -> Fault:
    """Plant a change of one module; ``others`` are right answers, too."""
    return Fault(name, (path, *others), at(path, change), **settings)


def text_of(fault: Fault) -> str | None:
    """The changed text of GPT-2's policy."""
    if not fault.policy:
        return None
    text = (policy_folder() / "gpt2.yaml").read_text()
    for old, new in fault.policy:
        assert old in text, old
        text = text.replace(old, new)
    return text


ATTN1, MLP1 = f"{H1}.attn", f"{H1}.mlp"

REFUSED = [
    ("a wrong unit", "mlp.c_fc: {column: ffn}", "mlp.c_fc: {column: heads}", "mlp.c_proj"),
    ("an attribute not divided", "    attn.split_size: heads\n", "", "h.0.attn"),
    ("a row that is left out", "    mlp.c_proj: {row: ffn}\n", "", "mlp.c_fc"),
    ("a row replicated", "mlp.c_proj: {row: ffn}", "mlp.c_proj: replicated", "mlp.c_fc"),
    ("a column replicated", "mlp.c_fc: {column: ffn}", "mlp.c_fc: replicated", "mlp.c_proj"),
    ("a tied weight cut once", "wte: {embedding: vocab}", "wte: replicated", "wte"),
    ("logits not gathered", ", gather_output: true", "", "lm_head"),
    ("a norm inside a region", "ln_2: replicated", "ln_2: {sharded: ffn}", "ln_2"),
    ("a row where a column belongs", "mlp.c_fc: {column: ffn}", "mlp.c_fc: {row: ffn}", "mlp.c_"),
]
FAULTS = [
    # -- the policy ---------------------------------------------------------------------------------------------------
    Fault(
        "fused q, k, v as one block",
        (f"{H0}.attn", f"{H0}.attn.c_attn"),
        policy=(("{column: [heads, heads, heads]}", "{column: [heads]}"),),
    ),
    Fault(
        "keys and values in one block",
        (f"{H0}.attn", f"{H0}.attn.c_attn"),
        policy=(("[heads, heads, heads]", "[heads, heads * 8]"),),
    ),
    *(Fault(name, policy=((old, new),), refused=refused) for name, old, new, refused in REFUSED),
    # -- what a layer computes ----------------------------------------------------------------------------------------
    in_forward("a missing all-reduce behind a row", f"{H1}.mlp.c_proj", p.row_without_sum),
    in_forward("a missing all-reduce behind attention", f"{H0}.attn.c_proj", p.row_without_sum),
    in_forward(
        "a bias on every rank before the sum", f"{H0}.mlp.c_proj", lambda layer, plain, x: plain(x) + layer.bias
    ),
    changed("a bias left out", f"{H1}.attn.c_proj", p.set("_add_bias", lambda y: y)),
    changed("the other rank's bias", f"{H1}.mlp.c_fc", p.swapped_bias),
    changed("the other rank's shard", f"{H0}.attn.c_attn", p.other_ranks_shard),
    changed("the other rank's rows of a row", f"{H1}.mlp.c_proj", p.other_ranks_shard),
    in_forward("rows of the other rank counted", "transformer.wte", p.mask_of_rows),
    in_forward("rows of a vocabulary not summed", "transformer.wte", p.no_sum_of_rows),
    in_forward("logits in another order", "lm_head", lambda layer, plain, x: plain(x).flip(-1)),
    changed("a norm with another epsilon", f"{H1}.ln_1", p.set("eps", 0.1)),
    changed("a norm's weight that has drifted", f"{H1}.ln_1", p.added("weight", 0.1)),
    changed("another scale of attention", ATTN1, p.scaled("scaling", 2.0)),
    changed("heads of another width", ATTN1, p.set("head_dim", 2), checks=("forward",)),
    in_forward(
        "a dropped mask", ATTN1, lambda module, plain, *args, **more: plain(*args, **{**more, "attention_mask": None})
    ),
    in_forward("positions off by one", "transformer.wpe", lambda module, plain, ids: plain((ids + 1) % 16)),
    in_forward("a missing residual", H1, p.no_residual),
    in_forward("another activation", f"{MLP1}.act", lambda module, plain, x: torch.relu(x)),
    in_forward("rotary angles turned back", "model.rotary_emb", p.wrong_rotation, model="llama"),
    Fault(
        "padding counted in the loss",
        ("",),
        before=patched("autopar.tensor_parallel.sharded_logits.sharded_cross_entropy", p.counted_padding),
    ),
    # -- gradients ----------------------------------------------------------------------------------------------------
    changed("a missing gradient sum before an MLP", f"{H1}.mlp.c_fc", p.enters_without_sum, MLP1, checks=("backward",)),
    changed(
        "a missing gradient sum before attention",
        f"{H0}.attn.c_attn",
        p.enters_without_sum,
        f"{H0}.attn",
        checks=("backward",),
    ),
    Fault(
        "a missing gradient sum of one of three columns",
        ("model.layers.1.self_attn",),
        at("model.layers.1.self_attn.k_proj", p.enters_without_sum),
        model="llama",
        checks=("backward",),
    ),
    Fault(
        "a gradient that ends",
        (f"{H1}.ln_2", f"{H1}.mlp", f"{H1}.mlp.c_fc"),
        forward_of(f"{H1}.mlp", lambda module, plain, x: plain(x.detach() + 0 * x)),
        checks=("backward",),
    ),
    in_forward("half a gradient", f"{MLP1}.act", p.half_gradient, checks=("backward",)),
    changed("a gradient of a parameter scaled", f"{H0}.ln_2", p.no_gradient_of("weight"), checks=("backward",)),
    Fault(
        "gradients of a key on both ranks not summed",
        (
            "model.layers.0.self_attn.k_proj",
            "model.layers.0.self_attn.v_proj",
            "model.layers.1.self_attn.k_proj",
            "model.layers.1.self_attn.v_proj",
        ),
        before=patched(
            "autopar.tensor_parallel.layers.sum_replicas", lambda original: lambda weight, axis, layout: weight
        ),
        model="mqa",
        checks=("backward",),
    ),
    Fault(
        "gradients of a norm of heads not summed",
        ("model.layers.1.self_attn.k_norm", "model.layers.1.self_attn.q_norm"),
        before=patched("autopar.tensor_parallel.region_modules.copy", lambda original: lambda x, axis: x),
        model="qwen3",
        checks=("backward",),
    ),
    # -- tokens, random draws, steps, files ---------------------------------------------------------------------------
    in_forward("a stale cache", ATTN1, p.stale_cache, checks=("generate",)),
    in_forward("positions that do not go on", "transformer.wpe", p.stuck_positions, checks=("generate",)),
    Fault(
        "equal dropout of different heads", (f"{H0}.attn", f"{H0}.attn.attn_dropout"), p.same_seeds, checks=("dropout",)
    ),
    in_forward("different dropout of what is replicated", "transformer.drop", p.other_seeds, checks=("dropout",)),
    Fault("equal dropout of different rows", ("transformer.drop",), p.same_seeds_of_rows, mesh=CP, checks=("dropout",)),
    in_forward(
        "different dropout of all rows in front of the blocks",
        "transformer.drop",
        p.other_seeds_of_all_rows,
        mesh=CP,
        checks=("dropout",),
    ),
    in_forward(
        "another rate of dropout",
        f"{H1}.mlp.dropout",
        lambda module, plain, x: torch.dropout(x, 0.6, module.training),
        mesh=CP,
        checks=("dropout",),
    ),
    Fault(
        "dropout that draws nothing by itself",
        (f"{H1}.attn", f"{H1}.attn.resid_dropout"),
        forward_of(f"{H1}.attn.resid_dropout", p.every_second),
        mesh=CP,
        checks=("dropout",),
    ),
    Fault("another learning rate", ("",), p.rate, checks=("step",)),
    Fault("decay of a norm", (f"{H1}.ln_2",), p.decay, checks=("step",)),
    Fault(
        "stages that draw on where the code in front of them did",
        ("",),
        before=patched(
            "autopar.pipeline_parallel.stage_forward.StageForward.come_to", lambda original: lambda self, place: None
        ),
        mesh=PP,
        checks=("dropout",),
    ),
    # -- stages and replicas ------------------------------------------------------------------------------------------
    Fault("a stage that begins one block early", (), p.other_stages, mesh=PP, checks=("backward",)),
    Fault(
        "a tied weight's gradients not summed over stages",
        ("transformer.wte", "lm_head"),
        p.no_sum_of_tied,
        mesh=PP,
        checks=("backward",),
    ),
    Fault(
        "a loss that is the mean of means",
        ("",),
        and_then(patched("autopar.pipeline_parallel.pipeline.weights_of", p.alike)),
        mesh=PP,
        checks=("backward",),
    ),
    in_forward(
        "a block of the second stage",
        f"{H1}.mlp.c_fc",
        lambda module, plain, x: plain(x) * 1.5,
        mesh=PP,
        checks=("backward",),
    ),
    Fault(
        "gradients not averaged over replicas",
        ("",),
        and_then(patched("autopar.pipeline_parallel.pipeline.average_over_replicas", lambda original: lambda *_: None)),
        mesh=DP,
        checks=("backward",),
    ),
    Fault(
        "replicas that count alike",
        ("",),
        and_then(
            patched(
                "autopar.pipeline_parallel.pipeline.weights_over_replicas", lambda original: lambda weights, *_: weights
            )
        ),
        mesh=DP,
        checks=("backward",),
    ),
    # -- rows of the sequence -----------------------------------------------------------------------------------------
    Fault(
        "attention to this rank's rows only",
        ("model.layers.0.self_attn",),
        p.own_rows_only,
        model="llama",
        mesh={**CP, "context_parallel_method": "gather"},
    ),
    Fault(
        "gradients not averaged over context parallelism",
        ("",),
        and_then(patched("autopar.tools.verification.checks.average_gradients", lambda original: lambda model: None)),
        model="llama",
        mesh=CP,
        checks=("backward",),
    ),
    Fault(
        "gradients of norms over rows not summed",
        (f"{H0}.ln_1", f"{H0}.ln_2", f"{H1}.ln_1", f"{H1}.ln_2", f"{H1}.attn.c_proj", f"{H1}.mlp.c_proj"),
        before=patched(
            "autopar.features.sequence_parallel.rows.sum_flat", lambda original: lambda tensors, axis: list(tensors)
        ),
        mesh=SP,
        checks=("backward",),
    ),
]
