"""transformers' continuous batching: whether ranks of a group may take part in one of it."""

from __future__ import annotations

import functools
from typing import Any

_HELPER = (
    "tp_all_reduce_state",
    "tp_all_reduce_min",
    "tp_broadcast_from_rank_0",
    "tp_broadcast_object_from_rank_0",
    "are_kv_heads_tp_ed",
    "destroy_cpu_comm_group",
)
_MANAGER = ("_create_batch_processor", "_generation_step", "warmup", "start", "stop", "pause", "is_running")


@functools.cache
def takes_ranks() -> bool:
    """Return whether this release asks an object what ranks must have alike, and makes the cache in one place."""
    try:
        from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
        from transformers.generation.continuous_batching.distributed import DistributedHelper
    except ImportError:
        return False
    helper = all(hasattr(DistributedHelper, name) for name in _HELPER)
    return helper and all(hasattr(ContinuousBatchingManager, name) for name in _MANAGER)


def kept_manager(model: Any) -> Any:
    """Return the manager that a model keeps for another session; None if it keeps none."""
    return vars(model).get("_cached_continuous_batching_manager")


def free_part() -> float:
    """Return how much is free of the host's memory that transformers takes for free: all that is not this process's."""
    import psutil  # type: ignore[import-untyped]

    memory = psutil.virtual_memory()
    return min(1.0, memory.available / (memory.total - psutil.Process().memory_info().rss))
