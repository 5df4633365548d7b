"""Activation checkpointing whose saved inputs wait for the backward pass in the CPU's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["keep_on_cpu"]


def keep_on_cpu(model: nn.Module) -> None:
    """Let the blocks that are recomputed keep their inputs on the CPU. Call it after transformers has enabled that.

    Only those inputs move: what else autograd saves stays where it is. On a CPU nothing changes.
    """
    for module in model.modules():
        function = vars(module).get("_gradient_checkpointing_func")
        if function is not None and not isinstance(function, Offloaded):
            module._gradient_checkpointing_func = Offloaded(function)  # type: ignore[assignment]


class Offloaded:
    """A checkpoint function whose saved inputs are kept on the CPU."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        self.plain = plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.cuda.is_available():
            return self.plain(*args, **kwargs)
        with _save_on_cpu():  # inside, the recomputation's own hooks take over
            return self.plain(*args, **kwargs)


def _save_on_cpu() -> torch.autograd.graph.saved_tensors_hooks:
    return torch.autograd.graph.save_on_cpu(pin_memory=True)
