"""Diagnosis of a failed check: both models run once more while every module is recorded, and the first difference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from autopar.tools.verification.bisection import Event, first_difference
from autopar.tools.verification.culprits import culprit_of_found, culprit_of_parameter, lines_of
from autopar.tools.verification.events import Comparison, over_ranks
from autopar.tools.verification.generation import generated, prompt_of
from autopar.tools.verification.outputs import reseed
from autopar.tools.verification.recording import Recording, recorded
from autopar.tools.verification.report import Culprit, Row
from autopar.tools.verification.session import Session

__all__ = ["diagnose"]


def diagnose(session: Session, check: str, rows: Sequence[Row]) -> Culprit | None:
    """Find the first module that differs, after ``check`` has failed with ``rows``. Collective: all ranks call it.

    Returns:
        The culprit, the same on every rank; None if no module is to blame.
    """
    failed = [row for row in rows if row.holds is False]
    find = {"forward": _forward, "generate": _generation, "backward": _training}.get(check)
    events = _events(session, find) if find is not None else []
    found = first_difference(events)
    if found is not None:
        return culprit_of_found(found, session.plan, session.policy)
    if check == "backward" and any(row.what == "loss" for row in failed):
        return Culprit(
            "", "the loss of the batch differs, and no module's output: its parts are weighed in another way"
        )
    named = next((row for row in failed if row.name in _parameters(session)), None)
    if named is not None and 2 * named.failing > named.of:
        what = "the optimizer's steps" if check == "step" else "no module's output, but the gradients"
        why = "" if check == "step" else ": they are weighed, or averaged over ranks, in another way"
        return Culprit("", f"{what} of {named.failing} of {named.of} parameters differ{why}")
    if named is not None:
        what = {"worst gradient": "the gradient of", "worst change of a weight": "the step of"}.get(named.what, "")
        return culprit_of_parameter(named.name, what, session.plan, session.policy)
    drawn = next((row for row in failed if check == "dropout" and row.note), None)
    if drawn is not None:
        module = drawn.name if drawn.difference is None else ""  # else it is a tensor of the outputs
        lines = tuple(lines_of(session.plan, (module,), session.policy)) if module else ()
        return Culprit(module, drawn.note, lines, (module,))
    return None


def _parameters(session: Session) -> set[str]:
    return {name for name, _ in session.plain.named_parameters()}


def _events(session: Session, find: Callable[[Session], list[Event]]) -> list[Event]:
    mine = find(session)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return over_ranks(everyone)


def _comparison(session: Session) -> Comparison:
    return Comparison(session.plan, session.stages, session.slices, session.mpu.pp.rank, session.tolerance)


def _forward(session: Session) -> list[Event]:
    batch = session.batches[0]
    return _compare_runs(session, lambda model: session.evaluate(model, batch))


def _generation(session: Session) -> list[Event]:
    inputs = prompt_of(session)
    return _compare_runs(session, lambda model: generated(model, inputs))


def _compare_runs(session: Session, run: Callable[[Any], Any]) -> list[Event]:
    with recorded(session.plain) as plain:
        run(session.plain)
    with recorded(session.parallel) as mine:
        run(session.parallel)
    return _comparison(session).forward(plain, mine)


def _training(session: Session) -> list[Event]:
    """A forward and a backward of the first batch: outputs first, in the order of the forward, then gradients."""
    session.zero_gradients()
    session.plain.train()
    session.parallel.train()
    plain, mine = _recorded_step(session)
    comparison = _comparison(session)
    gradients = [p.grad for p in session.plain.parameters() if p.grad is not None]
    largest = max((gradient.abs().max().item() for gradient in gradients if gradient.numel()), default=0.0)
    backward = comparison.backward(plain, mine, (session.plain, session.parallel), largest)
    if session.mpu.dp_cp.size > 1:  # parameters have the gradients of other batches, or rows, too
        backward = [event._replace(verdict=None) if event.kind == "parameter" else event for event in backward]
    return comparison.forward(plain, mine) + backward


def _recorded_step(session: Session) -> tuple[Recording, Recording]:
    if not session.piped:
        with recorded(session.plain) as plain:
            session.train_plain(0)
        with recorded(session.parallel) as mine:
            session.train_parallel(0)
        return plain, mine
    pipeline = session.state.pipeline(session.parallel)
    criterion = None if session.has_loss else session.criterion
    batch = copy.deepcopy(session.own_part(session.batches[0]))
    reseed(0)
    with pipeline.engine.one_pass():
        step = pipeline.read_step(batch, criterion, backward=True, wants_loss=True)
        with recorded(session.parallel) as mine:
            pipeline.run(session.parallel, step)
    with recorded(session.plain) as plain:
        for microbatch, weight in zip(step.microbatches, step.weights, strict=True):
            loss = session.loss_of(session.plain(**copy.deepcopy(microbatch)))
            (loss * weight).backward()
    return plain, mine
