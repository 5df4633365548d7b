"""A language model's head that is given whole to a forward that multiplies by its weight itself, as TRL's does.

TRL takes log-probabilities of some tokens at a time from ``get_output_embeddings().weight``. Every rank does the same
there, with the same hidden states: so the weight is gathered before, and of its gradient each rank keeps its shard.
"""

from __future__ import annotations

import functools
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from autopar.distributed import collectives
from autopar.swap import bind, unbind

_ARGUMENT = "fused_lm_head"
_OWNER = "the fused head"


def has_fused_head(model: nn.Module) -> bool:
    """Return whether the model's forward was replaced by one that takes ``fused_lm_head``."""
    forward = vars(model).get("forward")
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    return code is not None and _ARGUMENT in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def give_whole_head(model: Any, root: Any) -> None:
    """Give a forward with ``fused_lm_head=True`` the whole weight of the head of ``model``.

    Args:
        root: the parallelized model, which is ``model`` or has it inside.
    """
    inner = vars(model)["forward"].__func__

    @functools.wraps(inner)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get(_ARGUMENT):
            return inner(self, *args, **kwargs)
        head = _whole(self, root)
        bind(self, _OWNER, get_output_embeddings=lambda _: head)
        try:
            return inner(self, *args, **kwargs)
        finally:
            unbind(self, _OWNER)

    model.forward = MethodType(forward, model)


def _whole(model: Any, root: Any) -> SimpleNamespace:
    """Return the head's weight and bias, all-gathered over tp. A collective, also of the backward pass: none."""
    head = model.get_output_embeddings()
    state = root._autopar
    names = {id(parameter): name for name, parameter in root.named_parameters()}

    def gathered(tensor: torch.Tensor | None) -> torch.Tensor | None:
        name = None if tensor is None else names.get(id(tensor))
        layout = None if name is None else state.plan.tensors[state.plan.canonical(name)].layout
        return tensor if tensor is None or layout is None else collectives.gather(tensor, state.mpu.tp, layout, 0)

    return SimpleNamespace(weight=gathered(head.weight), bias=gathered(getattr(head, "bias", None)))
