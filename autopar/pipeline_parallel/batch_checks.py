"""The ranks of a pipeline agree on a pass before it begins: all have the same batch and the same past, or none starts.

Each rank sends a few bytes: what it has read, how often optimizers have stepped its weights, and digests of its copies
of weights that other stages hold too. So an error is the same on all ranks, and nothing has run.

Stages may have different optimizers: one that holds weights of a single stage may exist on that stage only, one for
each weight steps as often as there are weights, and each phase of a training may have a new one. So for each optimizer
the passes are counted that a step of it came after. Optimizers that have first stepped after the same pass are compared
between the stages; those that began at different times are different optimizers.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from autopar.call_site import warn_user
from autopar.distributed.axis import Axis
from autopar.distributed.digest import hexdigest
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError, ConsistencyError
from autopar.guards.step import listen
from autopar.pipeline_parallel.p2p import P2P, Message, map_tensors

_PATIENCE = 8  # passes without a step after which a stage is told, once, if another stage goes on


class StepReport(NamedTuple):
    """The steps of one stage's optimizers, for the other stages to compare.

    Attributes:
        counts: of each optimizer the first pass, and the number of passes that a step came after.
        idle: passes since the last step.
        trained: weights that have a gradient and that no optimizer steps, if it is time to tell.
    """

    counts: frozenset[tuple[int, int]]
    idle: int
    trained: str


@dataclass
class _Steps:
    """One optimizer's: its first pass, how many passes a step came after, the last of these, its parameters."""

    parameters: int
    ours: bool
    first: int = 0
    count: int = 0
    last: int = -1


