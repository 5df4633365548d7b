"""Find equal blocks of a model, of which one runs on the meta device (:mod:`autopar.tools.planner.activations`).

Equal blocks have the same modules, with equal attributes, parameters of the same shapes, and the same rules in a plan.
Only the number of the block (``layer_idx``) may differ.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.compat.peft import is_adapted
from autopar.compat.tensors import own_buffers, own_modules, own_parameters
from autopar.dry_run.operators import form_of
from autopar.plan.plan import Plan
from autopar.tensor_tracking import PLAIN

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
