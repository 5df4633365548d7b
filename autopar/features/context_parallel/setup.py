"""The step of ``initialize`` for context parallelism: block boundaries, attention over rows, and logits of rows.

The first block of a list shards the sequence into rows, and the last block gathers them. Code before the first block
sees the full sequence: positions, masks, documents, and embeddings, which may be lazy tensors
(:mod:`autopar.features.context_parallel.lazy_rows`). A block gets this rank's rows of the hidden states and of each
other argument with one row per position; masks stay full. A module that needs all rows gathers its arguments and keeps
this rank's rows of its result.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from autopar.compat.tensors import keystr, remove_forward_hooks, tree_map_with_path
from autopar.compat.transformers import ATTENTION, RECOMPUTE, attention_of, caches_in, holds_tokens
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import all_gather
from autopar.errors import ConfigError
from autopar.features.context_parallel.attention import Implementation, register
from autopar.features.context_parallel.lazy_rows import LazyRows, OwnRows, RowsOfLogits, full_tensors
from autopar.features.context_parallel.recurrent.state_passing import StatesOfRank, own_arguments, place_of, with_states
from autopar.features.context_parallel.state import GatheredModule, RowPlan, RowState, entered, join
from autopar.layout import Layout
from autopar.plan.stages import lies_in
from autopar.setup.steps import Given, Parallelized
from autopar.swap import change_given, drop_value, given_by_name, replaced, set_value, swap, unswap, view_of_config
from autopar.tensor_parallel.hooks import callable_alone
from autopar.tensor_parallel.sharded_logits import sharded_logits
from autopar.tensor_tracking import map_tensors, tensors_in

_MODELS = itertools.count(1)


def run_on_rows_of_sequences(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Set up context parallelism inside the hooks of tensor parallelism, which see the full batch."""
    plan, config = state.features["context_parallel"], state.config
    always = config.loss_gather_logits == "always"
    rows = apply(state.inner_of(model), plan, state.mpu.cp, config.context_parallel_method, gather_logits=always)
    state.region.beginning.append(rows.find_hooks)
    state.undo.append(lambda model, own: undo(model))
    state.undo.append(lambda model, own: plan.undo(model))


