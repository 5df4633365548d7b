"""torch.autograd: which pass runs, and what its nodes say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

__all__ = [
    "PROFILER_RUNS",
    "after_backward",
    "current_backward",
    "forward_class",
    "in_backward",
    "input_metadata",
    "is_forward_mode",
    "is_functorch_active",
    "next_sequence_number",
    "sequence_number",
]

PROFILER_RUNS = "_is_profiler_enabled"  # attribute of torch.autograd.profiler: whether one runs


current_backward = torch._C._current_graph_task_id  # () -> number of the pass that runs in this thread, or -1


def in_backward() -> bool:
    """Return whether a backward pass runs in this thread."""
    return torch._C._current_graph_task_id() != -1


def after_backward(action: Callable[[], None]) -> None:
    """Call ``action`` when the backward pass that runs is through."""
    torch.autograd.Variable._execution_engine.queue_callback(action)


def next_sequence_number() -> int:
    """Return the number that the next node of the graph gets."""
    return torch._C._autograd._get_sequence_nr()


def sequence_number(node: Any) -> int:
    """Return in which place among all nodes one was made."""
    return int(node._sequence_nr())


def input_metadata(node: Any) -> Any:
    """Return shape, dtype and device of the gradients that come to a node."""
    return node._input_metadata


def forward_class(node: Any) -> type:
    """Return the ``torch.autograd.Function`` that a node is of."""
    return node._forward_cls


def is_functorch_active() -> bool:
    """Return whether a transform of torch.func runs."""
    return bool(torch._C._are_functorch_transforms_active())


def is_forward_mode() -> bool:
    """Return whether tensors may carry tangents."""
    return forward_ad._current_level >= 0
