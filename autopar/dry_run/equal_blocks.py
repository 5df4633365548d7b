"""Equal blocks of a model: of the same modules, with parameters of the same shapes, and the same rules in a plan.

Results of a dry run of one of them hold for the others (:mod:`autopar.dry_run.block_replay`). Everything that a
``forward`` could read is compared: classes, children, shapes, attributes, layouts. Only plain values among the
attributes (the number of a layer, whether its attention slides) may differ: they are listed, and code that relies on
the equality looks whether ``forward`` reads one.
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from autopar.adapters import is_adapted
from autopar.foreign.tensors import own_buffers, own_modules, own_parameters
from autopar.plan.plan import ModulePlan, Plan

_LISTS = (nn.ModuleList, nn.Sequential)  # exactly these: a subclass may have a forward of its own
_FEWEST = 2  # blocks in a list
_PLAIN = (bool, int, float, str, type(None))
_EVERY_MODULE = frozenset(vars(nn.Module()))  # hooks, which are not copied, and what is compared by itself
_RULE = tuple(field.name for field in fields(ModulePlan) if field.name != "path")

Place = tuple[str, str]
"""A module's path in its block, and the name of an attribute."""


@dataclass(frozen=True)
class EqualBlocks:
    """Blocks that are equal but for plain attributes.

    Attributes:
        paths: of the blocks, in forward order; two or more.
        differing: attributes whose values are not the same in all of them.
    """

    paths: tuple[str, ...]
    differing: tuple[Place, ...]


def equal_blocks(model: nn.Module, plan: Plan | None = None) -> list[EqualBlocks]:
    """Find the blocks of ``model`` that are equal; with a plan of it, also by their rules, layouts and attributes.

    Blocks that share a module or a parameter with another place are equal to none. Neither is any block of a model that
    is configured to collect what lies inside of blocks (attention weights).
    """
    if _collects(model):
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


def _collects(model: nn.Module) -> bool:
    configs = {id(config): config for module in model.modules() if (config := vars(module).get("config")) is not None}
    return any(
        value is True and name.lstrip("_").startswith("output_")
        for config in configs.values()
        for name, value in getattr(config, "__dict__", {}).items()
    )


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
            structure, plain = look
            for known, paths, values in kinds:
                if known == structure:
                    paths.append(own)
                    values.append(plain)
                    break
            else:
                kinds.append((structure, [own], [plain]))
        return [EqualBlocks(tuple(paths), _differing(values)) for _, paths, values in kinds if len(paths) > 1]

    def _look(self, path: str, block: nn.Module) -> tuple[list[Any], dict[Place, Any]] | None:
        """Return the parts of a block and its plain attributes; None if it shares something."""
        structure: list[Any] = []
        plain: dict[Place, Any] = {}
        for inner, module in block.named_modules(remove_duplicate=False):
            tensors = _tensors(module)
            if id(module) in self._shared or any(id(tensor) in self._shared for tensor in tensors.values()):
                return None
            place = f"{path}.{inner}" if inner else path
            structure.append((inner, type(module), list(own_modules(module)), self._facts(place, tensors)))
            for name, value in vars(module).items():
                if name in _EVERY_MODULE or name.startswith("_autopar"):
                    continue
                if name == "kwargs" and is_adapted(module):
                    continue  # with the layer's own name: PEFT notes how it was made, and reads none of it again
                if type(value) in _PLAIN:
                    plain[inner, name] = value
                structure.append((name, "plain" if type(value) in _PLAIN else _comparable(value)))
        return structure, plain

    def _facts(self, path: str, tensors: Mapping[str, torch.Tensor]) -> list[Any]:
        facts: list[Any] = [
            (name, type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype) for name, tensor in tensors.items()
        ]
        if self._plan is not None:
            rule = self._plan.modules.get(path)
            facts.append(rule and [getattr(rule, name) for name in _RULE])
            planned = [self._plan.tensors.get(f"{path}.{name}") for name in tensors]
            facts.append([tensor and tensor.layout for tensor in planned])
            facts.append(self._attributes.get(path))
        return facts


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    own = {**own_parameters(module), **own_buffers(module)}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def _differing(values: list[dict[Place, Any]]) -> tuple[Place, ...]:
    first = values[0]
    return tuple(
        place for place, value in first.items() if any(_typed(other[place]) != _typed(value) for other in values)
    )


def _typed(value: Any) -> Any:
    return type(value), value  # 1, 1.0 and True are not the same


class _Only:
    """Equal to itself alone."""


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
    if isinstance(value, nn.Module | types.MethodType) or _holds_modules(value):
        return _Only()
    return id(value)


def _holds_modules(value: Any) -> bool:
    """Check whether an object has modules or tensors as attributes: then its results depend on more than the block."""
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return False
    return any(isinstance(entry, nn.Module | torch.Tensor) for entry in getattr(value, "__dict__", {}).values())
