"""Activation checkpointing: of a plain module's blocks, and with saved inputs that wait in the CPU's memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["keep", "keep_on_cpu", "recompute"]


class _Recomputed:
    """A block of a plain module that keeps its inputs alone and runs again in the backward pass."""

    training: bool
    _gradient_checkpointing_func: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain = super().__call__  # type: ignore[misc]
        if not (self.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        return self._gradient_checkpointing_func(plain, *args, **kwargs)


@functools.cache
def _recomputed_class(plain: Any) -> Any:
    return type(
        plain.__name__, (_Recomputed, plain), {"__module__": plain.__module__, "__qualname__": plain.__qualname__}
    )


def recompute(blocks: Iterable[nn.Module]) -> None:
    """Do for the blocks of a plain module what ``gradient_checkpointing_enable`` does for a Hugging Face model's."""
    for block in blocks:
        if not isinstance(block, _Recomputed):
            kind: Any = type(block)
            block.__class__ = _recomputed_class(kind)
            block._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)  # type: ignore[assignment]


def keep(model: nn.Module) -> None:
    """Inverse of :func:`recompute`."""
    for module in model.modules():
        if isinstance(module, _Recomputed):
            module.__class__ = type(module).__mro__[2]
        if "_gradient_checkpointing_func" in vars(module):
            del module._gradient_checkpointing_func


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
