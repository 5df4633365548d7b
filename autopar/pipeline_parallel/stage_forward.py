"""Run the forward of one stage through the model's code, from its received input to its output.

[Note: state passing between stages] Every stage runs the model's forward. The classes of the elements (the blocks, and
an encoder) are swapped. An element before the stage returns the received output, the stage's elements compute, and the
last one ends the forward by an exception with its output. The output is sent as it is, with all nested tensors
(:mod:`autopar.pipeline_parallel.p2p`), except for KV caches: each rank keeps the cache of its layers. Code around the
blocks (masks, positions, heads) runs on every stage with placeholders for other stages' weights. The first forward of
each kind of call is examined: its result must not depend on weights of another stage.

[Note: random streams of stages] Every stage runs the code before the blocks. Blocks of several stages, or the code
after them, may read its draws (the patches to mask, jittered coordinates). So these draws come from a stream of the
micro-batch, identical on all stages. Blocks draw (dropout) from a stream of their stage. The code before a decoder has
a third stream, because the stage with the end of the encoder has drawn from its blocks' stream.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache

from autopar.compat.tensors import version_of
from autopar.distributed.rng import seeded, switch_stream
from autopar.errors import UnsupportedModelError
from autopar.pipeline_parallel.outputs import (
    Provenance,
    examine,
    explain,
    find_cache,
    incomplete,
    kind_of_cache,
    record_length,
    tokens_of,
)
from autopar.pipeline_parallel.p2p import map_tensors, pack_shapes, unpack_shapes
from autopar.plan.stages import StagePlan
from autopar.swap import swap, unswap
from autopar.tensor_tracking import tensors_in


class StageOutput(NamedTuple):
    """The output of a stage and input of the next: the outputs of its last element and of the encoder, unchanged.

    ``ended``: the shapes of the outputs of lists of blocks that ended before the last element, packed.
    """

    output: Any
    encoder: Any = None
    ended: tuple[bytes, ...] = ()


class StageEnd(Exception):
    """The end of a stage's forward, after its last element."""

    completes = True  # not an error

    def __init__(self, result: StageOutput) -> None:
        super().__init__("a pipeline stage ended")
        self.result = result


class StageContext:
    """The state that the boundaries of one model share on this rank.

    Attributes:
        encoder: The index of the encoder among the elements.
        ends: The indices of the last blocks of lists after which another list runs.
        forward: The current stage forward; None outside of the pipeline, where elements run as usual.
        placeholders: Name -> placeholder of each tensor that this rank does not hold.
        examined: Kind of an examined call -> entries of the result that the last stage cannot compute.
    """

    def __init__(self, plan: StagePlan) -> None:
        self.encoder = plan.encoder
        lists = [path.rpartition(".")[0] for path in plan.elements if plan.encoder is None]
        self.ends = [place for place, (one, other) in enumerate(pairwise(lists)) if one != other]
        self.forward: StageForward | None = None
        self.placeholders: Mapping[str, torch.Tensor] = {}
        self.examined: dict[Any, tuple[str, ...]] = {}

    def in_front(self) -> bool | None:
        """Return whether the current forward is before its first element; None without a current forward."""
        return None if self.forward is None else not self.forward.reached


class Streams:
    """The random streams of one micro-batch; without a seed, generators do not change."""

    def __init__(self, seed: int | None, stages: int, microbatch: int = 0) -> None:
        self.stages = stages
        self.first = None if seed is None else seed + (stages + 1) * microbatch

    def front(self) -> AbstractContextManager[None]:
        """Draw from the stream of the code before the blocks, until another stream begins."""
        return nullcontext() if self.first is None else seeded(self.first)

    def stage(self, number: int) -> None:
        """Switch to the stream of a stage's blocks; the first stage keeps the stream of the code before them."""
        if self.first is not None and number > 0:
            switch_stream(self.first + number)

    def decoder(self) -> None:
        """Switch to the stream of the code before a decoder."""
        if self.first is not None:
            switch_stream(self.first + self.stages)


