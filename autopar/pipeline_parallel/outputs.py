"""A model's outputs without some entries: what only another stage could compute is no value, and reading it raises."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

from transformers.utils.generic import ModelOutput

from autopar.errors import UnsupportedModelError

__all__ = ["chief", "complete", "partial"]


def chief(output: ModelOutput) -> str:
    """The first entry that is no loss: logits, or hidden states."""
    return next((name for name in output if "loss" not in name), next(iter(output)))


def partial(output: Any, withheld: Sequence[str]) -> Any:
    """``output`` without these entries; reading one of them, or all entries in a row, raises."""
    if not withheld:
        return output
    plain: Any = type(complete(output))
    made = plain(**{name: value for name, value in dict.items(output) if name not in withheld})
    made.__class__ = _partial_class(plain)
    object.__setattr__(made, "_withheld", tuple(withheld))
    object.__setattr__(made, "_readable", _readable(output, withheld))
    return made


def complete(output: Any) -> Any:
    """The plain output again, with None in the place of what is withheld."""
    if not isinstance(output, _Partial):
        return output
    entries: Any = output
    return type(output).__mro__[2](**dict(dict.items(entries)))


def _readable(output: ModelOutput, withheld: Sequence[str]) -> int:
    """How many entries come before the first one that is withheld."""
    names = list(output)
    return min([place for place, name in enumerate(names) if name in withheld], default=len(names))


class _Partial:
    _withheld: tuple[str, ...] = ()
    _readable = 0

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name in self._withheld:
            _refuse(self, name)
        return super().__getattribute__(name)

    def __getitem__(self, key: Any) -> Any:
        own: Any = self
        if isinstance(key, str):
            if key in self._withheld:
                _refuse(self, key)
            return dict.__getitem__(own, key)
        entries = tuple(dict.values(own))
        if not isinstance(key, int) or not 0 <= key < self._readable:
            _refuse(self, f"[{key}]")
        return entries[key]

    def to_tuple(self) -> Any:
        _refuse(self, "all of them in a row")

    items = values = to_tuple


def _refuse(output: Any, what: str) -> NoReturn:
    raise UnsupportedModelError(
        f"{what} of {type(output).__name__}: {', '.join(output._withheld)} of this output is computed in front of the "
        "blocks, by the first pipeline stage, and the last stage, which makes the outputs, does not have it.\n"
        "  Read the other entries by name, or use pipeline_parallel_size=1."
    )


@functools.cache
def _partial_class(plain: Any) -> Any:
    return type(plain.__name__, (_Partial, plain), {"__module__": plain.__module__, "__qualname__": plain.__qualname__})
