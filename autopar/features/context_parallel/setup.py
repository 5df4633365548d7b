"""Context parallelism of one model: boundaries, attention, and the logits of rows; and all of that undone."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from autopar.compat.tensors import remove_forward_hooks
from autopar.compat.transformers import (
    ATTENTION,
    RECOMPUTE,
    attention_of,
    caches_in,
    holds_tokens,
)
from autopar.distributed.axis import Axis
from autopar.errors import ConfigError
from autopar.features.context_parallel.attention import Implementation, register
from autopar.features.context_parallel.block_boundary import (
    BlockBoundary,
    NeedsAllRows,
    OwnRows,
    Recomputed,
    gather_all,
)
from autopar.features.context_parallel.lazy_rows import RowsOfLogits, whole_tensors
from autopar.features.context_parallel.rows import entered
from autopar.features.context_parallel.state import RowPlan, RowState
from autopar.plan.stages import lies_in
from autopar.setup.steps import Given, Parallelized
from autopar.swap import drop_value, set_value, swap, unswap, view_of_config
from autopar.tensor_parallel.hooks import callable_alone
from autopar.tensor_parallel.sharded_logits import sharded_logits

_MODELS = itertools.count(1)


def run_on_rows_of_sequences(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Inside the hooks of tensor parallelism: these see the full batch, and what they call sees this rank's rows."""
    plan = state.features.get("context_parallel")
    if plan is not None:
        config, always = state.config, state.config.loss_gather_logits == "always"
        rows = apply(state.inner_of(model), plan, state.mpu.cp, config.context_parallel_method, gather_logits=always)
        state.region.beginning.append(rows.find_hooks)
        state.undo.append(lambda model, own: undo(model))


