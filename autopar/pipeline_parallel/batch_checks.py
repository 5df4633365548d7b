"""Checks of the batch: all stages of a replica have the same one, and every replica has one, or none has.

The first step of a mode compares whole batches over the replica before it begins. Later ones send digests along with
the activations, which cost nothing; a rank that has no batch then says so at the others' first receive from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopar.distributed.axis import Axis
from autopar.distributed.digest import hexdigest
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.errors import ConsistencyError, PipelineError
from autopar.pipeline_parallel.p2p import P2P, Failure, Message, map_tensors
from autopar.pipeline_parallel.step_count import check_steps

__all__ = ["check_microbatch", "digest_of", "end_pass", "read_batch"]

_END = Message("its report on the end of the step", 1_000_000_000)
_SAMPLE = 65536  # elements that a digest looks at
_PLAIN = (bool, int, float, str, list, tuple, dict, type(None))
_HINT = (
    "\n  Every stage needs the whole batch: shard the data by mpu.get_data_parallel_rank(), or use\n"
    "  autopar.prepare_dataloader(dataset, ..., mpu=model.mpu). consistency_check: {enable: false} turns this\n"
    "  check off."
)

Batch = TypeVar("Batch")


def read_batch(
    read: Callable[[], Batch],
    p2p: P2P,
    mpu: MPU,
    unchecked: set[bool],
    backward: bool,
    count: Callable[[Batch], float] | None,
) -> tuple[Batch, list[float]]:
    """Return the next batch, on the first step of a mode the same one on all ranks of the replica.

    Args:
        unchecked: the modes (with backward or not) without a first step so far.
        count: how much a batch counts among those of the replicas; None if replicas need not agree on a step.

    Returns:
        The batch, and each replica's count; nothing if they need not agree, or there is one replica.

    Raises:
        StopIteration: on all ranks; where the data has ended on some only, all raise an AutoparError.
        ConsistencyError: the data has ended on some ranks, or the batches differ.
        PipelineError: another rank did not answer within ``pipeline.timeout``.
    """
    count = count if mpu.dp.size > 1 else None
    try:
        if p2p.others and backward in unchecked:
            with _raised_by_all(p2p):
                batch = _read_alike(read, mpu.model, p2p.failures)
            unchecked.discard(backward)
        else:
            batch = _read(read, p2p)
    except StopIteration:
        if count is not None:
            _counts_of_replicas(None, mpu.dp, p2p)
        raise
    return batch, [] if count is None else _counts_of_replicas(count(batch), mpu.dp, p2p)


def _read_alike(read: Callable[[], Batch], axis: Axis, failures: FailureLog) -> Batch:
    """The next batch, compared over all ranks of a model replica; whatever is raised, every rank raises something.

    A list of nothing but None is no data, and not compared: the rank gets its own otherwise.
    """
    batch: Batch | None = None
    failure: Exception | None = None
    mine: tuple[str, Any]
    try:
        batch = read()
        nothing = isinstance(batch, list) and all(entry is None for entry in batch)
        mine = ("batch", None if nothing else {name: _exact(value) for name, value in _entries(batch).items()})
    except StopIteration as error:
        failure, mine = error, ("ended", None)
    except Exception as error:  # whatever it is, the peers must not wait for this rank
        failure, mine = error, ("failed", f"{type(error).__name__}: {error}")
    everyone = _gather(mine, axis, failures, "comparing the batch over the stages")
    ended = [rank for rank, (status, _) in everyone.items() if status == "ended"]
    if failure is not None and (mine[0] == "failed" or len(ended) == axis.size):
        raise failure
    for rank, (status, text) in everyone.items():
        if status == "failed":
            raise ConsistencyError(f"rank {rank} could not read its batch, so no stage begins:\n{text}")
    if ended:
        raise _data_ended(ended)
    lines = _differences({rank: digests for rank, (_, digests) in everyone.items() if digests is not None})
    if lines:
        raise ConsistencyError(
            f"the stages of one model replica (ranks {list(axis.ranks)}) got different batches ({len(lines)} "
            f"argument{'s' if len(lines) > 1 else ''}):\n" + "\n".join(lines) + _HINT
        )
    return batch  # type: ignore[return-value]


def _read(read: Callable[[], Batch], p2p: P2P) -> Batch:
    """The next batch; where it has ended, the other stages are told, and StopIteration means that none has one."""
    try:
        return read()
    except StopIteration:
        p2p.begin_pass()
        here = p2p.axis.ranks[p2p.axis.rank]
        p2p.send_failure(_data_ended([here]), _END.tag)
        try:
            ended = _ended(_reports(p2p))
        except PipelineError as error:
            p2p.send_failure(_data_ended([here]))
            raise _data_ended([here]) from error
        if len(ended) < len(p2p.others):
            raise _data_ended(sorted([here, *ended])) from None
        p2p.failures.publish("the data iterator has ended on this rank, which takes no part in another step.")
        raise


def _counts_of_replicas(count: float | None, axis: Axis, p2p: P2P) -> list[float]:
    """Each replica's count (of labels, or samples), None if its data has ended; raises on all if on some it has."""
    purpose = "agreeing with the other data-parallel replicas that each has a batch"
    counts = list(_gather(count, axis, p2p.failures, purpose).values())
    ended = [str(place) for place, other in enumerate(counts) if other is None]
    if ended and len(ended) < axis.size:
        going = [str(place) for place, other in enumerate(counts) if other is not None]
        with _raised_by_all(p2p):
            raise ConsistencyError(
                f"the data iterator has ended on data-parallel replica{'s' if len(ended) > 1 else ''} "
                f"{', '.join(ended)} of {axis.size}, and not on {', '.join(going)}.\n"
                "  A step averages gradients over all replicas, so each needs as many batches as the others: leave the "
                "rest out\n  (drop_last=True), or use autopar.prepare_dataloader(dataset, ..., mpu=model.mpu), which "
                "evens them out."
            )
    return counts


