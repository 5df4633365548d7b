"""What ranks agree on before and after a step: stages that they have one batch, replicas that each has its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopar.distributed.axis import Axis
from autopar.distributed.digest import hexdigest
from autopar.distributed.failures import FailureLog
from autopar.errors import ConsistencyError
from autopar.pipeline_parallel.p2p import Post, map_tensors

__all__ = [
    "DONE",
    "END",
    "ENDED",
    "check_batch",
    "check_digest",
    "counts_of_replicas",
    "data_ended",
    "digest_of",
    "end_pass",
    "weights_over_replicas",
]

END: dict[str, Any] = {"way": "forward", "tag": 1_000_000_000, "what": "its word on how the step ended"}
DONE, ENDED = "done", "ended"  # the words: all actions are done; the data has ended, so there is no step
_SAMPLE = 65536  # elements that a digest looks at
_PLAIN = (bool, int, float, str, list, tuple, dict, type(None))
_HINT = (
    "\n  Every stage needs the whole batch: shard the data by mpu.get_data_parallel_rank(), or use\n"
    "  autopar.prepare_dataloader(dataset, ..., mpu=model.mpu). consistency_check: {enable: false} turns this\n"
    "  check off."
)

Batch = TypeVar("Batch")


def check_batch(read: Callable[[], Batch], axis: Axis, failures: FailureLog) -> Batch:
    """What ``read`` gives, compared over all ranks of a model replica (``axis``); one object exchange.

    A list of nothing but None is no data, and not compared: the rank gets its own otherwise.

    Raises:
        StopIteration: the data has ended on every rank.
        ConsistencyError: it has ended on some; or another rank has no batch; or, naming the arguments that differ, the
            batches are different. Whatever is raised, every rank of the axis raises something.
        PipelineError: one of the ranks did not answer.
    """
    batch: Batch | None = None
    failure: Exception | None = None
    mine: tuple[str, Any]
    try:
        batch = read()
        nothing = isinstance(batch, list) and all(entry is None for entry in batch)
        mine = ("batch", None if nothing else {name: _exact(value) for name, value in _entries(batch).items()})
    except StopIteration as error:
        failure, mine = error, (ENDED, None)
    except Exception as error:  # whatever it is, the peers must not wait for this rank
        failure, mine = error, ("failed", f"{type(error).__name__}: {error}")
    everyone: list[tuple[str, Any]] = [mine] * axis.size
    with failures.blame("comparing the batch over the stages", axis.ranks):
        dist.all_gather_object(everyone, mine, group=axis.group)
    ended = [rank for rank, (word, _) in zip(axis.ranks, everyone, strict=True) if word == ENDED]
    if failure is not None and (mine[0] != ENDED or len(ended) == axis.size):
        raise failure
    for rank, (word, text) in zip(axis.ranks, everyone, strict=True):
        if word == "failed":
            raise ConsistencyError(f"rank {rank} could not read its batch, so no stage begins:\n{text}")
    if ended:
        raise data_ended(ended)
    reading = [place for place, (_, digests) in enumerate(everyone) if digests is not None]
    lines = _differences([everyone[place][1] for place in reading], [axis.ranks[place] for place in reading])
    if lines:
        raise ConsistencyError(
            f"the stages of one model replica (ranks {list(axis.ranks)}) got different batches ({len(lines)} "
            f"argument{'s' if len(lines) > 1 else ''}):\n" + "\n".join(lines) + _HINT
        )
    return batch  # type: ignore[return-value]


def data_ended(ranks: list[int]) -> ConsistencyError:
    """The error of every stage, if only some have a batch."""
    return ConsistencyError(
        f"the data iterator has ended on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}, and not on "
        "every stage of this model replica.\n  All its ranks read the same batches, so their iterators must be equally "
        "long and started together."
    )


def digest_of(batch: Any, count: int) -> dict[str, str]:
    """Argument -> shape and hash of its tensors (of an even sample of large ones), and how many micro-batches."""
    digests = {name: _sampled(value) for name, value in _entries(batch).items()}
    return {name: digest for name, digest in digests.items() if digest} | {"number of micro-batches": str(count)}


def check_digest(mine: dict[str, str], theirs: dict[str, str], ranks: tuple[int, int], microbatch: int) -> None:
    """Compare the digests of a micro-batch on two stages.

    Args:
        ranks: this one, and the sender.

    Raises:
        ConsistencyError: they differ; names the arguments.
    """
    lines = _differences([mine, theirs], ranks)
    if lines:
        raise ConsistencyError(
            f"two stages of one model replica (ranks {ranks[0]} and {ranks[1]}) got different batches (micro-batch "
            f"{microbatch}):\n" + "\n".join(lines) + _HINT
        )


def end_pass(post: Post, word: str) -> list[int]:
    """Tell all ranks of the pipeline this rank's word, and hear theirs; returns the ranks whose data has ended.

    Raises:
        PipelineError: another rank failed or did not answer.
    """
    others = [place for place in range(post.axis.size) if place != post.axis.rank]
    for place in others:
        post.send(word, place, **END)
    words = {post.axis.rank: word} | {place: post.receive(place, **END) for place in others}
    if len(set(words.values())) == 1:  # a rank without data takes nothing of what was sent
        post.settle()
    return [post.axis.ranks[place] for place in sorted(words) if words[place] == ENDED]


def _differences(everyone: list[dict[str, str]], ranks: tuple[int, ...] | list[int]) -> list[str]:
    lines = []
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        seen = [theirs.get(name, "missing") for theirs in everyone]
        if len(set(seen)) > 1:
            lines.append(f"  {name}: " + ", ".join(f"rank {r}: {s}" for r, s in zip(ranks, seen, strict=True)))
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


# -- over data-parallel replicas --------------------------------------------------------------------------------------


def counts_of_replicas(count: int | None, axis: Axis, device: torch.device, failures: FailureLog) -> list[int]:
    """Each replica's count (labels, or samples); a collective over ``axis`` (dp).

    Args:
        count: this one's; None if its data has ended.

    Returns:
        The counts, or nothing if the data has ended on all replicas.

    Raises:
        ConsistencyError: it has ended on some of them only; on all ranks.
        PipelineError: a replica did not answer within ``pipeline.timeout``.
    """
    mine = torch.tensor([-1 if count is None else count], device=device)
    everyone = [torch.empty_like(mine) for _ in range(axis.size)]
    with failures.blame("agreeing with the other data-parallel replicas that each has a batch", axis.ranks):
        dist.all_gather(everyone, mine, group=axis.group)
    counts = torch.cat(everyone).tolist()
    ended = [place for place, other in enumerate(counts) if other < 0]
    if len(ended) == axis.size:
        return []
    if ended:
        going = [place for place, other in enumerate(counts) if other >= 0]
        raise ConsistencyError(
            f"the data iterator has ended on data-parallel replica{'s' if len(ended) > 1 else ''} "
            f"{', '.join(map(str, ended))} of {axis.size}, and not on {', '.join(map(str, going))}.\n"
            "  A step averages gradients over all replicas, so each needs as many batches as the others: leave the "
            "rest out\n  (drop_last=True), or use autopar.prepare_dataloader(dataset, ..., mpu=model.mpu), which "
            "evens them out."
        )
    return counts


def weights_over_replicas(weights: list[float], counts: list[int], replica: int) -> list[float]:
    """Weights that make the mean of the replicas' gradients that of the global batch.

    Args:
        weights: of the micro-batches within this replica.
        counts: of every replica; each counts by its own.
        replica: this one's place.
    """
    total = sum(counts)
    if not total:
        return weights
    factor = counts[replica] * len(counts) / total
    return [weight * factor for weight in weights]
