"""PipelineConfig: the section ``pipeline`` of the configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.errors import clip, nearest

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv", "dualpipev")
SPLIT_BACKWARD = ("zero-bubble", "zbv", "dualpipev")  # gradients of weights come later than those of inputs
_FOLDED = ("zbv", "dualpipev")
_REDUCTIONS = ("tokens", "microbatch")


@dataclass(frozen=True)
class PipelineConfig:
    """The section ``pipeline``: how ``execute_pipeline`` runs.

    Attributes:
        schedule: ``1f1b``, ``gpipe``, ``interleaved``, ``zero-bubble``, ``zbv`` or ``dualpipev``; a batch that gives
            fewer micro-batches than two for each rank goes through ``dualpipev`` in the order of ``zbv``.
        microbatch_size: samples of a micro-batch. None with ``num_microbatches``, and at one stage by default (the
            whole batch); at more stages the default is 1.
        num_microbatches: or the number of micro-batches: at least as many as ranks of the pipeline, twice as many with
            ``dualpipev``. A smaller batch gives fewer.
        layers_per_stage: blocks of each stage, in order; empty: split by parameters.
        loss_reduction: ``tokens``: the loss of the whole batch, whatever the padding; ``microbatch``: the mean of the
            micro-batches' means.
        timeout: seconds that a rank waits for another one, over any axis, in a step or a plain call.
        chunks: stages on each rank; above 1 for ``interleaved``, 2 for ``zbv`` and ``dualpipev``.
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
        return self.schedule in _FOLDED

    def given(self) -> dict[str, Any]:
        """Return the keys of the section that are not the defaults."""
        found: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value, default = getattr(self, field.name), field.default
            if value != default or type(value) is not type(default):
                found[field.name] = value
        if isinstance(self.layers_per_stage, tuple) and self.layers_per_stage:
            found["layers_per_stage"] = list(self.layers_per_stage)
        return found

    @classmethod
    def of(cls, section: Mapping[str, Any], pp: int, problems: list[str]) -> PipelineConfig:
        """From the keys of the section; what is wrong with them is added to ``problems``."""
        found = dict(section)
        schedule = found.setdefault("schedule", "1f1b")
        chunks = found.setdefault("chunks", 2 if schedule in ("interleaved", *_FOLDED) else 1)
        if schedule not in SCHEDULES:
            problems.append(
                f"pipeline.schedule={clip(repr(schedule))} is unknown.{nearest(schedule, SCHEDULES)} Known: "
                f"{', '.join(SCHEDULES)}"
            )
        elif (schedule == "interleaved") != (chunks > 1) and schedule not in _FOLDED:
            problems.append(
                f"pipeline.chunks={chunks} does not fit schedule {schedule}: more than 1 is for interleaved"
            )
        elif schedule in _FOLDED and chunks != 2:
            problems.append(
                f"pipeline.chunks={chunks} does not fit schedule {schedule}, which has 2 stages on each rank"
            )
        reduction = found.get("loss_reduction", "tokens")
        if reduction not in _REDUCTIONS:
            problems.append(
                f"pipeline.loss_reduction={clip(repr(reduction))} is unknown. Known: {', '.join(_REDUCTIONS)}"
            )
        layers = found["layers_per_stage"] = tuple(found.get("layers_per_stage", ()))
        if any(type(count) is not int or count < 1 for count in layers):
            problems.append(
                f"pipeline.layers_per_stage={clip(str(list(layers)))} must list numbers of blocks of at least 1"
            )
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
        elif count is not None and schedule == "dualpipev" and pp > 1 and count < 2 * pp:
            problems.append(
                f"pipeline.num_microbatches={count} is less than twice pipeline_parallel_size={pp}: schedule dualpipev "
                f"is not defined for that; give at least {2 * pp}, or schedule zbv"
            )
        return cls(**found)
