"""Dry runs that this process has made before, for the ranks of the pool: their tests begin with the same few models."""

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopar.dry_run import plan_model
from autopar.features.context_parallel import plan as context_parallel
from autopar.features.sequence_parallel import plan as sequence_parallel


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


class _Form(pickle.Pickler):
    """Pickles tensors as their forms, and tied ones as one."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._seen: dict[int, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        place = self._seen.setdefault(id(value), len(self._seen))
        return place, type(value), tuple(value.shape), value.dtype, value.requires_grad


def _form(model: nn.Module) -> bytes:
    """All that a dry run can read of a model."""
    file, forwards = io.BytesIO(), [type(module).forward for module in model.modules()]
    try:
        _Form(file).dump((torch.get_default_dtype(), forwards, model))
    except Exception as error:  # a function or a class without a name
        raise _Unknown from error
    return file.getvalue()
