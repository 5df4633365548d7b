"""The ranks of a pipeline agree on a pass before it begins: all have the same batch and the same past, or none has one.

Each tells the others in a few bytes what it has read, how often optimizers have stepped its weights, and what its
copies of weights are that other stages hold, too. So what is wrong is the same error on all ranks, and nothing has run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from autopar.distributed.axis import Axis
from autopar.distributed.digest import hexdigest
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.errors import ConsistencyError
from autopar.pipeline_parallel.p2p import P2P, Message, map_tensors
from autopar.pipeline_parallel.step_count import StepReport, check_steps, warn_of_idle

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
