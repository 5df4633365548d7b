"""What data-parallel replicas agree on before a training step: that each has a batch, and how much each counts."""

from __future__ import annotations

import torch
import torch.distributed as dist

from autopar.collectives import Axis
from autopar.errors import ConsistencyError
from autopar.roll_call import RollCall

__all__ = ["counts_of_replicas", "weights_over_replicas"]


def counts_of_replicas(count: int | None, axis: Axis, device: torch.device, roll: RollCall) -> list[int]:
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
    with roll.naming("agreeing with the other data-parallel replicas that each has a batch", axis.ranks):
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
