"""Bisection: the first module whose output, or gradient, is another than the plain model's. Pure: a list of events.

Events come in the order in which the plain model makes them. Forward: what each module is given and what it returns.
Backward: gradients of outputs, of parameters, in the order of the backward pass. A module whose input is wrong while
everything before it was right is not to blame: the code around it is, that of the module which holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Event", "Found", "first_difference", "parent_of"]


class Event(NamedTuple):
    """Something that was compared.

    Attributes:
        path: of the module.
        kind: ``input``, ``output``, ``gradient`` (of the output) or ``parameter`` (its gradient).
        verdict: True: as in the plain model; False: not; None: unknown (a form that has no counterpart there).
        name: of the tensor among those of the module; of a parameter its own.
        difference: as a part of the largest element.
        call: how often the module was called before.
        readers: paths of modules that were given this output, for a gradient.
    """

    path: str
    kind: str
    verdict: bool | None
    name: str = ""
    difference: float = 0.0
    call: int = 0
    readers: tuple[str, ...] = ()


class Found(NamedTuple):
    """The first difference.

    Attributes:
        event: where it shows.
        module: that is to blame.
        since: paths of modules between the last event that was right and this one.
    """

    event: Event
    module: str
    since: tuple[str, ...] = ()


def first_difference(events: Sequence[Event]) -> Found | None:
    """Return the first event that differs, and the module to blame for it; None if there is none."""
    place = next((number for number, event in enumerate(events) if event.verdict is False), None)
    if place is None:
        return None
    event, before = events[place], events[:place]
    last = next((n for n, earlier in reversed(list(enumerate(before))) if earlier.verdict is True), -1)
    since = [event.path for event in events[max(last, 0) : place]]
    module = event.path
    if event.kind == "input":
        module = parent_of(event.path)
        since.append(event.path)  # what it is given may be made by the code that calls it
    elif event.kind == "gradient" and event.readers:
        module = event.readers[0] if len(event.readers) == 1 else _common(event.readers)
    return Found(event, module, tuple(dict.fromkeys(path for path in since if path != module)))


def parent_of(path: str) -> str:
    """Return the path of the module around a module."""
    return path.rpartition(".")[0]


def _common(paths: Sequence[str]) -> str:
    """The innermost module that holds all of them."""
    split = [parent_of(path).split(".") for path in paths]
    common: list[str] = []
    for names in zip(*split, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)
