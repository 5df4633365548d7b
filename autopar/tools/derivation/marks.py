"""Marks: what is known of a tensor while features are followed; and the events that a search reacts to."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

__all__ = [
    "ACTIVATION",
    "CONSTANT",
    "INPUT",
    "INSIDE",
    "PARAMETER",
    "Mark",
    "Meeting",
    "Spoiled",
    "places_of",
]

CONSTANT, INPUT, PARAMETER, ACTIVATION, INSIDE = range(5)
"""Kinds: of no gradient; the model's inputs; of parameters alone; replicated with a gradient; inside of a region."""


@dataclass(frozen=True)
class Mark:
    """Facts about a tensor.

    Attributes:
        features: the number of each element, 0 for none; of the tensor's shape. None: no element has one.
        producers: paths of the layers that it comes from, if it is an activation.
        places: parameter -> for each of its dims the index of each element; of the tensor's shape.
        fresh: nothing but moves and scaling happened since the layer that numbered the features.
        partial: the sum over ranks is still to come (behind a bare parameter).
    """

    kind: int
    features: torch.Tensor | None = None
    producers: frozenset[str] = frozenset()
    places: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    fresh: bool = False
    partial: bool = False


@dataclass(frozen=True)
class Meeting:
    """A replicated activation met what is inside of a region.

    Attributes:
        features: some of what is inside, if they are numbered; ``before``: all that were numbered by then are below.
    """

    producers: frozenset[str]
    features: torch.Tensor
    where: str
    before: int


@dataclass(frozen=True)
class Spoiled:
    """Features that cannot be sharded, and why; ``before``: all that were numbered by then are below."""

    why: str
    features: torch.Tensor
    before: int


def places_of(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return for each dim the index of each element, without memory for them."""
    shape = parameter.shape
    return [
        torch.arange(size, dtype=torch.int32).reshape([-1 if d == dim else 1 for d in range(len(shape))]).expand(shape)
        for dim, size in enumerate(shape)
    ]
