"""Faults that are planted into a parallelized model, where such mistakes are made, and which module is to blame.

All of them hit both ranks alike, so that no rank waits for another.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from autopar.policy.files import policy_folder
from tests.verification import planting as p
from tests.verification.planting import After, Before, and_then, at, forward_of, patched

H0, H1 = "transformer.h.0", "transformer.h.1"
TP, PP, DP, CP = ({f"{kind}_parallel_size": 2} for kind in ("tensor", "pipeline", "data", "context"))
SP = {**TP, "sequence_parallel": True}
BACKWARD: dict[str, Any] = {"checks": ("backward",)}
DROPOUT: dict[str, Any] = {"checks": ("dropout",)}
GENERATE: dict[str, Any] = {"checks": ("generate",)}
STAGES, ROWS, ON_LLAMA = {**BACKWARD, "mesh": PP}, {**DROPOUT, "mesh": CP}, {**BACKWARD, "model": "llama"}
REPLICAS = {**BACKWARD, "mesh": DP}
GATHER = {**CP, "context_parallel_method": "gather"}


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


def replaced(name: str, modules: tuple[str, ...], target: str, make: Any, **settings: Any) -> Fault:
    """Replace a function of the package before ``initialize``."""
    return Fault(name, modules, before=patched(target, make), **settings)


def replaced_later(name: str, target: str, make: Any, **settings: Any) -> Fault:
    """Replace a function of the package after ``initialize``; no module is to blame."""
    return Fault(name, ("",), and_then(patched(target, make)), **settings)


def text_of(fault: Fault) -> str | None:
    """The changed text of GPT-2's policy."""
    if not fault.policy:
        return None
    text = (policy_folder() / "gpt2.yaml").read_text()
    for old, new in fault.policy:
        assert old in text, old
        text = text.replace(old, new)
    return text


ATTN0, ATTN1, MLP1 = f"{H0}.attn", f"{H1}.attn", f"{H1}.mlp"
QKV, PIPELINE = (ATTN0, f"{ATTN0}.c_attn"), "autopar.pipeline_parallel.pipeline"
LAYERS, REGIONS, LOGITS = (f"autopar.tensor_parallel.{name}" for name in ("layers", "region_modules", "sharded_logits"))
REPLICA_GRADIENTS = "autopar.data_parallel.grad_sync.ReplicaGradients"
COME_TO, DROPOUT_PP = "autopar.pipeline_parallel.stage_forward.StageForward.come_to", {**DROPOUT, "mesh": PP}
AVERAGE, LLAMA_CP = "autopar.tools.verification.checks.average_gradients", {**ON_LLAMA, "mesh": CP}
LLAMA0, LLAMA1 = "model.layers.0.self_attn", "model.layers.1.self_attn"
NORMS = *(f"{block}.ln_{n}" for block in (H0, H1) for n in (1, 2)), f"{ATTN1}.c_proj", f"{MLP1}.c_proj"
SUM_FLAT, ON_SP = "autopar.features.sequence_parallel.rows.sum_flat", {**BACKWARD, "mesh": SP}
KEYS = tuple(f"{layer}.{kind}_proj" for layer in (LLAMA0, LLAMA1) for kind in "kv")
NORMS_OF_HEADS = f"{LLAMA1}.k_norm", f"{LLAMA1}.q_norm"
ON_MQA, ON_QWEN3 = ({**BACKWARD, "model": model} for model in ("mqa", "qwen3"))

