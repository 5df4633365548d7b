"""Equal blocks of a model: in a dry run one of them computes, and the others answer as it did.

Blocks are equal that consist of the same modules, with parameters of the same shapes, and the same rules in a plan.
Everything that a ``forward`` could read is compared: classes, children, shapes, attributes, layouts. Only plain values
among the attributes (the number of a layer, whether its attention slides) may differ: they are listed.

A replay answers for a block only where nothing could make a difference: the blocks are equal, the arguments have the
same structure, shapes and properties, the plain attributes that the first one's ``forward`` read have the same values,
and it neither wrote into its arguments nor returned a view of them. Everything else is computed. Code around the blocks
always runs, once for each block.
"""

from __future__ import annotations

import functools
import types
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from autopar.compat.peft import is_adapted
from autopar.compat.tensors import (
    TreeSpec,
    own_buffers,
    own_modules,
    own_parameters,
    tree_flatten,
    tree_unflatten,
    version_of,
)
from autopar.dry_run.operators import form_of
from autopar.layout import Layout
from autopar.plan.plan import ModulePlan, Plan
from autopar.swap import swap, unswap
from autopar.tensor_tracking import PLAIN, storage_key

_LISTS = (nn.ModuleList, nn.Sequential)  # exactly these: a subclass may have a forward of its own
_FEWEST = 2  # blocks in a list
_PLAIN = (bool, int, float, str, type(None))
_EVERY_MODULE = frozenset(vars(nn.Module()))  # hooks, which are not copied, and what is compared by itself
_RULE = tuple(field.name for field in fields(ModulePlan) if field.name != "path")

Place = tuple[str, str]
"""A module's path in its block, and the name of an attribute."""


@dataclass(frozen=True)
class EqualBlocks:
    """Paths of blocks, in forward order, that are equal but for the plain attributes that are ``differing``."""

    paths: tuple[str, ...]
    differing: tuple[Place, ...]


def equal_blocks(model: nn.Module, plan: Plan | None = None) -> list[EqualBlocks]:
    """Find the blocks of ``model`` that are equal; with a plan of it, also by their rules, layouts and attributes.

    Blocks that share a module or a parameter with another place are equal to none. Neither is any block of a model that
    is configured to collect what lies inside of blocks (attention weights).
    """
    configs = {id(config): config for module in model.modules() if (config := vars(module).get("config")) is not None}
    settings = (pair for config in configs.values() for pair in getattr(config, "__dict__", {}).items())
    if any(value is True and name.lstrip("_").startswith("output_") for name, value in settings):
        return []
    comparison = _Comparison(model, plan)
    found: list[EqualBlocks] = []
    below = ""  # a list whose blocks were compared: those inside of them are not
    for path, module in model.named_modules():
        if below and path.startswith(below):
            continue
        if type(module) in _LISTS and len(module) >= _FEWEST:
            groups = comparison.groups(path, module)
            if groups:
                found += groups
                below = path + "."
    return found


class _Comparison:
    def __init__(self, model: nn.Module, plan: Plan | None) -> None:
        seen = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
        for module in model.modules():
            seen.update(id(tensor) for tensor in _tensors(module).values())
        self._shared = {key for key, count in seen.items() if count > 1}
        self._plan = plan
        self._attributes: dict[str, list[Any]] = {}
        for attribute in plan.attributes if plan is not None else ():
            fact = (attribute.name, attribute.whole, attribute.values, attribute.where)
            self._attributes.setdefault(attribute.path, []).append(fact)

    def groups(self, path: str, blocks: nn.Module) -> list[EqualBlocks]:
        """The groups of equal blocks in a list; blocks that equal no other are in none."""
        kinds: list[tuple[list[Any], list[str], list[dict[Place, Any]]]] = []
        for name, block in blocks.named_children():
            own = f"{path}.{name}" if path else name
            look = self._look(own, block)
            if look is None:
                continue
            kind = next((kind for kind in kinds if kind[0] == look[0]), None)
            if kind is None:
                kinds.append(kind := (look[0], [], []))
            kind[1].append(own)
            kind[2].append(look[1])
        found = []
        for _, paths, values in kinds:
            forms = {place: [_typed(each[place]) for each in values] for place in values[0]}
            if len(paths) > 1:
                differing = (place for place, (one, *others) in forms.items() if any(each != one for each in others))
                found.append(EqualBlocks(tuple(paths), tuple(differing)))
        return found

    def _look(self, path: str, block: nn.Module) -> tuple[list[Any], dict[Place, Any]] | None:
        """Return the parts of a block and its plain attributes; None if it shares something."""
        structure: list[Any] = []
        plain: dict[Place, Any] = {}
        for inner, module in block.named_modules(remove_duplicate=False):
            tensors = _tensors(module)
            if id(module) in self._shared or any(id(tensor) in self._shared for tensor in tensors.values()):
                return None
            place = f"{path}.{inner}" if inner else path
            facts: list[Any] = [(name, type(x), tuple(x.shape), x.stride(), x.dtype) for name, x in tensors.items()]
            if self._plan is not None:
                rule = self._plan.modules.get(place)
                planned = [self._plan.tensors.get(f"{place}.{name}") for name in tensors]
                facts.append(rule and [getattr(rule, name) for name in _RULE])
                facts.append([tensor and tensor.layout for tensor in planned])
                facts.append(self._attributes.get(place))
            structure.append((inner, type(module), list(own_modules(module)), facts))
            for name, value in vars(module).items():
                if name in _EVERY_MODULE or name.startswith("_autopar"):
                    continue
                if name == "kwargs" and is_adapted(module):
                    continue  # with the layer's own name: PEFT notes how it was made, and reads none of it again
                if type(value) in _PLAIN:
                    plain[inner, name] = value
                structure.append((name, "plain" if type(value) in _PLAIN else _comparable(value)))
        return structure, plain


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    own = {**own_parameters(module), **own_buffers(module)}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def _typed(value: Any) -> Any:
    return type(value), value  # 1, 1.0 and True are not the same


