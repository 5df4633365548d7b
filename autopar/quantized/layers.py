"""The quantized layers of a model, and that model with plain ones in their place, of which a plan is made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autopar.foreign.modules import own_parameters
from autopar.layout import Layout
from autopar.quantized import bitsandbytes
from autopar.quantized.stored import Kind, StoredWeight

__all__ = [
    "KINDS",
    "StandIn",
    "as_plain",
    "block_of",
    "form_kept",
    "keep_form",
    "nbytes_of",
    "stand_in",
    "stored_weight",
    "stored_weights",
]

_FORMATS: tuple[Callable[[nn.Module], StoredWeight | None], ...] = (bitsandbytes.find,)
KINDS: dict[str, Kind] = {**bitsandbytes.KINDS}


def stored_weight(module: nn.Module) -> StoredWeight | None:
    """Return the quantized weight of a layer; None of a plain one."""
    return next(filter(None, (find(module) for find in _FORMATS)), None)


def stored_weights(model: nn.Module) -> dict[str, StoredWeight]:
    """Return the quantized weights of ``model``, by the path of their layer."""
    found = ((path, stored_weight(module)) for path, module in model.named_modules())
    return {path: stored for path, stored in found if stored is not None}


def keep_form(model: nn.Module, keep: bool) -> None:
    """Keep evaluation from storing quantized weights in another form, or let it again."""
    for stored in stored_weights(model).values():
        stored.keep_form(keep)


@contextlib.contextmanager
def form_kept(model: nn.Module) -> Iterator[None]:
    """Keep evaluation inside of ``with`` from storing quantized weights in another form."""
    keep_form(model, keep=True)
    try:
        yield
    finally:
        keep_form(model, keep=False)


class StandIn(nn.Parameter):
    """Stands for a quantized weight while a plan is made: of its shape, without memory.

    Attributes:
        block: as in :class:`~autopar.quantized.stored.StoredWeight`.
        format: likewise.
    """

    block: tuple[int, int]
    format: str


def stand_in(shape: tuple[int, int], dtype: torch.dtype, form: str, block: tuple[int, int]) -> StandIn:
    """Return what stands for a weight of this shape."""
    made = StandIn(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
    made.block, made.format = block, form
    return made


def nbytes_of(form: str, shape: tuple[int, int], layout: Layout | None, rank: int) -> int:
    """Return the bytes of a rank's part of a quantized weight of this shape, with all that stands beside it."""
    (kind,) = (kind for kind in KINDS.values() if kind.form == form)
    return kind.nbytes(shape, layout if layout is not None and layout.axis_size > 1 else None, rank)


def block_of(model: nn.Module) -> int:
    """Return how many inputs of quantized weights lie on one rank together, inside of :func:`as_plain`."""
    return max((p.block[1] for p in model.parameters() if isinstance(p, StandIn)), default=1)


@contextlib.contextmanager
def as_plain(model: nn.Module) -> Iterator[None]:
    """Show the quantized layers of ``model`` as ``nn.Linear`` inside of ``with``, with weights that have no memory."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    found: list[tuple[Any, type, nn.Parameter, dict[str, Any]]] = []
    try:
        for path, stored in stored_weights(model).items():
            module = model.get_submodule(path)
            hidden = {name: vars(module).pop(name) for name in stored.hidden if name in vars(module)}
            found.append((module, type(module), own_parameters(module)["weight"], hidden))
            own_parameters(module)["weight"] = stand_in(stored.shape, dtype, stored.format, stored.block)
            module.__class__ = nn.Linear
        yield
    finally:
        for module, kind, weight, hidden in found:
            module.__class__ = kind
            own_parameters(module)["weight"] = weight
            vars(module).update(hidden)
