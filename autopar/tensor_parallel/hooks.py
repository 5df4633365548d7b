"""Forward hooks of a parallelized model: checks before a forward, and full tensors in its arguments and outputs.

Hooks are objects, so that ``copy.deepcopy`` of the model copies them.

[Note: hooks and torch.compile] Dynamo traces the hooks of a compiled model. A rank check there would break the graph,
or run only during tracing. So the checks before a forward are one operation that is opaque to the compiler. It returns
copies of the forward's input tensors, so the rest of the graph depends on it. ``torch.compile(model)`` calls the hooks
of ``model`` outside the graph; a compiled function or outer model has them inside. Hooks support both
(:func:`not_compiled_alone`).

Blocks return the attention maps of local heads and the hidden states of the local sequence; users get both in full. A
cache that the parallelized model filled holds local KV heads only, and an attribute marks it. A user's cache has all
heads. They are sharded like the heads of the attention layer, inside the graph: the gradient of each rank is gathered,
and gradients of replicated heads are summed.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from autopar.compat.tensors import leave_alone, remove_forward_hooks
from autopar.compat.transformers import CACHES, caches_in, holds_states, holds_tokens
from autopar.distributed.autograd_functions import refuse_transforms
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import gather, gathered, scatter
from autopar.distributed.digest import leaves
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError, first_line
from autopar.guards.model_changes import ModuleTree
from autopar.layout import Block, Layout
from autopar.plan.plan import Plan
from autopar.swap import argument_names
from autopar.tensor_parallel.regions import Region

_Function = TypeVar("_Function", bound=Callable[..., Any])

_CHECKS: weakref.WeakValueDictionary[int, BeforeForward] = weakref.WeakValueDictionary()
_KEYS = itertools.count()


def not_compiled_alone(function: _Function) -> _Function:
    """Let a hook be traced as part of a larger graph, but never start a graph by itself."""
    outside = torch.compiler.disable(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if torch.compiler.is_compiling() else outside)(*args, **kwargs)

    leave_alone(call.__code__)
    return cast("_Function", functools.wraps(function)(call))


def checked_arguments(
    check: BeforeForward, named: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Check the arguments of a forward, also inside a graph, and return copies; ``named``: the arguments by name."""
    found = list(leaves(named))
    tensors = [value for _, value in found if isinstance(value, torch.Tensor)]
    names = "\n".join(name for name, value in found if isinstance(value, torch.Tensor))
    others = "\n".join(f"{name}={value!r}" for name, value in found if isinstance(value, bool | int | float | str))
    if not tensors:
        return args, kwargs
    copies = _begin_forward(tensors, check.key, names, others)

    def copied(value: Any) -> Any:
        return next((new for old, new in zip(tensors, copies, strict=True) if old is value), value)

    return tuple(copied(value) for value in args), {name: copied(value) for name, value in kwargs.items()}


def _run(tensors: Sequence[torch.Tensor], key: int, names: str, others: str) -> list[torch.Tensor]:
    check = _CHECKS.get(key)
    if check is not None:  # None: the graph outlived its model
        arguments = {**dict(zip(names.split("\n"), tensors, strict=True)), "other arguments": others}
        check.check_forward(check.model, arguments, compiled=True)
    return [tensor.clone() for tensor in tensors]


def _on_meta(tensors: Sequence[torch.Tensor], key: int, names: str, others: str) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def _backward(ctx: Any, gradients: list[torch.Tensor]) -> tuple[Any, ...]:
    return gradients, None, None, None


_begin_forward: Any = torch.library.custom_op(
    "autopar::begin_forward",
    _run,
    mutates_args=(),
    schema="(Tensor[] tensors, int key, str names, str others) -> Tensor[]",
    tags=[torch.Tag.cudagraph_unsafe],
)
_begin_forward.register_fake(_on_meta)
_begin_forward.register_autograd(_backward)


_OTHER_HEADS = ("kv_heads", "state_heads", "key_heads", "value_heads")


def head_layouts(plan: Plan) -> list[Layout]:
    """Return the distinct layouts of attention heads in this model; one element is one head."""
    blocks = (block for module in plan.modules.values() if module.layout is not None for block in module.layout.blocks)
    return [layout for layout in _of_heads(blocks, _OTHER_HEADS) if not layout.replicated]


