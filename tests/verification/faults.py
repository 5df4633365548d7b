"""Faults that are planted into a parallelized model, where such mistakes are made, and which module is to blame.

All of them hit both ranks alike, so that no rank waits for another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.policy.files import policy_folder
from tests.verification.planting import (
    After,
    Before,
    added,
    alike,
    and_then,
    at,
    bias_before_the_sum,
    counted_padding,
    cut_gradient,
    decay,
    enters_without_sum,
    every_second,
    forward_of,
    half_gradient,
    mask_of_rows,
    no_gradient_of,
    no_mask,
    no_residual,
    no_sum_of_rows,
    no_sum_of_tied,
    no_sum_over_rows,
    no_switch,
    other_counts,
    other_ranks_shard,
    other_seeds,
    other_seeds_of_all_rows,
    other_stages,
    own_rows_only,
    patched,
    rate,
    reversed_gather,
    row_without_sum,
    same_seeds,
    same_seeds_of_rows,
    scaled,
    set,
    shifted,
    stale_cache,
    stuck_positions,
    swapped_bias,
    without_bias,
    wrong_rotation,
)

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
    Fault("a wrong unit", (), policy=(("mlp.c_fc: {column: ffn}", "mlp.c_fc: {column: heads}"),), refused="mlp.c_proj"),
    Fault("an attribute not divided", (), policy=(("    attn.split_size: heads\n", ""),), refused="h.0.attn"),
    Fault("a row that is left out", (), policy=(("    mlp.c_proj: {row: ffn}\n", ""),), refused="mlp.c_fc"),
    Fault("a row replicated", (), policy=(("mlp.c_proj: {row: ffn}", "mlp.c_proj: replicated"),), refused="mlp.c_fc"),
    Fault(
        "a column replicated", (), policy=(("mlp.c_fc: {column: ffn}", "mlp.c_fc: replicated"),), refused="mlp.c_proj"
    ),
    Fault("a tied weight cut once", (), policy=(("wte: {embedding: vocab}", "wte: replicated"),), refused="wte"),
    Fault("logits not gathered", (), policy=((", gather_output: true", ""),), refused="lm_head"),
    Fault("a norm inside a region", (), policy=(("ln_2: replicated", "ln_2: {sharded: ffn}"),), refused="ln_2"),
    Fault(
        "a row where a column belongs",
        (),
        policy=(("mlp.c_fc: {column: ffn}", "mlp.c_fc: {row: ffn}"),),
        refused="mlp.c_",
    ),
    # -- what a layer computes ----------------------------------------------------------------------------------------
    Fault("a missing all-reduce behind a row", (f"{H1}.mlp.c_proj",), forward_of(f"{H1}.mlp.c_proj", row_without_sum)),
    Fault(
        "a missing all-reduce behind attention",
        (f"{H0}.attn.c_proj",),
        forward_of(f"{H0}.attn.c_proj", row_without_sum),
    ),
    Fault(
        "a bias on every rank before the sum",
        (f"{H0}.mlp.c_proj",),
        forward_of(f"{H0}.mlp.c_proj", bias_before_the_sum),
    ),
    Fault("a bias left out", (f"{H1}.attn.c_proj",), at(f"{H1}.attn.c_proj", without_bias)),
    Fault("the other rank's bias", (f"{H1}.mlp.c_fc",), at(f"{H1}.mlp.c_fc", swapped_bias)),
    Fault("the other rank's shard", (f"{H0}.attn.c_attn",), at(f"{H0}.attn.c_attn", other_ranks_shard)),
    Fault("the other rank's rows of a row", (f"{H1}.mlp.c_proj",), at(f"{H1}.mlp.c_proj", other_ranks_shard)),
    Fault("rows of the other rank counted", ("transformer.wte",), forward_of("transformer.wte", mask_of_rows)),
    Fault("rows of a vocabulary not summed", ("transformer.wte",), forward_of("transformer.wte", no_sum_of_rows)),
    Fault("logits in another order", ("lm_head",), forward_of("lm_head", reversed_gather)),
    Fault("a norm with another epsilon", (f"{H1}.ln_1",), at(f"{H1}.ln_1", set("eps", 0.1))),
    Fault("a norm's weight that has drifted", (f"{H1}.ln_1",), at(f"{H1}.ln_1", added("weight", 0.1))),
    Fault("another scale of attention", (ATTN1,), at(ATTN1, scaled("scaling", 2.0))),
    Fault("heads of another width", (ATTN1,), at(ATTN1, set("head_dim", 2)), checks=("forward",)),
    Fault("a dropped mask", (ATTN1,), forward_of(ATTN1, no_mask)),
    Fault("positions off by one", ("transformer.wpe",), forward_of("transformer.wpe", shifted)),
    Fault("a missing residual", (H1,), forward_of(H1, no_residual)),
    Fault("another activation", (f"{MLP1}.act",), forward_of(f"{MLP1}.act", lambda module, plain, x: torch.relu(x))),
    Fault(
        "rotary angles turned back",
        ("model.rotary_emb",),
        forward_of("model.rotary_emb", wrong_rotation),
        model="llama",
    ),
    Fault(
        "padding counted in the loss",
        ("",),
        before=patched("autopar.tensor_parallel.logits_shards.sharded_cross_entropy", counted_padding),
    ),
    # -- gradients ----------------------------------------------------------------------------------------------------
    Fault(
        "a missing gradient sum before an MLP",
        (f"{H1}.mlp.c_fc", MLP1),
        at(f"{H1}.mlp.c_fc", enters_without_sum),
        checks=("backward",),
    ),
    Fault(
        "a missing gradient sum before attention",
        (f"{H0}.attn.c_attn", f"{H0}.attn"),
        at(f"{H0}.attn.c_attn", enters_without_sum),
        checks=("backward",),
    ),
    Fault(
        "a missing gradient sum of one of three columns",
        ("model.layers.1.self_attn",),
        at("model.layers.1.self_attn.k_proj", enters_without_sum),
        model="llama",
        checks=("backward",),
    ),
    Fault(
        "a gradient that ends",
        (f"{H1}.ln_2", f"{H1}.mlp", f"{H1}.mlp.c_fc"),
        forward_of(f"{H1}.mlp", cut_gradient),
        checks=("backward",),
    ),
    Fault("half a gradient", (f"{MLP1}.act",), forward_of(f"{MLP1}.act", half_gradient), checks=("backward",)),
    Fault(
        "a gradient of a parameter scaled",
        (f"{H0}.ln_2",),
        at(f"{H0}.ln_2", no_gradient_of("weight")),
        checks=("backward",),
    ),
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
    Fault("a stale cache", (ATTN1,), forward_of(ATTN1, stale_cache), checks=("generate",)),
    Fault(
        "positions that do not go on",
        ("transformer.wpe",),
        forward_of("transformer.wpe", stuck_positions),
        checks=("generate",),
    ),
    Fault(
        "equal dropout of different heads", (f"{H0}.attn", f"{H0}.attn.attn_dropout"), same_seeds, checks=("dropout",)
    ),
    Fault(
        "different dropout of what is replicated",
        ("transformer.drop",),
        forward_of("transformer.drop", other_seeds),
        checks=("dropout",),
    ),
    Fault("equal dropout of different rows", ("transformer.drop",), same_seeds_of_rows, mesh=CP, checks=("dropout",)),
    Fault(
        "different dropout of all rows in front of the blocks",
        ("transformer.drop",),
        forward_of("transformer.drop", other_seeds_of_all_rows),
        mesh=CP,
        checks=("dropout",),
    ),
    Fault(
        "another rate of dropout",
        (f"{H1}.mlp.dropout",),
        forward_of(f"{H1}.mlp.dropout", lambda module, plain, x: torch.dropout(x, 0.6, module.training)),
        mesh=CP,
        checks=("dropout",),
    ),
    Fault(
        "dropout that draws nothing by itself",
        (f"{H1}.attn", f"{H1}.attn.resid_dropout"),
        forward_of(f"{H1}.attn.resid_dropout", every_second),
        mesh=CP,
        checks=("dropout",),
    ),
    Fault("another learning rate", ("",), rate, checks=("step",)),
    Fault("decay of a norm", (f"{H1}.ln_2",), decay, checks=("step",)),
    Fault(
        "stages that draw on where the code in front of them did",
        ("",),
        before=patched("autopar.pipeline_parallel.stage_forward.StageForward.come_to", no_switch),
        mesh=PP,
        checks=("dropout",),
    ),
    # -- stages and replicas ------------------------------------------------------------------------------------------
    Fault("a stage that begins one block early", (), other_stages, mesh=PP, checks=("backward",)),
    Fault(
        "a tied weight's gradients not summed over stages",
        ("transformer.wte", "lm_head"),
        no_sum_of_tied,
        mesh=PP,
        checks=("backward",),
    ),
    Fault(
        "a loss that is the mean of means",
        ("",),
        and_then(patched("autopar.pipeline_parallel.pipeline.weights_of", alike)),
        mesh=PP,
        checks=("backward",),
    ),
    Fault(
        "a block of the second stage",
        (f"{H1}.mlp.c_fc",),
        forward_of(f"{H1}.mlp.c_fc", lambda module, plain, x: plain(x) * 1.5),
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
        and_then(patched("autopar.pipeline_parallel.pipeline.weights_over_replicas", other_counts)),
        mesh=DP,
        checks=("backward",),
    ),
    # -- rows of the sequence -----------------------------------------------------------------------------------------
    Fault(
        "attention to this rank's rows only",
        ("model.layers.0.self_attn",),
        own_rows_only,
        model="llama",
        mesh={**CP, "context_parallel_method": "gather"},
    ),
    Fault(
        "gradients not averaged over context parallelism",
        ("",),
        and_then(patched("autopar.tools.verification.session.average_gradients", lambda original: lambda model: None)),
        model="llama",
        mesh=CP,
        checks=("backward",),
    ),
    Fault(
        "gradients of norms over rows not summed",
        (f"{H0}.ln_1", f"{H0}.ln_2", f"{H1}.ln_1", f"{H1}.ln_2", f"{H1}.attn.c_proj", f"{H1}.mlp.c_proj"),
        before=patched("autopar.tensor_parallel.sequence_rows.sum_flat", no_sum_over_rows),
        mesh=SP,
        checks=("backward",),
    ),
]
