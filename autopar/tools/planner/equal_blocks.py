"""Find equal blocks of a model. Run one of them on the meta device, and replay its result for the other blocks.

Equal blocks have the same modules, with equal attributes, parameters of the same shapes, and the same rules in a plan.
Only the number of the block (``layer_idx``) may differ.

A block replays a result only if its arguments have the same structure, shapes and properties. A result is not replayed
if its block appended to a list among the arguments or returned a view of an argument. Code around the blocks always
runs.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

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
)
from autopar.dry_run.operators import form_of
from autopar.layout import Layout
from autopar.plan.plan import Plan
from autopar.tensor_tracking import PLAIN, storage_key

_LISTS = (nn.ModuleList, nn.Sequential)  # exactly these: a subclass may have a custom forward
_EVERY_MODULE = frozenset(vars(nn.Module()))  # hooks, modules and tensors, which are compared separately

Paths = tuple[str, ...]
"""Paths of equal blocks, in forward order."""

_Facts = dict[tuple[str, str], Any]  # path of a module in its block, and attribute -> comparable value


def equal_blocks(model: nn.Module, plan: Plan) -> list[Paths]:
    """Return groups of equal blocks. Their rules, layouts and attributes in ``plan`` are equal, too.

    The list is empty if the model's config collects values from inside blocks, for example attention weights.
    """
    configs = {id(config): config for module in model.modules() if (config := vars(module).get("config")) is not None}
    settings = (pair for config in configs.values() for pair in getattr(config, "__dict__", {}).items())
    if any(value is True and name.lstrip("_").startswith("output_") for name, value in settings):
        return []
    attributes: dict[str, list[Any]] = {}
    for each in plan.attributes:
        attributes.setdefault(each.path, []).append((each.name, each.whole, each.values, each.where))
    found: list[Paths] = []
    below = ""  # the last compared list; skip the lists inside its blocks
    for path, module in model.named_modules():
        if type(module) in _LISTS and len(module) > 1 and not (below and path.startswith(below)):
            start = f"{path}." if path else ""
            groups = _groups(
                [
                    (start + name, number, _facts(start + name, block, plan, attributes))
                    for number, (name, block) in enumerate(module.named_children())
                ]
            )
            found += groups
            below = path + "." if groups else below
    return found


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*own_parameters(module).items(), *own_buffers(module).items()):
        if tensor is not None:
            yield name, tensor


def _facts(path: str, block: nn.Module, plan: Plan, attributes: dict[str, list[Any]]) -> _Facts:
    """Return the properties that a ``forward`` may depend on, by module and attribute."""
    facts: _Facts = {}
    for inner, module in block.named_modules():
        place = f"{path}.{inner}" if inner else path
        rule, tensors = plan.modules.get(place), list(_tensors(module))
        planned = [plan.tensors.get(f"{place}.{name}") for name, _ in tensors]
        facts[inner, ""] = (
            *(type(module), list(own_modules(module)), attributes.get(place), rule and replace(rule, path="")),
            *([(name, _comparable(x)) for name, x in tensors], [each and each.layout for each in planned]),
        )
        for name, value in vars(module).items():
            if name == "kwargs" and is_adapted(module):
                continue  # PEFT stores the constructor's arguments with the layer's name, and never reads them
            if name not in _EVERY_MODULE and not name.startswith("_autopar"):
                facts[inner, name] = _comparable(value)
    return facts


def _groups(blocks: list[tuple[str, int, _Facts]]) -> list[Paths]:
    """Return the groups of two or more equal ``blocks``, which are given by path, number and facts.

    An attribute that equals the block's number in every block is not compared.
    """
    compared_places = {place for _, number, facts in blocks for place, value in facts.items() if value != (int, number)}
    kinds: list[tuple[_Facts, list[str]]] = []
    for path, _, facts in blocks:
        compared = {place: value for place, value in facts.items() if place in compared_places}
        same = next((paths for other, paths in kinds if other == compared), None)
        if same is None:
            kinds.append((compared, same := []))
        same.append(path)
    return [tuple(paths) for _, paths in kinds if len(paths) > 1]


def _comparable(value: Any) -> Any:
    """Return the comparable form of an attribute: the ``repr`` of containers, the identity of other objects."""
    if isinstance(value, torch.Tensor):
        return (type(value), *form_of(value))
    if isinstance(value, PLAIN):
        return type(value), value  # 1, 1.0 and True differ
    containers = (list, tuple, set, frozenset, dict, functools.partial)  # partial: an activation with its arguments
    return (type(value), repr(value)) if isinstance(value, containers) else id(value)


class _Known(NamedTuple):
    """Structure and leaves of a block's result. A leaf is the place of an argument (-1: None), or a kept output."""

    outputs: list[tuple[int | None, Any]]
    structure: TreeSpec


