"""Sizes in ``print(model)`` of sharded layers: on this rank, and of the whole tensors."""

from __future__ import annotations

from typing import Any

from torch import nn

from autopar.distributed.axis import Axis
from autopar.foreign.modules import own_buffers, own_parameters
from autopar.layout import Layout
from autopar.swap import bind, unbind

__all__ = ["hide_sizes", "show_sizes"]

_OWNER = "printed sizes"


def show_sizes(module: nn.Module) -> None:
    """Let ``repr`` of a module with ``autopar_layouts`` say how its parameters and buffers are sharded."""
    bind(module, _OWNER, extra_repr=_extra_repr)


def hide_sizes(model: nn.Module) -> None:
    """Undo :func:`show_sizes` for all modules of ``model``."""
    unbind(model, _OWNER)


def _extra_repr(self: Any) -> str:
    axis: Axis = self.tp
    layouts: dict[str, Layout] = self.autopar_layouts
    sizes = []
    for name, layout in layouts.items():
        tensor = own_parameters(self).get(name)
        tensor = own_buffers(self).get(name) if tensor is None else tensor
        if tensor is not None:
            whole = list(tensor.shape)
            whole[layout.dim] = layout.size
            sizes.append(f"{name} {list(tensor.shape)} of {whole}")
    here = f"tp {axis.rank}/{axis.size}: {', '.join(sizes)}" if sizes else ""
    return "; ".join(part for part in (type(self).extra_repr(self), here) if part)
