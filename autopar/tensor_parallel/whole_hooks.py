"""Hooks of the user's on modules whose activations are sharded: they get whole tensors, and give back whole ones.

A hook on a column-parallel layer would see this rank's features. Its place in torch's own dict of hooks is taken by an
object that gathers what the hook reads, and cuts what it returns; both are differentiable. Handles still remove it.
Nothing is gathered where no hook is. All ranks have the same hooks: that is compared when a forward begins.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.call_site import is_of_library
from autopar.distributed import collectives, plain_collectives
from autopar.distributed.axis import Axis
from autopar.errors import ConfigError
from autopar.foreign.modules import hooks_of, hooks_of_all, hooks_with_kwargs, own_parameters
from autopar.layout import Layout
from autopar.plan.plan import ModulePlan

__all__ = ["WholeHooks", "local_hooks"]

_KINDS = ("forward", "forward_pre", "backward", "backward_pre")
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
_LOCAL = "_autopar_local_hooks"


def local_hooks(module: nn.Module) -> None:
    """Let hooks on a module see this rank's shards, not whole tensors: those that are registered, and later ones.

    Args:
        module: inside of a parallelized model. Hooks on modules inside of it are not meant.
    """
    vars(module)[_LOCAL] = True
    for kind in _KINDS:
        _unwrap(hooks_of(module, kind))


class _Shards(NamedTuple):
    """Facts about the tensors of one module.

    Attributes:
        path, module: of it.
        given, made: layouts of the features that its forward is given, and that it makes; None: they are whole.
        rows: which rows of the sequence its block computes with now.
        heads: tensors of four dims have heads as a dim of their own.
    """

    path: str
    module: nn.Module
    given: Layout | None = None
    made: Layout | None = None
    rows: Any = None  # a RowsOfList
    heads: bool = False


class WholeHooks:
    """Finds hooks of the user's when a forward begins, and lets them see whole tensors."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._known: dict[int, _Shards] | None = None
        self._places: list[tuple[dict[int, Any], str, _Shards]] = []  # torch's own dicts, by kind

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeHooks:
        return WholeHooks(self.axis)

    def wrap(self, model: nn.Module) -> str:
        """Wrap the hooks that are new; return where all of them are, in words that are alike on all ranks."""
        if self._known is None:
            self._known = {id(shards.module): shards for shards in _shards_of(model)}
            self._places = [(hooks_of(s.module, kind), kind, s) for s in self._known.values() for kind in _KINDS]
        places = []
        for hooks, kind, shards in self._places:
            if hooks and _LOCAL not in vars(shards.module):
                self._wrap(hooks, hooks_with_kwargs(shards.module, kind), kind, {id(shards.module): shards})
                places += [f"{kind} on {shards.path}" for hook in hooks.values() if isinstance(hook, _WholeHook)]
        for kind in _KINDS:
            hooks, with_kwargs = hooks_of_all(kind)
            if hooks:
                self._wrap(hooks, with_kwargs, kind, self._known)
                places += [f"{kind} on all modules" for hook in hooks.values() if isinstance(hook, _WholeHook)]
        return ", ".join(places)

    def _wrap(self, hooks: dict[int, Any], with_kwargs: set[int], kind: str, known: Mapping[int, _Shards]) -> None:
        for key, hook in list(hooks.items()):
            if isinstance(hook, _WholeHook):
                hook.known.update(known)  # on all modules, of several models
            elif not is_of_library(hook):
                hooks[key] = _WholeHook(hook, kind, key in with_kwargs, dict(known), self.axis)

    def unwrap(self) -> None:
        """Put the hooks themselves back in their places."""
        for hooks, _, _ in self._places:
            _unwrap(hooks)
        for kind in _KINDS if self._places else ():
            for hook in hooks_of_all(kind)[0].values():
                for key in self._known or () if isinstance(hook, _WholeHook) else ():
                    hook.known.pop(key, None)
        self._known, self._places = None, []


