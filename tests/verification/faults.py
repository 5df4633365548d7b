"""Faults that are planted into a parallelized model, each where such mistakes are made, and which module is to blame.

``before`` plants before ``initialize`` (a policy, a function of the package), ``after`` in the model that it made. All of
them hit both ranks alike, so that no rank waits for another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from autopar.policy.files import policy_folder
from autopar.verification.session import Session

H0, H1 = "transformer.h.0", "transformer.h.1"
TP, PP, DP, CP = ({f"{kind}_parallel_size": 2} for kind in ("tensor", "pipeline", "data", "context"))
SP = {**TP, "sequence_parallel": True}

After = Callable[[Session, ExitStack], None]


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: what is wrong.
        modules: paths, each of which is a right answer to the question where; empty: no module's.
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
    before: Callable[[ExitStack], None] | None = None
    model: str = "gpt2"
    mesh: dict[str, Any] = field(default_factory=lambda: TP)
    checks: tuple[str, ...] = ("forward", "backward")
    policy: tuple[tuple[str, str], ...] = ()
    refused: str = ""


def at(path: str, change: Callable[[Any, Session], None]) -> After:
    """Change one module of the parallel model."""
    return lambda session, stack: change(session.parallel.get_submodule(path), session)


def forward_of(path: str, forward: Callable[..., Any]) -> After:
    """Replace the forward of one module: ``forward(module, plain_forward, *args, **kwargs)``."""

    def plant(session: Session, stack: ExitStack) -> None:
        module = session.parallel.get_submodule(path)
        plain = module.forward
        module.forward = lambda *args, **kwargs: forward(module, plain, *args, **kwargs)

    return plant


def patched(target: str, make: Callable[[Any], Any]) -> Callable[[ExitStack], None]:
    """Replace a function of the package by ``make(function)``."""

    def plant(stack: ExitStack) -> None:
        patcher = patch(target)
        original, _ = patcher.get_original()
        stack.enter_context(patch(target, make(original)))

    return plant


def and_then(before: Callable[[ExitStack], None]) -> After:
    """Replace it after ``initialize``."""
    return lambda session, stack: before(stack)


def text_of(fault: Fault) -> str | None:
    """The changed text of GPT-2's policy."""
    if not fault.policy:
        return None
    text = (policy_folder() / "gpt2.yaml").read_text()
    for old, new in fault.policy:
        assert old in text, old
        text = text.replace(old, new)
    return text


# -- what is planted --------------------------------------------------------------------------------------------------


def _row_without_sum(layer: Any, plain: Any, x: torch.Tensor) -> torch.Tensor:
    return layer._add_bias(layer._multiply(x, layer.weight, None))


def _bias_before_the_sum(layer: Any, plain: Any, x: torch.Tensor) -> torch.Tensor:
    return plain(x) + layer.bias


def _enters_without_sum(layer: Any, session: Session) -> None:
    layer._product = lambda x, weight, bias: layer._multiply(x, weight, bias)


def _other_ranks_shard(layer: Any, session: Session) -> None:
    name = next(n for n, p in session.parallel.named_parameters() if p is layer._parameters["weight"])
    whole = dict(session.plain.named_parameters())[name]
    layout, tp = layer.autopar_layouts["weight"], session.mpu.tp
    layer._parameters["weight"].data.copy_(layout.shard(whole.data, 1 - tp.rank))


def _swapped_bias(layer: Any, session: Session) -> None:
    other = [torch.empty_like(layer.bias.data) for _ in range(2)]
    dist.all_gather(other, layer.bias.data.contiguous())
    layer.bias.data.copy_(other[1 - session.mpu.tp.rank])


def _without_bias(layer: Any, session: Session) -> None:
    layer._add_bias = lambda y: y


def _set(name: str, value: Any) -> Callable[[Any, Session], None]:
    return lambda module, session: setattr(module, name, value)


def _scaled(name: str, factor: float) -> Callable[[Any, Session], None]:
    return lambda module, session: setattr(module, name, getattr(module, name) * factor)


def _added(name: str, amount: float) -> Callable[[Any, Session], None]:
    return lambda module, session: getattr(module, name).data.add_(amount * (1 + session.mpu.tp.rank))


def _no_mask(module: Any, plain: Any, *args: Any, **kwargs: Any) -> Any:
    return plain(*args, **{**kwargs, "attention_mask": None})


def _shifted(module: Any, plain: Any, ids: torch.Tensor) -> torch.Tensor:
    return plain((ids + 1) % 16)


def _mask_of_rows(module: Any, plain: Any, ids: torch.Tensor) -> torch.Tensor:
    """Ids of the other rank's rows are looked up too, in the first row of this one."""
    from autopar.distributed.collectives import reduce_

    ((start, stop),) = module.autopar_layouts["weight"].ranges(module.tp.rank)
    local = (ids - start).clamp(0, stop - start - 1)
    return reduce_(nn.functional.embedding(local, module.weight), module.tp)


