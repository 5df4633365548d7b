"""Compare the batch and the optimizer steps of all ranks of a pipeline before a pass.

Each rank sends a few bytes: digests of its batch, the number of optimizer steps of its weights, and digests of its
copies of weights that several stages hold. So an error is identical on all ranks, and nothing has run.

Stages may have different optimizers. An optimizer may hold the weights of one stage, there may be an optimizer for each
weight, and each phase of a training may create new ones. So for each optimizer the passes that it stepped after are
counted. Optimizers with the same first pass are compared between the stages.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from autopar.distributed.axis import Axis
from autopar.distributed.collectives import gathered
from autopar.distributed.digest import hexdigest
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError, ConsistencyError
from autopar.guards.step import listen
from autopar.pipeline_parallel.p2p import P2P, REPORT, map_tensors
from autopar.swap import given_by_name

Steps = frozenset[tuple[int, int]]
"""First pass of an optimizer -> the number of passes after which it stepped."""


@dataclass
class _Steps:
    """The steps of one optimizer: the first pass, the number of passes and the last pass after which it stepped."""

    parameters: int
    ours: bool
    first: int = 0
    count: int = 0
    last: int = -1


class StepCount:
    """Count, for every optimizer of the model, the training passes of this rank after which it stepped.

    Args:
        released: The ``id`` of each weight of other stages, which an optimizer may hold too.

    Attributes:
        expected: True if the optimizer that was passed to ``initialize`` steps weights of this rank's stages.
    """

    def __init__(self, model: nn.Module, released: Collection[int] = ()) -> None:
        self.expected = False
        self._model, self._released = model, released
        self._optimizers: weakref.WeakKeyDictionary[Any, _Steps] = weakref.WeakKeyDictionary()
        self._passes = self._running = 0
        listen(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepCount:
        """Return a new count for a copied model."""
        return StepCount(copy.deepcopy(self._model, memo))

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Count the first step of ``optimizer`` after a pass; raise ConfigError for a step inside a pass."""
        if self._running and not self._stepped(optimizer).isdisjoint(map(id, self._model.parameters())):
            raise ConfigError(
                f"{type(optimizer).__name__}.step() is not supported inside of execute_pipeline, before all "
                f"{self._running} micro-batches have run\n  Step after execute_pipeline. An optimizer in the backward "
                "(a hook of register_post_accumulate_grad_hook)\n  needs pipeline_parallel_size: 1."
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
        """Return the steps to compare; ``microbatches`` is the number of micro-batches with a backward."""
        if microbatches:
            self._passes, self._running = self._passes + 1, microbatches
        counts = {(steps.first, steps.count) for steps in self._optimizers.values() if steps.count}
        return frozenset(counts or ({(0, 0)} if self.expected else ()))

    def end_pass(self) -> None:
        """End a pass, also after an error."""
        self._running = 0


def _listed(by_rank: Mapping[int, Any]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in by_rank.items())


def check_steps(said: Mapping[int, Steps]) -> None:
    """Raise ConsistencyError if an optimizer has stepped after different numbers of passes on two ranks."""
    one, other = ({first: {n for f, n in steps if f == first} for first, _ in steps} for steps in said.values())
    for first in one.keys() & other.keys():
        if one[first].isdisjoint(other[first]):
            found = dict(zip(said, (max(one[first]), max(other[first])), strict=True))
            raise ConsistencyError(
                f"two stages of one model replica (ranks {' and '.join(map(str, found))}) have made different numbers "
                "of optimizer steps:\n"
                f"  optimizer steps so far: {_listed(found)}\n"
                "  Call optimizer.step() on every rank after the same execute_pipeline, not for some ranks only.\n"
                "  consistency_check: {enable: false} turns this check off."
            )


_SAMPLE = 65536  # elements that a digest looks at
_PLAIN = (bool, int, float, str, list, tuple, dict, type(None))

Batch = TypeVar("Batch")


class BatchReport(NamedTuple):
    """The facts that a rank sends to the other ranks before a pass; empty facts are not compared.

    Attributes:
        batch: The digests of the model's arguments.
        steps: The optimizer steps; None if they are not compared.
        copies: The digests of weights that other stages hold too.
        cache: True if an earlier plain call received the KV cache; None without a cache.
    """

    batch: Mapping[str, str]
    steps: Steps | None = None
    copies: Mapping[str, str] = {}
    cache: bool | None = None


def read_batch(
    read: Callable[[], Batch],
    describe: Callable[[Batch], BatchReport],
    p2p: P2P,
    mpu: MPU,
    count: Callable[[Batch], float] | None,
) -> tuple[Batch, list[float]]:
    """Return the next batch, identical on all stages of the replica.

    Args:
        describe: A function of the batch that returns the facts to compare.
        count: A function of the batch that returns its weight among the replicas; None if replicas need not agree.

    Returns:
        The batch, and each replica's count; no counts if replicas need not agree, or for one replica.

    Raises:
        StopIteration: The data has ended on all ranks.
        ConsistencyError: The data has ended on some ranks, or reports differ; on all ranks.
        PipelineError: Another rank failed, or did not answer within ``pipeline.timeout``.
    """
    batch: Any = None
    end: StopIteration | None = None
    try:
        batch = read()
    except StopIteration as error:
        end = error
    said = p2p.exchange(describe(batch) if end is None else None, REPORT)
    ended = [rank for rank, report in said.items() if report is None]
    with p2p.raised_by_all():
        if ended and len(ended) < len(said):
            raise ConsistencyError(
                f"the data iterator has ended on rank{'s' if len(ended) > 1 else ''} {', '.join(map(str, ended))}, but "
                "not on every stage of this model replica.\n  Use the same batches on all ranks of a replica: "
                "iterators of equal length, started together."
            )
        if end is None:
            _compare(said)
        else:
            p2p.failures.publish("the data iterator has ended on this rank, which makes no further step.")
    counts: list[float] = []
    if count is not None and mpu.dp.size > 1:
        counts = _counts_of_replicas(count(batch) if end is None else None, mpu.dp, p2p)
    with p2p.raised_by_all():
        if end is not None:
            raise end
    return batch, counts


def compare_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], p2p: P2P, compared: bool | None
) -> None:
    """Compare the tokens, masks and labels of a plain call on all stages; raise ConsistencyError on all ranks.

    Args:
        compared: The state of the KV cache: None without a cache or for a new one, False after the call that made it,
            True after a call that received it.
    """
    named = given_by_name(module, args, kwargs)
    integers = {n: x for n, x in named if isinstance(x, torch.Tensor) and not x.is_floating_point()}
    said = p2p.exchange(BatchReport(digest_of(integers), cache=compared), REPORT)
    given = set.intersection(*(set(report.batch) for report in said.values()))
    with p2p.raised_by_all():
        if len({report.cache for report in said.values()}) > 1:
            states = {None: "a new cache or none", False: "a cache of one call", True: "a cache of several calls"}
            raise ConsistencyError(
                f"the stages of one model replica (ranks {list(said)}) got different KV caches:\n  "
                f"{_listed({rank: states[report.cache] for rank, report in said.items()})}\n  Pass each rank the cache "
                "of its last call of the sequence, or a new cache on every rank."
            )
        _compare(
            {rank: BatchReport({n: x for n, x in report.batch.items() if n in given}) for rank, report in said.items()}
        )


