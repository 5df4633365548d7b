"""Random streams of the stages: what all of them draw alike, and what each draws for itself.

Every stage runs the code in front of its blocks. What that draws (the patches to mask, jittered coordinates) the blocks
of several stages may read, or the code behind them, so it must be the same everywhere: it comes from a stream of the
micro-batch. Blocks draw (dropout) from a stream of their stage. The code in front of a decoder has a third one, since
the stage that runs the end of the encoder comes there from its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from autopar.distributed.rng import seeded, switch_stream
from autopar.plan.stages import StagePlan

__all__ = ["Streams", "switching"]


class Streams:
    """The streams of one micro-batch.

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


@contextmanager
def switching(model: nn.Module, plan: StagePlan, streams: Callable[[], Streams]) -> Iterator[None]:
    """Let a whole model draw as its stages do: hooks switch the streams where a stage begins.

    Args:
        model: a plain one, with the plan's elements.
        streams: returns those of the micro-batch that runs.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    hooks: list[Any] = []

    def begin(number: int) -> Callable[..., None]:
        return lambda *_: streams().stage(number)

    if plan.encoder is not None:
        hooks.append(modules[plan.elements[plan.encoder]].register_forward_hook(lambda *_: streams().decoder()))
    for number, start in enumerate(plan.bounds[1:-1], 1):
        before = start - 1
        if before == plan.encoder:
            hooks.append(modules[plan.elements[start]].register_forward_pre_hook(begin(number)))
        else:
            hooks.append(modules[plan.elements[before]].register_forward_hook(begin(number)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