def _comparable(value: Any) -> Any:
    """Return the form in which attributes are compared: containers by their elements, other objects by identity."""
    if isinstance(value, torch.Tensor):
        return (type(value), tuple(value.shape), value.stride(), value.dtype)
    if type(value) in (*_PLAIN, torch.device):
        return _typed(value)
    if type(value) in (list, tuple, set, frozenset, torch.Size):
        return (type(value), [_comparable(entry) for entry in value])
    if isinstance(value, dict):
        return (type(value), [(key, _comparable(entry)) for key, entry in value.items()])
    if type(value) is functools.partial:  # an activation with its form
        return (type(value), [_comparable(entry) for entry in (value.func, value.args, value.keywords)])
    plain = isinstance(value, type | types.FunctionType | types.BuiltinFunctionType)
    held = () if plain else getattr(value, "__dict__", {}).values()  # results depend on more than the block then
    if isinstance(value, nn.Module | types.MethodType) or any(isinstance(x, nn.Module | torch.Tensor) for x in held):
        return object()  # equal to itself alone
    return id(value)


_ARGUMENTS = (*PLAIN, Layout)


class _ReadsSeen:
    """Class before that of a module some of whose attributes were taken away, so that a read of one is seen.

    ``nn.Module`` asks ``__getattr__`` for what is not in ``__dict__``.
    """

    _autopar_plain_values: dict[str, Any]
    _autopar_reads: set[str]

    def __getattr__(self, name: str) -> Any:
        values = vars(self).get("_autopar_plain_values", ())
        if name not in values:
            return super().__getattr__(name)  # type: ignore[misc]
        vars(self)["_autopar_reads"].add(name)
        return vars(self)["_autopar_plain_values"][name]


@contextmanager
def _reads_seen(block: nn.Module, places: Sequence[Place]) -> Iterator[dict[Place, Any]]:
    """Note which of these attributes are read inside, with their values."""
    found: dict[Place, Any] = {}
    names: dict[str, list[str]] = {}
    for path, name in places:
        names.setdefault(path, []).append(name)
    modules = {path: block.get_submodule(path) for path in names}
    try:
        for path, module in modules.items():
            own = {name: vars(module).pop(name) for name in names[path]}
            swap(module, _ReadsSeen, _autopar_plain_values=own, _autopar_reads=set())
        yield found
    finally:
        for path, module in modules.items():
            seen: Any = module
            values, reads = seen._autopar_plain_values, seen._autopar_reads
            unswap(module, _ReadsSeen, "_autopar_plain_values", "_autopar_reads")
            written = {name: vars(module)[name] for name in values if name in vars(module)}
            vars(module).update({**values, **written})
            found |= {(path, name): values[name] for name in {*reads, *written}}


@dataclass
class _Known:
    """Record of one block's forward.

    Attributes:
        read: plain attributes that its forward read.
        values: their values.
        outputs: the leaves of what it returned: the place of an argument (-1: None), or what
            :meth:`BlockReplay.keep` kept.
    """

    read: tuple[Place, ...]
    values: list[Any]
    outputs: list[tuple[int | None, Any]]
    structure: TreeSpec


