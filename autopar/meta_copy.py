"""A copy of a model without data, on which its forward can be tried."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import nn

__all__ = ["meta_copy"]

Model = TypeVar("Model", bound=nn.Module)


def meta_copy(model: Model, *, gradients: bool = False) -> Model:
    """A copy on the meta device, in evaluation mode; never holds memory for weights.

    Args:
        gradients: whether its floating parameters require them.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=gradients and empty.is_floating_point())
    beside = [value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)]
    for buffer in (*model.buffers(), *beside):
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    copied = copy.deepcopy(model, memo).eval()
    for config in {id(m.config): m.config for m in copied.modules() if hasattr(m, "config")}.values():
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = "eager"  # every model has it, it runs without data, and it reads every count
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "batched_mm"  # the one that does not look at data
    for module in copied.modules():  # the user's hooks have no part in this
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.clear()
    return copied