def _of_heads(blocks: Iterable[Block], other: Sequence[str]) -> tuple[Layout, ...]:
    """Return the distinct layouts of heads, except ``other`` units; one element is one head."""
    found: dict[Any, Layout] = {}
    for block in blocks:
        if "heads" in block.unit and block.unit not in other:
            found.setdefault((block.count, block.ranges), Layout.of(1, [replace(block, width=1)]))
    return tuple(found.values())


def gather_attentions(output: Any, axis: Axis, layouts: list[Layout]) -> Any:
    """Gather every attention map in ``output``. A collective of the axis if there is any.

    The sizes of a map on all ranks determine its layout, so every rank chooses the same one.
    """
    maps: list[torch.Tensor] = []

    def collect(x: torch.Tensor) -> torch.Tensor:
        maps.append(x)
        return x

    _walk(output, collect, inside=False)
    return _gather_maps(output, maps, axis, layouts) if maps and layouts else output


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _gather_maps(output: Any, maps: list[torch.Tensor], axis: Axis, layouts: list[Layout]) -> Any:
    sizes = gathered([x.shape[1] for x in maps], axis.group)
    known = {tuple(layout.local_size(rank) for rank in range(axis.size)): layout for layout in layouts}
    chosen = iter([known.get(each) for each in zip(*sizes, strict=True)])

    def full(x: torch.Tensor) -> torch.Tensor:
        layout = next(chosen)
        return x if layout is None else gather(x, axis, layout, dim=1)

    return _walk(output, full, inside=False)


def _walk(value: Any, change: Any, inside: bool) -> Any:
    """Return ``value`` with ``change`` applied to each map; ``inside``: True below a key of attention maps."""
    if isinstance(value, dict):
        for name in list(value):
            entry = value[name]
            below = inside or "attentions" in name
            if isinstance(entry, dict) or (below and isinstance(entry, (tuple, list, torch.Tensor))):
                value[name] = _walk(entry, change, below)
        return value
    if isinstance(value, (tuple, list)):
        maps = inside or (len(value) > 0 and all(isinstance(x, torch.Tensor) and x.ndim == 4 for x in value))
        return type(value)([_walk(entry, change, maps) for entry in value]) if type(value) in (tuple, list) else value
    return change(value) if inside and isinstance(value, torch.Tensor) and value.ndim == 4 else value


_SHARDED = "_autopar_local"
_NOT_CACHED = ("key_heads", "value_heads", "state_heads")  # of linear attention

Layouts = Mapping[int, tuple[Layout, ...]]
"""Number of a layer -> layouts of the heads of its attentions; one element is one head."""


def cache_layouts(model: nn.Module) -> Layouts:
    """Return the layouts of heads in each attention layer of a sharded ``model``, KV heads first."""
    found: dict[int, list[Block]] = {}
    for module in model.modules():
        number = vars(module).get("layer_idx")
        if isinstance(number, int):
            layouts = [one for inside in module.modules() for one in vars(inside).get("autopar_layouts", {}).values()]
            blocks = [block for one in layouts for block in one.blocks]
            found.setdefault(number, []).extend(sorted(blocks, key=lambda block: "kv" not in block.unit))
    return {number: heads for number, blocks in found.items() if (heads := _of_heads(blocks, _NOT_CACHED))}


