"""User hooks on modules with sharded activations get full tensors, and may return full tensors.

A hook on a column-parallel layer would see local features only. So an object replaces the hook in torch's dict of
hooks. It gathers the hook's arguments and shards its results, both differentiably. Handles still remove the hook. The
module continues with a shard of the tensor that the hook got, so the hook may keep this tensor for the backward pass;
only the input of a forward hook is a copy. In sequence parallelism, a block with hooks inside runs on full sequences.
Without hooks nothing is gathered. A rank check at the start of each forward ensures that all ranks have the same hooks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.call_site import LOCAL_HOOKS, described, is_of_library, user_hooks
from autopar.compat.tensors import (
    HOOKS,
    hooks_of,
    hooks_of_all,
    hooks_with_kwargs,
    own_parameters,
    tree_leaves,
    tree_map_only,
    version_of,
)
from autopar.distributed import collectives
from autopar.distributed.axis import Axis
from autopar.errors import ConfigError
from autopar.layout import Layout
from autopar.plan.plan import ModulePlan

_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")


def local_hooks(module: nn.Module) -> None:
    """Let all hooks on a module, also later ones, see local shards instead of full tensors.

    Args:
        module: Module inside a parallelized model. Hooks on modules inside it still see full tensors.
    """
    vars(module)[LOCAL_HOOKS] = True
    for hooks in (hooks_of(module, kind) for kind in HOOKS):
        hooks.update({key: hook.user_hook for key, hook in hooks.items() if isinstance(hook, _FullTensorHook)})


class FullTensorHooks:
    """The user hooks of one model, which see full tensors; ``dicts``: torch's dicts that may hold a user hook."""

    def __init__(self, model: nn.Module, axis: Axis) -> None:
        self._known = {id(shards.module): shards._replace(axis=axis) for shards in _shards_of(model)}
        self._places = [(hooks_of(s.module, kind), kind, s) for s in self._known.values() for kind in HOOKS]
        self._blocks = [  # blocks on sequence shards
            (path, block, [(module, hooks_of(module, kind)) for module in block.modules() for kind in HOOKS])
            for path, block in model.named_modules()
            if hasattr(block, "rows_hooked")
        ]
        inside = [hooks for _, _, below in self._blocks for _, hooks in below]
        self.dicts = [hooks for hooks, _, _ in self._places] + inside + [hooks_of_all(kind)[0] for kind in HOOKS]

    def wrap(self) -> dict[str, str]:
        """Wrap new hooks; return the places of all hooks, described identically on all ranks."""
        places = list[str]()
        for hooks, kind, shards in self._places:
            if hooks and LOCAL_HOOKS not in vars(shards.module):
                self._wrap(hooks, hooks_with_kwargs(shards.module, kind), kind, {id(shards.module): shards})
                places += [f"{kind} on {shards.path}" for hook in hooks.values() if isinstance(hook, _FullTensorHook)]
        everywhere = False
        for kind in HOOKS:
            hooks, with_kwargs = hooks_of_all(kind)
            self._wrap(hooks, with_kwargs, kind, self._known)
            found = [f"{kind} on all modules" for hook in hooks.values() if isinstance(hook, _FullTensorHook)]
            places, everywhere = places + found, everywhere or bool(found)
        for path, block, inside in self._blocks:
            here = (user_hooks(hooks) for module, hooks in inside if hooks and LOCAL_HOOKS not in vars(module))
            block.rows_hooked = everywhere or any(here)
            places += [f"inside of {path}"] * block.rows_hooked
        return {"hooks that see full tensors": ", ".join(places)} if places else {}

    def _wrap(self, hooks: dict[int, Any], with_kwargs: set[int], kind: str, known: Mapping[int, HookedModule]) -> None:
        for key, hook in list(hooks.items()):
            if isinstance(hook, _FullTensorHook):
                hook.known.update(known)  # a global hook may serve several models
            elif not is_of_library(hook):
                hooks[key] = _FullTensorHook(hook, kind, key in with_kwargs, dict(known))

    def unwrap(self) -> None:
        """Restore the original hooks; a global hook only if no other model wraps it."""
        for hooks in self.dicts:
            for key, hook in list(hooks.items()):
                if isinstance(hook, _FullTensorHook):
                    hook.known = {module: shards for module, shards in hook.known.items() if module not in self._known}
                    if not hook.known:
                        hooks[key] = hook.user_hook


