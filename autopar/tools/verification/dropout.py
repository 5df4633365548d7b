"""Dropout of a model: its rates, switched off for comparisons and put back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn
from transformers import PretrainedConfig

from autopar.foreign.tensors import Dropout

_USUAL = ("p", "dropout", "attention_dropout")
_LAYERS = re.compile(r"layer_?drop")


class Rate(NamedTuple):
    """One place where a rate is kept: an attribute of a module or of a config.

    Attributes:
        place: path of the module, ``config`` for all configs.
        owner: the object itself.
    """

    place: str
    owner: Any
    name: str
    value: float

    def set(self, value: float) -> None:
        """Set it; some are declared as integers, which 0 is as well."""
        setattr(self.owner, self.name, type(self.value)(0) if value == 0 else float(value))


def rates(model: nn.Module) -> list[Rate]:
    """Find all rates of a model: ``p`` of dropouts, numbers called ``*drop*`` on modules and in their configs."""
    found: list[Rate] = []
    seen = set[int]()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            called = "drop" in name or "jitter" in name or (name == "p" and isinstance(module, Dropout))
            if called and type(value) in (float, int):
                found.append(Rate(path, module, name, value))
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            found += _of_config(config, seen)
    return found


def _of_config(config: PretrainedConfig, seen: set[int]) -> Iterator[Rate]:
    if id(config) in seen:
        return
    seen.add(id(config))
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield from _of_config(value, seen)
        elif ("drop" in name or "jitter" in name) and type(value) in (float, int):
            yield Rate("config", config, name, value)


def switch_off(model: nn.Module) -> list[Rate]:
    """Set all rates to 0; returns them as they were."""
    found = rates(model)
    for rate in found:
        rate.set(0)
    return found


@contextmanager
def switched_on(models: Sequence[nn.Module], known: Sequence[Rate], default: float) -> Iterator[bool]:
    """Switch dropout on inside, with the rates that were ``known``; gives whether any is on.

    Whole layers are not dropped: which of them are, the plain model's generator and the parallel one's tell apart.

    Args:
        default: for all dropouts of the modules, where the model had none that was on.
    """
    values = {(rate.place, rate.name): rate.value for rate in known if rate.value and not _LAYERS.search(rate.name)}
    if all(place == "config" and "att" not in name for place, name in values):
        values = {}  # modules have copied theirs, and the others belong to no module
    found = [rate for model in models for rate in rates(model)]
    for rate in found:
        own = default if rate.place != "config" and rate.name in _USUAL else 0.0
        rate.set(values.get((rate.place, rate.name), 0.0) if values else own)
    try:
        yield bool(values) or any(rate.place != "config" and rate.name in _USUAL for rate in found)
    finally:
        for rate in found:
            rate.set(0)
