"""Rehearse the meshes that a plan has found: what their ranks hold is counted then, and what they send is matched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.errors import AutoparError, ConfigError, first_line
from autopar.quantized.layers import StandIn
from autopar.tools.planner.candidate import Candidate
from autopar.tools.planner.estimate import Estimator
from autopar.tools.planner.report import gigabytes
from autopar.tools.planner.search import Found
from autopar.tools.rehearsal.run import Rehearsal, rehearse


def check_rehearsed(estimator: Estimator) -> None:
    """Raise ConfigError for a model that is planned, and that a rehearsal does not take."""
    quantized = next((each for each in estimator.model.model.parameters() if isinstance(each, StandIn)), None)
    if quantized is not None:
        raise ConfigError(
            f"--rehearse: weights in {quantized.kind.form} are planned, not rehearsed. Without it their memory is "
            "estimated; with another model, or without --quantization, it is counted."
        )


def count(estimator: Estimator, found: Found) -> None:
    """Rehearse the best candidates, and note what each rank of their pipelines holds at most.

    Those that need more than the GPU has, and those whose ranks do not match, become refused ones.
    """
    for place, estimate in reversed([*enumerate(found.best)]):
        candidate = estimate.candidate
        counted, reason = _counted(estimator, candidate, estimate.memory[0].reserve)
        found.best[place] = replace(estimate, counted=counted)
        if reason:
            del found.best[place]
            found.refused.append(((candidate.tp, candidate.cp, candidate.pp, candidate.dp), reason))


def _counted(estimator: Estimator, candidate: Candidate, reserve: int) -> tuple[tuple[int, ...], str]:
    """Return the bytes of each rank of the pipeline, of its rank that holds most; or why the candidate falls out."""
    try:
        run = _run(estimator, candidate)
    except AutoparError as error:
        return (), first_line(error)
    except RuntimeError as error:
        return (), f"fails in its rehearsal: {str(error).partition('Before that, ')[0].splitlines()[-1]}"
    most = [0] * candidate.pp
    for rank, held in run.held.items():
        stage = run.coordinates[rank][0]
        most[stage] = max(most[stage], held.peak + reserve)
    large = max(most) > estimator.gpu.memory
    fits = f"needs {gigabytes(max(most))} GB, counted in its rehearsal" if large else ""
    return tuple(most), next(iter(run.problems), fits)


def _run(estimator: Estimator, candidate: Candidate) -> Rehearsal:
    model = estimator.model
    whole: Any = model.model
    return rehearse(
        whole,
        model.sections(candidate),
        candidate.gpus,
        batch=candidate.microbatch * candidate.microbatches,
        sequence=model.sequence,
        gpus_per_node=estimator.gpus_per_node,
        gpu=estimator.gpu,
        optimizer=model.optimizer,
    )
