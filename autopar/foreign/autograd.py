"""torch.autograd: which pass runs, what its nodes say, and whether transforms of torch.func run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

PROFILER_RUNS = "_is_profiler_enabled"  # attribute of torch.autograd.profiler: whether one runs


current_backward = torch._C._current_graph_task_id  # () -> number of the pass that runs in this thread, or -1


def has_hooks(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Return whether a tensor has hooks of its gradient, and hooks behind the accumulation of its gradient."""
    behind = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return bool(tensor._backward_hooks), bool(behind)


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the hooks that an optimizer has of its own before its step."""
    return list(optimizer._optimizer_step_pre_hooks.values())


def in_backward() -> bool:
    """Return whether a backward pass runs in this thread."""
    return torch._C._current_graph_task_id() != -1


def after_backward(action: Callable[[], None]) -> None:
    """Call ``action`` when the backward pass that runs is through."""
    torch.autograd.Variable._execution_engine.queue_callback(action)


def run_backward(
    roots: torch.Tensor | Sequence[torch.Tensor],
    gradients: Any = None,
    keep_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = (),
) -> None:
    """Run ``torch.autograd.backward`` with function modes on: it would give itself to them, and run without them."""
    tensors = (roots,) if isinstance(roots, torch.Tensor) else tuple(roots)
    given = (gradients,) if gradients is None or isinstance(gradients, torch.Tensor) else tuple(gradients)
    given = given if len(given) == len(tensors) else (None,) * len(tensors)
    given = tuple(torch.ones_like(x) if g is None else g for x, g in zip(tensors, given, strict=True))
    wanted = () if inputs is None else (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    keep = create_graph if keep_graph is None else keep_graph
    torch.autograd.graph._engine_run_backward(
        tensors, given, keep, create_graph, wanted, allow_unreachable=True, accumulate_grad=True
    )


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


is_functorch_active = torch._C._are_functorch_transforms_active  # () -> whether a transform of torch.func runs


def is_transformed() -> bool:
    """Return whether a transform of torch.func (grad, vmap, jvp) runs, or forward mode: tensors may be wrapped ones."""
    return not torch.compiler.is_compiling() and (is_functorch_active() or forward_ad._current_level >= 0)
