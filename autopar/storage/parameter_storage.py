"""Other storage for a parameter that lives on: what knows the object goes on knowing it."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from autopar.foreign.tensors import swap_implementation

__all__ = ["replace_storage"]


def replace_storage(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Give a parameter other storage, also on another kind of device, which ``parameter.data =`` refuses to do.

    The object stays the same one: optimizers, ties and lists of parameters go on pointing to it.
    """
    other = nn.Parameter(data, requires_grad=parameter.requires_grad)
    vars(other).update(vars(parameter))
    if weakref.getweakrefs(parameter):  # an LSTM has some; the object stays, so they go on being right
        swap_implementation(parameter, other)
    else:
        torch.utils.swap_tensors(parameter, other)
