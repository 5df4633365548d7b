"""Megatron-LM's marks on sharded parameters, by which its own and DeepSpeed's norms count each parameter once."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["mark"]


def mark(parameter: torch.Tensor, dim: int, stride: int = 1) -> None:
    """Say of ``parameter`` that it is this rank's shard along ``dim``, of ``stride`` parts side by side."""
    marked: Any = parameter
    marked.tensor_model_parallel = True
    marked.partition_dim = dim
    marked.partition_stride = stride