def _unwrap(hooks: dict[int, Any]) -> None:
    for key, hook in list(hooks.items()):
        if isinstance(hook, _WholeHook):
            hooks[key] = hook.hook


class _WholeHook:
    """In the place of a user's hook, on one module or on all."""

    def __init__(
        self, hook: Callable[..., Any], kind: str, with_kwargs: bool, known: dict[int, _Shards], axis: Axis
    ) -> None:
        self.hook, self.kind, self.with_kwargs, self.known, self.axis = hook, kind, with_kwargs, known, axis

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.hook, memo)  # a copied model finds its hooks anew

    def __call__(self, module: nn.Module, *values: Any) -> Any:
        """Call the hook as torch would on one process."""
        shards = self.known.get(id(module))
        failed = self.kind == "forward" and values[-1] is None  # called in spite of an error, maybe on one rank
        if shards is None or failed or _LOCAL in vars(module):
            return self.hook(module, *values)
        given, made = _Seen(shards.given, shards, self.axis), _Seen(shards.made, shards, self.axis)
        if self.kind == "forward":
            *inputs, output = values
            return made.cut(self.hook(module, *given.whole(inputs), made.whole(output)))
        if self.kind == "forward_pre":
            return given.cut(self.hook(module, *given.whole(list(values))))
        if self.kind == "backward":
            into, out = values
            result = self.hook(module, given.whole(into, gradient=True), made.whole(out, gradient=True))
            return given.cut(result, gradient=True)
        return made.cut(self.hook(module, *made.whole(list(values), gradient=True)), gradient=True)