def _no_sum_of_rows(module: Any, plain: Any, ids: torch.Tensor) -> torch.Tensor:
    ((start, stop),) = module.autopar_layouts["weight"].ranges(module.tp.rank)
    outside = (ids < start) | (ids >= stop)
    y = nn.functional.embedding((ids - start).masked_fill(outside, 0), module.weight)
    return y.masked_fill(outside.unsqueeze(-1), 0)


def _no_residual(module: Any, plain: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    out = plain(hidden, *args, **kwargs)
    return (out[0] - hidden, *out[1:]) if isinstance(out, tuple) else out - hidden


def _stale_cache(module: Any, plain: Any, *args: Any, **kwargs: Any) -> Any:
    """In a step of decoding the keys of the prompt are those of another one."""
    cache = kwargs.get("past_key_values", args[1] if len(args) > 1 else None)
    if cache is not None and cache.get_seq_length(1) > 0:
        cache.layers[1].keys = cache.layers[1].keys.roll(1, 2)
    return plain(*args, **kwargs)


def _stuck_positions(module: Any, plain: Any, positions: torch.Tensor) -> torch.Tensor:
    return plain(torch.zeros_like(positions) if positions.shape[1] == 1 else positions)


def _cut_gradient(module: Any, plain: Any, x: torch.Tensor) -> torch.Tensor:
    return plain(x.detach() + 0 * x)


def _half_gradient(module: Any, plain: Any, *args: Any) -> torch.Tensor:
    y = plain(*args)
    return y * 0.5 + y.detach() * 0.5


def _no_gradient_of(name: str) -> Callable[[Any, Session], None]:
    def plant(module: Any, session: Session) -> None:
        parameter = module._parameters[name]
        parameter.register_hook(lambda gradient: gradient * 0.5)

    return plant


def _reversed_gather(layer: Any, plain: Any, x: torch.Tensor) -> torch.Tensor:
    return plain(x).flip(-1)


def _same_seeds(session: Session, stack: ExitStack) -> None:
    region = session.parallel.transformer.h[0].attn.c_attn.region
    region.draw_per_rank = lambda training: None


def _other_seeds(module: Any, plain: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(dist.get_rank())
    return plain(x)


def _wrong_rotation(module: Any, plain: Any, *args: Any, **kwargs: Any) -> Any:
    cos, sin = plain(*args, **kwargs)
    return cos, -sin


def _other_stages(session: Session, stack: ExitStack) -> None:
    """The border between the stages is one block further on the second rank's side of things, on both ranks."""
    pipeline = session.parallel._autopar_pipeline
    start, border, stop = pipeline.plan.bounds
    pipeline.engine.plan = dataclasses.replace(pipeline.plan, bounds=(start, border - 1, stop))


def _no_sum_of_tied(session: Session, stack: ExitStack) -> None:
    session.parallel._autopar_pipeline.tied.sum = lambda alike: None


def _rate(session: Session, stack: ExitStack) -> None:
    session.optimizers[1].param_groups[0]["lr"] *= 1.5


def _decay(session: Session, stack: ExitStack) -> None:
    """One tensor is decayed that must not be."""
    group = session.optimizers[1].param_groups[0]
    chosen = dict(session.parallel.named_parameters())[f"{H1}.ln_2.weight"]
    group["params"] = [p for p in group["params"] if p is not chosen]
    session.optimizers[1].param_groups.append({**group, "params": [chosen], "weight_decay": 5.0})


def _own_rows_only(session: Session, stack: ExitStack) -> None:
    """Keys and values of the other rank are those of this one."""
    original = session.parallel

    def gathered(x: torch.Tensor, axis: Any, dim: int, layout: Any = None, *more: Any) -> torch.Tensor:
        parts = [x if rank == axis.rank else x.detach() * 0 for rank in range(axis.size)]
        return layout.unshard(parts, dim)

    assert original is not None
    stack.enter_context(patch("autopar.context_parallel.attention.gather_sum", gathered))


def _wrong_rows(original: Any) -> Any:
    def rows_layout(length: int, ranks: int, *, zigzag: bool = False) -> Any:
        layout = original(length, ranks, zigzag=zigzag)
        mirrored = [dataclasses.replace(block, ranges=tuple(reversed(block.ranges))) for block in layout.blocks]
        return dataclasses.replace(layout, blocks=tuple(mirrored[:1] + list(layout.blocks[1:])))

    return rows_layout


def _no_sum_over_rows(original: Any) -> Any:
    return lambda tensors, axis: list(tensors)


def _other_counts(original: Any) -> Any:
    return lambda weights, counts, replica: weights


def _alike(original: Any) -> Any:
    return lambda microbatches, *_: [1 / len(microbatches)] * len(microbatches)


def _counted_padding(original: Any) -> Any:
    def losses(shards: Any, target: torch.Tensor, *args: Any) -> Any:
        return original(shards, target.masked_fill(target == -100, 0), *args)

    return losses


ATTN1, MLP1 = f"{H1}.attn", f"{H1}.mlp"

FAULTS = [
    # -- the policy ---------------------------------------------------------------------------------------------------
    Fault("fused q, k, v as one block", (f"{H0}.attn", f"{H0}.attn.c_attn"), policy=(("{column: [heads, heads, heads]}", "{column: [heads]}"),)),
    Fault("keys and values in one block", (f"{H0}.attn", f"{H0}.attn.c_attn"), policy=(("[heads, heads, heads]", "[heads, heads * 8]"),)),
    Fault("a wrong unit", (), policy=(("mlp.c_fc: {column: ffn}", "mlp.c_fc: {column: heads}"),), refused="mlp.c_proj"),
    Fault("an attribute not divided", (), policy=(("    attn.split_size: heads\n", ""),), refused="h.0.attn"),
    Fault("a row that is left out", (), policy=(("    mlp.c_proj: {row: ffn}\n", ""),), refused="mlp.c_proj.weight"),
    Fault("a row replicated", (), policy=(("mlp.c_proj: {row: ffn}", "mlp.c_proj: replicated"),), refused="mlp.c_proj"),
    Fault("a column replicated", (), policy=(("mlp.c_fc: {column: ffn}", "mlp.c_fc: replicated"),), refused="mlp.c_proj"),
    Fault("a tied weight cut once", (), policy=(("wte: {embedding: vocab}", "wte: replicated"),), refused="wte"),
    Fault("logits not gathered", (), policy=((", gather_output: true", ""),), refused="logits"),
    Fault("a norm inside a region", (), policy=(("ln_2: replicated", "ln_2: {sharded: ffn}"),), refused="ln_2"),
    Fault("a row where a column belongs", (), policy=(("mlp.c_fc: {column: ffn}", "mlp.c_fc: {row: ffn}"),), refused="mlp.c_fc"),
    Fault("another count of heads", (f"{H0}.attn", f"{H0}.attn.c_attn"), policy=(("heads: num_attention_heads", "heads: num_hidden_layers"),)),
    # -- what a layer computes ----------------------------------------------------------------------------------------
    Fault("a missing all-reduce behind a row", (f"{H1}.mlp.c_proj",), forward_of(f"{H1}.mlp.c_proj", _row_without_sum)),
    Fault("a missing all-reduce behind attention", (f"{H0}.attn.c_proj",), forward_of(f"{H0}.attn.c_proj", _row_without_sum)),
    Fault("a bias on every rank before the sum", (f"{H0}.mlp.c_proj",), forward_of(f"{H0}.mlp.c_proj", _bias_before_the_sum)),
    Fault("a bias left out", (f"{H1}.attn.c_proj",), at(f"{H1}.attn.c_proj", _without_bias)),
    Fault("the other rank's bias", (f"{H1}.mlp.c_fc",), at(f"{H1}.mlp.c_fc", _swapped_bias)),
    Fault("the other rank's shard", (f"{H0}.attn.c_attn",), at(f"{H0}.attn.c_attn", _other_ranks_shard)),
    Fault("the other rank's rows of a row", (f"{H1}.mlp.c_proj",), at(f"{H1}.mlp.c_proj", _other_ranks_shard)),
    Fault("rows of the other rank counted", ("transformer.wte",), forward_of("transformer.wte", _mask_of_rows)),
    Fault("rows of a vocabulary not summed", ("transformer.wte",), forward_of("transformer.wte", _no_sum_of_rows)),
    Fault("logits in another order", ("lm_head",), forward_of("lm_head", _reversed_gather)),
    Fault("a norm with another epsilon", (f"{H1}.ln_1",), at(f"{H1}.ln_1", _set("eps", 0.1))),
    Fault("a norm's weight that has drifted", (f"{H1}.ln_1",), at(f"{H1}.ln_1", _added("weight", 0.1))),
    Fault("another scale of attention", (ATTN1,), at(ATTN1, _scaled("scaling", 2.0))),
    Fault("heads of another width", (ATTN1,), at(ATTN1, _set("head_dim", 2)), checks=("forward",)),
    Fault("a dropped mask", (ATTN1,), forward_of(ATTN1, _no_mask)),
    Fault("positions off by one", ("transformer.wpe",), forward_of("transformer.wpe", _shifted)),
    Fault("a missing residual", (H1,), forward_of(H1, _no_residual)),
    Fault("another activation", (f"{MLP1}.act",), forward_of(f"{MLP1}.act", lambda module, plain, x: torch.relu(x))),
    Fault("rotary angles turned back", ("model.rotary_emb",), forward_of("model.rotary_emb", _wrong_rotation), model="llama"),
    Fault("padding counted in the loss", (), before=patched("autopar.tensor_parallel.sharded_logits.sharded_cross_entropy", _counted_padding)),
    # -- gradients ----------------------------------------------------------------------------------------------------
    Fault("a missing gradient sum before an MLP", (f"{H1}.mlp.c_fc", MLP1), at(f"{H1}.mlp.c_fc", _enters_without_sum), checks=("backward",)),
    Fault("a missing gradient sum before attention", (f"{H0}.attn.c_attn", f"{H0}.attn"), at(f"{H0}.attn.c_attn", _enters_without_sum), checks=("backward",)),
    Fault("a missing gradient sum of one of three columns", ("model.layers.1.self_attn",), at("model.layers.1.self_attn.k_proj", _enters_without_sum), model="llama", checks=("backward",)),
    Fault("a gradient that ends", (f"{H1}.ln_2", f"{H1}.mlp", f"{H1}.mlp.c_fc"), forward_of(f"{H1}.mlp", _cut_gradient), checks=("backward",)),
    Fault("half a gradient", (f"{MLP1}.act",), forward_of(f"{MLP1}.act", _half_gradient), checks=("backward",)),
    Fault("a gradient of a parameter scaled", (f"{H0}.ln_2",), at(f"{H0}.ln_2", _no_gradient_of("weight")), checks=("backward",)),
    Fault("gradients of a key on both ranks not summed", ("model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj", "model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.v_proj"), before=patched("autopar.tensor_parallel.parallel_layer.sum_replicas", lambda original: lambda weight, axis, layout: weight), model="mqa", checks=("backward",)),
    Fault("gradients of a norm of heads not summed", ("model.layers.1.self_attn.k_norm", "model.layers.1.self_attn.q_norm"), before=patched("autopar.tensor_parallel.region_modules.copy", lambda original: lambda x, axis: x), model="qwen3", checks=("backward",)),
    # -- tokens, random draws, steps, files ---------------------------------------------------------------------------
    Fault("a stale cache", (ATTN1,), forward_of(ATTN1, _stale_cache), checks=("generate",)),
    Fault("positions that do not go on", ("transformer.wpe",), forward_of("transformer.wpe", _stuck_positions), checks=("generate",)),
    Fault("equal dropout of different heads", (f"{H0}.attn", f"{H0}.attn.attn_dropout"), _same_seeds, checks=("dropout",)),
    Fault("different dropout of what is replicated", ("transformer.drop",), forward_of("transformer.drop", _other_seeds), checks=("dropout",)),
    Fault("another learning rate", (), _rate, checks=("step",)),
    Fault("decay of a norm", (f"{H1}.ln_2",), _decay, checks=("step",)),
    # -- stages and replicas ------------------------------------------------------------------------------------------
    Fault("a stage that begins one block early", (), _other_stages, mesh=PP, checks=("backward",)),
    Fault("a tied weight's gradients not summed over stages", ("transformer.wte", "lm_head"), _no_sum_of_tied, mesh=PP, checks=("backward",)),
    Fault("a loss that is the mean of means", (), and_then(patched("autopar.pipeline_parallel.pipeline.weights_of", _alike)), mesh=PP, checks=("backward",)),
    Fault("a block of the second stage", (f"{H1}.mlp.c_fc",), forward_of(f"{H1}.mlp.c_fc", lambda module, plain, x: plain(x) * 1.5), mesh=PP, checks=("backward",)),
    Fault("gradients not averaged over replicas", (), and_then(patched("autopar.pipeline_parallel.pipeline.average_over_replicas", lambda original: lambda *_: None)), mesh=DP, checks=("backward",)),
    Fault("replicas that count alike", (), and_then(patched("autopar.pipeline_parallel.pipeline.weights_over_replicas", _other_counts)), mesh=DP, checks=("backward",)),
    # -- rows of the sequence -----------------------------------------------------------------------------------------
    Fault("attention to this rank's rows only", ("model.layers.0.self_attn",), _own_rows_only, model="llama", mesh={**CP, "context_parallel_method": "gather"}),
    Fault("gradients not averaged over context parallelism", (), and_then(patched("autopar.verification.session.average_gradients", lambda original: lambda model: None)), model="llama", mesh=CP, checks=("backward",)),
    Fault("gradients of norms over rows not summed", (f"{H0}.ln_1", f"{H0}.ln_2", f"{H1}.ln_1", f"{H1}.ln_2", f"{H1}.attn.c_proj", f"{H1}.mlp.c_proj"), before=patched("autopar.tensor_parallel.sequence_parallel.parameters.sum_flat", _no_sum_over_rows), mesh=SP, checks=("backward",)),
]
