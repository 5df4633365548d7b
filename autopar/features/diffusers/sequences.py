"""Context parallelism of a transformer, by the plan that its class in diffusers has for it.

Hooks split the arguments and results that the plan names into local rows, and gather the output. In between, attention
exchanges local rows of all heads for all rows of local heads (:mod:`autopar.features.context_parallel.attention`).
diffusers' own exchange needs heads that the ranks divide, and fails with a mask for each head.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from autopar.compat.patches import hold, patch_member, patches
from autopar.config import ParallelConfig
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import all_gather, even_layout
from autopar.errors import ConfigError
from autopar.features.context_parallel.attention import exchange, heads_layout
from autopar.features.context_parallel.setup import RowHook
from autopar.features.context_parallel.state import RowPlan, RowState, entered, join
from autopar.features.diffusers.checks import unsupported
from autopar.policy.match import config_of
from autopar.swap import change_given

CLASSES = ("Flux", "Flux2", "LTXVideo", "QwenImage", "Wan")  # starts of the names of classes that tests compare
_HOME, _ATTENTION = "diffusers.models.attention_dispatch", "_templated_context_parallel_attention"
_PLAN = "_cp_plan"  # of a class: module -> {argument or place in the result: how to split it}, or how to gather it
_CONFIG = "_parallel_config"  # of the processor of an attention module, which passes it to attention


def plan_sequences(model: nn.Module, ranks: int) -> Sequences:
    """Return the plan of ``model``; raise ConfigError if it does not support context parallelism."""
    kind = type(model).__name__
    known = {each.__name__.partition("Transformer")[0] for each in type(model).__mro__} & {*CLASSES}
    if not known or getattr(model, _PLAN, None) is None:
        listed = ", ".join(CLASSES)
        raise ConfigError(f"context_parallel_size={ranks} does not fit {kind}: of diffusers, it supports {listed}")
    inside = {module for block in _blocks(model) for module in block.modules()}
    dropouts = ((path, each.p) for path, each in model.named_modules() if isinstance(each, nn.Dropout) and each.p > 0)
    outside = ((path, p) for path, p in dropouts if model.get_submodule(path) not in inside)
    _refuse(model, ranks, [*unsupported(model), *((f"dropout {p} at {path}", "Set it to 0.") for path, p in outside)])
    return Sequences(lists=(), between=True)


def _refuse(model: nn.Module, ranks: int, reasons: list[tuple[str, str]]) -> None:
    for what, instead in reasons:
        kind = type(model).__name__
        raise ConfigError(f"context_parallel_size={ranks} is not supported with {what} of {kind}.\n  {instead}")


class Sequences(RowPlan):
    """The plan for a model of diffusers."""

    def check(self, model: nn.Module, config: ParallelConfig) -> None:
        """Raise ConfigError if the configuration does not fit."""
        pp, cp = config.pipeline_parallel_size, config.context_parallel_size
        ranks, heads = cp * config.tensor_parallel_size, config_of(model).num_attention_heads
        reasons = [(f"the {pp} pipeline stages", "Use tensor_parallel_size.")] if pp > 1 else []
        if config.context_parallel_method == "gather":
            reasons.append(("context_parallel_method=gather", "Use ulysses."))
        if heads < ranks:
            reasons.append((f"the {heads} heads for {ranks} ranks", "Each rank of tp and cp requires a head."))
        _refuse(model, cp, reasons)

    def apply(self, model: nn.Module, axis: Axis) -> RowState:
        """Add hooks and attention over rows to ``model`` in place, without communication."""
        state = RowState(axis, "ulysses", self)
        if axis.group is not None:
            hold(state)
        if all(each.name != f"{_HOME}.{_ATTENTION}" for each in patches()):
            patch_member(import_module(_HOME), _ATTENTION, _attention)
        state.region.find_dropout(model)
        for path, entries in {"": {}, **getattr(model, _PLAN)}.items():
            parent = model.get_submodule(path.removesuffix(".*"))
            for module in parent.children() if path.endswith(".*") else [parent]:
                if isinstance(entries, dict):
                    module.register_forward_pre_hook(SplitArguments(state, path, entries), with_kwargs=True)
                module.register_forward_hook(SplitResults(state, path, entries), always_call=path == "")
        for block in _blocks(model):
            block.register_forward_pre_hook(Draws(state))
            block.register_forward_hook(Draws(state), always_call=True)
        for processor in _processors(model):
            setattr(processor, _CONFIG, state)
        return state

    def undo(self, model: nn.Module) -> None:
        """Undo the changes of :meth:`apply` to processors."""
        for processor in _processors(model):
            vars(processor).pop(_CONFIG, None)


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [block for each in model.children() if isinstance(each, nn.ModuleList) for block in each]


def _processors(model: nn.Module) -> list[Any]:
    found = (getattr(module, "processor", None) for module in model.modules())
    return [processor for processor in found if hasattr(processor, _CONFIG)]


class Draws(RowHook):
    """Hook before and after a block: inside, each rank has other random draws."""

    def __call__(self, block: Any, args: Any, *out: Any) -> None:
        self.state.region.draw_alike() if out else self.state.region.draw_per_rank(block.training)


class SplitArguments(RowHook):
    """Forward pre-hook that splits the arguments in ``entries``, a part of the class's plan."""

    def __init__(self, state: RowState, path: str, entries: Any) -> None:
        super().__init__(state, path == "")
        self.path, self.entries = path, entries

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.outermost:
            if self.state.refused:
                raise ConfigError(self.state.refused)
            self.state.entered.clear()
            self.state.region.start()
            args, kwargs = entered((args, kwargs), self.state.axis)
        return change_given(module, args, kwargs, self.own)

    def own(self, name: str | int, x: Any) -> Any:
        """Return the local rows of an argument or result; ``x`` if it has no rows, such as one time per sample."""
        entry = self.entries.get(name)
        if entry is None or not isinstance(x, torch.Tensor):
            return x
        missing, ranks = entry.expected_dims - x.ndim, self.state.axis.size
        if missing and not str(name).endswith("_ids"):  # positions may lack the dim of samples
            return x
        dim = entry.split_dim - missing
        if x.shape[dim] % ranks:
            what = f"result {name}" if isinstance(name, int) else name
            raise ConfigError(
                f"context_parallel_size={ranks}: {what} of {self.path or 'the model'} must have a multiple of {ranks} "
                f"rows in dim {dim}, got shape {list(x.shape)}\n"
                "  Pad texts, with their mask; or use another size of images or videos."
            )
        return x.chunk(ranks, dim)[self.state.axis.rank]


