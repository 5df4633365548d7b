"""The forward of one stage through the model's own code, from what it received to what it sends on.

The elements of a model (its blocks, and an encoder) are the boundaries of its stages: their classes are swapped. While
a :class:`StageForward` runs, an element before the stage returns what the stage received, the stage's own elements
compute, and the last of them ends the forward by an exception that carries its output. Everything around the blocks
(masks, positions, heads) is the model's own code. The first forward of each kind of call is examined: nothing that
another stage holds may reach its results.

[Note: random streams of stages] Every stage runs the code in front of its blocks. The blocks of several stages, or the
code behind them, may read its draws (the patches to mask, jittered coordinates), so they must be the same everywhere:
they come from a stream of the micro-batch. Blocks draw (dropout) from a stream of their stage. The code in front of a
decoder has a third one, since the stage that runs the end of the encoder comes there from its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from autopar.pipeline_parallel.p2p import map_tensors
from autopar.plan.stages import StagePlan
from autopar.swap import swap, unswap


class StageOutput(NamedTuple):
    """Output of one stage, input of the next one.

    Attributes:
        output: of the last element, in exactly the form in which it returned it.
        encoder: the encoder's output, for the stages behind it; None before.
    """

    output: Any
    encoder: Any = None


class StageEnd(Exception):
    """End of a stage's forward: its last element has its output."""

    completes = True  # the forward has done all that it had to do

    def __init__(self, result: StageOutput) -> None:
        super().__init__("a pipeline stage ended")
        self.result = result


class StageContext:
    """State that the boundaries of one model share on this rank.

    Attributes:
        encoder: place of the encoder among the elements.
        forward: the stage forward that runs now; None outside of the pipeline (then elements do as they always did).
        placeholders: name -> placeholder of each tensor that this rank does not hold.
        examined: kinds of calls that were examined -> entries of the result that the last stage cannot make.
    """

    def __init__(self, encoder: int | None) -> None:
        self.encoder = encoder
        self.forward: StageForward | None = None
        self.placeholders: Mapping[str, torch.Tensor] = {}
        self.examined: dict[Any, tuple[str, ...]] = {}

    def in_front(self) -> bool | None:
        """Check whether the forward that runs has reached no element yet, so that all stages run; None: none runs."""
        return None if self.forward is None else not self.forward.reached


class Streams:
    """The random streams of one micro-batch.

    Args:
        seed: of the pass; None: there are none, all draws go on where the generators are.
    """

    def __init__(self, seed: int | None, stages: int, microbatch: int = 0) -> None:
        self.stages = stages
        self.first = None if seed is None else seed + (stages + 1) * microbatch

    @contextmanager
    def front(self) -> Iterator[None]:
        """Draw from the stream of the code in front of the blocks; inside, other streams may be switched to."""
        if self.first is None:
            yield
            return
        with seeded(self.first):
            yield

    def stage(self, number: int) -> None:
        """Switch to the stream of a stage's own blocks; the first stage goes on with that of the code in front."""
        if self.first is not None and number > 0:
            switch_stream(self.first + number)

    def decoder(self) -> None:
        """Switch to the stream of the code in front of a decoder."""
        if self.first is not None:
            switch_stream(self.first + self.stages)


class StageForward:
    """One forward of a stage.

    Args:
        bounds: it runs the elements from the first up to, not including, the second.
        last: whether it returns what the model returns.
        streams: what is drawn from, by default the generators as they are.
        stage: its number among the streams.

    Attributes:
        provenance: where a forward is examined: then only ``source``, the element in front of the stage, returns what
            was received, and earlier ones a copy that is marked.
        reached: whether an element was called.
        before: earlier blocks that were called.
        cache: KV cache that the model's blocks were called with; ``tokens``: of the call, as the model got them.
        loss: computed from the result of the last stage.
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
        """Reset, to run for the first time or again."""
        self.source = source
        # the output of the last element so far, and the encoder's
        self.output, self.encoder = self.received or StageOutput(None)
        self.cache: Cache | None = None
        self.tokens: torch.Tensor | None = None
        self.reached = self._entered = False
        self.before: list[int] = []
        self._copies: list[tuple[int, torch.Tensor, int]] = []

    @property
    def skipped_source(self) -> bool:
        """Check whether earlier blocks were called, but not the last of them."""
        return bool(self.before) and self.source not in self.before

    def run(self, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the stage: returns its :class:`StageOutput`, or on the last stage what the model returns."""
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
        return StageOutput(self.output, self.encoder)

    def output_before(self, place: int) -> Any:
        """Return the output of the earlier block ``place``, as far as this stage has it."""
        assert self.received is not None, f"element {place} of a stage that received nothing"
        self.before.append(place)
        if self.provenance is None or place == self.source:
            return self.received.output

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            copied = tensor.detach().clone()
            self._copies.append((place, copied, version_of(copied)))
            return copied

        made = map_tensors(self.received.output, copy)
        self.provenance.mark(made, [f"the output of block {place}"])
        return made

    def come_to(self, place: int) -> None:
        """Begin the stage's own blocks, at the block ``place`` or right behind it."""
        if place >= self.start - 1 and not self._entered:
            self._entered = True
            self.streams.stage(self.stage)

    def check_copies(self) -> None:
        """Raise UnsupportedModelError if the model wrote into what :meth:`output_before` returned."""
        for place, copied, version in self._copies:
            if version_of(copied) != version:
                raise UnsupportedModelError(
                    "this model cannot be split into pipeline stages: its forward writes in place into the output of "
                    f"block {place}, which a later stage does not have"
                )


class StageBoundary:
    """Class before that of a block, or an encoder: a forward may start behind it, and stop there."""

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
        if place == forward.stop - 1 and not forward.last:
            raise StageEnd(forward.result())
        return output


def mark_boundaries(model: nn.Module, plan: StagePlan, context: StageContext, prefix: str = "") -> None:
    """Swap the classes of the plan's elements (their names begin with ``prefix``): a forward may start there."""
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
    """Run the forward of one stage: returns its :class:`StageOutput`, or on the last stage what the model returns.

    Args:
        finish: on the last stage, applied to what the model returns; its result is left in ``forward.loss``.

    Raises:
        UnsupportedModelError: the result would need what this stage does not have; found at the first call of its kind
            (with an image for the first time, say).
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
    """Return the arguments' names and types: they decide which code of a model runs."""
    if isinstance(value, torch.Tensor):
        return value.ndim, value.dtype
    if isinstance(value, Cache):
        return kind_of_cache(value)
    if isinstance(value, Mapping):
        return tuple((name, _kind_of(entry)) for name, entry in value.items() if entry is not None)
    if isinstance(value, list | tuple):
        return tuple(dict.fromkeys(map(_kind_of, value)))
    return value if value is None or isinstance(value, bool | str) else type(value)