class _Seen:
    """Makes what a module is given, or makes, whole, and cuts what a hook returns as that was cut."""

    def __init__(self, layout: Layout | None, shards: _Shards, axis: Axis) -> None:
        self.layout, self.axis, self.heads, self.path = layout, axis, shards.heads, shards.path
        rows = shards.rows
        self.rows: Layout | None = None if rows is None else rows.rows
        self.batch = 1 if rows is None else max(rows.batch, 1)
        self._cuts: dict[torch.Size, tuple[int, Layout]] = {}  # shape of the whole -> how it is sharded
        self._kept: list[torch.Tensor] = []  # given as they are

    def whole(self, value: Any, *, gradient: bool = False) -> Any:
        """Return it with its first tensor whole: hidden states, beside which others are. Gradients have no gradient."""
        first = next(_tensors(value), None)
        found = None if first is None else self._sharded(first)
        if first is None or found is None:
            return value
        full = self._gather(first, *found, gradient)
        return _mapped(lambda x: full if x is first else self._as_it_is(x), value)

    def cut(self, value: Any, *, gradient: bool = False) -> Any:
        """Return it with this rank's parts of tensors that have the shape of one that was gathered."""
        return _mapped(lambda x: self._own(x, gradient), value)

    def _as_it_is(self, x: torch.Tensor) -> torch.Tensor:
        self._kept.append(x)
        return x

    def _gather(self, x: torch.Tensor, dim: int, layout: Layout, gradient: bool) -> torch.Tensor:
        flat = layout is self.rows and x.ndim == 2
        y = x.unflatten(0, (self.batch, -1)) if flat else x
        if not gradient:
            full = collectives.gather(y, self.axis, layout, dim)
        elif layout.replicated:  # each of several ranks has a part
            full = plain_collectives.sum_shards(y, self.axis, layout, dim)
        else:
            full = plain_collectives.all_gather(y, self.axis, layout, dim)
        full = full.flatten(0, 1) if flat else full
        self._cuts[full.shape] = dim, layout
        return full

    def _own(self, x: torch.Tensor, gradient: bool) -> torch.Tensor:
        found = None if any(x is kept for kept in self._kept) else self._cuts.get(x.shape)
        if found is None:
            return x
        dim, layout = found
        flat = layout is self.rows and x.ndim == 2
        y = x.unflatten(0, (self.batch, -1)) if flat else x
        if not gradient:
            part = collectives.scatter(y, self.axis, layout, dim)
        else:
            part = plain_collectives.owned(layout.shard(y, self.axis.rank, dim), self.axis, layout, dim)
        return part.flatten(0, 1) if flat else part

    def _sharded(self, x: torch.Tensor) -> tuple[int, Layout] | None:
        """Return the dim along which a tensor is sharded, and how: features, heads or rows; None if it is whole.

        Sizes say so. Where those of the ranks differ, one may match by chance, so it has to on all of them.
        """
        ways: list[tuple[int, int, Layout]] = []  # dim, size there, layout
        if self.layout is not None and self.heads and x.ndim == 4:  # [batch, heads/tp, seq, d], or seq before heads
            heads = _heads(self.layout)
            ways += [(dim, x.shape[dim], heads) for dim in (1, 2)]
        elif self.layout is not None:
            ways.append((x.ndim - 1, x.shape[-1], self.layout))
        if self.rows is not None and x.ndim == 3:
            ways.append((1, x.shape[1], self.rows))
        if self.rows is not None and x.ndim == 2 and len(x) % self.batch == 0:
            ways.append((1, len(x) // self.batch, self.rows))
        fit = [int(size == layout.local_size(self.axis.rank)) for _, size, layout in ways]
        if any(len({layout.local_size(rank) for rank in range(self.axis.size)}) > 1 for _, _, layout in ways):
            _, fit = plain_collectives.extremes_over(self.axis, fit)
        found = [(dim, layout) for (dim, _, layout), fits in zip(ways, fit, strict=True) if fits]
        if len(found) > 1 and found[0][1] is found[1][1]:
            raise ConfigError(
                f"a hook on {self.path} would get whole heads, but {list(x.shape)} has as many positions as heads on "
                "this rank, and which\n  are which cannot be told. Use another length, a hook on q_proj or k_proj, or "
                "autopar.local_hooks(module)."
            )
        return found[0] if found else None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of numbers in tuples, lists and dicts, with two dims or more."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.ndim > 1:
            yield value
    elif type(value) in (tuple, list, dict):
        for each in value.values() if type(value) is dict else value:
            yield from _tensors(each)


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Change the tensors in tuples, lists and dicts; a cache, which is written into, stays the same object."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(_mapped(function, each) for each in value)
    if type(value) is dict:
        return {key: _mapped(function, each) for key, each in value.items()}
    return value


@functools.lru_cache(maxsize=256)
def _heads(layout: Layout) -> Layout:
    """Return the layout of whole units, where features are a dim of their own: ``[batch, heads/tp, seq, d]``."""
    return Layout.of(1, [replace(block, width=1) for block in layout.blocks])


def _shards_of(model: nn.Module) -> Iterator[_Shards]:
    """Yield sharded layers, the activations and norms beside them, and all modules of blocks that compute with rows."""
    found: dict[int, _Shards] = {}
    for path, module in model.named_modules():
        plan: ModulePlan | None = vars(module).get("autopar")
        layout = None if plan is None else plan.layout
        if plan is None or layout is None or plan.rule not in ("column", "row") or plan.gather_output:
            continue
        if own_parameters(module).get("weight") is None:
            continue
        if plan.rule == "row":
            found[id(module)] = _Shards(path, module, None if plan.split_input else layout)
            continue
        found[id(module)] = _Shards(path, module, made=layout)
        above, _, own = path.rpartition(".")
        for name, beside in model.get_submodule(above).named_children():
            norm = "norm" in name and name[0] == own[0] and "autopar" in vars(beside)  # q_norm beside q_proj
            if norm or type(beside).__module__ in _ACTIVATIONS:
                found.setdefault(id(beside), _Shards(f"{above}.{name}".strip("."), beside, layout, layout, heads=norm))
    for path, block in model.named_modules():
        rows = getattr(block, "rows_list", None)
        for name, module in block.named_modules(prefix=path) if rows is not None else ():
            found[id(module)] = found.get(id(module), _Shards(name, module))._replace(rows=rows)
    yield from found.values()
