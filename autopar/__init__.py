"""autopar: one line turns a Hugging Face model that sits in memory into a tensor- and data-parallel one."""

from autopar.api import deparallelize, initialize
from autopar.config import ParallelConfig
from autopar.data_parallel.batches import prepare_dataloader
from autopar.data_parallel.gradients import clip_grad_norm_
from autopar.errors import (
    AutoparError,
    CheckpointError,
    ConfigError,
    ConsistencyError,
    PolicyError,
    UnsupportedModelError,
)
from autopar.mesh import MPU

__all__ = [
    "MPU",
    "AutoparError",
    "CheckpointError",
    "ConfigError",
    "ConsistencyError",
    "ParallelConfig",
    "PolicyError",
    "UnsupportedModelError",
    "clip_grad_norm_",
    "deparallelize",
    "initialize",
    "prepare_dataloader",
]