class BlockReplay(ABC):
    """The replay of the equal blocks of one copy of a model, which is on the meta device. A context manager.

    Subclasses say in :meth:`describe`, :meth:`keep` and :meth:`make` what a dry run follows about tensors.
    """

    alone = True  # whether what the block that runs now did follows from the block and its arguments

    def __init__(self, model: nn.Module, groups: Sequence[EqualBlocks]) -> None:
        self._known: dict[Any, list[_Known]] = {}
        self._blocks: list[nn.Module] = []
        for number, group in enumerate(groups):
            for block in map(model.get_submodule, group.paths):
                if "forward" not in vars(block):
                    self._attach(block, number, group.differing)

    def _attach(self, block: nn.Module, group: int, differing: tuple[Place, ...]) -> None:
        forward = block.forward

        @functools.wraps(forward)
        def replayed(*args: Any, **kwargs: Any) -> Any:
            return self._call(block, group, differing, forward, args, kwargs)

        block.forward = replayed
        self._blocks.append(block)

    def __enter__(self) -> BlockReplay:
        return self

    def __exit__(self, *exc: object) -> None:
        for block in self._blocks:  # their own forward again
            vars(block).pop("forward", None)

    def comparable(self, block: nn.Module) -> bool:
        """Return whether the block itself is like the others now."""
        return True

    @abstractmethod
    def describe(self, tensor: torch.Tensor) -> Any:
        """Return what must be the same of an argument beside its form; hashable. None: this call must be computed."""

    @abstractmethod
    def keep(self, output: torch.Tensor, block: nn.Module, arguments: list[torch.Tensor]) -> Any:
        """Return what is needed to make an output again; None if that cannot be."""

    @abstractmethod
    def make(self, kept: Any, block: nn.Module, arguments: list[torch.Tensor]) -> torch.Tensor:
        """Return a tensor like the output that was kept, of another block with other arguments."""

    @contextmanager
    def running(self, block: nn.Module) -> Iterator[None]:
        """Watch a block that is computed; may set :attr:`alone` to False."""
        yield

    def _call(
        self, block: nn.Module, group: int, differing: tuple[Place, ...], forward: Any, args: Any, kwargs: Any
    ) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        key = self._key(group, leaves, structure) if self.comparable(block) else None
        if key is None:
            return forward(*args, **kwargs)
        arguments = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for known in self._known.get(key, ()):
            if known.values == [_value_at(block, place) for place in known.read]:
                given = [*leaves, None]
                outputs = [self.make(kept, block, arguments) if place is None else given[place]
                           for place, kept in known.outputs]  # fmt: skip
                return tree_unflatten(outputs, known.structure)
        versions = [version_of(tensor) for tensor in arguments]
        self.alone = True
        with _reads_seen(block, differing) as read, self.running(block):
            output = forward(*args, **kwargs)
        after, structure_after = tree_flatten((args, kwargs))
        untouched = structure_after == structure and all(now is then for now, then in zip(after, leaves, strict=True))
        if self.alone and untouched and [version_of(tensor) for tensor in arguments] == versions:
            outputs_kept = self._kept(output, block, leaves, arguments)
            if outputs_kept is not None:
                values = [_value_at(block, place) for place in read]
                self._known.setdefault(key, []).append(_Known(tuple(read), values, *outputs_kept))
        return output

    def _key(self, group: int, leaves: list[Any], structure: TreeSpec) -> Any:
        parts: list[Any] = [group, structure]
        first: dict[int, int] = {}
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                described = self.describe(leaf) if leaf.is_meta else None
                if described is None:
                    return None
                parts.append((form_of(leaf), described, first.setdefault(id(leaf), place)))
            elif isinstance(leaf, _ARGUMENTS):
                parts.append((type(leaf), leaf))
            else:
                return None
        return tuple(parts)

    def _kept(
        self, output: Any, block: nn.Module, leaves: list[Any], arguments: list[torch.Tensor]
    ) -> tuple[list[tuple[int | None, Any]], TreeSpec] | None:
        given = {id(leaf): place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        storages = {storage_key(tensor) for tensor in arguments}
        returned, structure = tree_flatten(output)
        made: list[tuple[int | None, Any]] = []
        seen: set[int | None] = set()
        for leaf in returned:
            if isinstance(leaf, torch.Tensor):
                if id(leaf) in given:
                    made.append((given[id(leaf)], None))
                    continue
                storage = storage_key(leaf)
                kept = self.keep(leaf, block, arguments) if leaf.is_meta else None
                if kept is None or storage in storages or storage in seen:
                    return None
                seen.add(storage)
                made.append((None, kept))
            elif leaf is None:
                made.append((-1, None))
            else:
                return None
        return made, structure


def _value_at(block: nn.Module, place: Place) -> Any:
    path, name = place
    return _typed(vars(block.get_submodule(path)).get(name))