REFUSED = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())
FAULTS = [
    # -- the policy ---------------------------------------------------------------------------------------------------
    Fault("fused q, k, v as one block", QKV, policy=(("[heads, heads, heads]", "[heads]"),)),
    Fault("keys and values in one block", QKV, policy=(("[heads, heads, heads]", "[heads, heads * 8]"),)),
    *(Fault(name, policy=((old, new),), refused=refused) for name, old, new, refused in REFUSED),
    # -- what a layer computes ----------------------------------------------------------------------------------------
    in_forward("a missing all-reduce behind a row", f"{MLP1}.c_proj", p.row_without_sum),
    in_forward("a missing all-reduce behind attention", f"{ATTN0}.c_proj", p.row_without_sum),
    in_forward("a bias on every rank before the sum", f"{H0}.mlp.c_proj", lambda m, plain, x: plain(x) + m.bias),
    changed("a bias left out", f"{ATTN1}.c_proj", p.set("_add_bias", lambda y: y)),
    changed("the other rank's bias", f"{MLP1}.c_fc", p.swapped_bias),
    changed("the other rank's shard", f"{ATTN0}.c_attn", p.other_ranks_shard),
    changed("the other rank's rows of a row", f"{MLP1}.c_proj", p.other_ranks_shard),
    in_forward("rows of the other rank counted", "transformer.wte", p.mask_of_rows),
    in_forward("rows of a vocabulary not summed", "transformer.wte", p.no_sum_of_rows),
    in_forward("logits in another order", "lm_head", lambda m, plain, x: plain(x).flip(-1)),
    changed("a norm with another epsilon", f"{H1}.ln_1", p.set("eps", 0.1)),
    changed("a norm's weight that drifted", f"{H1}.ln_1", lambda m, s: m.weight.data.add_(0.1 + 0.1 * s.mpu.tp.rank)),
    changed("another scale of attention", ATTN1, p.set("scaling", 2 * 8**-0.5)),
    changed("heads of another width", ATTN1, p.set("head_dim", 2), checks=("forward",)),
    in_forward("a dropped mask", ATTN1, lambda m, plain, *a, **k: plain(*a, **{**k, "attention_mask": None})),
    in_forward("positions off by one", "transformer.wpe", lambda m, plain, ids: plain((ids + 1) % 16)),
    in_forward("a missing residual", H1, p.no_residual),
    in_forward("another activation", f"{MLP1}.act", lambda m, plain, x: torch.relu(x)),
    in_forward("rotary angles turned back", "model.rotary_emb", p.wrong_rotation, model="llama"),
    replaced("padding counted in the loss", ("",), f"{LOGITS}.sharded_cross_entropy", p.counted_padding),
    # -- gradients ----------------------------------------------------------------------------------------------------
    changed("a missing gradient sum before an MLP", f"{MLP1}.c_fc", p.enters_without_sum, MLP1, **BACKWARD),
    changed("a missing gradient sum before attention", QKV[1], p.enters_without_sum, ATTN0, **BACKWARD),
    Fault("a missing gradient sum of a key", (LLAMA1,), at(f"{LLAMA1}.k_proj", p.enters_without_sum), **ON_LLAMA),
    in_forward("a gradient that ends", MLP1, p.ended, f"{H1}.ln_2", f"{MLP1}.c_fc", **BACKWARD),
    in_forward("half a gradient", f"{MLP1}.act", p.half_gradient, **BACKWARD),
    changed("half a norm's gradient", f"{H0}.ln_2", lambda m, _: m.weight.register_hook(lambda g: g / 2), **BACKWARD),
    replaced("gradients of a key on both ranks not summed", KEYS, f"{LAYERS}.sum_replicas", p.left_out, **ON_MQA),
    replaced("gradients of a norm of heads not summed", NORMS_OF_HEADS, f"{REGIONS}.copy", p.left_out, **ON_QWEN3),
    # -- tokens, random draws, steps, files ---------------------------------------------------------------------------
    in_forward("a stale cache", ATTN1, p.stale_cache, **GENERATE),
    in_forward("no positions in decoding", "transformer.wpe", lambda m, f, x: f(x * (x.shape[1] > 1)), **GENERATE),
    Fault("equal dropout of different heads", (ATTN0, f"{ATTN0}.attn_dropout"), p.same_seeds, **DROPOUT),
    in_forward("different dropout of what is replicated", "transformer.drop", p.other_seeds, **DROPOUT),
    Fault("equal dropout of different rows", ("transformer.drop",), p.same_seeds_of_rows, **ROWS),
    in_forward("different dropout in front of the blocks", "transformer.drop", p.other_seeds_of_all_rows, **ROWS),
    in_forward("another dropout rate", f"{MLP1}.dropout", lambda m, f, x: torch.dropout(x, 0.6, m.training), **ROWS),
    in_forward("dropout that draws nothing by itself", f"{ATTN1}.resid_dropout", p.every_second, ATTN1, **ROWS),
    Fault("another learning rate", ("",), p.rate, checks=("step",)),
    Fault("decay of a norm", (f"{H1}.ln_2",), p.decay, checks=("step",)),
    replaced("stages whose draws continue those of the code before them", ("",), COME_TO, p.left_out, **DROPOUT_PP),
    # -- stages and replicas ------------------------------------------------------------------------------------------
    Fault("a stage that begins one block early", (), p.other_stages, **STAGES),
    Fault("gradients of tied weights not summed", ("transformer.wte", "lm_head"), p.no_sum_of_tied, **STAGES),
    replaced_later("a loss that is the mean of means", f"{PIPELINE}.weights_of", p.alike, **STAGES),
    in_forward("a block of the second stage", f"{MLP1}.c_fc", lambda m, plain, x: plain(x) * 1.5, **STAGES),
    replaced_later("gradients not averaged", f"{REPLICA_GRADIENTS}._end", p.left_out, **REPLICAS),
    replaced_later("replicas that count alike", f"{PIPELINE}.weights_over_replicas", p.left_out, **REPLICAS),
    # -- rows of the sequence -----------------------------------------------------------------------------------------
    Fault("attention to this rank's rows only", (LLAMA0,), p.own_rows_only, model="llama", mesh=GATHER),
    replaced_later("gradients not averaged over context parallelism", AVERAGE, p.left_out, **LLAMA_CP),
    replaced("gradients of norms over rows not summed", NORMS, SUM_FLAT, lambda _: lambda x, axis: [*x], **ON_SP),
]