def apply(model: nn.Module, plan: Any, axis: Axis, method: str, *, gather_logits: bool = False) -> RowState:
    """Add block boundaries and attention over rows to ``model`` in place, without communication.

    Args:
        model: Inner Hugging Face model; names in the plan are relative to it.
        gather_logits: True to gather logits in every forward, not only when they are read.
    """
    if type(plan) is not RowPlan:  # of another library
        made: RowState = plan.apply(model, axis)
        return made
    register()
    state = RowState(axis, method, plan)
    state.gathers_logits = gather_logits
    if axis.group is not None:  # not in a dry run, which may not run on all ranks
        state.region.model = str(next(_MODELS))
    state.region.find_dropout(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    for number, blocks in enumerate(plan.lists):
        for path in blocks:
            for name, module in modules[path].named_modules(prefix=path):
                if hasattr(getattr(module, "config", None), ATTENTION):
                    plain = attention_of(module.config) or "eager"
                    set_value(view_of_config(module), ATTENTION, Implementation(plain))
                    vars(module).update(_autopar_rows=state, _autopar_list=number, _autopar_path=name)
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


def undo(model: nn.Module) -> None:
    """Undo :func:`apply`: each rank runs the full model again."""
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
        remove_forward_hooks(module, (RowHook,))


class RowHook:
    """A hook of a model that runs over rows; :func:`undo` removes it."""

    def __init__(self, state: RowState, outermost: bool = False) -> None:
        self.state, self.outermost = state, outermost


class BeforeRows(RowHook):
    """Forward pre-hook of a Hugging Face model: decide whether this forward runs over rows."""

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = self.state
        if self.outermost:
            state.running = 0  # an interrupted forward did not end
        state.running += 1
        caches = [cache for x in (*args, *kwargs.values()) if isinstance(x, Cache) for cache in caches_in(x)]
        if state.running > 1:
            if state.cutting and any(map(holds_tokens, caches)):
                raise ConfigError(
                    f"context_parallel_size={state.axis.size}: {type(model).__name__} must not get keys and values "
                    "cached in this forward, which cover this rank's rows only\n  Use tensor_parallel_size, with or "
                    "without sequence_parallel."
                )
            return None
        cached = kwargs.get("use_cache") is True or bool(caches)
        if not cached and (kwargs.get("output_attentions") or getattr(model.config, "output_attentions", False)):
            raise ConfigError(
                f"output_attentions=True is not supported with context_parallel_size={state.axis.size}\n"
                "  Remove it, or use the plain model for attention maps."
            )
        if not cached and state.refused:
            raise ConfigError(state.refused)
        keep = kwargs.get("logits_to_keep", 0)
        every = isinstance(keep, int) and keep == 0 and self.outermost
        state.region.expect_logits(kwargs.get("labels") is not None)
        state.start(cutting=not cached, keeping=every and state.plan.through)
        return (args, kwargs) if cached or state.tracking is not None else entered((args, kwargs), state.axis)


class AfterRows(RowHook):
    """Forward hook, called after an error too: gather outputs collected inside blocks."""

    def __call__(self, model: Any, args: Any, output: Any) -> Any:
        state = self.state
        state.running = max(state.running - 1, 0)
        outermost = state.running == 0
        if state.cutting and isinstance(output, dict):
            output = _joined(output, state, outermost=outermost)
        if outermost:
            output = full_tensors(output) if state.cutting else output
            state.finish(failed=output is None)
        return output


def _joined(output: Any, state: RowState, *, outermost: bool) -> Any:
    """Gather outputs collected from blocks, and drop the empty cache that the model made itself."""
    changed: dict[str, Any] = {}
    for name, value in output.items():
        if outermost and isinstance(value, Cache):
            changed[name] = None
        if (name in _ROUTERS or (outermost and name in _HIDDEN)) and isinstance(value, tuple | list):
            number = len(state.plan.lists) - 1
            if name.startswith("encoder"):
                number -= 1  # no such list if the encoder ran on full sequences
            changed[name] = _gathered(value, state, number)
    return type(output)(**{**output, **changed}) if changed else output


_ROUTERS = ("router_logits", "encoder_router_logits", "decoder_router_logits")
_HIDDEN = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")


def _gathered(value: Any, state: RowState, number: int) -> Any:
    """Gather the output of a block if it has this rank's rows; the output of a module with all rows is full already."""
    layout = state.layouts.get(number)
    if isinstance(value, tuple | list):
        return type(value)(_gathered(x, state, number) for x in value)
    if not isinstance(value, torch.Tensor) or layout is None or value.ndim < 2:
        return value
    own, dim = layout.local_size(state.axis.rank), 1 if value.ndim > 2 else 0  # [batch * rows, experts]
    expected = own if dim else own * state.batches.get(number, 0)
    return gather_all(value, state, layout, dim) if value.shape[dim] == expected else value


class BeforeHead(RowHook):
    """Forward pre-hook of the head, which then computes logits for this rank's rows only."""

    def __call__(self, head: Any, args: tuple[Any, ...]) -> Any:
        state = self.state
        layout = state.layouts.get(len(state.plan.lists) - 1)
        if not state.cutting or layout is None or not args or not isinstance(args[0], torch.Tensor):
            return None
        x = args[0]
        held = state.tracking is not None and state.tracking.holds_rows(x)
        if x.ndim != 3 or x.shape[1] != layout.size or held:
            return None
        state.keeping = True
        return (state.mark(layout.shard(x, state.axis.rank, 1)), *args[1:])


class AfterHead(RowHook):
    """Forward hook of the head, which makes its logits of this rank's rows gather lazily."""

    def __call__(self, head: Any, args: Any, logits: torch.Tensor) -> torch.Tensor | None:
        state = self.state
        layout = state.layouts.get(len(state.plan.lists) - 1)
        if not state.keeping or layout is None or logits.shape[1] != layout.local_size(state.axis.rank):
            return None
        state.region.draw_alike()
        if state.tracking is not None:
            return logits.new_empty(logits.shape[0], layout.size, logits.shape[-1])
        name = f"forward {state.forwards} of model {state.region.model}"
        made = sharded_logits(RowsOfLogits(logits, state.axis, layout, name))
        at_once = state.gathers_logits or state.region.is_evaluated(head.training, made.nbytes)
        return made.gathered() if at_once else made


# -- blocks, and modules inside them ------------------------------------------------------------------------------

_FULL = ("mask", "alibi", "cross_attention", "cu_seq")
"""Parts of names of block arguments that stay full: masks. (``encoder_...``: arguments of another sequence.)"""


class BlockBoundary:
    """Class mixed into a block; comes first in the MRO."""

    training: bool
    _gradient_checkpointing_func: Callable[..., Any]
    _autopar_rows: RowState
    _autopar_place: tuple[int, bool, bool]  # number of its list, and whether it is the first and the last block in it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state, (number, first, last) = self._autopar_rows, self._autopar_place
        if not state.cutting:
            state.check_recomputed()
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        named = given_by_name(self, args, kwargs)
        hidden = next((name for name, x in named if isinstance(x, torch.Tensor)), "")
        if (first and number in state.inside) and not state.plan.between and state.tracking is not None:
            raise state.tracking.mixed("the first block runs a second time", between=True)
        if first or state.plan.between:
            x = dict(named).get(hidden)
            state.enter(number, _length(hidden, x, state), x.shape[0] if isinstance(x, torch.Tensor) else 0)
        layout = state.layouts.get(number)
        if layout is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        state.region.draw_per_rank(self.training)
        recompute = vars(self).get(RECOMPUTE)
        if recompute is not None and not isinstance(recompute, Recomputed):
            for module in self.modules():  # type: ignore[attr-defined]  # also layers recomputed separately
                plain = vars(module).get(RECOMPUTE)
                if plain is not None and not isinstance(plain, Recomputed):
                    module._gradient_checkpointing_func = Recomputed(plain, state)
        full = first or state.plan.between
        enter = lambda name, x: self._enter(name, x, layout, full=full or name != hidden)  # noqa: E731
        args, kwargs = change_given(self, args, kwargs, enter)
        out = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if not (last or state.plan.between):
            return out
        keeps = state.keeping and number == len(state.plan.lists) - 1 and not state.plan.between  # up to the head
        if not keeps:
            state.region.draw_alike()
            state.inside.discard(number)
        return _join(state, layout, out, keeps=keeps)

    def _enter(self, name: str, value: Any, layout: Layout, *, full: bool) -> Any:
        """Return this rank's rows of an argument, or all of an argument that stays full."""
        if isinstance(value, Cache):
            return None  # empty, and made by the model itself
        if not full or name.startswith("encoder_") or any(part in name for part in _FULL):
            return value
        state = self._autopar_rows

        def own(path: Any, x: Any) -> Any:
            if type(x) is int:
                _check_number(f"{name}{keystr(path)}", x, state)
            if not isinstance(x, torch.Tensor):
                return x
            dim = _dim_of_rows(place_of(path, x, name), x, layout.size, state)
            if dim is None:
                return full_tensors(x)
            opened = x.opened(layout, dim) if isinstance(x, LazyRows) else None
            return state.narrow(full_tensors(x), layout, dim) if opened is None else opened

        return tree_map_with_path(own, value)


def _length(name: str, x: Any, state: RowState) -> int:
    """Return the number of rows of the hidden states; 0 for a value without rows."""
    if not isinstance(x, torch.Tensor) or x.ndim < 3:
        return 0
    if state.tracking is not None:
        length = state.tracking.prime * state.axis.size
        return length if list(x.shape).count(length) == 1 and not state.tracking.holds_rows(x) else 0
    return x.shape[state.plan.arguments.get(place_of((), x, name), 1)]


def _join(state: RowState, layout: Layout, out: Any, *, keeps: bool) -> Any:
    """Gather the rows in a block's result, unless this forward ``keeps`` them up to the head."""
    own, seen = layout.local_size(state.axis.rank), state.plan.arguments

    def full(path: Any, x: torch.Tensor) -> Any:
        place = place_of(path, x, "return")
        if state.tracking is not None:
            dims = [dim for dim, size in enumerate(x.shape) if size == own and state.tracking.holds_rows(x)]
            seen[place] = dims[0] if len(dims) == 1 else -1
        dim = seen.get(place, -1)
        return x if keeps or dim < 0 or x.shape[dim] != own else gather_all(x, state, layout, dim)

    return map_tensors(full, out)


def _dim_of_rows(path: str, x: torch.Tensor, length: int, state: RowState) -> int | None:
    """Return the dim of rows, as recorded in the dry run; otherwise the dim of size ``length``, or None."""
    fitting = [dim for dim, size in enumerate(x.shape) if size == length]
    seen = state.plan.arguments
    if state.tracking is not None and (fitting or path not in seen) and not state.tracking.holds_rows(x):
        seen[path] = fitting[0] if len(fitting) == 1 else -1
    if path in seen:
        return seen[path] if seen[path] in fitting else None
    if len(fitting) > 1 and not (x.ndim <= 3 and 1 in fitting):
        raise ConfigError(
            f"context_parallel_size: argument {path} of a block must have one dim of {length} rows, got shape "
            f"{list(x.shape)}\n  Use another sequence length."
        )
    return 1 if len(fitting) > 1 else next(iter(fitting), None)


def _check_number(name: str, number: int, state: RowState) -> None:
    """Check that the dry run saw the value of an integer argument of a block, which may be a number of rows."""
    if name.startswith(("max_length_", "max_seqlen_", "num_items_in_batch")):
        return  # counts of full sequences, for the attention function and for the loss
    seen = state.plan.numbers.setdefault(name, set())
    if state.tracking is not None:
        if number and number % state.tracking.prime == 0:
            raise state.tracking.mixed(f"argument {name} of a block counts rows, {number}")
        seen.add(number)
    elif number not in seen:
        known = ", ".join(map(str, sorted(seen)[:8])) or "missing"
        raise ConfigError(
            f"context_parallel_size={state.axis.size}: argument {name} of a block is {number}, which may count rows\n"
            f"  In the dry run it was {known}. For these inputs use the reference model, or tensor_parallel_size."
        )


class Recomputed:
    """A checkpoint function that recomputes a block with the rows of its forward."""

    def __init__(self, plain: Callable[..., Any], state: RowState) -> None:
        self.plain, self.state = plain, state

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        forward = self.state.snapshot()

        def resumed(*args: Any, **kwargs: Any) -> Any:
            with self.state.resumed(forward):
                return function(*args, **kwargs)

        return self.plain(resumed, *args, **kwargs)


class NeedsAllRows:
    """Class mixed into a module that mixes rows: it runs with all rows on every rank, or passes states."""

    _autopar_rows: RowState
    _autopar_whole: tuple[int, GatheredModule, str]  # number of its list, how it runs, its path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state, (number, where, path) = self._autopar_rows, self._autopar_whole
        layout = state.layouts.get(number)
        if not state.cutting or layout is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        if where.states is not None and state.tracking is None:
            own = own_arguments(self, (args, kwargs), where.states, where.inputs, layout, state.axis.rank)
            if own is not None:
                anchors = (*tensors_in(own), *self.parameters())  # type: ignore[attr-defined]
                states = StatesOfRank(where.states, state.links, path, anchors)
                args, kwargs = with_states(self, own, where.states, states)
                return states.tie(super().__call__(*args, **kwargs))  # type: ignore[misc]
        args, kwargs = self._gather((args, kwargs), state, number, layout, where)
        full, paused = replaced(vars(state), {"cutting": False}), contextlib.nullcontext()
        paused = paused if state.tracking is None else state.tracking.paused()
        with full, paused, state.region.outside():  # all ranks compute the same, with the same dropout
            out = super().__call__(*args, **kwargs)  # type: ignore[misc]
        return _own_part(out, state, layout, where)

    def _gather(self, values: Any, state: RowState, number: int, layout: Layout, where: GatheredModule) -> Any:
        own = layout.local_size(state.axis.rank)

        def gather(path: Any, x: torch.Tensor) -> Any:
            name = place_of(path, x)
            if state.tracking is not None and state.tracking.holds_rows(x):
                found = next(d for d, size in enumerate(x.shape) if size and size % own == 0)
                where.inputs[name], where.folded[name] = found, x.shape[found] // own
            dim = where.inputs.get(name)
            before = state.full_of(x)
            if dim is None or before is not x:
                return before
            folded = where.folded[name]  # multiple of the rows in the dim: 1, or once per sequence
            times = 1 if folded == 1 else folded // (state.axis.size + 1) * state.batches[number]  # in this forward
            if x.shape[dim] == layout.size * times:
                return x
            if x.shape[dim] != own * times:  # the same on all ranks, whose rows differ in number
                raise ConfigError(
                    f"context_parallel_size={state.axis.size}: argument {name} of a module that needs all rows must "
                    f"have {own * times} or {layout.size * times} rows in dim {dim}, got shape {list(x.shape)}\n"
                    "  Use tensor_parallel_size for these inputs, with or without sequence_parallel."
                )
            return gather_all(x, state, layout, dim)

        return map_tensors(gather, values)


def gather_all(x: torch.Tensor, state: RowState, layout: Layout, dim: int) -> torch.Tensor:
    """Gather rows along ``dim``, which may include the batch: ``[batch * rows, ...]``."""
    own = layout.local_size(state.axis.rank)
    if own and x.shape[dim] != own:
        parts = x.unflatten(dim, (-1, own))
        return gather_all(parts, state, layout, dim + 1).flatten(dim, dim + 1)
    if x.is_floating_point():
        return state.unmark(join(x, state.axis, dim, layout))
    return state.unmark(all_gather(x, state.axis, layout, dim))


def _own_part(out: Any, state: RowState, layout: Layout, where: GatheredModule) -> Any:
    def own(path: Any, x: torch.Tensor) -> Any:
        name = keystr(path)
        if state.tracking is not None:
            dims = [d for d, size in enumerate(x.shape) if size and size % layout.size == 0]
            if len(dims) > 1:
                state.tracking.mark_table(x)
            if len(dims) == 1:
                where.outputs[name] = dims[0]
        dim = where.outputs.get(name)
        return x if dim is None else _own_along(x, state, layout, dim)

    return map_tensors(own, out)


def _own_along(x: torch.Tensor, state: RowState, layout: Layout, dim: int) -> torch.Tensor:
    if x.shape[dim] != layout.size:  # [batch * rows, ...]
        return _own_along(x.unflatten(dim, (-1, layout.size)), state, layout, dim + 1).flatten(dim, dim + 1)
    return state.mark(layout.shard(x, state.axis.rank, dim))
