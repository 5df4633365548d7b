"""Every entry of the state dict as a TensorPlan: which names are one tensor, and what ``save_pretrained`` calls it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn
from transformers import PreTrainedModel

from autopar.adapters import plain_name
from autopar.errors import UnsupportedModelError
from autopar.layout import Layout
from autopar.plan.plan import Piece, TensorPlan
from autopar.plan.saved_form import saved_form

__all__ = ["plan_tensors"]


def plan_tensors(
    root: nn.Module,
    prefix: str,
    model: nn.Module,
    layouts: Mapping[int, Layout | None],
    places: Mapping[int, str] = MappingProxyType({}),
) -> dict[str, TensorPlan]:
    """Return one :class:`TensorPlan` per distinct tensor of ``root.state_dict()``, in its order.

    Args:
        layouts: ``id(parameter)`` -> layout, None if replicated, as tensors are that are not listed.
        places: ``id(parameter)`` -> ``file:line`` of its rule.
    """
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in root.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedModelError(
                f"{name} in the state dict of {type(root).__name__} is a {type(tensor).__name__}, no tensor "
                "(get_extra_state): a checkpoint of autopar has no place for it. Keep it in a buffer."
            )
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    canonical = {key: _canonical(listed, prefix, model) for key, listed in names.items()}
    start = f"{prefix}." if prefix else ""
    if not isinstance(model, PreTrainedModel):
        planned = [_of_plain(tensors[key], names[key], layouts.get(key), places.get(key, "")) for key in tensors]
        return {plan.name: plan for plan in planned}
    kept = [name.removeprefix(start) for name in canonical.values() if name.startswith(start)]
    stored = {plain: name for name in kept if (plain := plain_name(model, name)) is not None}  # without adapters
    renamed, pieces = saved_form(model, stored)
    saved = {start + stored[name]: new for name, new in renamed.items()}
    parts = {
        start + stored[name]: tuple(piece.renamed(lambda plain: start + stored[plain]) for piece in new)
        for name, new in pieces.items()
    }
    plans = {}
    for key, tensor in tensors.items():
        name = canonical[key]
        plans[name] = TensorPlan(
            name,
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            layouts.get(key),
            tuple(sorted(set(names[key]) - {name})),
            saved.get(name),
            outside=not name.startswith(start),
            pieces=parts.get(name, ()),
            where=places.get(key, ""),
        )
    return plans


def _of_plain(tensor: torch.Tensor, listed: list[str], layout: Layout | None, where: str) -> TensorPlan:
    """Plan a tensor of a plain module, which is written under all of its names, for a strict ``load_state_dict``."""
    name, *aliases = listed
    whole = torch.empty(tensor.shape, device="meta")
    pieces = [Piece(same, tuple(tensor.shape), tuple(whole.stride()), 0) for same in listed] if aliases else ()
    dtype = str(tensor.dtype).removeprefix("torch.")
    saved_as = None if aliases else name
    return TensorPlan(
        name, tuple(tensor.shape), dtype, layout, tuple(aliases), saved_as, pieces=tuple(pieces), where=where
    )


def _canonical(listed: list[str], prefix: str, model: nn.Module) -> str:
    """Return the name of a tied tensor that transformers keeps (remove_tied_weights_from_state_dict)."""
    if len(listed) == 1:
        return listed[0]
    tied = [f"{prefix}.{name}" if prefix else name for name in getattr(model, "all_tied_weights_keys", None) or {}]
    left = sorted(listed)
    for name in sorted(listed):
        if len(left) > 1 and any(re.search(pattern, name) for pattern in tied):
            left.remove(name)
    return left[0]
