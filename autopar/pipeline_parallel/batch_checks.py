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

from autopar.distributed.axis import Axis
from autopar.distributed.digest import hexdigest
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError, ConsistencyError
from autopar.guards.step import listen
from autopar.pipeline_parallel.p2p import P2P, REPORT, map_tensors
from autopar.swap import given_by_name

Steps = frozenset[tuple[int, int]]
"""Of each optimizer the first pass, and the number of passes that a step came after."""


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
        self._passes = self._running = 0
        listen(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepCount:
        """Return one that begins to count the steps of a copied model."""
        return StepCount(copy.deepcopy(self._model, memo))

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Count the first step of ``optimizer`` behind a pass: called by torch before that of any optimizer.

        Raises:
            ConfigError: a hook steps weights of the model inside of a pass.
        """
        if self._running and not self._stepped(optimizer).isdisjoint(map(id, self._model.parameters())):
            raise ConfigError(
                f"{type(optimizer).__name__}.step() inside of execute_pipeline: the gradients are those of some of its "
                f"{self._running} micro-batches,\n  and the others use the weights as they were. Step when "
                "execute_pipeline has returned: an optimizer in the backward (a hook of\n  "
                "register_post_accumulate_grad_hook) needs pipeline_parallel_size: 1."
            )
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        steps = self._optimizers.get(optimizer)
        if steps is None or steps.parameters != size:
            held = {*map(id, self._model.parameters()), *self._released}
            ours = not self._stepped(optimizer).isdisjoint(held)
            given = ours and self.expected and not any(steps.ours for steps in self._optimizers.values())
            steps = self._optimizers.setdefault(optimizer, _Steps(size, ours, 0 if given else self._passes))
            steps.parameters, steps.ours = size, steps.ours or ours
        if steps.ours and steps.last != self._passes:
            steps.count, steps.last = steps.count + 1, self._passes

    def _stepped(self, optimizer: Any) -> set[int]:
        return {id(p) for group in optimizer.param_groups for p in group["params"]}

    def begin_pass(self, microbatches: int) -> Steps:
        """Return what stages compare. ``microbatches``: that are differentiated."""
        if microbatches:
            self._passes, self._running = self._passes + 1, microbatches
        counts = {(steps.first, steps.count) for steps in self._optimizers.values() if steps.count}
        return frozenset(counts or ({(0, 0)} if self.expected else ()))

    def end_pass(self) -> None:
        """End it, also one that failed."""
        self._running = 0


def check_steps(said: Mapping[int, Steps]) -> None:
    """Compare what :meth:`StepCount.begin_pass` returned on two ranks.

    Raises:
        ConsistencyError: an optimizer has stepped behind other numbers of passes.
    """
    one, other = ({first: {n for f, n in steps if f == first} for first, _ in steps} for steps in said.values())
    for first in one.keys() & other.keys():
        if one[first].isdisjoint(other[first]):
            found = dict(zip(said, (max(one[first]), max(other[first])), strict=True))
            raise ConsistencyError(
                f"two stages of one model replica (ranks {' and '.join(map(str, found))}) have made different numbers "
                "of optimizer steps:\n"
                f"  optimizer steps so far: {', '.join(f'rank {rank}: {count}' for rank, count in found.items())}\n"
                "  Every rank steps after the same execute_pipeline: put no rank's optimizer.step() behind an if.\n"
                "  consistency_check: {enable: false} turns this check off."
            )


_SAMPLE = 65536  # elements that a digest looks at
_PLAIN = (bool, int, float, str, list, tuple, dict, type(None))

Batch = TypeVar("Batch")


class Report(NamedTuple):
    """The facts that a rank tells the others before a pass.

    Attributes:
        batch: digests of its arguments; without any it is not compared.
        steps: of the optimizers; None if they are not compared.
        copies: digests of weights that other stages hold, too.
        cache: whether the KV cache of a plain call was given to one before; None without one.
    """

    batch: Mapping[str, str]
    steps: Steps | None = None
    copies: Mapping[str, str] = {}
    cache: bool | None = None


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


def compare_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], p2p: P2P, compared: bool | None
) -> None:
    """Compare tokens, masks and labels of a plain call over the stages: those that all stages were given.

    Args:
        compared: of the given KV cache: None without one, or for a new one; False if one call has made it; True if a
            call was given it before.

    Raises:
        ConsistencyError: they differ, or these caches do; on all ranks of the replica.
    """
    named = given_by_name(module, args, kwargs)
    integers = {n: x for n, x in named if isinstance(x, torch.Tensor) and not x.is_floating_point()}
    said = p2p.exchange(Report(digest_of(integers), cache=compared), REPORT)
    given = set.intersection(*(set(report.batch) for report in said.values()))
    with p2p.raised_by_all():
        if len({report.cache for report in said.values()}) > 1:
            states = {None: "a new cache or none", False: "a cache of one call", True: "a cache of several calls"}
            raise ConsistencyError(
                f"the stages of one model replica (ranks {list(said)}) got different KV caches:\n  "
                + ", ".join(f"rank {rank}: {states[report.cache]}" for rank, report in said.items())
                + "\n  Each rank keeps its own cache over all calls of a sequence: give every rank the cache of its "
                "last call, or a new one."
            )
        _compare({rank: Report({n: x for n, x in report.batch.items() if n in given}) for rank, report in said.items()})


def _read_alike(read: Callable[[], Batch], describe: Callable[[Batch], Report], p2p: P2P) -> Batch:
    batch: Batch | None = None
    end: StopIteration | None = None
    try:
        batch = read()
    except StopIteration as error:
        end = error
    said = p2p.exchange(None if end is not None else describe(batch), REPORT)  # type: ignore[arg-type]
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
        _compare(said)
    return batch  # type: ignore[return-value]


def _counts_of_replicas(count: float | None, axis: Axis, p2p: P2P) -> list[float]:
    """Each replica's count (of labels, or samples), None if its data has ended; raises on all if on some it has."""
    purpose = "agreeing with the other data-parallel replicas that each has a batch"
    counts: list[Any] = [count] * axis.size
    with p2p.failures.blame(purpose, axis.ranks):
        dist.all_gather_object(counts, count, group=axis.group)
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


def _compare(said: Mapping[int, Report]) -> None:
    """Compare what the ranks have told, all of them alike."""
    steps = {rank: report.steps for rank, report in said.items() if report.steps is not None}
    for pair in pairwise(steps.items()):
        check_steps(dict(pair))
    lines = _differences({rank: report.batch for rank, report in said.items() if report.batch})
    if lines:
        raise ConsistencyError(
            f"the stages of one model replica (ranks {list(said)}) got different batches ({len(lines)} "
            f"argument{'s' if len(lines) > 1 else ''}):\n" + "\n".join(lines) + "\n"
            "  Every stage needs the whole batch: shard the data by mpu.dp.rank, or use\n"
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
