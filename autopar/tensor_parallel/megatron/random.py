"""Megatron-LM's names for the random state: see :mod:`autopar.distributed.rng_tracker`, where the work is done."""

from __future__ import annotations

from autopar.distributed.axis import Group
from autopar.distributed.rng_tracker import MODEL_PARALLEL_STREAM, RandomStateTracker, checkpoint, manual_seed
from autopar.errors import ConfigError

__all__ = [
    "MODEL_PARALLEL_STREAM",
    "RandomStateTracker",
    "checkpoint",
    "get_cuda_rng_tracker",
    "manual_seed",
    "model_parallel_cuda_manual_seed",
]


def model_parallel_cuda_manual_seed(seed: int, group: Group) -> RandomStateTracker:
    """Megatron's name of :func:`manual_seed`; seeds the CPU as well."""
    return manual_seed(seed, group)


def get_cuda_rng_tracker(group: Group) -> RandomStateTracker:
    """The tracker that :func:`manual_seed` left on this MPU.

    Raises:
        ConfigError: if there is none, or ``group`` is a bare process group, which cannot keep one.
    """
    tracker = getattr(group, "random_tracker", None)
    if not isinstance(tracker, RandomStateTracker):
        raise ConfigError(f"{type(group).__name__} has no random state tracker: call manual_seed(seed, mpu) first")
    return tracker