class ShardCaches:
    """Forward pre-hook of a Hugging Face model that shards the user's caches."""

    def __init__(self, mpu: MPU, layouts: Layouts) -> None:
        self.mpu, self.layouts = mpu, layouts

    @not_compiled_alone
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Cache):
                for cache in caches_in(value):
                    if not vars(cache).get(_SHARDED):
                        self._shard(model, cache)
                        setattr(cache, _SHARDED, True)

    def _shard(self, model: nn.Module, cache: Cache) -> None:
        filled = [(number, layer) for number, layer in enumerate(cache.layers) if holds_states(vars(layer))]
        if not filled:
            return
        if self.mpu.pp.size > 1:
            raise ConfigError(
                f"a user-defined cache is not supported with pipeline_parallel_size={self.mpu.pp.size} "
                f"({type(model).__name__}): stages read only caches that they filled.\n"
                "  Pass the tokens instead of their keys and values, or use pipeline_parallel_size=1."
            )
        sharded: list[tuple[Any, str, Layout]] = [
            (layer, name, layout) for number, layer in filled for name, layout in self._layouts(model, number, layer)
        ]
        for layer, name, layout in sharded:  # after all checks, so that an error leaves the cache unchanged
            setattr(layer, name, scatter(getattr(layer, name), self.mpu.tp, layout, dim=1))
            if "num_heads" in vars(layer):
                layer.num_heads = layout.local_size(self.mpu.tp.rank)

    def _layouts(self, model: nn.Module, number: int, layer: Any) -> list[tuple[str, Layout]]:
        """Return the tensors of a layer that have all heads, with their layouts."""
        layouts, rank = self.layouts.get(number, ()), self.mpu.tp.rank
        other = [name for name, value in vars(layer).items() if name not in ("keys", "values") and holds_states(value)]
        place = f"layer {number} ({type(layer).__name__}) of the user-defined cache"
        if other:
            raise ConfigError(
                f"{place} holds {', '.join(other)}, which autopar cannot shard.\n"
                f"  Pass a cache that {type(model).__name__} filled, or one with keys and values only."
            )
        if not layouts:
            return []  # replicated attention
        found = []
        for name in ("keys", "values"):
            heads = getattr(layer, name).shape[1]
            full = [layout for layout in layouts if heads == layout.size]
            if full:
                found.append((name, full[0]))
            elif not any(heads == layout.local_size(rank) for layout in layouts):
                due = " or ".join(f"{layout.size} ({layout.local_size(rank)} on this rank)" for layout in layouts)
                raise ConfigError(
                    f"{place} has {name} of {heads} heads; {type(model).__name__} expects {due}.\n"
                    "  Pass keys and values of all heads: [batch, heads, length, head width]."
                )
        return found