class BlockReplay(ABC):
    """A context manager that replays equal blocks in one copy of a model on the meta device."""

    def __init__(self, model: nn.Module, groups: Sequence[Paths]) -> None:
        self._known: dict[Any, _Known] = {}
        self._blocks: list[nn.Module] = []
        for number, paths in enumerate(groups):
            for block in map(model.get_submodule, paths):
                if "forward" not in vars(block):
                    self._attach(block, number)

    def _attach(self, block: nn.Module, group: int) -> None:
        forward = block.forward

        @functools.wraps(forward)
        def replayed(*args: Any, **kwargs: Any) -> Any:
            return self._call(block, group, forward, args, kwargs)

        block.forward = replayed
        self._blocks.append(block)

    def __enter__(self) -> BlockReplay:
        return self

    def __exit__(self, *exc: object) -> None:
        for block in self._blocks:  # restore the original forward
            vars(block).pop("forward", None)

    @abstractmethod
    def keep(self, output: torch.Tensor, arguments: list[torch.Tensor]) -> Any:
        """Return the data from which :meth:`make` recreates an output."""

    @abstractmethod
    def make(self, kept: Any, arguments: list[torch.Tensor]) -> torch.Tensor:
        """Return a tensor like the kept output, for an equal block with different arguments."""

    def _call(self, block: nn.Module, group: int, forward: Any, args: Any, kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        key = _key(group, leaves, structure)
        if key is None:
            return forward(*args, **kwargs)
        arguments = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if key in self._known:
            known, given = self._known[key], [*leaves, None]
            outputs = [self.make(kept, arguments) if place is None else given[place] for place, kept in known.outputs]
            return tree_unflatten(outputs, known.structure)
        output = forward(*args, **kwargs)
        kept = self._kept(output, leaves, arguments) if tree_flatten((args, kwargs))[1] == structure else None
        if kept is not None:
            self._known[key] = kept
        return output

    def _kept(self, output: Any, leaves: list[Any], arguments: list[torch.Tensor]) -> _Known | None:
        given = {id(leaf): place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        seen = {storage_key(tensor) for tensor in arguments}
        returned, structure = tree_flatten(output)
        made: list[tuple[int | None, Any]] = []
        for leaf in returned:
            if leaf is None:
                made.append((-1, None))
            elif id(leaf) in given:
                made.append((given[id(leaf)], None))
            elif isinstance(leaf, torch.Tensor) and leaf.is_meta and storage_key(leaf) not in seen:
                seen.add(storage_key(leaf))
                made.append((None, self.keep(leaf, arguments)))
            else:
                return None
        return _Known(made, structure)


def _key(group: int, leaves: list[Any], structure: TreeSpec) -> Any:
    """Return a key of all values that a block's result depends on; None if they are unknown."""
    parts: list[Any] = [group, structure]
    first: dict[int, int] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.is_meta:
            parts.append((form_of(leaf), leaf.requires_grad, first.setdefault(id(leaf), place)))
        elif isinstance(leaf, (*PLAIN, Layout)):
            parts.append((type(leaf), leaf))
        else:
            return None
    return tuple(parts)
