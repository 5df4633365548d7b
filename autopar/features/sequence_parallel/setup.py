"""The step of ``initialize``."""

from __future__ import annotations

from torch import nn

from autopar.applied.steps import Given, Parallelized
from autopar.tensor_parallel import sequence_parallel


def run_on_rows_between_regions(model: nn.Module, state: Parallelized, given: Given) -> None:
    """After stages: the first and the last block of the rank cut and join rows."""
    plan = state.features.get("sequence_parallel")
    if plan is not None:
        sequence_parallel.apply(model, plan, state.region)
        state.undo.append(lambda model, own: sequence_parallel.undo(model, own.features["sequence_parallel"]))