class StageForward:
    """One forward of a stage.

    Args:
        bounds: The range ``(first, stop)`` of its elements.
        last: True if it returns the model's result.
        streams: The random streams; by default generators do not change.

    Attributes:
        provenance: The dispatch mode while a forward is examined. Then only ``source``, the element before the stage,
            returns the received output, and earlier elements a marked copy.
        before: The earlier blocks that were called.
        cache: The KV cache of the model's blocks.
        loss: The loss of the last stage's result.
    """

    def __init__(
        self,
        context: StageContext,
        bounds: Sequence[int],
        last: bool,
        received: StageOutput | None,
        streams: Streams | None = None,
        stage: int = 0,
    ) -> None:
        self.context, self.last, self.received = context, last, received
        self.streams, self.stage = streams or Streams(None, 1), stage
        self.start, self.stop = bounds
        self.provenance: Provenance | None = None
        self.loss: Any = None
        self.restart(self.start - 1)

    def restart(self, source: int) -> None:
        """Reset before the first or another run."""
        self.source = source
        # outputs of the last element so far, and of the encoder
        self.output, self.encoder, self.ended = self.received or StageOutput(None)
        self.cache: Cache | None = None
        self.tokens: torch.Tensor | None = None
        self.reached = self._entered = False
        self.before: list[int] = []
        self._copies: list[tuple[int, torch.Tensor, int]] = []

    def run(self, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the :class:`StageOutput`, or on the last stage the model's result."""
        self.context.forward, self.tokens = self, tokens_of(kwargs)
        try:
            result = model(*args, **kwargs)
        except StageEnd as end:
            return end.result
        finally:
            self.context.forward = None
        return result if self.last else self.result()

    def result(self) -> StageOutput:
        """Return the output of the last element so far."""
        return StageOutput(self.output, self.encoder, self.ended)

    def output_before(self, place: int) -> Any:
        """Return the received output for the earlier block ``place``."""
        assert self.received is not None, f"element {place} of a stage that received nothing"
        self.before.append(place)
        number = bisect_left(self.context.ends, place)
        in_earlier_list = number < bisect_left(self.context.ends, self.start - 1)  # with other outputs
        if not in_earlier_list and (self.provenance is None or place == self.source):
            return self.received.output

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            copied = tensor.detach().clone()
            self._copies.append((place, copied, version_of(copied)))
            return copied

        if in_earlier_list:
            made = unpack_shapes(self.received.ended[number], next(tensors_in(self.received.output)).device)
        else:
            made = map_tensors(self.received.output, copy)
        if self.provenance is not None:
            self.provenance.mark(made, [f"the output of block {place}"])
        return made

    def come_to(self, place: int) -> None:
        """Switch to the stage's stream at its first block, or at the block before it."""
        if place >= self.start - 1 and not self._entered:
            self._entered = True
            self.streams.stage(self.stage)

    def check_copies(self) -> None:
        """Raise UnsupportedModelError if the model wrote into an output of :meth:`output_before`."""
        for place, copied, version in self._copies:
            if version_of(copied) != version:
                raise UnsupportedModelError(
                    "this model is not supported with pipeline stages: its forward writes in place into the output of "
                    f"block {place}, which a later stage does not have"
                )


class StageBoundary:
    """A mixin before the class of a block or an encoder, after which a stage's forward may start or end."""

    stage_context: StageContext
    stage_place: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context, place = self.stage_context, self.stage_place
        forward, is_encoder = context.forward, place == context.encoder
        if forward is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        forward.reached = True
        if not is_encoder:
            forward.cache = forward.cache or find_cache(args, kwargs)
        if place < forward.start:
            if is_encoder:
                forward.streams.decoder()
                return forward.encoder
            forward.come_to(place)
            if forward.cache is not None:
                record_length(self, forward.cache, args, kwargs, forward.tokens)  # type: ignore[arg-type]
            return forward.output_before(place)
        if forward.provenance is not None:
            forward.check_copies()
        if place >= forward.stop and not is_encoder and not forward.last:
            raise StageEnd(forward.result())  # the element that ends the stage was not called
        if not is_encoder:
            forward.come_to(place)
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if is_encoder:
            forward.encoder, forward.output = output, None
            forward.streams.decoder()
        else:
            forward.output = output
            if place in context.ends:
                forward.ended += (pack_shapes(output),)
        if place == forward.stop - 1 and not forward.last:
            raise StageEnd(forward.result())
        return output


def mark_boundaries(model: nn.Module, plan: StagePlan, context: StageContext, prefix: str = "") -> None:
    """Swap the classes of the plan's elements, whose names begin with ``prefix``."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for place, path in enumerate(plan.elements):
        swap(modules[path.removeprefix(prefix)], StageBoundary, stage_context=context, stage_place=place)


def unmark_boundaries(model: nn.Module, plan: StagePlan, prefix: str = "") -> None:
    """Undo :func:`mark_boundaries`."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for path in plan.elements:
        unswap(modules[path.removeprefix(prefix)], StageBoundary, "stage_context", "stage_place")


def run_stage(
    forward: StageForward,
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    finish: Callable[[Any], Any] | None = None,
) -> Any:
    """Run the forward of one stage; return its :class:`StageOutput`, or on the last stage the model's result.

    There ``finish`` computes ``forward.loss`` from it.

    Raises:
        UnsupportedModelError: The result depends on another stage's tensors, at the first call of its kind (with an
            image for the first time, say).
    """
    kind = (forward.start, forward.last, torch.is_grad_enabled(), _kind_of(list(args)), _kind_of(kwargs))
    unavailable = forward.context.examined.get(kind)
    with forward.streams.front():
        if unavailable is None:
            result, missing, unavailable = examine(forward, model, args, kwargs, finish)
            if missing:
                raise UnsupportedModelError(explain(forward, missing))
            forward.context.examined[kind] = unavailable
            return result
        result = forward.run(model, args, kwargs)
        if forward.last:
            result = incomplete(result, unavailable) if unavailable else result
            forward.loss = finish(result) if finish is not None else None
        return result


def _kind_of(value: Any) -> Any:
    """Return the names and types of arguments, which determine the code that a model runs."""
    if isinstance(value, torch.Tensor):
        return value.ndim, value.dtype
    if isinstance(value, Cache):
        return kind_of_cache(value)
    if isinstance(value, Mapping):
        return tuple((name, _kind_of(entry)) for name, entry in value.items() if entry is not None)
    if isinstance(value, list | tuple):
        return tuple(dict.fromkeys(map(_kind_of, value)))
    return value if value is None or isinstance(value, bool | str) else type(value)
