"""Hooks of the user's on modules whose activations are sharded: they get whole tensors, and give back whole ones.

A hook on a column-parallel layer would see this rank's features. Its place in torch's own dict of hooks is taken by an
object that gathers what the hook reads, and cuts what it returns; both are differentiable. Handles still remove it.
After it the module continues with a shard of what the hook got, so that the hook may keep that for the backward. In
sequence parallelism a block with hooks inside computes with whole sequences.
Nothing is gathered where no hook is. All ranks have the same hooks: that is compared when a forward begins.
:mod:`~autopar.tensor_parallel.seen_values` says which tensors are gathered, and how;
:mod:`autopar.context_parallel.row_hooks` does so for rows that the ranks of the context-parallel axis have.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from itertools import compress
from typing import Any

import torch
from torch import nn

from autopar.call_site import is_of_library
from autopar.distributed.axis import Axis
from autopar.distributed.shard_reads import inside_hook
from autopar.errors import ConfigError
from autopar.foreign.modules import hooks_of, hooks_of_all, hooks_with_kwargs, own_parameters
from autopar.plan.plan import ModulePlan
from autopar.tensor_parallel.seen_values import Chain, Seen, SeenShards, Shards

_KINDS = ("forward", "forward_pre", "backward", "backward_pre")
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
_LOCAL = "_autopar_local_hooks"
_FRONT = -1  # key among a module's forward pre-hooks, of which torch counts its own from 0


def users_hook(module: nn.Module) -> Any:
    """Return a hook of the user's on a module, which expects whole tensors; None without any."""
    if _LOCAL in vars(module):
        return None
    found = (hook for kind in _KINDS for hook in hooks_of(module, kind).values())
    return next((hook for hook in found if not is_of_library(hook)), None)


def local_hooks(module: nn.Module) -> None:
    """Let hooks on a module see this rank's shards, not whole tensors: those that are registered, and later ones.

    Args:
        module: inside of a parallelized model. Hooks on modules inside of it are not meant.
    """
    vars(module)[_LOCAL] = True
    for kind in _KINDS:
        _unwrap(hooks_of(module, kind))