def end_pass(p2p: P2P, tied: dict[str, str]) -> None:
    """Wait until all ranks of the pipeline have done their actions: nobody is left in a collective of a failed stage.

    Args:
        tied: digests of weights that other stages hold, too; they are compared.

    Raises:
        ConsistencyError: the data of another rank has ended, so it took no part; or copies of a weight differ.
        PipelineError: another rank failed or did not answer.
    """
    p2p.send_to_others(tied, _END)
    reports = _reports(p2p)
    ended = _ended(reports)
    if ended:
        raise _data_ended(ended)
    p2p.wait_sent()
    _compare_copies({p2p.axis.ranks[p2p.axis.rank]: tied, **reports})


def _reports(p2p: P2P) -> dict[int, Any]:
    """Receive the reports of all others, by rank."""
    return {p2p.axis.ranks[place]: p2p.receive(place, _END) for place in p2p.others}


def _ended(reports: dict[int, Any]) -> list[int]:
    """Return the ranks whose data has ended."""
    return [rank for rank, report in reports.items() if isinstance(report, Failure)]


def _compare_copies(said: dict[int, dict[str, str]]) -> None:
    for name in dict.fromkeys(name for digests in said.values() for name in digests):
        seen = {rank: said[rank][name] for rank in sorted(said) if name in said[rank]}
        if len(set(seen.values())) > 1:
            raise ConsistencyError(
                f"stages of one model replica have drifted apart: their copies of {name} differ:\n  "
                + ", ".join(f"rank {rank}: {digest}" for rank, digest in seen.items())
                + "\n  Every stage that holds it makes the same update of it: one by noise, or by a norm of a stage's "
                "own weights, is another one.\n  Go on from the last checkpoint. consistency_check: {enable: false} "
                "turns this check off."
            )


def _data_ended(ranks: list[int]) -> ConsistencyError:
    return ConsistencyError(
        f"the data iterator has ended on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}, and not on "
        "every stage of this model replica.\n  All its ranks read the same batches, so their iterators must be equally "
        "long and started together."
    )


@contextmanager
def _raised_by_all(p2p: P2P) -> Iterator[None]:
    """An error inside is raised on all ranks: none needs to be told."""
    try:
        yield
    except Exception:
        p2p.begin_pass()
        raise


def _gather(value: Any, axis: Axis, failures: FailureLog, purpose: str) -> dict[int, Any]:
    """Values of all ranks of the axis, by rank."""
    everyone = [value] * axis.size
    with failures.blame(purpose, axis.ranks):
        dist.all_gather_object(everyone, value, group=axis.group)
    return dict(zip(axis.ranks, everyone, strict=True))


# -- digests ----------------------------------------------------------------------------------------------------------


def digest_of(batch: Any, count: int) -> dict[str, str]:
    """Digest a batch: argument -> shape and hash of its tensors (samples of large ones), number of micro-batches."""
    digests = {name: _sampled(value) for name, value in _entries(batch).items()}
    return {name: digest for name, digest in digests.items() if digest} | {"number of micro-batches": str(count)}


def check_microbatch(digests: Mapping[int, dict[str, str]], microbatch: int) -> None:
    """Compare the digests of a micro-batch on two stages, by rank, and their optimizer steps.

    Raises:
        ConsistencyError: they differ; names the arguments.
    """
    digests = {rank: dict(theirs) for rank, theirs in digests.items()}
    check_steps(digests)
    lines = _differences(digests)
    if lines:
        raise ConsistencyError(
            f"two stages of one model replica (ranks {' and '.join(map(str, digests))}) got different batches "
            f"(micro-batch {microbatch}):\n" + "\n".join(lines) + _HINT
        )


def _differences(digests: Mapping[int, dict[str, str]]) -> list[str]:
    lines = []
    for name in dict.fromkeys(name for theirs in digests.values() for name in theirs):
        seen = {rank: theirs.get(name, "missing") for rank, theirs in digests.items()}
        if len(set(seen.values())) > 1:
            lines.append(f"  {name}: " + ", ".join(f"rank {rank}: {digest}" for rank, digest in seen.items()))
    return lines


def _entries(batch: Any) -> Mapping[str, Any]:
    if isinstance(batch, Mapping):
        return batch
    if isinstance(batch, list | tuple):
        return {
            f"micro-batch {number}" if isinstance(entry, Mapping) else f"entry {number}": entry
            for number, entry in enumerate(batch)
        }
    return {"batch": batch}


def _exact(value: Any) -> str:
    return _hashes(value, lambda tensor: tensor) or (repr(value) if isinstance(value, _PLAIN) else type(value).__name__)


def _sampled(value: Any) -> str:
    return _hashes(value, lambda tensor: tensor.reshape(-1)[:: max(tensor.numel() // _SAMPLE, 1)])


def _hashes(value: Any, part: Callable[[torch.Tensor], torch.Tensor]) -> str:
    found: list[str] = []

    def note(tensor: torch.Tensor) -> None:
        found.append(f"{list(tensor.shape)} {hexdigest(part(tensor.detach()))}")

    map_tensors(value, note)
    return ", ".join(found)
