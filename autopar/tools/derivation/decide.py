"""Which layers become columns: take all, trace, leave out what stands in the way, until nothing does."""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.foreign.tensors import own_parameters
from autopar.plan.matching import around
from autopar.tools.derivation.marks import Meeting
from autopar.tools.derivation.trace import Decisions, Trace, Traced, trace, underivable

_ROUNDS = 60
_MOST_ENTERED = 3


def decide(models: list[Traced], blocks: tuple[str, ...], decisions: Decisions) -> tuple[Trace, Decisions]:
    """Return a trace in which every column leads to a row, and the decisions that made it so."""
    for _ in range(_ROUNDS):
        seen = trace(models, blocks, decisions)
        if seen.tracking.bare_sinks:  # what is one unit in the end is no sum over several
            seen = trace(models, blocks, decisions, seen)
        other = _next(models, blocks, decisions, seen)
        if other is None:
            return seen, decisions
        decisions = other
    raise underivable(models[0].model, f"{_ROUNDS} traces did not settle which of its layers are columns")


def _next(models: list[Traced], blocks: tuple[str, ...], decisions: Decisions, seen: Trace) -> Decisions | None:
    """Return the decisions to try next; None if these hold."""
    tracking = seen.tracking
    called = set(seen.order)
    around_it = {path: next((p for p in (path, *around(path)) if p in called), "") for path in tracking.first_of}
    if cut_off := [path for path, holder in around_it.items() if holder not in seen.proven]:
        return decisions.without(map(seen.names, cut_off))  # the model around them failed behind them
    if idle := _idle_in_regions(models, decisions, seen, called):
        return decisions.without(map(seen.names, idle))
    holders = {name.rpartition(".")[0] for name in tracking.bare_sinks}
    regions = {seen.names(holder) for holder in holders} - decisions.regions
    if regions:
        root = models[0].model
        single = {
            name for name in tracking.bare_sinks if not _may_be_region(root.get_submodule(name.rpartition(".")[0]))
        }
        if single:
            features = torch.cat([tracking.bare_sinks[name] for name in single])
            return decisions.without(map(seen.names, sources_of(seen, features)))
        return replace(decisions, regions=decisions.regions | regions)
    enters: set[str] = set()
    for event in tracking.events:
        block = seen.names.block_of(event.where) if isinstance(event, Meeting) else None
        if isinstance(event, Meeting) and _may_enter(event, block):
            enters |= {seen.names(path) for path in event.producers}
        elif enters - decisions.enters:
            break
        elif found := [p for p in sources_of(seen, event.features) if tracking.first_of[p] < event.before]:
            return decisions.without(map(seen.names, found))
        elif decisions.enters and block is not None:  # behind something that entered, and no row sums it
            near = [path for path in tracking.first_of if path.startswith(block + ".")]
            return decisions.without(map(seen.names, near or list(tracking.first_of)))
    if enters - decisions.enters:
        return replace(decisions, enters=decisions.enters | enters)
    if contradictory := {seen.names(path) for path in seen.contradictory} - decisions.whole:
        return replace(decisions, whole=decisions.whole | contradictory, enters=frozenset())
    if few := _too_few(models, blocks, decisions, seen):
        return decisions.without(map(seen.names, few))
    return None


def _idle_in_regions(models: list[Traced], decisions: Decisions, seen: Trace, called: set[str]) -> list[str]:
    """Columns in regions of which a module was not run: what it adds to the partial sums is not known."""
    regions = [p for p, _ in models[0].model.named_modules() if seen.names(p) in decisions.regions and p in called]
    idle = [
        path
        for path in regions
        if any(
            f"{path}.{below}" not in called for below, _ in models[0].model.get_submodule(path).named_modules() if below
        )
    ]
    return [p for p in seen.tracking.first_of if p.startswith(tuple(path + "." for path in idle))]


def _may_enter(event: Meeting, block: str | None) -> bool:
    """Return whether what met the inside of a region comes from few layers of the same block."""
    few = block is not None and 0 < len(event.producers) <= _MOST_ENTERED
    return few and all(path.startswith(f"{block}.") for path in event.producers)


def _may_be_region(module: torch.nn.Module) -> bool:
    own = [p for p in own_parameters(module).values() if p is not None]
    return sum(p.ndim >= 3 for p in own) >= 1 or len([p for p in own if p.ndim >= 2]) >= 2


def sources_of(seen: Trace, features: torch.Tensor) -> list[str]:
    """Return the columns and bare parameters that have a feature in the components of ``features``."""
    tracking = seen.tracking
    wanted = tracking.components.of(features).unique()
    wanted = wanted[wanted != 0]
    return [path for path in tracking.first_of if bool(torch.isin(components(seen, path), wanted).any())]


def components(seen: Trace, source: str) -> torch.Tensor:
    """Return the component of each feature of a column."""
    tracking = seen.tracking
    first = tracking.first_of[source]
    return tracking.components.of(torch.arange(first, first + tracking.count_of[source]))


def _too_few(models: list[Traced], blocks: tuple[str, ...], decisions: Decisions, seen: Trace) -> list[str]:
    """Columns whose features are all computed with one another, or that no row follows."""
    tracking = seen.tracking
    lines = [tracking.components.of(line) for line in seen.sinks.values()]
    lines += [
        tracking.components.of(p[:, 1])
        for name in tracking.bare_sinks
        for d in tracking.touched.get(name, [])
        for p in d
    ]
    closed = torch.cat(lines).unique() if lines else torch.zeros(0, dtype=torch.int32)
    for path in tracking.first_of:
        found = components(seen, path)
        if not bool(torch.isin(found, closed).all()):
            return sources_of(seen, found)
        if len(found.unique()) == 1:
            together = sources_of(seen, found)
            if len(together) == 1:
                return together
            return _alone_too_few(models, blocks, decisions, seen, together)
    return []


def _alone_too_few(
    models: list[Traced], blocks: tuple[str, ...], decisions: Decisions, seen: Trace, together: list[str]
) -> list[str]:
    """Return those columns that end in one component even without the others."""
    kinds = {seen.names(path): path for path in together}
    result = []
    for kind, path in kinds.items():
        alone = trace(models, blocks, replace(decisions, only=frozenset([kind])))
        if path not in alone.tracking.first_of or len(components(alone, path).unique()) == 1:
            result.append(path)
    if result and len(result) < len(kinds):
        return result
    best: tuple[int, str] | None = None
    for kind, path in kinds.items():  # the one without which most is left
        others = trace(models, blocks, replace(decisions, whole=decisions.whole | {kind}))
        left = [p for p in together if p != path and p in others.tracking.first_of]
        gained = sum(len(components(others, p)) for p in left if len(components(others, p).unique()) > 1)
        if gained and (best is None or gained > best[0]):
            best = gained, path
    return [best[1]] if best is not None else together