class WholeHooks:
    """Finds hooks of the user's when a forward begins, and lets them see whole tensors.

    Attributes:
        over_rows: finds modules that compute rows of the sequence, where ranks share sequences: a RowHooks.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.over_rows: Any = None
        self._known: dict[int, Shards] | None = None
        self._places: list[tuple[dict[int, Any], str, Shards]] = []  # torch's own dicts, by kind
        self._dicts: list[dict[int, Any]] = []
        # Modules whose inputs are shards, with torch's dicts of their forward pre-hooks and forward hooks.
        self._fronts: list[tuple[Shards, dict[int, Any], dict[int, Any]]] = []
        self._blocks: list[tuple[str, Any, list[tuple[nn.Module, dict[int, Any]]]]] = []  # that compute with rows

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeHooks:
        copied = memo[id(self)] = WholeHooks(self.axis)
        copied.over_rows = copy.deepcopy(self.over_rows, memo)
        return copied

    @property
    def may_gather(self) -> bool:
        """Whether modules of the model have parts of tensors."""
        return self.axis.size > 1 or self.over_rows is not None

    def wrap(self, model: nn.Module) -> str:
        """Wrap the hooks that are new; return where all of them are, in words that are alike on all ranks."""
        if self._known is None:
            self._find(model)
        assert self._known is not None
        for _, front, _ in self._fronts:
            front.pop(_FRONT, None)
        places, hooked = list[str](), list[tuple[str, str, Any]]()
        for hooks, kind, shards in compress(self._places, self._dicts):
            if _LOCAL not in vars(shards.module):
                self._wrap(hooks, hooks_with_kwargs(shards.module, kind), kind, {id(shards.module): shards})
                found = [hook.hook for hook in hooks.values() if isinstance(hook, _WholeHook)]
                hooked += [(kind, shards.path, hook) for hook in found]
                places += [f"{kind} on {shards.path}" for _ in found]
        for kind in _KINDS:
            hooks, with_kwargs = hooks_of_all(kind)
            if hooks:
                self._wrap(hooks, with_kwargs, kind, self._known)
                found = [hook.hook for hook in hooks.values() if isinstance(hook, _WholeHook)]
                seeing = [s.path for s in self._known.values() if found and _LOCAL not in vars(s.module)]
                hooked += [(kind, path, found[0]) for path in seeing]
                places += [f"{kind} on all modules" for _ in found]
        after = _has_users(hooks_of_all("forward")[0])
        for shards, front, hooks in self._fronts:
            if (after or (hooks and _has_users(hooks))) and _LOCAL not in vars(shards.module):
                front[_FRONT] = _Front(shards, self.axis)
        everywhere = any(_has_users(hooks_of_all(kind)[0]) for kind in _KINDS)
        for path, block, inside in self._blocks:
            here = (_has_users(hooks) for module, hooks in inside if hooks and _LOCAL not in vars(module))
            block.rows_hooked = everywhere or any(here)
            places += [f"inside of {path}"] * block.rows_hooked
        if self.over_rows is not None:
            self.over_rows.begin(hooked)
        return ", ".join(places)

    def _find(self, model: nn.Module) -> None:
        sharded = {id(shards.module): shards for shards in _shards_of(model)} if self.axis.size > 1 else {}
        for path, module, seen in () if self.over_rows is None else self.over_rows.places():
            sharded[id(module)] = sharded.get(id(module), Shards(path, module))._replace(over_rows=seen)
        self._known = sharded
        self._fronts = [
            (shards, hooks_of(shards.module, "forward_pre"), hooks_of(shards.module, "forward"))
            for shards in sharded.values()
            if shards.given is not None
        ]
        self._blocks = [
            (path, block, [(module, hooks_of(module, kind)) for module in block.modules() for kind in _KINDS])
            for path, block in model.named_modules()
            if hasattr(block, "rows_hooked")
        ]
        self._places = [(hooks_of(s.module, kind), kind, s) for s in sharded.values() for kind in _KINDS]
        self._dicts = [hooks for hooks, _, _ in self._places]

    def _wrap(self, hooks: dict[int, Any], with_kwargs: set[int], kind: str, known: Mapping[int, Shards]) -> None:
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
        for _, front, _ in self._fronts:
            front.pop(_FRONT, None)
        self._known, self._places, self._dicts, self._fronts, self._blocks = None, [], [], [], []


def _has_users(hooks: dict[int, Any]) -> bool:
    return any(isinstance(hook, _WholeHook) or not is_of_library(hook) for hook in hooks.values())


def _unwrap(hooks: dict[int, Any]) -> None:
    for key, hook in list(hooks.items()):
        if isinstance(hook, _WholeHook):
            hooks[key] = hook.hook


class _WholeHook:
    """In the place of a user's hook, on one module or on all."""

    def __init__(
        self, hook: Callable[..., Any], kind: str, with_kwargs: bool, known: dict[int, Shards], axis: Axis
    ) -> None:
        self.hook, self.kind, self.with_kwargs, self.known, self.axis = hook, kind, with_kwargs, known, axis

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.hook, memo)  # a copied model finds its hooks anew

    def __call__(self, module: nn.Module, *values: Any) -> Any:
        """Call the hook as torch would on one process."""
        shards = self.known.get(id(module))
        failed = self.kind == "forward" and values[-1] is None  # called in spite of an error, maybe on one rank
        if shards is None or failed or _LOCAL in vars(module):
            return self._run(module, *values)
        backward = self.kind.startswith("backward")
        given, made = self._seen(shards, backward, made=False), self._seen(shards, backward, made=True)
        if self.kind == "forward":
            *inputs, output = values
            seen = made.whole(output)
            result = self._run(module, *given.whole(inputs), seen)
            if given.loses_writes():
                raise ConfigError(_lost(self.hook, shards.path))
            return made.cut(seen if result is None and (made.is_written() or made.is_kept()) else result)
        if self.kind == "backward":
            into, out = values
            seen = given.whole(into, gradient=True)
            result = self._run(module, seen, made.whole(out, gradient=True))
            return given.cut(seen if result is None and given.is_written() else result, gradient=True)
        front = made if backward else given
        entered = front.whole(list(values), gradient=backward)
        result = self._run(module, *entered)
        if result is None and (front.is_written() or front.is_kept()):
            result = tuple(entered) if self.with_kwargs else entered[0]
        return front.cut(result, gradient=backward)

    def _run(self, *values: Any) -> Any:
        """Call the hook; it is told if it reads shards of weights."""
        if torch.compiler.is_compiling():
            return self.hook(*values)
        with inside_hook():
            return self.hook(*values)

    def _seen(self, shards: Shards, gradients: bool, *, made: bool) -> Seen:
        over_rows = None if shards.over_rows is None else shards.over_rows(self.hook, gradients, made)
        layout = shards.made if made else shards.given
        parts: list[Seen] = [SeenShards(layout, shards, self.axis)] if self.axis.size > 1 else []
        return Chain([*parts, over_rows] if over_rows is not None else parts)


