"""Traffic: the collectives of a step, recorded, and played again with nothing between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autopar.tools.verification.recording import Collective, recording_of

__all__ = ["Collective", "described", "record", "replay", "replay_on_axis"]


def record(work: Callable[[], Any]) -> list[Collective]:
    """Return the collectives that ``work`` calls on torch's process groups, in order."""
    with recording_of() as found:
        work()
    return found


def replay(collectives: Sequence[Collective]) -> Callable[[], None]:
    """Return a function that does the same ones on the default group, back to back."""
    world = dist.get_world_size()
    tensors = [torch.zeros(each.elements, dtype=each.dtype) for each in collectives]
    whole = {(each.elements, each.dtype): torch.zeros(each.elements * world, dtype=each.dtype) for each in collectives}
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def work() -> None:
        for each, tensor in zip(collectives, tensors, strict=True):
            if each.name.startswith("allgather"):
                gather(whole[each.elements, each.dtype], tensor)
            else:
                dist.all_reduce(tensor)

    return work


def replay_on_axis(collectives: Sequence[Collective], axis: Any) -> Callable[[], None]:
    """Return a function that does the same ones through autopar's axis, with whatever transport it has."""
    from autopar.distributed.collectives import all_gather, even_layout, reduce_

    tensors = [torch.zeros(each.elements, dtype=each.dtype) for each in collectives]

    @torch.no_grad()
    def work() -> None:
        for each, tensor in zip(collectives, tensors, strict=True):
            if each.name.startswith("allgather"):
                all_gather(tensor, axis, even_layout(each.elements * axis.size, axis.size))
            else:
                reduce_(tensor, axis)

    return work


def described(collectives: Sequence[Collective]) -> str:
    """Describe them: ``35 allreduce_ of 34.0 MiB``."""
    numbers = Counter(each.name for each in collectives)
    size = {name: sum(each.bytes for each in collectives if each.name == name) / 2**20 for name in numbers}
    return ", ".join(f"{number} {name}, {size[name]:.2f} MiB" for name, number in numbers.items()) or "none"
