"""Dropout of rows, heads and stages against the plain model, which is given the masks that the ranks have drawn."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.context_parallel.state import RowState
from autopar.layout import Layout
from autopar.tools.verification.closeness import measure
from autopar.tools.verification.dropout_masks import DrawnMask, DrawnStates, MaskNotes, Replay, generator_state
from autopar.tools.verification.mask_parts import Place, Site, kept_too_few_or_many, sites_of, whole_mask, wrong_parts
from autopar.tools.verification.outputs import named, reseed, same_floats
from autopar.tools.verification.recording import running
from autopar.tools.verification.report import Row
from autopar.tools.verification.session import Session
from autopar.tools.verification.training import Named, worst_row

__all__ = ["recomputed", "replayed"]

_MOST_DEVIATIONS = 6.0  # of a number of elements that is drawn: once in 500 million runs
_OTHERS = "with the ranks' masks the plain model computes something else: they are put together in another way"


def replayed(session: Session) -> list[Row]:
    """Compare the masks of all ranks of a replica, and outputs with those of the plain model, given these masks.

    Dropout is on in both models.
    """
    batch = copy.deepcopy(session.own_part(session.batches[0]))
    session.evaluate(session.parallel, batch)  # the first forward of its kind may run twice
    plain, _ = _run(session, session.plain, MaskNotes)
    if not plain.found:
        return [Row("dropout", "random draws", None, note="the model has no dropout")]
    rows = _rows_of(session.parallel)
    mine, outputs = _run(session, session.parallel, lambda stack: MaskNotes(stack, rows))
    mpu = session.mpu
    everyone: list[Any] = [None] * mpu.model.size
    place, after = Place(mpu.pp.rank, mpu.cp.rank, mpu.tp.rank), generator_state(mpu.device)
    dist.all_gather_object(everyone, (place, mine.found, after), group=mpu.model.group)
    draws: dict[Place, list[DrawnMask]] = {at: found for at, found, _ in everyone}
    layouts, samples = _layouts(rows, mine.lengths), _samples(session, batch)
    sites = list(sites_of(plain.found, draws, layouts, samples, _scattered(session, rows)))
    return [
        _row_of_draws(sites),
        _row_of_rates(sites),
        _row_of_generators({at: state for at, _, state in everyone}),
        _row_of_outputs(session, sites, outputs),
    ]


def recomputed(session: Session) -> list[Row]:
    """Check that what activation checkpointing computes again draws the masks of the forward. Dropout is on."""
    with DrawnStates() as notes:
        session.train_parallel(0)
    session.zero_gradients()
    others = [draw for draw in notes.again if draw not in notes.first]
    if not notes.again:
        return [Row("dropout", "recomputed draws", None, note="nothing was drawn again")]
    note = f"{len(others)} of {len(notes.again)} are others than in the forward" if others else ""
    return [Row("dropout", "recomputed draws", not others, note=note)]


def _run(session: Session, model: nn.Module, mode: Callable[[list[str]], Any]) -> tuple[Any, Any]:
    """A forward in training mode: the mode that was on, and the outputs."""
    model.train()
    batch = copy.deepcopy(session.own_part(session.batches[0]))
    reseed(7)
    with session.own_failure(model), running(model) as stack, mode(stack) as on, torch.no_grad():
        return on, named(model(**batch))


def _rows_of(model: nn.Module) -> RowState | None:
    found = (vars(module).get("_autopar_rows") for module in model.modules())
    return next((rows for rows in found if isinstance(rows, RowState)), None)


def _layouts(rows: RowState | None, lengths: Collection[int]) -> Callable[[int], Layout | None]:
    """Rows of the sequences that were cut; other dims are as long by chance."""
    return lambda length: rows.rows_of(length) if rows is not None and length in lengths else None


def _scattered(session: Session, rows: RowState | None) -> Callable[[str], bool]:
    """Tell of a module whether a row-parallel layer in it, or beside it, has several runs of features on a rank."""
    planned = dict(session.plan.modules)
    for path, whole in rows.plan.whole.items() if rows is not None else ():
        planned |= {f"{path}.{below}": each for below, each in (whole.heads.modules if whole.heads else {}).items()}
    around = {
        path.rpartition(".")[0]
        for path, each in planned.items()
        if each.rule == "row" and each.layout is not None
        if any(len(each.layout.ranges(rank)) > 1 for rank in range(each.layout.axis_size))
    }
    return lambda module: any(f"{module}.".startswith(f"{path}.") for path in around)


def _samples(session: Session, batch: dict[str, Any]) -> int:
    main = batch.get(getattr(session.plain, "main_input_name", "input_ids"))
    return int(main.shape[0]) if isinstance(main, torch.Tensor) and main.ndim else 1


def _row_of_draws(sites: Sequence[Site]) -> Row:
    wrong = next(((site.plain.module, text) for site in sites if (text := wrong_parts(site))), None)
    if wrong is None:
        return Row("dropout", "random draws", True, note=f"{len(sites)} draws")
    return Row("dropout", "random draws", False, name=wrong[0], note=f"{wrong[0] or 'the model'} {wrong[1]}")


def _row_of_rates(sites: Sequence[Site]) -> Row:
    away = kept_too_few_or_many(sites)
    holds = away <= _MOST_DEVIATIONS
    note = "" if holds else f"{away:.0f} standard deviations away from what the rates say"
    return Row("dropout", "number of kept elements", holds, note=note)


def _row_of_generators(states: dict[Place, str]) -> Row:
    """Behind the forward the ranks of a stage draw alike again."""
    stages = {at.pp: {state for place, state in states.items() if place.pp == at.pp} for at in states}
    apart = [stage for stage, found in stages.items() if len(found) > 1]
    note = "they differ between ranks that hold the same activations" if apart else ""
    return Row("dropout", "generators behind the forward", not apart, note=note)


def _row_of_outputs(session: Session, sites: Sequence[Site], outputs: Any) -> Row:
    what = "outputs, with the ranks' draws"
    masks = {(site.plain.module, site.number): whole_mask(site) for site in sites}
    unknown = sorted({module for (module, _), mask in masks.items() if mask is None})
    before: list[str] = []

    def replay(stack: list[str]) -> Replay:
        before.append(generator_state(session.mpu.device))
        return Replay(stack, {site: mask for site, mask in masks.items() if mask is not None})

    _, expected = _run(session, session.plain, replay)
    pairs = list(same_floats(expected, outputs))  # logits of rows are gathered here, on all ranks
    if unknown:
        return Row("dropout", what, None, note=f"which part of a mask each rank has is not known in {unknown[0]}")
    if generator_state(session.mpu.device) != before[0]:
        return Row("dropout", what, None, note="the model draws other numbers than those of dropout")
    found = [Named(name, measure(theirs, own)) for name, own, theirs in pairs if theirs is not None]
    row = worst_row("dropout", what, found, session.tolerance, show=False)
    return row if row.holds is not False or row.note else replace(row, note=_OTHERS)