class _Front:
    """The last forward pre-hook of a module with forward hooks: the full input that they get lies in the graph."""

    def __init__(self, shards: Shards, axis: Axis) -> None:
        self.shards, self.axis = shards, axis

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _no_front  # a copied model finds its hooks anew

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """Let the module continue with a shard of the full input."""
        seen = SeenShards(self.shards.given, self.shards, self.axis)
        full = seen.whole(args)
        return seen.held(full) if seen.is_kept() else None


def _no_front(*_: Any) -> None:
    """Change nothing."""


def _lost(hook: Any, path: str) -> str:
    return (
        f"the hook {described(hook)} on {path} writes into what its module was given, of which it has a copy: the "
        "module's input is in parts.\n  Change it in a forward pre-hook, return what is changed, or use "
        "autopar.local_hooks(module)."
    )


def described(hook: Any) -> str:
    """Return the name of a hook, and where it is written."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    code = getattr(hook, "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return getattr(hook, "__name__", type(hook).__name__) + place


def _shards_of(model: nn.Module) -> Iterator[Shards]:
    """Yield sharded layers, and the activations and norms beside them."""
    found: dict[int, Shards] = {}
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
            found[id(module)] = Shards(path, module, None if plan.split_input else layout)
            continue
        found[id(module)] = Shards(path, module, made=layout)
        above, _, own = path.rpartition(".")
        for name, beside in model.get_submodule(above).named_children():
            norm = "norm" in name and name[0] == own[0] and "autopar" in vars(beside)  # q_norm beside q_proj
            if norm or type(beside).__module__ in _ACTIVATIONS:
                found.setdefault(id(beside), Shards(f"{above}.{name}".strip("."), beside, layout, layout, heads=norm))
    yield from found.values()


def _inside_experts(path: str, experts: nn.Module, plan: ModulePlan) -> Iterator[tuple[int, Shards]]:
    """Yield the activation between matrices of experts, if the features of each expert are sharded."""
    own = own_parameters(experts)  # [experts, features in, features out], or the other way round
    matrices = (layout for name, layout in plan.layouts.items() if name in own and own[name].dim() == 3)
    features = next(
        (layout for layout in matrices if layout.dim and len(layout.blocks) == 1), None
    )  # gate and up are two, in one
    for name, beside in experts.named_children() if features is not None else ():
        if type(beside).__module__ in _ACTIVATIONS:
            yield id(beside), Shards(f"{path}.{name}", beside, features, features)