def _counts_of_replicas(count: float | None, axis: Axis, p2p: P2P) -> list[float]:
    """Return each replica's count of labels or samples. Raise if the data has ended on only some replicas."""
    purpose = "agreeing with the other data-parallel replicas that each has a batch"
    with p2p.failures.blame(purpose, axis.ranks):
        counts = gathered(count, axis.group)
    ended = [str(place) for place, other in enumerate(counts) if other is None]
    if ended and len(ended) < axis.size:
        going = [str(place) for place, other in enumerate(counts) if other is not None]
        with p2p.raised_by_all():
            raise ConsistencyError(
                f"the data iterator has ended on data-parallel replica{'s' if len(ended) > 1 else ''} "
                f"{', '.join(ended)} of {axis.size}, but not on {', '.join(going)}.\n"
                "  Use the same number of batches on all replicas: drop_last=True, or\n"
                "  autopar.prepare_dataloader(dataset, ..., mpu=model.mpu), which evens them out."
            )
    return counts


def _compare(said: Mapping[int, BatchReport]) -> None:
    """Compare the reports of all ranks. The result is identical on all ranks."""
    steps = {rank: report.steps for rank, report in said.items() if report.steps is not None}
    for pair in pairwise(steps.items()):
        check_steps(dict(pair))
    digests, lines = {rank: report.batch for rank, report in said.items() if report.batch}, []
    for name in dict.fromkeys(name for theirs in digests.values() for name in theirs):
        seen = {rank: theirs.get(name, "missing") for rank, theirs in digests.items()}
        if len(set(seen.values())) > 1:
            lines.append(f"  {name}: {_listed(seen)}")
    if lines:
        raise ConsistencyError(
            f"the stages of one model replica (ranks {list(said)}) got different batches ({len(lines)} "
            f"argument{'s' if len(lines) > 1 else ''}):\n" + "\n".join(lines) + "\n"
            "  Pass the full batch to every stage: shard the data by mpu.dp.rank, or use\n"
            "  autopar.prepare_dataloader(dataset, ..., mpu=model.mpu). consistency_check: {enable: false} turns this\n"
            "  check off."
        )
    for name in dict.fromkeys(name for report in said.values() for name in report.copies):
        seen = {rank: report.copies[name] for rank, report in said.items() if name in report.copies}
        if len(set(seen.values())) > 1:
            raise ConsistencyError(
                f"the copies of {name} differ between stages of one model replica:\n  "
                f"{_listed(seen)}\n  Make the same update on every stage that holds it, without noise or norms of one "
                "stage's weights.\n  Resume from the last checkpoint. consistency_check: {enable: false} turns this "
                "check off."
            )


def digest_of(batch: Any, *, full: bool = False) -> dict[str, str]:
    """Digest a batch: argument -> shapes and hashes of its tensors (of samples of large tensors), or plain values."""
    if isinstance(batch, list) and all(entry is None for entry in batch):
        return {}  # no data on this rank
    if isinstance(batch, list | tuple):
        kinds = ("micro-batch" if isinstance(entry, Mapping) else "entry" for entry in batch)
        batch = {f"{kind} {number}": entry for number, (kind, entry) in enumerate(zip(kinds, batch, strict=True))}
    named = batch if isinstance(batch, Mapping) else {"batch": batch}
    return {name: _digest(value, full) for name, value in named.items()}


def _digest(value: Any, full: bool) -> str:
    found: list[str] = []

    def note(tensor: torch.Tensor) -> None:
        part = tensor.detach()
        part = part if full else part.reshape(-1)[:: max(part.numel() // _SAMPLE, 1)]
        found.append(f"{list(tensor.shape)} {hexdigest(part)}")

    map_tensors(value, note)
    return ", ".join(found) or (repr(value) if isinstance(value, _PLAIN) else type(value).__name__)
