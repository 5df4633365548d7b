"""Ways to plant a fault: a forward, a function, an attribute or a number of one model that is parallelized."""

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from autopar.compat.transformers import given_cache
from autopar.distributed.axis import Axis
from autopar.distributed.rng import seeded
from autopar.features.context_parallel.lazy_rows import full_tensors
from autopar.pipeline_parallel.pipeline import pipeline_of
from autopar.tools.verification.session import Session

After = Callable[[Session, ExitStack], None]
"""Plants in the model that ``initialize`` has made."""
Before = Callable[[ExitStack], None]
"""Plants before that."""


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


def left_out(original: Any) -> Any:
    """The function does nothing: it returns its first argument."""
    return lambda first, *_: first


def and_then(before: Callable[[ExitStack], None]) -> After:
    """Replace it after ``initialize``."""
    return lambda session, stack: before(stack)


def row_without_sum(layer: Any, plain: Any, x: torch.Tensor) -> torch.Tensor:
    return layer._add_bias(layer._multiply(x, layer.weight, None))


def enters_without_sum(layer: Any, session: Session) -> None:
    layer._product = layer._multiply


def other_ranks_shard(layer: Any, session: Session) -> None:
    name = next(n for n, p in session.parallel.named_parameters() if p is layer._parameters["weight"])
    whole = dict(session.plain.named_parameters())[name]
    layout, tp = layer.autopar_layouts["weight"], session.mpu.tp
    layer._parameters["weight"].data.copy_(layout.shard(whole.data, 1 - tp.rank))


def swapped_bias(layer: Any, session: Session) -> None:
    other = [torch.empty_like(layer.bias.data) for _ in range(2)]
    dist.all_gather(other, layer.bias.data.contiguous())
    layer.bias.data.copy_(other[1 - session.mpu.tp.rank])


def set(name: str, value: Any) -> Callable[[Any, Session], None]:
    return lambda module, session: setattr(module, name, value)


def mask_of_rows(module: Any, plain: Any, ids: torch.Tensor) -> torch.Tensor:
    """Ids of the other rank's rows are looked up too, in the first row of this one."""
    from autopar.distributed.collectives import reduce_

    ((start, stop),) = module.autopar_layouts["weight"].ranges(module.tp.rank)
    local = (ids - start).clamp(0, stop - start - 1)
    return reduce_(nn.functional.embedding(local, module.weight), module.tp)


def no_sum_of_rows(module: Any, plain: Any, ids: torch.Tensor) -> torch.Tensor:
    ((start, stop),) = module.autopar_layouts["weight"].ranges(module.tp.rank)
    outside = (ids < start) | (ids >= stop)
    y = nn.functional.embedding((ids - start).masked_fill(outside, 0), module.weight)
    return y.masked_fill(outside.unsqueeze(-1), 0)


def ended(module: Any, plain: Any, x: torch.Tensor) -> torch.Tensor:
    return plain(x.detach() + 0 * x)


def no_residual(module: Any, plain: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    out = plain(hidden, *args, **kwargs)
    return (out[0] - hidden, *out[1:]) if isinstance(out, tuple) else out - hidden


def stale_cache(module: Any, plain: Any, *args: Any, **kwargs: Any) -> Any:
    """In a step of decoding the keys of the prompt are those of another one."""
    cache = given_cache(kwargs) or (args[1] if len(args) > 1 else None)
    if cache is not None and cache.get_seq_length(1) > 0:
        cache.layers[1].keys = cache.layers[1].keys.roll(1, 2)
    return plain(*args, **kwargs)


def half_gradient(module: Any, plain: Any, *args: Any) -> torch.Tensor:
    y = plain(*args)
    return y * 0.5 + y.detach() * 0.5


def same_seeds(session: Session, stack: ExitStack) -> None:
    region = session.parallel.transformer.h[0].attn.c_attn.region
    region.draw_per_rank = lambda training: None


def same_seeds_of_rows(session: Session, stack: ExitStack) -> None:
    region = session.parallel.transformer.h[0]._autopar_rows.region
    region.axis = Axis("cp", None, range(2), 0)


def other_seeds_of_all_rows(module: Any, plain: Any, x: torch.Tensor) -> torch.Tensor:
    with seeded(dist.get_rank()):
        return plain(full_tensors(x))


def every_second(module: Any, plain: Any, x: torch.Tensor) -> torch.Tensor:
    return x * (torch.arange(x.shape[-1]) % 2) * 2 if module.training and module.p else x


def other_seeds(module: Any, plain: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(dist.get_rank())
    return plain(x)


def wrong_rotation(module: Any, plain: Any, *args: Any, **kwargs: Any) -> Any:
    cos, sin = plain(*args, **kwargs)
    return cos, -sin


def other_stages(session: Session, stack: ExitStack) -> None:
    """The border between the stages is one block further on the second rank's side of things, on both ranks."""
    pipeline = pipeline_of(session.parallel)
    start, border, stop = pipeline.plan.bounds
    pipeline.engine.plan = dataclasses.replace(pipeline.plan, bounds=(start, border - 1, stop))


def no_sum_of_tied(session: Session, stack: ExitStack) -> None:
    pipeline_of(session.parallel).tied.sum = lambda alike: None


def rate(session: Session, stack: ExitStack) -> None:
    session.optimizers[1].param_groups[0]["lr"] *= 1.5


def decay(session: Session, stack: ExitStack) -> None:
    """One tensor is decayed that must not be."""
    group = session.optimizers[1].param_groups[0]
    chosen = dict(session.parallel.named_parameters())["transformer.h.1.ln_2.weight"]
    group["params"] = [p for p in group["params"] if p is not chosen]
    session.optimizers[1].param_groups.append({**group, "params": [chosen], "weight_decay": 5.0})


def own_rows_only(session: Session, stack: ExitStack) -> None:
    """Keys and values of the other rank are those of this one."""

    def gathered(x: torch.Tensor, axis: Any, dim: int, layout: Any = None, *more: Any) -> torch.Tensor:
        parts = [x if rank == axis.rank else x.detach() * 0 for rank in range(axis.size)]
        return layout.unshard(parts, dim)

    stack.enter_context(patch("autopar.features.context_parallel.attention.gather_sum", gathered))


def alike(original: Any) -> Any:
    return lambda microbatches, *_: [1 / len(microbatches)] * len(microbatches)


def counted_padding(original: Any) -> Any:
    def losses(shards: Any, target: torch.Tensor, *args: Any) -> Any:
        return original(shards, target.masked_fill(target == -100, 0), *args)

    return losses
