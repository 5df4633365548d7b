"""Dry runs that this process has made before, for the ranks of the pool: their tests begin with the same few models."""

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from autopar.dry_run import plan_model
from autopar.features.context_parallel import plan as context_parallel
from autopar.features.sequence_parallel import plan as sequence_parallel

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_OWN = frozenset(vars(nn.Module()))
_HOOKS = tuple(name for name in _OWN if "hooks" in name and isinstance(vars(nn.Module())[name], dict))


class _Unknown(Exception):
    """Something that a dry run could depend on, and that has no name."""


def remember() -> None:
    """Have ``autopar.initialize`` of this process make each dry run once."""
    plan_model.check_plan = _once(plan_model.check_plan, _of_plan)
    sequence_parallel.plan_sequence = _once(sequence_parallel.plan_sequence, _of_sequence)
    context_parallel.plan_rows = _once(context_parallel.plan_rows, _of_rows)


def _once(dry_run: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Any, Any] = {}

    @functools.wraps(dry_run)
    def run(*args: Any, **settings: Any) -> Any:
        try:
            form = key(*args), tuple(sorted(settings.items()))
        except _Unknown:
            return dry_run(*args, **settings)
        if form not in known:
            known[form] = dry_run(*args, **settings)
        return copy.deepcopy(known[form])

    return run


def _of_plan(model: nn.Module, prefix: str, plan: Any) -> Any:
    return _form(model), prefix, repr(plan)


def _of_sequence(model: nn.Module, prefix: str, plan: Any, stages: Any) -> Any:
    return *_of_plan(model, prefix, plan), tuple(stages.elements), stages.encoder


def _of_rows(model: nn.Module, policy: Any, prefix: str, ranks: int) -> Any:
    return _form(model), repr(policy), prefix, ranks


def _form(model: nn.Module) -> Any:
    """All that a dry run can read of a model."""
    parts: list[Any] = [torch.get_default_dtype()]
    seen: dict[int, int] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        parts.append((path, type(module), type(module).forward, *_attributes(module)))
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                place = seen.setdefault(id(tensor), len(seen))  # tied ones have the same
                parts.append((name, type(tensor), tuple(tensor.shape), tensor.dtype, tensor.requires_grad, place))
    return tuple(parts)


def _attributes(module: nn.Module) -> Iterator[Any]:
    state = vars(module)
    if any(state[name] for name in _HOOKS):
        raise _Unknown
    for name, value in state.items():
        if name in _OWN and name != "training":
            continue
        if isinstance(value, PretrainedConfig):
            yield name, _pickled(vars(value))
        elif isinstance(value, _PLAIN):
            yield name, type(value), value
        elif isinstance(value, FunctionType | MethodType):
            if name == "forward" or value.__module__.partition(".")[0] not in ("torch", "transformers"):
                raise _Unknown
            yield name, value.__module__, value.__qualname__
        elif isinstance(value, torch.Tensor):
            yield name, tuple(value.shape), value.dtype
        elif isinstance(value, nn.Module):
            yield name, type(value)
        else:
            yield name, _pickled(value)


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise _Unknown from error