class _FullTensorHook:
    """The replacement of a user hook, on one module or on all modules."""

    def __init__(self, hook: Callable[..., Any], kind: str, with_kwargs: bool, known: dict[int, HookedModule]) -> None:
        self.user_hook, self.kind, self.with_kwargs, self.known = hook, kind, with_kwargs, known

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.user_hook, memo)  # a copied model wraps its hooks again

    def __call__(self, module: nn.Module, *values: Any) -> Any:
        """Call the hook as torch would for the single-process model."""
        shards = self.known.get(id(module))
        failed = self.kind == "forward" and values[-1] is None  # torch calls it after an error, maybe on one rank
        if shards is None or failed or LOCAL_HOOKS in vars(module):
            return self.user_hook(module, *values)
        backward = self.kind.startswith("backward")
        given, made = GatheredTensors(shards.given, shards), GatheredTensors(shards.made, shards)
        if self.kind == "forward":
            *inputs, output = values
            seen = made.full(output)
            result = self.user_hook(module, *given.full(inputs), seen)
            if given.is_written():
                raise ConfigError(
                    f"the hook {described(self.user_hook)} on {shards.path} must not change its module's sharded input "
                    "in place: it gets a copy\n  Change the input in a forward pre-hook, return a changed output, or "
                    "use autopar.local_hooks(module)."
                )
            return made.cut(seen if result is None and (made.is_written() or made.is_kept()) else result)
        if self.kind == "backward":
            into, out = values
            seen = given.full(into, gradient=True)
            result = self.user_hook(module, seen, made.full(out, gradient=True))
            return given.cut(seen if result is None and given.is_written() else result, gradient=True)
        front = made if backward else given
        entered = front.full(list(values), gradient=backward)
        result = self.user_hook(module, *entered)
        if result is None and (front.is_written() or front.is_kept()):
            result = tuple(entered) if self.with_kwargs else entered[0]
        return front.cut(result, gradient=backward)


def _shards_of(model: nn.Module) -> Iterator[HookedModule]:
    """Yield sharded layers, and the activations and norms next to them."""
    found: dict[int, HookedModule] = {}
    for path, module in model.named_modules():
        plan: ModulePlan | None = vars(module).get("autopar")
        layout = None if plan is None else plan.layout
        if plan is not None and plan.rule == "region":
            found.update(_inside_experts(path, module, plan))
        if plan is None or layout is None or plan.rule not in ("column", "row") or plan.gather_output:
            continue
        if own_parameters(module).get("weight") is None:
            continue
        if plan.rule == "row":
            found[id(module)] = HookedModule(path, module, None if plan.split_input else layout)
            continue
        found[id(module)] = HookedModule(path, module, made=layout)
        above, _, own = path.rpartition(".")
        for name, near in model.get_submodule(above).named_children():
            norm = "norm" in name and name[0] == own[0] and "autopar" in vars(near)  # such as q_norm next to q_proj
            if norm or type(near).__module__ in _ACTIVATIONS:
                found.setdefault(id(near), HookedModule(f"{above}.{name}".strip("."), near, layout, layout, heads=norm))
    yield from found.values()


def _inside_experts(path: str, experts: nn.Module, plan: ModulePlan) -> Iterator[tuple[int, HookedModule]]:
    """Yield the activation between matrices of experts, if the features of each expert are sharded."""
    own = own_parameters(experts)  # [experts, features in, features out], or with the last dims swapped
    matrices = (layout for name, layout in plan.layouts.items() if name in own and own[name].dim() == 3)
    # Skip gate and up, which are two blocks in one matrix.
    features = next((layout for layout in matrices if layout.dim and len(layout.blocks) == 1), None)
    for name, near in experts.named_children() if features is not None else ():
        if type(near).__module__ in _ACTIVATIONS:
            yield id(near), HookedModule(f"{path}.{name}", near, features, features)


class HookedModule(NamedTuple):
    """A module with sharded input or output."""

    path: str
    module: nn.Module
    given: Layout | None = None  # layout of the input features; None if they are full
    made: Layout | None = None  # layout of the output features; None if they are full
    heads: bool = False  # True if tensors with four dims have a dim of heads
    axis: Axis | None = None  # tp axis of the model


