"""PipelineConfig: the section ``pipeline`` of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.errors import nearest

__all__ = ["PipelineConfig"]

_SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv")
_REDUCTIONS = ("tokens", "microbatch")


@dataclass(frozen=True)
class PipelineConfig:
    """How ``execute_pipeline`` runs: the section ``pipeline``.

    Attributes:
        schedule: ``1f1b``, ``gpipe``, ``interleaved``, ``zero-bubble`` or ``zbv``.
        microbatch_size: samples of a micro-batch. None with ``num_microbatches``, and at one stage by default (the
            whole batch); at more stages the default is 1.
        num_microbatches: or the number of micro-batches.
        layers_per_stage: blocks of each stage, in order; empty: shared out by parameters.
        loss_reduction: ``tokens``: the loss of the whole batch, whatever the padding; ``microbatch``: the mean of the
            micro-batches' means.
        timeout: seconds that a stage waits for another one.
        chunks: stages on each rank; above 1 for ``interleaved``, 2 for ``zbv``.
    """

    schedule: str = "1f1b"
    microbatch_size: int | None = None
    num_microbatches: int | None = None
    layers_per_stage: tuple[int, ...] = ()
    loss_reduction: str = "tokens"
    timeout: int = 600
    chunks: int = 1

    @property
    def folded(self) -> bool:
        """Whether the second half of the stages runs back over the ranks."""
        return self.schedule == "zbv"

    @classmethod
    def of(cls, section: Mapping[str, Any], pp: int, problems: list[str]) -> PipelineConfig:
        """From the keys of the section; what is wrong with them is added to ``problems``."""
        found = dict(section)
        schedule = found.setdefault("schedule", "1f1b")
        chunks = found.setdefault("chunks", 2 if schedule in ("interleaved", "zbv") else 1)
        if schedule not in _SCHEDULES:
            problems.append(
                f"pipeline.schedule={schedule!r} is unknown.{nearest(schedule, _SCHEDULES)} Known: "
                f"{', '.join(_SCHEDULES)}"
            )
        elif (schedule == "interleaved") != (chunks > 1) and schedule != "zbv":
            problems.append(
                f"pipeline.chunks={chunks} does not fit schedule {schedule}: more than 1 is for interleaved"
            )
        elif schedule == "zbv" and chunks != 2:
            problems.append(f"pipeline.chunks={chunks} does not fit schedule zbv, which has 2 stages on each rank")
        reduction = found.get("loss_reduction", "tokens")
        if reduction not in _REDUCTIONS:
            problems.append(f"pipeline.loss_reduction={reduction!r} is unknown. Known: {', '.join(_REDUCTIONS)}")
        layers = found["layers_per_stage"] = tuple(found.get("layers_per_stage", ()))
        if any(type(count) is not int or count < 1 for count in layers):
            problems.append(f"pipeline.layers_per_stage={list(layers)} must list numbers of blocks of at least 1")
        size, count = found.get("microbatch_size"), found.get("num_microbatches")
        if size is not None and count is not None:
            problems.append(
                f"pipeline.microbatch_size={size} and pipeline.num_microbatches={count} are both given: one follows "
                "from the other and the batch, so give one"
            )
        elif size is None and count is None and pp > 1:
            found["microbatch_size"] = 1
        if count is not None and count < pp:
            problems.append(
                f"pipeline.num_microbatches={count} is less than pipeline_parallel_size={pp}: some stages would never "
                f"work at the same time; give at least {pp}"
            )
        return cls(**found)