class StepCount:
    """Counts, for every optimizer of the model, the training passes of this rank that a step of it came after.

    Args:
        model: with the weights of this rank's stages.
        released: ``id`` of those of other stages, whose objects an optimizer may hold, too.

    Attributes:
        expected: whether the optimizer that ``initialize`` was given steps weights of this rank's stages.
    """

    def __init__(self, model: nn.Module, released: Collection[int] = ()) -> None:
        self.expected = False
        self._model, self._released = model, released
        self._optimizers: weakref.WeakKeyDictionary[Any, _Steps] = weakref.WeakKeyDictionary()
        self._held: set[int] | None = None  # ids of the model's weights, looked up once in a pass
        self._passes, self._running, self._last, self._stepped_once = 0, 0, 0, False
        self._patience = _PATIENCE  # twice the longest interval between two steps, at least
        self._trained = ""  # weights with a gradient after a pass that no step was to come after
        listen(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepCount:
        """Return one that begins to count the steps of a copied model."""
        return StepCount(copy.deepcopy(self._model, memo))

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Count the first step of ``optimizer`` behind a pass: called by torch before that of any optimizer.

        Raises:
            ConfigError: a hook steps weights of the model inside of a pass.
        """
        if self._running and not self._stepped(optimizer).isdisjoint(self._weights()):
            raise ConfigError(
                f"{type(optimizer).__name__}.step() inside of execute_pipeline: the gradients are those of some of its "
                f"{self._running} micro-batches,\n  and the others use the weights as they were. Step when "
                "execute_pipeline has returned: an optimizer in the backward (a hook of\n  "
                "register_post_accumulate_grad_hook) needs pipeline_parallel_size: 1."
            )
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        steps = self._optimizers.get(optimizer)
        if steps is None or steps.parameters != size:
            ours = not self._stepped(optimizer).isdisjoint(self._weights() | set(self._released))
            steps = self._optimizers.setdefault(optimizer, _Steps(size, ours, self._begin(ours)))
            steps.parameters, steps.ours = size, steps.ours or ours
        if steps.ours and steps.last != self._passes:
            steps.count, steps.last = steps.count + 1, self._passes
            self._patience = max(self._patience, 2 * (self._passes - self._last))
            self._last, self._stepped_once, self._trained = self._passes, True, ""

    def _begin(self, ours: bool) -> int:
        """Return the pass that a new optimizer begins after; 0 for the one that ``initialize`` was given."""
        given = ours and self.expected and not any(steps.ours for steps in self._optimizers.values())
        return 0 if given else self._passes

    def _stepped(self, optimizer: Any) -> set[int]:
        return {id(p) for group in optimizer.param_groups for p in group["params"]}

    def _weights(self) -> set[int]:
        if self._held is None:
            self._held = {id(p) for p in self._model.parameters()}
        return self._held

    def begin_pass(self, microbatches: int) -> StepReport:
        """Return what stages compare. ``microbatches``: that are differentiated."""
        self._held = None
        idle = self._passes - self._last
        if microbatches:
            self._passes, self._running = self._passes + 1, microbatches
        counts = {(steps.first, steps.count) for steps in self._optimizers.values() if steps.count}
        if self.expected and not self._stepped_once:
            counts = {(0, 0)}
        told = idle == self._patience if self._stepped_once else not self.expected
        return StepReport(frozenset(counts), idle, self._trained if told else "")

    def end_pass(self) -> None:
        """End it, also one that failed; where no step seems to follow, note which weights have got a gradient."""
        trained, self._running = self._running, 0
        waits = self._passes - self._last >= self._patience or not self._stepped_once
        if trained and waits:
            names = [name for name, p in self._model.named_parameters() if p.requires_grad and p.grad is not None]
            self._trained = f"{len(names)} weights, {names[0]} first" if names else ""


def warn_of_idle(said: Mapping[int, StepReport], own: int) -> None:
    """Warn if rank ``own`` has never stepped, or not for some passes, and another one of its replica goes on."""
    going_on = any(report.counts and report.idle < _PATIENCE for report in said.values())
    if own in said and said[own].trained and going_on:
        since = f" in the last {said[own].idle} passes" if said[own].counts else ""
        warn_user(
            f"rank {own} has stepped no optimizer{since}, and other stages of its replica have: {said[own].trained}, "
            "have gradients there and stay as they are. If they are not to be trained, requires_grad_(False) says "
            "so; else make the optimizer on every rank, and step it there."
        )


def check_steps(said: Mapping[int, StepReport]) -> None:
    """Compare what :meth:`StepCount.begin_pass` returned on two ranks.

    Raises:
        ConsistencyError: an optimizer has stepped behind other numbers of passes.
    """
    counts = {rank: _by_first(report.counts) for rank, report in said.items()}
    one, other = counts.values()
    for first in one.keys() & other.keys():
        if one[first].isdisjoint(other[first]):
            raise ConsistencyError(_unlike({rank: max(found[first]) for rank, found in counts.items()}))


def _by_first(counts: Collection[tuple[int, int]]) -> dict[int, set[int]]:
    """Return for each first pass how often the optimizers that began after it have stepped."""
    found: dict[int, set[int]] = {}
    for first, count in counts:
        found.setdefault(first, set()).add(count)
    return found


def _unlike(counts: Mapping[int, int]) -> str:
    return (
        f"two stages of one model replica (ranks {' and '.join(map(str, counts))}) have made different numbers of "
        "optimizer steps:\n"
        f"  optimizer steps so far: {', '.join(f'rank {rank}: {count}' for rank, count in counts.items())}\n"
        "  Every rank steps after the same execute_pipeline: put no rank's optimizer.step() behind an if.\n"
        "  consistency_check: {enable: false} turns this check off."
    )


_REPORT = Message("its report on the batch", 1_000_000_000)
_SAMPLE = 65536  # elements that a digest looks at
_PLAIN = (bool, int, float, str, list, tuple, dict, type(None))

Batch = TypeVar("Batch")


class Report(NamedTuple):
    """The facts that a rank tells the others before a pass.

    Attributes:
        batch: digests of its arguments; without any it is not compared.
        steps: of the optimizers; None if they are not compared.
        copies: digests of weights that other stages hold, too.
    """

    batch: Mapping[str, str]
    steps: StepReport | None = None
    copies: Mapping[str, str] = {}


def read_batch(
    read: Callable[[], Batch],
    describe: Callable[[Batch], Report],
    p2p: P2P,
    mpu: MPU,
    count: Callable[[Batch], float] | None,
) -> tuple[Batch, list[float]]:
    """Return the next batch, the same one on all stages of the replica.

    Args:
        describe: returns what the stages compare.
        count: how much a batch counts among those of the replicas; None if replicas need not agree on a step.

    Returns:
        The batch, and each replica's count; nothing if they need not agree, or there is one replica.

    Raises:
        StopIteration: on all ranks; where the data has ended on some only, all raise an AutoparError.
        ConsistencyError: the data has ended on some ranks, or what they compare differs; on all of them.
        PipelineError: another rank failed, or did not answer within ``pipeline.timeout``.
    """
    count = count if mpu.dp.size > 1 else None
    try:
        batch = _read_alike(read, describe, p2p)
    except StopIteration:
        if count is not None:
            _counts_of_replicas(None, mpu.dp, p2p)
        raise
    return batch, [] if count is None else _counts_of_replicas(count(batch), mpu.dp, p2p)


def _read_alike(read: Callable[[], Batch], describe: Callable[[Batch], Report], p2p: P2P) -> Batch:
    batch: Batch | None = None
    end: StopIteration | None = None
    try:
        batch = read()
    except StopIteration as error:
        end = error
    said = p2p.exchange(None if end is not None else describe(batch), _REPORT)  # type: ignore[arg-type]
    ended = [rank for rank, report in said.items() if report is None]
    with p2p.raised_by_all():
        if end is not None and len(ended) == len(said):
            p2p.failures.publish("the data iterator has ended on this rank, which takes no part in another step.")
            raise end
        if ended:
            raise ConsistencyError(
                f"the data iterator has ended on rank{'s' if len(ended) > 1 else ''} {', '.join(map(str, ended))}, and "
                "not on every stage of this model replica.\n  All its ranks read the same batches, so their iterators "
                "must be equally long and started together."
            )
        _compare(said, p2p.axis.ranks[p2p.axis.rank])
    return batch  # type: ignore[return-value]


def _counts_of_replicas(count: float | None, axis: Axis, p2p: P2P) -> list[float]:
    """Each replica's count (of labels, or samples), None if its data has ended; raises on all if on some it has."""
    purpose = "agreeing with the other data-parallel replicas that each has a batch"
    counts = list(_gather(count, axis, p2p.failures, purpose).values())
    ended = [str(place) for place, other in enumerate(counts) if other is None]
    if ended and len(ended) < axis.size:
        going = [str(place) for place, other in enumerate(counts) if other is not None]
        with p2p.raised_by_all():
            raise ConsistencyError(
                f"the data iterator has ended on data-parallel replica{'s' if len(ended) > 1 else ''} "
                f"{', '.join(ended)} of {axis.size}, and not on {', '.join(going)}.\n"
                "  A step averages gradients over all replicas, so each needs as many batches as the others: leave the "
                "rest out\n  (drop_last=True), or use autopar.prepare_dataloader(dataset, ..., mpu=model.mpu), which "
                "evens them out."
            )
    return counts


def _gather(value: Any, axis: Axis, failures: FailureLog, purpose: str) -> dict[int, Any]:
    """Values of all ranks of the axis, by rank."""
    everyone = [value] * axis.size
    with failures.blame(purpose, axis.ranks):
        dist.all_gather_object(everyone, value, group=axis.group)
    return dict(zip(axis.ranks, everyone, strict=True))


def _compare(said: Mapping[int, Report], own: int) -> None:
    """Compare what the ranks have told, all of them alike; a rank whose weights nobody steps warns."""
    steps = {rank: report.steps for rank, report in said.items() if report.steps is not None}
    warn_of_idle(steps, own)
    for pair in pairwise(steps.items()):
        check_steps(dict(pair))
    lines = _differences({rank: report.batch for rank, report in said.items() if report.batch})
    if lines:
        raise ConsistencyError(
            f"the stages of one model replica (ranks {list(said)}) got different batches ({len(lines)} "
            f"argument{'s' if len(lines) > 1 else ''}):\n" + "\n".join(lines) + "\n"
            "  Every stage needs the whole batch: shard the data by mpu.get_data_parallel_rank(), or use\n"
            "  autopar.prepare_dataloader(dataset, ..., mpu=model.mpu). consistency_check: {enable: false} turns this\n"
            "  check off."
        )
    for name in dict.fromkeys(name for report in said.values() for name in report.copies):
        seen = {rank: report.copies[name] for rank, report in said.items() if name in report.copies}
        if len(set(seen.values())) > 1:
            raise ConsistencyError(
                f"stages of one model replica have drifted apart: their copies of {name} differ:\n  "
                + ", ".join(f"rank {rank}: {digest}" for rank, digest in seen.items())
                + "\n  Every stage that holds it makes the same update of it: one by noise, or by a norm of a stage's "
                "own weights, is another one.\n  Go on from the last checkpoint. consistency_check: {enable: false} "
                "turns this check off."
            )


def _differences(digests: Mapping[int, Mapping[str, str]]) -> list[str]:
    lines = []
    for name in dict.fromkeys(name for theirs in digests.values() for name in theirs):
        seen = {rank: theirs.get(name, "missing") for rank, theirs in digests.items()}
        if len(set(seen.values())) > 1:
            lines.append(f"  {name}: " + ", ".join(f"rank {rank}: {digest}" for rank, digest in seen.items()))
    return lines


def digest_of(batch: Any, *, whole: bool = False) -> dict[str, str]:
    """Digest a batch: argument -> shapes and hashes of its tensors (samples of large ones), or plain values.

    A list of nothing but None has no data and no digests: the rank gets its own otherwise.

    Args:
        whole: hash tensors whole.
    """
    if isinstance(batch, list) and all(entry is None for entry in batch):
        return {}
    return {name: _digest(value, whole) for name, value in _entries(batch).items()}


def _digest(value: Any, whole: bool) -> str:
    found: list[str] = []

    def note(tensor: torch.Tensor) -> None:
        part = tensor.detach()
        part = part if whole else part.reshape(-1)[:: max(part.numel() // _SAMPLE, 1)]
        found.append(f"{list(tensor.shape)} {hexdigest(part)}")

    map_tensors(value, note)
    return ", ".join(found) or (repr(value) if isinstance(value, _PLAIN) else type(value).__name__)


def _entries(batch: Any) -> Mapping[str, Any]:
    if isinstance(batch, Mapping):
        return batch
    if isinstance(batch, list | tuple):
        return {
            f"micro-batch {number}" if isinstance(entry, Mapping) else f"entry {number}": entry
            for number, entry in enumerate(batch)
        }
    return {"batch": batch}
