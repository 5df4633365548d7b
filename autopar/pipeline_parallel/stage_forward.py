"""One forward of one stage through the model's own code, from what it received to what it hands on.

The elements of a model (its blocks, and an encoder) change class. While a :class:`Course` runs, an element before the
stage returns what the stage received, the stage's own elements compute, and the last of them ends the forward by an
exception that carries its output. Everything around the blocks (masks, positions, heads) is the model's own code.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from autopar.pipeline_parallel.p2p import map_tensors
from autopar.pipeline_parallel.provenance import Absent

__all__ = [
    "Conductor",
    "Course",
    "Handed",
    "StageDone",
    "WrittenInPlace",
    "element_class",
    "keep_length",
    "plain_element_class",
]


class Handed:
    """What goes from one stage to the next.

    Attributes:
        output: of the last element, in exactly the form in which it returned it.
        encoder: the encoder's output, for the stages behind it; None before.
    """

    __slots__ = ("encoder", "output")

    def __init__(self, output: Any, encoder: Any = None) -> None:
        self.output, self.encoder = output, encoder


class StageDone(Exception):
    """The stage's last element has its output."""

    completes = True  # the forward has done all that it had to do

    def __init__(self, handed: Handed) -> None:
        super().__init__("a pipeline stage ended")
        self.handed = handed


class WrittenInPlace(Exception):
    """A model wrote into the output of an earlier block, which every block before this stage returned."""


class Course:
    """Which elements one forward runs: those from ``start`` up to, not including, ``stop``.

    Attributes:
        watch: where a forward is examined: then only ``source``, the element in front of the stage, returns what was
            received, and earlier ones a copy that is marked as absent.
        before: earlier blocks that were called.
        loss: what was made of the result.
    """

    def __init__(self, start: int, stop: int, last: bool, received: Handed | None) -> None:
        self.start, self.stop, self.last = start, stop, last
        self.received = received
        self.watch: Absent | None = None
        self.loss: Any = None
        self.restart(start - 1)

    def restart(self, source: int) -> None:
        """Ready to run, again if it ran before."""
        received = self.received
        self.source = source
        self.encoder = received.encoder if received is not None else None
        self.output = received.output if received is not None else None  # of the last element so far
        self.cache: Cache | None = None
        self.before: list[int] = []
        self._copies: list[tuple[int, torch.Tensor, int]] = []

    @property
    def skipped_source(self) -> bool:
        """Whether earlier blocks were called, but not the last of them."""
        return bool(self.before) and self.source not in self.before

    def arrived(self, place: int) -> Any:
        """What the earlier block ``place`` returns."""
        assert self.received is not None, f"element {place} of a stage that received nothing"
        self.before.append(place)
        if self.watch is None or place == self.source:
            return self.received.output

        def stand_in(tensor: torch.Tensor) -> torch.Tensor:
            copied = tensor.detach().clone()
            self._copies.append((place, copied, copied._version))
            return copied

        made = map_tensors(self.received.output, stand_in)
        self.watch.mark(made, [f"the output of block {place}"])
        return made

    def check_copies(self) -> None:
        """Raise if the model wrote into what :meth:`arrived` gave it."""
        for place, copied, version in self._copies:
            if copied._version != version:
                raise WrittenInPlace(place)


class Conductor:
    """What the elements of one model on this rank share.

    Attributes:
        encoder: place of the encoder among the elements.
        course: what runs now; None outside of the pipeline's forwards (then elements are what they were).
        absent: name -> placeholder of each tensor that this rank does not hold.
        proven: kinds of calls that were examined -> entries of the result that the last stage cannot make.
    """

    def __init__(self, encoder: int | None) -> None:
        self.encoder = encoder
        self.course: Course | None = None
        self.absent: dict[str, torch.Tensor] = {}
        self.proven: dict[Any, tuple[str, ...]] = {}

    @contextmanager
    def running(self, course: Course) -> Iterator[Course]:
        """Run the model inside of it."""
        self.course = course
        try:
            yield course
        finally:
            self.course = None


class _Element:
    """A block, or an encoder, of a model that is cut into stages."""

    conductor: Conductor
    place: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        course = self.conductor.course
        if course is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        if self.place != self.conductor.encoder:
            course.cache = course.cache or _cache_among(args, kwargs)
        if self.place < course.start:
            if self.place == self.conductor.encoder:
                return course.encoder
            if course.cache is not None:
                _keep_length_of(self, course.cache, args, kwargs)
            return course.arrived(self.place)
        if course.watch is not None:
            course.check_copies()
        if self.place >= course.stop and self.place != self.conductor.encoder and not course.last:
            # The element that ends the stage was not called.
            raise StageDone(Handed(course.output, course.encoder))
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if self.place == self.conductor.encoder:
            course.encoder, course.output = output, None
        else:
            course.output = output
        if self.place == course.stop - 1 and not course.last:
            raise StageDone(Handed(course.output, course.encoder))
        return output


@functools.cache
def element_class(plain: Any) -> Any:
    """``plain`` as an element; it keeps its name and is still a ``plain``."""
    return type(plain.__name__, (_Element, plain), {"__module__": plain.__module__, "__qualname__": plain.__qualname__})


def plain_element_class(module: nn.Module) -> type[nn.Module]:
    """The class that an element had."""
    kind = type(module)
    return kind.__mro__[2] if issubclass(kind, _Element) else kind


def _cache_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Cache | None:
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)


def keep_length(cache: Any, index: int, batch: int, length: int, like: torch.Tensor) -> None:
    """Tell layer ``index`` of a cache that runs elsewhere how long the sequence is: keys and values of width 1.

    A model asks one layer, often the first, for the length from which it makes positions and masks.
    """
    cache = getattr(cache, "self_attention_cache", cache)
    layers = getattr(cache, "layers", None)
    if layers is None or (index < len(layers) and not hasattr(layers[index], "get_mask_sizes")):
        return
    narrow = torch.zeros(batch, 1, length, 1, device=like.device)
    cache.update(narrow, narrow, index)


def _keep_length_of(block: Any, cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    hidden = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
    index = _layer_index(block)
    if index is not None and hidden is not None and hidden.ndim == 3:
        keep_length(cache, index, hidden.shape[0], hidden.shape[1], hidden)


def _layer_index(block: nn.Module) -> int | None:
    for module in block.modules():
        for name in ("layer_idx", "layer_index"):
            value = vars(module).get(name)
            if type(value) is int:
                return value
    return None