def reuses_cache(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a forward gets a cache that the parallelized model filled and that was not reset."""
    caches = [list(caches_in(value)) for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
    return any(
        all(vars(cache).get(_SHARDED) for cache in leaves) and any(map(holds_tokens, leaves)) for leaves in caches
    )


class MarkCaches:
    """Forward hook of a Hugging Face model that marks the caches it returns as sharded."""

    @not_compiled_alone
    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        values: Any = output if isinstance(output, tuple) else ()
        if isinstance(output, Mapping):  # a stage before the last one may lack some values
            values = dict.values(output) if isinstance(output, dict) else output.values()
        for value in values:
            if isinstance(value, Cache):
                for cache in caches_in(value):
                    setattr(cache, _SHARDED, True)


class Hook:
    """Base of the forward hooks that :func:`detach` removes."""


_NAMES = ("_autopar_failures", "_autopar_check", "_autopar_region")
T = TypeVar("T")


def attach(
    model: nn.Module, plan: Plan, mpu: MPU, region: Region, failures: FailureLog, check: Any, *, sharded: bool
) -> None:
    """Register hooks on ``model`` and on the Hugging Face models inside it, which users may call directly.

    Args:
        failures: Log in which forwards publish their errors.
        check: Rank check over tp and cp that runs before a forward; None for no checks.
        sharded: True if layers use the region or ranks share a forward; otherwise a forward needs no hooks.
    """
    layouts = head_layouts(plan) if plan.tp > 1 and isinstance(model, PreTrainedModel) else []
    for module in callable_alone(model):
        if sharded:
            tree = ModuleTree(module) if plan.tp > 1 else None
            before = BeforeForward(region, check, tree, argument_names(module))
            before.outermost = module is model
            before.together = plan.shards > 1 or mpu.cp.size > 1
            if check is not None or plan.tp > 1:
                before.model = module
            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(AfterForward(mpu, region, layouts, check), always_call=True)
        if isinstance(module, PreTrainedModel) and mpu.tp_pp.size > 1:
            module.register_forward_pre_hook(ShardCaches(mpu, cache_layouts(module)), with_kwargs=True)
            module.register_forward_hook(MarkCaches())
        vars(module).update(zip(_NAMES, (failures, check, region), strict=True))


def detach(model: nn.Module) -> None:
    """Undo :func:`attach`."""
    for module in callable_alone(model):
        remove_forward_hooks(module, (Hook, ShardCaches, MarkCaches))
        for name in _NAMES:
            module.__dict__.pop(name, None)


def callable_alone(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model and the Hugging Face models inside it."""
    yield from (module for module in model.modules() if module is model or isinstance(module, PreTrainedModel))


class BeforeForward(Hook):
    """Forward pre-hook: check weights, modules, and consistency over tp and cp, before the outermost model runs.

    Attributes:
        key: Number by which compiled graphs find this object; a copy gets a new one.
    """

    outermost = together = False
    model: nn.Module

    def __init__(self, region: Region, check: Any, tree: ModuleTree | None, names: tuple[str, ...]) -> None:
        self.region, self.check, self.tree, self.names = region, check, tree, names
        self.key = next(_KEYS)
        _CHECKS[self.key] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = copy.copy(self)
        vars(copied).update(copy.deepcopy(vars(self), memo))
        copied.key = next(_KEYS)
        _CHECKS[copied.key] = copied
        return copied

    @not_compiled_alone
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        compiling, changed = torch.compiler.is_compiling(), None
        if self.region.check_thread is not None and not compiling:
            self.region.check_thread()
        silent = self.tree is None if self.check is None else self.check.is_silent
        if self.outermost and not compiling:
            self.region.running = 0  # a forward interrupted by Ctrl-C did not reset it
        if self.region.running == 0 and compiling and not silent:  # silent: decoding may become a CUDA graph
            changed = checked_arguments(self, named_arguments(self.names, args, kwargs), args, kwargs)
        elif self.region.running == 0 and not compiling:
            named = named_arguments(self.names, args, kwargs)
            if self.region.beginning:
                seen = self._or_report(lambda: [begin(model) for begin in self.region.beginning])
                if self.check is not None:
                    self.check.begun = seen  # compared before anything gathers
            cached = not silent and self.check is not None and reuses_cache(args, kwargs)
            self.check_forward(model, named, cached=cached)
            self.region.expect_logits(kwargs.get("labels") is not None)
        self.region.start()
        return changed

    def check_forward(
        self, model: nn.Module, arguments: Mapping[str, Any], *, compiled: bool = False, cached: bool = False
    ) -> None:
        """Check a forward with these named arguments. A collective if values are compared."""
        if self.together:
            refuse_transforms(lambda: [*model.parameters(), arguments])
        if self._or_report(lambda: self.tree is not None and self.tree.check(model)):
            self.region.find_dropout(model)  # in the new modules too
            if self.check is not None:
                self.check.reset()
        if self.check is not None:
            self.check.before_forward(model, arguments, compiled=compiled, cached=cached)

    def _or_report(self, step: Callable[[], T]) -> T:
        """Run a step; if it raises on this rank alone, let the other ranks raise too."""
        try:
            return step()
        except Exception as error:
            if self.check is not None:
                self.check.report(f"refused: {first_line(error)}")
            raise


class AfterForward(Hook):
    """Forward hook that ends the region and gathers attention maps; also called after an error."""

    def __init__(self, mpu: MPU, region: Region, layouts: list[Layout], check: Any) -> None:
        self.mpu, self.region, self.layouts, self.check = mpu, region, layouts, check

    @not_compiled_alone
    def __call__(self, model: Any, args: Any, output: Any) -> Any:
        self.region.finish()
        if not self.region.running and not torch.compiler.is_compiling():
            for end in self.region.ending:
                end()
        if output is not None and self.region.sequence is not None:
            output = self.region.sequence.after_forward(model, output)
        if self.region.running or self.mpu.tp_cp.size == 1:
            return output  # inside a forward of an outer model
        check = None if torch.compiler.is_compiling() else self.check
        if check is not None and (output is not None or getattr(sys.exc_info()[1], "completes", False)):
            check.after_forward(model)
        return None if output is None else gather_attentions(output, self.mpu.tp, self.layouts)


def named_arguments(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward by name, without caches; ``names``: the positional names in order."""
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    return {name: value for name, value in named.items() if name not in CACHES}