class GatheredTensors:
    """The sharded tensors of one call of a module: gathered for a hook, and sharded again after it."""

    def __init__(self, layout: Layout | None, shards: HookedModule) -> None:
        self._gathered: list[tuple[torch.Tensor, int]] = []  # gathered tensors, and their versions
        assert shards.axis is not None
        self.layout, self.axis, self.heads, self.path = layout, shards.axis, shards.heads, shards.path
        self._cuts: dict[torch.Size, tuple[int, Layout]] = {}  # shape of a full tensor -> sharded dim, layout
        self._kept: list[torch.Tensor] = []  # tensors that the hook gets unchanged

    def full(self, value: Any, *, gradient: bool = False) -> Any:
        """Return ``value`` with its first tensor, the hidden states, gathered; a ``gradient`` without autograd."""
        tensors = [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
        first = next((x for x in tensors if x.is_floating_point() and x.ndim > 1), None)
        found = None if first is None else self._sharded(first)
        if first is None or found is None:
            return value
        full = self._gather(first, *found, gradient)
        self._kept += [x for x in tensors if x is not first]
        return tree_map_only(torch.Tensor, lambda x: full if x is first else x, value)

    def cut(self, value: Any, *, gradient: bool = False) -> Any:
        """Return ``value`` with local shards of the tensors that have the shape of a gathered tensor."""
        return tree_map_only(torch.Tensor, lambda x: self._own(x, gradient), value)

    def is_written(self) -> bool:
        """Return whether the hook changed a gathered tensor in place."""
        return any(version_of(x) != version for x, version in self._gathered)

    def is_kept(self) -> bool:
        """Return whether a gathered tensor requires a gradient, which the hook may use until the backward pass."""
        return any(x.requires_grad for x, _ in self._gathered)

    def _gather(self, x: torch.Tensor, dim: int, layout: Layout, gradient: bool) -> torch.Tensor:
        parts = collectives.sum_shards if layout.replicated else collectives.all_gather  # for a gradient
        full = (parts if gradient else collectives.gather)(x, self.axis, layout, dim)
        self._cuts[full.shape] = dim, layout
        self._gathered.append((full, version_of(full)))
        return full

    def _own(self, x: torch.Tensor, gradient: bool) -> torch.Tensor:
        found = None if any(x is kept for kept in self._kept) else self._cuts.get(x.shape)
        if found is None:
            return x
        dim, layout = found
        if not gradient:
            return collectives.scatter(x, self.axis, layout, dim)
        return collectives.owned(layout.shard(x, self.axis.rank, dim), self.axis, layout, dim)

    def _sharded(self, x: torch.Tensor) -> tuple[int, Layout] | None:
        """Return the dim along which a tensor is sharded, and its layout; None if it is full.

        The size decides. With uneven shards it may match by chance on one rank, so it must match on all ranks.
        """
        ways: list[tuple[int, int, Layout]] = []  # dim, size there, layout
        if self.layout is not None and self.heads and x.ndim == 4:  # [batch, heads/tp, seq, d], or seq before heads
            heads = Layout.of(1, [replace(block, width=1) for block in self.layout.blocks])
            ways += [(dim, x.shape[dim], heads) for dim in (1, 2)]
        elif self.layout is not None:
            ways.append((x.ndim - 1, x.shape[-1], self.layout))
        fit = [int(size == layout.local_size(self.axis.rank)) for _, size, layout in ways]
        if any(len({layout.local_size(rank) for rank in range(self.axis.size)}) > 1 for _, _, layout in ways):
            _, fit = collectives.extremes_over(self.axis, fit)
        found = [(dim, layout) for (dim, _, layout), fits in zip(ways, fit, strict=True) if fits]
        if len(found) > 1 and found[0][1] is found[1][1]:
            raise ConfigError(
                f"a hook on {self.path} cannot get full heads: {list(x.shape)} has as many positions as heads on this "
                "rank, so the dim of heads is ambiguous\n  Use another length, a hook on q_proj or k_proj, or "
                "autopar.local_hooks(module)."
            )
        return found[0] if found else None