class SplitResults(SplitArguments):
    """Forward hook that splits the results in ``entries``, or gathers the output."""

    def __call__(self, module: Any, args: tuple[Any, ...], out: Any) -> Any:
        if self.outermost:
            self.state.region.finish()
        if isinstance(self.entries, dict):
            split = any(isinstance(name, int) for name in self.entries)
            return tuple(self.own(place, x) for place, x in enumerate(out)) if split else None
        if not self.state.entered:
            raise _other_backend(self.state.axis.size)
        dim, axis = self.entries.gather_dim, self.state.axis
        return join(out, axis, dim, even_layout(out.shape[dim] * axis.size, axis.size))


def _other_backend(ranks: int) -> ConfigError:
    return ConfigError(
        f"context_parallel_size={ranks} requires diffusers' attention backend 'native'\n"
        "  Leave out set_attention_backend, attention_backend and DIFFUSERS_ATTN_BACKEND."
    )


def _attention(plain: Any, query: Any, key: Any, value: Any, mask: Any, *given: Any, **more: Any) -> torch.Tensor:
    """Compute attention of ``[batch, rows/cp, heads, head_dim]``; other calls go to diffusers' function."""
    state, (dropout, causal, scale) = more[_CONFIG], given[:3]
    if not isinstance(state, RowState):
        return plain(query, key, value, mask, *given, **more)
    axis = state.axis
    if not more["forward_op"].__name__.startswith("_native_attention"):
        raise _other_backend(axis.size)
    state.entered.add(0)
    heads = heads_layout(query.shape[2], 1, axis.size)
    of_queries, of_keys = (even_layout(x.shape[1] * axis.size, axis.size) for x in (query, key))
    if mask is not None and mask.shape[-1] == key.shape[1]:
        mask = all_gather(mask, axis, of_keys, mask.ndim - 1)
    if mask is not None and mask.ndim == 4 and mask.shape[1] == heads.size:
        mask = heads.shard(mask, axis.rank, 1)
    query = exchange(query.transpose(1, 2), axis, heads, of_queries, to_heads=True)
    key, value = (exchange(x.transpose(1, 2), axis, heads, of_keys, to_heads=True) for x in (key, value))
    out = scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale=scale)
    return exchange(out, axis, heads, of_queries, to_heads=False).transpose(1, 2)
