"""Random draws: what ranks hold alike is dropped alike, different parts apart, and rates are the plain model's.

No seed gives the plain model the draws of several ranks, so states of generators are compared, not masks. Stages alone
draw from streams that the plain model can be given: then it drops the same elements, and returns the same outputs.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.distributed.digest import of_tensor
from autopar.foreign.tensors import in_backward, schema_of
from autopar.tensor_tracking import TensorTracking, tensors_in
from autopar.tools.verification.checks import Named, worst_row
from autopar.tools.verification.outputs import floats_of, gathered, measure, named, reseed, same_floats
from autopar.tools.verification.recording import running
from autopar.tools.verification.report import Row
from autopar.tools.verification.session import Session, switched_on

_RATE = 0.2  # where a model has none that is on


class Draw(NamedTuple):
    """One draw of random numbers.

    Attributes:
        module: path of the module that drew; ``shape``: of what it drew for.
        state: of the generator before.
        rate: probability of a zero; 0: no dropout draws.
    """

    module: str
    shape: tuple[int, ...]
    state: str
    rate: float


class _Draws(TensorTracking):
    """Notes random draws by their operators, also those of fused attention.

    Args:
        stack: paths of the modules that run, of :func:`~autopar.tools.verification.recording.running`.

    Attributes:
        forward, backward: in their order; the backward draws where blocks are recomputed.
    """

    def __init__(self, stack: Sequence[str] = ()) -> None:
        super().__init__()
        self.stack, self.forward, self.backward = stack, list[Draw](), list[Draw]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            names = [each.name for each in schema_of(func).arguments]
            named, fused = dict(zip(names, args, strict=False)) | kwargs, "dropout_p" in names
            tensors = list(tensors_in(list(named.values())))
            given = named.get("dropout_p" if fused else "p", 0.0)
            rate = given if type(given) is float else 0.0
            rate = 1 - rate if func.__name__.startswith("bernoulli") and type(named.get("p")) is float else rate
            if tensors and (rate or not fused):
                x = tensors[0]
                shape = (*x.shape[:-1], tensors[1].shape[-2]) if fused else tuple(x.shape)  # of the scores
                module = self.stack[-1] if self.stack else ""
                draw = Draw(module, shape, generator_state(x.device), rate)
                (self.backward if in_backward() else self.forward).append(draw)
        return func(*args, **kwargs)


def generator_state(device: torch.device) -> str:
    """Return a digest of the state of the default generator of a device."""
    on_host = device.type in ("cpu", "meta")
    state = torch.get_rng_state() if on_host else torch.get_device_module(device).get_rng_state(device)
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()


class Place(NamedTuple):
    """The place of a rank in its replica."""

    pp: int
    cp: int
    tp: int


def wrong_draws(plain: Sequence[Draw], everyone: Mapping[Place, Sequence[Draw]]) -> Iterator[tuple[str, str]]:
    """Yield module and problem of each draw that is alike where it must differ, or the other way round. Pure.

    Args:
        plain: the draws of the plain model, whose shapes say what is sharded.
        everyone: those of each rank of a replica.
    """
    expected = _by_module(plain)
    by_rank = {place: _by_module(draws) for place, draws in everyone.items()}
    for module in {name: None for found in (expected, *by_rank.values()) for name in found}:
        wholes = expected.get(module, [])
        stages = {place.pp for place, found in by_rank.items() if module in found}
        ranks = [place for place in everyone if place.pp in stages]
        counts = [len(by_rank[place].get(module, [])) for place in ranks or everyone]
        if not wholes or not all(counts) or any(count % len(wholes) for count in counts):
            listed = ", ".join(map(str, counts))
            yield module, f"draws {listed} times on the ranks, {len(wholes)} times in the plain model"
            continue
        for number, whole in enumerate(wholes):
            held = {place: _joined(by_rank[place][module], number, len(wholes)) for place in ranks}
            draws = list(held.values())
            if any(draw.rate != whole.rate for draw in draws):
                yield module, f"drops {draws[0].rate:g} of its elements, and the plain model's {whole.rate:g}"
            elif any(draw.shape != whole.shape for draw in draws):
                if not _are_apart(held):
                    yield module, f"draws alike on ranks that hold different parts {list(draws[0].shape)}"
            elif len({draw.state for draw in draws}) > 1:
                yield module, "draws differently on ranks that hold the same activation"


def _by_module(draws: Sequence[Draw]) -> dict[str, list[Draw]]:
    found: dict[str, list[Draw]] = {}
    for draw in draws:
        found.setdefault(draw.module, []).append(draw)
    return found


def _joined(draws: Sequence[Draw], number: int, count: int) -> Draw:
    """Return one of ``count`` draws of a module; attention over two runs of rows draws twice for one."""
    runs = len(draws) // count
    parts = draws[number * runs : (number + 1) * runs]
    if runs == 1:
        return parts[0]
    rate = parts[0].rate if len({part.rate for part in parts}) == 1 else -1.0
    return parts[0]._replace(shape=(runs, *parts[0].shape), rate=rate)  # states part at the first one


def _are_apart(holders: Mapping[Place, Draw]) -> bool:
    """Return whether all ranks draw apart, or those along one axis do, and are alike along the other."""
    states = {place: draw.state for place, draw in holders.items()}
    if len(set(states.values())) == len(states):
        return True
    for along in ("cp", "tp"):
        pairs = {(getattr(place, along), state) for place, state in states.items()}
        if 1 < len(pairs) == len({place for place, _ in pairs}) == len({state for _, state in pairs}):
            return True
    return False


def dropout(session: Session) -> list[Row]:
    """Compare what the ranks draw with what the plain model does. Dropout is on in both models."""
    tp, pp, cp = session.mpu.tp, session.mpu.pp, session.mpu.cp
    if tp.size == pp.size == cp.size == 1:
        return [Row("dropout", "random draws", None, note="only ranks of a model do")]
    with switched_on((session.plain, session.parallel), session.rates, _RATE) as switched:
        if not switched:
            return [Row("dropout", "random draws", None, note="the model has no dropout")]
        rows = _of_stages(session) if tp.size == cp.size == 1 else _of_ranks(session)
        if session.config.activation_checkpointing and rows[0].holds is not None:
            rows += _recomputed(session)
    return rows


def _of_stages(session: Session) -> list[Row]:
    """Compare outputs with those of the plain model, which is given the streams of the stages."""
    plain, expected = _run(session, session.plain)
    _, outputs = _run(session, session.parallel)
    if not plain:
        return [Row("dropout", "random draws", None, note="the model has no dropout")]
    pairs = same_floats(expected, outputs)
    found = [Named(name, measure(theirs, own)) for name, own, theirs in pairs if theirs is not None]
    row = worst_row("dropout", "outputs, with the plain model's draws", found, session.tolerance, show=False)
    others = "a stage draws other numbers than the plain model, or in another order"
    return [row if row.holds is not False or row.note else replace(row, note=others)]


def _of_ranks(session: Session) -> list[Row]:
    """Compare the draws of all ranks of a replica by their states, their rates, and what comes after them."""
    session.evaluate(session.parallel, copy.deepcopy(session.own_part(session.batches[0])))  # the first may run twice
    plain, _ = _run(session, session.plain)
    mine, outputs = _run(session, session.parallel)
    mpu = session.mpu
    place, after = Place(mpu.pp.rank, mpu.cp.rank, mpu.tp.rank), generator_state(mpu.device)
    digest = repr([of_tensor(value + 0) for _, value in floats_of(outputs)])
    everyone = gathered((place, mine, after, digest), mpu.model.group)
    if not plain:
        return [Row("dropout", "random draws", None, note="the model has no dropout")]
    draws = {at: _comparable(session, found) for at, found, _, _ in everyone}
    plain = _comparable(session, plain)
    module, wrong = next(wrong_draws(plain, draws), ("", ""))
    note = f"{module or 'the model'} {wrong}" if wrong else f"{len(plain)} draws"
    return [
        Row("dropout", "random draws", not wrong, name=module, note=note),
        _row_alike("generators behind the forward", {(at.pp, state) for at, _, state, _ in everyone}),
        _row_alike("outputs of all ranks", {(at.pp, text) for at, _, _, text in everyone}),
    ]


def _comparable(session: Session, draws: list[Draw]) -> list[Draw]:
    """Return the draws without those of experts that one rank computes, for tokens of all."""
    inside = tuple(f"{path}." for path, rule in session.plan.modules.items() if rule.rule == "expert_modules")
    return [draw for draw in draws if not draw.module.startswith(inside)] if inside else draws


def _row_alike(what: str, found: set[tuple[int, str]]) -> Row:
    """The ranks of a stage must have the same behind the forward."""
    alike = len(found) == len({stage for stage, _ in found})
    return Row("dropout", what, alike, note="" if alike else "they differ between ranks that hold the same activations")


def _recomputed(session: Session) -> list[Row]:
    """Check that what activation checkpointing computes again draws the masks of the forward."""
    with _Draws() as draws:
        session.train_parallel(0)
    session.zero_gradients()
    others = set(draws.backward) - set(draws.forward)
    if not draws.backward:
        return [Row("dropout", "recomputed draws", None, note="nothing was drawn again")]
    note = f"{len(others)} of {len(draws.backward)} are others than in the forward" if others else ""
    return [Row("dropout", "recomputed draws", not others, note=note)]


def _run(session: Session, model: nn.Module) -> tuple[list[Draw], Any]:
    """Return the draws of a forward in training mode, and its outputs; the plain model draws as stages do."""
    model.train()
    reseed(7)
    batch = copy.deepcopy(session.own_part(session.batches[0]))
    streams = session.drawing_as_stages() if model is session.plain else nullcontext()
    with session.own_failure(model), streams, running(model) as stack, _Draws(stack) as draws, torch.no_grad():
        outputs = named(model(**batch))
    return [draw for draw in draws.forward if draw.rate], outputs
