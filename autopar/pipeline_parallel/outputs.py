"""Model outputs without the entries that only another stage could compute: reading one of those raises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from autopar.errors import UnsupportedModelError
from autopar.swap import plain_class, swap

__all__ = ["complete", "incomplete", "unavailable"]


def incomplete(output: Any, names: Sequence[str]) -> Any:
    """Return ``output`` without these entries; reading one of them, or all entries in a row, raises."""
    if not names:
        return output
    kept = {name: value for name, value in dict.items(output) if name not in names}
    made = plain_class(output, IncompleteOutput)(**kept)
    readable = next((place for place, name in enumerate(output) if name in names), len(output))
    swap(made, IncompleteOutput, _unavailable=tuple(names), _readable=readable)
    return made


def complete(output: Any) -> Any:
    """Return the plain output again, with None in the place of what is unavailable."""
    if not isinstance(output, IncompleteOutput):
        return output
    entries: Any = output
    return plain_class(output, IncompleteOutput)(**dict(dict.items(entries)))


def unavailable(output: Any) -> tuple[str, ...]:
    """Return the names of the entries that are unavailable."""
    return output._unavailable if isinstance(output, IncompleteOutput) else ()


class IncompleteOutput:
    """Class before that of an output.

    Attributes:
        _unavailable: names of the entries that are not there.
        _readable: entries before the first one that is not there, which can be read by their place.
    """

    _unavailable: tuple[str, ...] = ()
    _readable = 0

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name in self._unavailable:
            _refuse(self, name)
        return super().__getattribute__(name)

    def __getitem__(self, key: Any) -> Any:
        own: Any = self
        if isinstance(key, str):
            if key in self._unavailable:
                _refuse(self, key)
            return dict.__getitem__(own, key)
        entries = tuple(dict.values(own))
        if not isinstance(key, int) or not 0 <= key < self._readable:
            _refuse(self, f"[{key}]")
        return entries[key]

    def to_tuple(self) -> Any:
        _refuse(self, "all of them in a row")

    items = values = to_tuple


def _refuse(output: Any, entry: str) -> NoReturn:
    raise UnsupportedModelError(
        f"{entry} of {type(output).__name__}: {', '.join(output._unavailable)} of this output is computed in front of "
        "the blocks, by the first pipeline stage, and the last stage, which makes the outputs, does not have it.\n"
        "  Read the other entries by name, or use pipeline_parallel_size=1."
    )
