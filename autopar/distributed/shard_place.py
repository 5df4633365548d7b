"""The place of a shard: of which parameter it is, where in it, and on which pipeline stage."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType, FrameType
from typing import Any

from autopar.distributed.summed_lines import adds_up, goes_over_parameters
from autopar.layout import Layout

__all__ = ["Shard", "Stage", "all_stages", "in_microbatches"]


class Shard:
    """The place of a shard: of which parameter, and where in it.

    Args:
        layout: None if it is whole here.
        rank: among those that hold the shards.
        axis: what these ranks are called: ``tensor-parallel``.
        told: places in the user's code that have been told, of the whole model.
        stage: that holds the parameter, and others hold other ones; None without pipeline stages.
        block: of the model in which it is.
        joins: ``autopar.whole`` joins it; not with FSDP2, which shards it over replicas.
    """

    def __init__(
        self,
        name: str,
        whole: Sequence[int],
        layout: Layout | None,
        rank: int,
        told: set[tuple[str, int]],
        axis: str,
        stage: Stage | None = None,
        block: str = "",
        *,
        joins: bool = True,
    ) -> None:
        self.axis, self.stage, self.block, self.joins = axis, stage, block, joins
        self.name, self.whole, self.layout, self.rank, self.told = name, tuple(whole), layout, rank, told
        self.here = self.whole
        if layout is not None:
            self.here = (*whole[: layout.dim], layout.local_size(rank), *whole[layout.dim + 1 :])

    @functools.cached_property
    def read(self) -> Shard | None:
        """The place of what is read of all of the parameter (a norm): a stage's; None without stages."""
        if self.stage is None:
            return None
        return Shard(self.name, (), None, self.rank, self.told, self.axis, self.stage, self.block, joins=self.joins)

    def held(self) -> str:
        """Return what of the whole is here."""
        assert self.layout is not None
        ranges = ", ".join(f"{start} to {stop - 1}" for start, stop in self.layout.ranges(self.rank)) or "none"
        return f"shape {self.here} of {self.whole}, {ranges} of dim {self.layout.dim}"


class Stage:
    """The weights that a rank holds of a model in stages.

    Args:
        held: ``this rank holds stage 0 of 2: 20 of 39 parameters``.
        joins: ``autopar.whole`` joins weights of all stages.
    """

    def __init__(self, held: str, *, joins: bool = True) -> None:
        self.held, self.joins = held, joins
        self.microbatches = 1  # of the pass that runs
        self.quiet = False  # nothing is missing: weights of all stages are here, or a sum over the stages follows
        self._read: dict[
            tuple[CodeType, int], tuple[str, str] | None
        ] = {}  # line -> of what it reads; None: it is known

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Say nothing inside of ``with``."""
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before

    def first_of(self, block: str, name: str, frame: FrameType, *, draws: bool) -> str | None:
        """Return the weight of another block of which a line of the user's has read a number, if it adds them up.

        Once, and None before and after it.

        Args:
            draws: it has drawn random numbers for it, in a loop over parameters.
        """
        place = (frame.f_code, frame.f_lineno)
        first = self._read.setdefault(place, (block, name))
        if first is None or first[0] == block:
            return None
        self._read[place] = None
        counts = goes_over_parameters if draws else adds_up
        return first[1] if counts(frame.f_code.co_filename, frame.f_lineno) else None

    @contextmanager
    def passing(self, microbatches: int) -> Iterator[None]:
        """Differentiate so many micro-batches inside of ``with``, one after the other."""
        self.microbatches = microbatches
        try:
            yield
        finally:
            self.microbatches = 1

    def explain_hook(self, how: str, name: str) -> str:
        """Return the warning for a hook of a gradient that sees one micro-batch."""
        return (
            f"{how} in a hook of {name} sees the gradient of one of {self.microbatches} micro-batches, or their sum so "
            "far.\n  Change parameter.grad after execute_pipeline for that of the batch; factors and masks may be in "
            "hooks.\n  Where that is meant: warnings.filterwarnings('ignore', category=autopar.ShardWarning)."
        )

    def explain_draw(self, how: str, one: str, other: str) -> str:
        """Return the warning for a line that draws random numbers for two weights."""
        return (
            f"{how} for {one} and {other} is for this stage's weights alone: {self.held}.\n"
            "  Under one seed stages draw the same numbers, and others than one process."
            + (" With autopar.whole(model): they are those of\n  one process." if self.joins else "")
            + " Where that is meant: warnings.filterwarnings('ignore', category=autopar.ShardWarning)."
        )

    def explain(self, how: str, one: str, other: str) -> str:
        """Return the warning for a line that puts two weights together."""
        return (
            f"{how} of {one} and {other} is of this stage's weights alone: {self.held}.\n"
            "  torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm) returns the norm of all stages; "
            "model.num_parameters() counts all;\n  execute_pipeline(batch, penalty=...) adds a penalty on all"
            + ("; with autopar.whole(model): all weights and gradients are here." if self.joins else ".")
            + "\n  Where that is meant: warnings.filterwarnings('ignore', category=autopar.ShardWarning)."
        )


def all_stages(parameters: Iterable[Any]) -> AbstractContextManager[None]:
    """Say nothing of sums over these parameters of a stage inside of ``with``: nothing is missing there."""
    stage = _stage_of(parameters)
    return nullcontext() if stage is None else stage.aside()


def in_microbatches(parameters: Iterable[Any], count: int) -> AbstractContextManager[None]:
    """Let hooks of the gradients of these parameters know, inside of ``with``, that a pass is of so many parts."""
    stage = _stage_of(parameters)
    return nullcontext() if stage is None else stage.passing(count)


def _stage_of(parameters: Iterable[Any]) -> Stage | None:
    shards = (getattr(parameter, "autopar_shard", None) for parameter in parameters)
    return next((shard.stage for shard in shards if shard is not None and shard.stage is not None), None)