def apply(model: nn.Module, plan: RowPlan, axis: Axis, method: str, *, gather_logits: bool = False) -> RowState:
    """Put boundaries before the blocks of ``model`` and attention over rows into them, in place; no communication.

    Args:
        model: the Hugging Face model inside; names of the plan begin there.
        gather_logits: in every forward, not only when they are read.
    """
    register()
    state = RowState(axis, method, plan)
    state.gathers_logits = gather_logits
    if axis.group is not None:  # not in a rehearsal, which some ranks may leave out
        state.region.model = str(next(_MODELS))
    state.region.find_dropout(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    for number, blocks in enumerate(plan.lists):
        for path in blocks:
            for below, module in modules[path].named_modules():
                _attend_over_rows(module, f"{path}.{below}" if below else path, number, state)
        for path, where in plan.whole.items():
            if any(lies_in(path, block) for block in blocks):
                swap(modules[path], NeedsAllRows, _autopar_rows=state, _autopar_whole=(number, where, path))
        for place, path in enumerate(blocks):
            ends = (number, place == 0, place == len(blocks) - 1)
            swap(modules[path], BlockBoundary, _autopar_rows=state, _autopar_place=ends)
    for path in plan.own:
        swap(modules[path], OwnRows, _autopar_rows=state, _autopar_own=path)
    for module in callable_alone(model):
        module.register_forward_pre_hook(BeforeRows(state, module is model), with_kwargs=True)
        module.register_forward_hook(AfterRows(state), always_call=True)
    if plan.head is not None:
        modules[plan.head].register_forward_pre_hook(BeforeHead(state))
        modules[plan.head].register_forward_hook(AfterHead(state))
    return state


def _attend_over_rows(module: nn.Module, path: str, number: int, state: RowState) -> None:
    if hasattr(getattr(module, "config", None), ATTENTION):
        name = attention_of(module.config) or "eager"
        set_value(view_of_config(module), ATTENTION, Implementation(name))
        module._autopar_rows, module._autopar_list = state, number  # type: ignore[assignment]
        module._autopar_path = path  # type: ignore[assignment]


def undo(model: nn.Module) -> None:
    """Take all of it away: the model runs whole again on each rank."""
    for module in model.modules():
        unswap(module, BlockBoundary, "_autopar_place")
        unswap(module, NeedsAllRows, "_autopar_whole")
        unswap(module, OwnRows, "_autopar_own")
        if "_autopar_list" in vars(module):
            drop_value(module, ATTENTION)
        recompute = vars(module).get(RECOMPUTE)
        if isinstance(recompute, Recomputed):
            setattr(module, RECOMPUTE, recompute.plain)
        for name in ("_autopar_rows", "_autopar_list", "_autopar_path"):
            vars(module).pop(name, None)
        remove_forward_hooks(module, (_RowHook,))


class _RowHook:
    """A hook of a model that runs over rows; :func:`undo` takes it away."""

    def __init__(self, state: RowState, outermost: bool = False) -> None:
        self.state, self.outermost = state, outermost


class BeforeRows(_RowHook):
    """Forward pre-hook of a Hugging Face model: decide whether this forward is cut."""

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = self.state
        if self.outermost:
            state.running = 0  # an interrupted forward did not end
        state.running += 1
        caches = [cache for x in (*args, *kwargs.values()) if isinstance(x, Cache) for cache in caches_in(x)]
        if state.running > 1:
            if state.cutting and any(map(holds_tokens, caches)):
                raise ConfigError(
                    f"context_parallel_size={state.axis.size}: {type(model).__name__} is given keys and values that "
                    "another part of the model has cached in this forward, of this rank's rows only.\n  Use "
                    "tensor_parallel_size, or sequence_parallel."
                )
            return None
        cached = kwargs.get("use_cache") is True or bool(caches)
        if not cached and (kwargs.get("output_attentions") or getattr(model.config, "output_attentions", False)):
            raise ConfigError(
                "output_attentions=True: with context_parallel_size="
                f"{state.axis.size} no rank has a map of rows by rows. Leave it out, or use the plain model for maps."
            )
        if not cached and state.refused:
            raise ConfigError(state.refused)
        keep = kwargs.get("logits_to_keep", 0)
        every = isinstance(keep, int) and keep == 0 and self.outermost
        state.region.expect_logits(kwargs.get("labels") is not None)
        state.start(cutting=not cached, keeping=every and state.plan.through)
        return (args, kwargs) if cached or state.tracking is not None else entered((args, kwargs), state.axis)


class AfterRows(_RowHook):
    """Forward hook, called after an error too: outputs that were collected inside of blocks become whole."""

    def __call__(self, model: Any, args: Any, output: Any) -> Any:
        state = self.state
        state.running = max(state.running - 1, 0)
        if state.cutting and isinstance(output, dict):
            output = _joined(output, state, outermost=state.running == 0)
        if state.cutting and state.running == 0:
            output = whole_tensors(output)
        if state.running == 0:
            state.finish(failed=output is None)
        return output


def _joined(output: Any, state: RowState, *, outermost: bool) -> Any:
    """Gather what was collected from blocks; a cache that the model made for itself has nothing in it."""
    changed: dict[str, Any] = {}
    for name, value in output.items():
        if outermost and isinstance(value, Cache):
            changed[name] = None
        if (name in _ROUTERS or (outermost and name in _HIDDEN)) and isinstance(value, tuple | list):
            number = len(state.plan.lists) - 1
            if name.startswith("encoder"):
                number -= 1  # none: the encoder ran whole
            changed[name] = _whole(value, state, number)
    return type(output)(**{**output, **changed}) if changed else output


_ROUTERS = ("router_logits", "encoder_router_logits", "decoder_router_logits")
_HIDDEN = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")


def _whole(value: Any, state: RowState, number: int) -> Any:
    """Gather what blocks left; it has rows, or was made by a module with all rows: the same on all ranks."""
    layout = state.layout(number)
    if isinstance(value, tuple | list):
        return type(value)(_whole(x, state, number) for x in value)
    if not isinstance(value, torch.Tensor) or layout is None or value.ndim < 2:
        return value
    own, dim = layout.local_size(state.axis.rank), 1 if value.ndim > 2 else 0  # [batch * rows, experts]
    expected = own if dim else own * state.batches.get(number, 0)
    return gather_all(value, state, layout, dim) if value.shape[dim] == expected else value


class BeforeHead(_RowHook):
    """Forward pre-hook of the head: it makes the logits of this rank's rows only."""

    def __call__(self, head: Any, args: tuple[Any, ...]) -> Any:
        state = self.state
        layout = state.layout(len(state.plan.lists) - 1)
        if not state.cutting or layout is None or not args or not isinstance(args[0], torch.Tensor):
            return None
        x = args[0]
        held = state.tracking is not None and state.tracking.holds_rows(x)
        if x.ndim != 3 or x.shape[1] != layout.size or held:
            return None
        state.keeping = True
        return (state.mark(layout.shard(x, state.axis.rank, 1)), *args[1:])


class AfterHead(_RowHook):
    """Forward hook of the head: its logits of rows are whole for the code that reads them."""

    def __call__(self, head: Any, args: Any, logits: torch.Tensor) -> torch.Tensor | None:
        state = self.state
        layout = state.layout(len(state.plan.lists) - 1)
        if not state.keeping or layout is None or logits.shape[1] != layout.local_size(state.axis.rank):
            return None
        state.region.draw_alike()
        if state.tracking is not None:
            return logits.new_empty(logits.shape[0], layout.size, logits.shape[-1])
        name = f"forward {state.forwards} of model {state.region.model}"
        made = sharded_logits(RowsOfLogits(logits, state.axis, layout, name))
        at_once = state.gathers_logits or state.region.is_evaluated(head.training, made.nbytes)
        return made.gathered() if at_once else made
