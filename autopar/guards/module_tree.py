"""Check that modules and parameters are those that initialize left: none added, replaced or resized since.

A module that comes later (an adapter, a new head, a parametrization) computes with this rank's shard as if it were the
full weight, and nothing in its numbers shows it. So each forward begins with a comparison of the tree: objects are
compared by identity, which takes a fraction of a millisecond.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.adapters import tuner_layers
from autopar.errors import ConfigError
from autopar.foreign.modules import own_modules, own_parameters

_WHEN = (
    "  Add or replace modules (adapters, heads, parametrizations) before autopar.initialize, or take the model back\n"
    "  with autopar.deparallelize(model), change it, and initialize it again."
)

_ADAPTERS = (
    "  Adapters come first: model = autopar.initialize(peft.get_peft_model(plain_model, lora_config), config).\n"
    "  On a model that is parallelized already: autopar.integrations.get_peft_model(model, lora_config).\n"
    "  Where the plain model is too large for one process, build it, with its adapters, in autopar.lazy_init()."
)


class _Seen(NamedTuple):
    module: nn.Module
    path: str
    kind: type[nn.Module]
    children: list[nn.Module | None]
    names: list[str]  # of its own parameters
    parameters: list[nn.Parameter | None]
    shapes: list[torch.Size | None]


class ModuleTree:
    """The module tree of a tensor-parallel model, as it was when last checked."""

    def __init__(self, model: nn.Module) -> None:
        self._remember(model)

    def _remember(self, model: nn.Module) -> None:
        self._seen = _look(model)
        self._modules = [seen.module for seen in self._seen]
        self._kinds = [seen.kind for seen in self._seen]
        self._sizes, self._objects = _contents(self._modules)
        self._parameters = [x for x in self._objects if isinstance(x, nn.Parameter) and not _is_packed(x)]
        self._shapes = [parameter.shape for parameter in self._parameters]

    def _is_unchanged(self) -> bool:
        sizes, now = _contents(self._modules)
        return (
            list(map(type, self._modules)) == self._kinds
            and sizes == self._sizes
            and all(map(operator.is_, now, self._objects))
            and [parameter.shape for parameter in self._parameters] == self._shapes
        )

    @property
    def model(self) -> nn.Module:
        """The model whose tree it is."""
        return self._seen[0].module

    def check(self, model: nn.Module) -> bool:
        """Compare the tree with the last one; True if it has changed in a way that sharding allows.

        Modules without parameters may come and go, modules may be wrapped, a parameter may be replaced by one of the
        same shape, whole blocks may be removed, and FSDP may turn parameters into DTensors.

        Raises:
            ConfigError: parameters are new, or a sharded one was resized, renamed, parametrized or replaced; the
                next forward raises as well.
        """
        if self._is_unchanged():
            return False
        _check_parameters(model, self._seen)
        _check_layers(model, self._seen)
        self._remember(model)
        return True


def _is_packed(parameter: nn.Parameter) -> bool:
    """Return whether a parameter holds bytes of a quantized weight, which its library may pack otherwise."""
    return not parameter.is_floating_point() and not parameter.requires_grad


def _look(model: nn.Module) -> list[_Seen]:
    return [
        _Seen(
            module,
            path,
            type(module),
            list(own_modules(module).values()),
            list(own_parameters(module)),
            list(own_parameters(module).values()),
            [None if p is None else p.shape for p in own_parameters(module).values()],
        )
        for path, module in model.named_modules()
    ]


_CHILDREN, _PARAMETERS = operator.attrgetter("_modules"), operator.attrgetter("_parameters")
_VALUES = operator.methodcaller("values")


def _contents(modules: Sequence[nn.Module]) -> tuple[list[int], list[Any]]:
    """Count the children and parameters of each module, and list them in order; for every forward, so only in C."""
    held = [*map(_CHILDREN, modules), *map(_PARAMETERS, modules)]
    return list(map(len, held)), list(chain.from_iterable(map(_VALUES, held)))


def _check_parameters(model: nn.Module, before: list[_Seen]) -> None:
    """Raise if a parameter is neither an old one nor replaces one of its shape."""
    known = {id(parameter) for seen in before for parameter in seen.parameters}
    shapes = {
        (id(seen.module), name): shape for seen in before for name, shape in zip(seen.names, seen.shapes, strict=True)
    }
    new = []
    for path, module in model.named_modules():
        for name, parameter in own_parameters(module).items():
            if parameter is None or isinstance(parameter, DTensor) or _is_packed(parameter):
                continue
            place = (id(module), name)
            if place in shapes and shapes[place] == parameter.shape:
                continue
            if id(parameter) not in known:
                new.append(f"{path}.{name}" if path else name)
            elif place in shapes:
                was = shapes[place]
                raise ConfigError(
                    f"{path}.{name} of {type(model).__name__} has another shape than autopar.initialize gave it: it "
                    f"holds a shard.\n  Now {list(parameter.shape)}, then {was and list(was)} on this rank.\n{_WHEN}"
                )
    if new:
        more = " ..." if len(new) > 3 else ""
        adapted = next(tuner_layers(model), None)
        raise ConfigError(
            f"{len(new)} parameters of {type(model).__name__} came after autopar.initialize, which does not know how "
            f"they are to be sharded: {', '.join(new[:3])}{more}\n{_WHEN if adapted is None else _ADAPTERS}"
        )


def _reordered(seen: _Seen) -> bool:
    """Check whether a module has the parameters that it had: PEFT puts one of experts back behind the others."""
    before = zip(seen.names, seen.parameters, strict=True)
    return {name: id(one) for name, one in own_parameters(seen.module).items()} == {name: id(p) for name, p in before}


def _check_layers(model: nn.Module, before: list[_Seen]) -> None:
    """Raise if a parallel layer has changed, or was taken out of its parent."""
    now = {id(module) for module in model.modules()}
    parents = {id(child): seen for seen in before for child in seen.children if child is not None}
    for seen in before:
        plan: Any = vars(seen.module).get("autopar")
        if plan is None:
            continue
        if id(seen.module) not in now:
            parent = parents.get(id(seen.module))
            if parent is not None and id(parent.module) in now and not plan.gather_output:
                _refuse(model, seen, "was taken out or replaced")
        elif not issubclass(type(seen.module), seen.kind):
            _refuse(model, seen, f"is a {type(seen.module).__name__} now (parametrized?)")
        elif list(own_parameters(seen.module)) != seen.names and not _reordered(seen):
            _refuse(model, seen, f"holds {_listed(seen.module)} now, and held {', '.join(seen.names)}")


def _listed(module: nn.Module) -> str:
    return ", ".join(own_parameters(module)) or "no parameter"


def _refuse(model: nn.Module, seen: _Seen, what: str) -> None:
    raise ConfigError(
        f"{seen.path} of {type(model).__name__}, a {seen.kind.__name__} since autopar.initialize, {what}: what was put "
        f"there would compute with this rank's shard as if it were the whole weight.\n{_WHEN}"
    )
