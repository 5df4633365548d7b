"""Every entry of the state dict as a TensorPlan: which names are one tensor, and what ``save_pretrained`` calls it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from autopar.errors import UnsupportedModelError
from autopar.layout import Layout
from autopar.policy.plan import Piece, TensorPlan

__all__ = ["plan_tensors"]


def plan_tensors(
    root: nn.Module, prefix: str, model: nn.Module, layouts: Mapping[int, Layout | None]
) -> dict[str, TensorPlan]:
    """One :class:`TensorPlan` per distinct tensor of ``root.state_dict()``, in its order.

    Args:
        layouts: ``id(parameter)`` -> layout, None if whole. Tensors that are not listed are whole.
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
        return {plan.name: plan for key in tensors for plan in [_of_plain(tensors[key], names[key], layouts.get(key))]}
    renamed, pieces = _saved_names(model)
    saved = {start + name: new for name, new in renamed.items()}
    parts = {start + name: new for name, new in pieces.items()}
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
        )
    return plans


def _of_plain(tensor: torch.Tensor, listed: list[str], layout: Layout | None) -> TensorPlan:
    """A tensor of a plain module, which is written under all of its names, for a strict ``load_state_dict``."""
    name, *aliases = listed
    whole = torch.empty(tensor.shape, device="meta")
    pieces = [Piece(same, tuple(tensor.shape), tuple(whole.stride()), 0) for same in listed] if aliases else ()
    dtype = str(tensor.dtype).removeprefix("torch.")
    saved_as = None if aliases else name
    return TensorPlan(name, tuple(tensor.shape), dtype, layout, tuple(aliases), saved_as, pieces=tuple(pieces))


def _canonical(listed: list[str], prefix: str, model: nn.Module) -> str:
    """Of the names of one tied tensor the one that transformers keeps (remove_tied_weights_from_state_dict)."""
    if len(listed) == 1:
        return listed[0]
    tied = [f"{prefix}.{name}" if prefix else name for name in getattr(model, "all_tied_weights_keys", None) or {}]
    left = sorted(listed)
    for name in sorted(listed):
        if len(left) > 1 and any(re.search(pattern, name) for pattern in tied):
            left.remove(name)
    return left[0]


def _saved_names(model: PreTrainedModel) -> tuple[dict[str, str], dict[str, tuple[Piece, ...]]]:
    """State-dict name -> the name in the file that ``save_pretrained`` writes, or the pieces that it writes.

    transformers renames some modules between memory and file, and writes stacked experts one by one. That conversion is
    run on meta tensors, in a mode that keeps views: what comes out tells which part of which tensor it is. What is no
    view (several tensors joined into one) keeps the names in memory, which ``from_pretrained`` reads as well.
    """
    ignored = {str(key) for key in model._keys_to_ignore_on_save or ()}
    state = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in model.state_dict().items()
        if name not in ignored
    }
    original = {id(tensor): name for name, tensor in state.items()}
    renamed: dict[str, str] = {}
    pieces: dict[str, list[Piece]] = {}
    unknown = 0
    try:
        with torch.no_grad(), _KeepViews():
            converted = dict(revert_weight_conversion(model, dict(state)))
    except RuntimeError:  # it needs the copies
        converted = dict(revert_weight_conversion(model, dict(state)))
    for saved, tensor in converted.items():
        base = tensor if tensor._base is None else tensor._base
        name = original.get(id(base))
        if name is None:
            unknown += 1
        elif tensor is base:
            renamed[name] = saved
        else:
            piece = Piece(saved, tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())
            pieces.setdefault(name, []).append(piece)
    whole = {
        name: tuple(parts)
        for name, parts in pieces.items()
        if name not in renamed and sum(math.prod(part.shape) for part in parts) == state[name].numel()
    }
    if unknown or len(renamed) + len(whole) != len(state):
        return {name: renamed.get(name, name) for name in state}, {}
    return renamed, whole


class _KeepViews(TorchDispatchMode):
    """Copies are not made: ``chunk.contiguous()`` stays the view that it was; what needs a copy makes no view."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0]
        if func is torch.ops.aten._unsafe_view.default:
            try:
                return func(*args)
            except RuntimeError:  # of what would have been a copy
                return args[0].new_empty(args[1])
        return func(*args, **(kwargs or {}))
