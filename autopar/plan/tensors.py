"""Plan every tensor of the state dict: its names, and the form in which ``save_pretrained`` writes it.

transformers renames some modules between memory and file, writes stacked experts one by one, and joins tensors that are
fused on the hub. This conversion runs once on meta tensors, in a mode that tracks views and joined tensors. The result
describes each written tensor by elements of stored tensors, so merging needs neither transformers nor the model.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from autopar.compat.peft import plain_name
from autopar.compat.tensors import UNSAFE_VIEW, TorchDispatchMode, base_of
from autopar.compat.transformers import as_never_quantized, unsaved_keys
from autopar.errors import UnsupportedModelError
from autopar.layout import Layout
from autopar.plan.plan import Joined, Piece, TensorPlan
from autopar.stored import StandIn


def plan_tensors(
    root: nn.Module,
    prefix: str,
    model: nn.Module,
    layouts: Mapping[int, Layout | None],
    places: Mapping[int, str] = MappingProxyType({}),
) -> dict[str, TensorPlan]:
    """Return one :class:`TensorPlan` per distinct tensor of ``root.state_dict()``, in its order.

    Args:
        layouts: ``id(parameter)`` -> layout; None or missing for replicated parameters.
        places: ``id(parameter)`` -> ``file:line`` of its rule.
    """
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in root.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedModelError(
                f"{name} in the state dict of {type(root).__name__} must be a tensor; got a {type(tensor).__name__} "
                "(get_extra_state)\n  Keep it in a buffer."
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
            quantized=tensor.kind.form if isinstance(tensor, StandIn) else "",
        )
    return plans


def _of_plain(tensor: torch.Tensor, listed: list[str], layout: Layout | None, where: str) -> TensorPlan:
    """Plan a tensor of a custom module, which is written under all its names for a strict ``load_state_dict``."""
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


_ATEN = torch.ops.aten


def saved_form(model: PreTrainedModel, names: Mapping[str, str]) -> tuple[dict[str, str], dict[str, tuple[Piece, ...]]]:
    """Call :func:`followed_form`; if it raises, warn and return the names in memory."""
    try:
        return followed_form(model, names)
    except (RuntimeError, ValueError) as error:
        warnings.warn(
            f"the conversion of {type(model).__name__} in save_pretrained is not supported ({error})\n  Merged "
            "checkpoints have the names in memory, which from_pretrained reads, but other tools may not.",
            stacklevel=2,
        )
        ignored = unsaved_keys(model)
        return {name: name for name in names if name not in ignored}, {}


def followed_form(
    model: PreTrainedModel, names: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, tuple[Piece, ...]]]:
    """Return the names and the pieces that ``save_pretrained`` writes, by state-dict name.

    A piece that joins several tensors is listed with the first one. ``names``: name in the reference model's state
    dict (one per tied tensor) -> name in this model's, which may have adapters.

    Raises:
        RuntimeError, ValueError: The conversion computes with elements, or loses some.
    """
    ignored = unsaved_keys(model)
    held = model.state_dict()
    state = {
        name: torch.empty(held[stored].shape, dtype=held[stored].dtype, device="meta")
        for name, stored in names.items()
        if name not in ignored
    }
    views = _ViewTracking(state)
    renamed: dict[str, str] = {}
    pieces: dict[str, list[Piece]] = {}
    with torch.no_grad(), views, as_never_quantized(model):
        converted = dict(revert_weight_conversion(model, dict(state)))
    for saved, tensor in converted.items():
        source = views.piece(tensor, saved)
        if source is None or not source[0]:
            raise ValueError(f"{saved} is computed")
        name, piece = source
        if tensor is views.stored.get(name):
            renamed[name] = saved
        else:
            pieces.setdefault(name, []).append(piece)
    parts = [part for listed in pieces.values() for part in listed]
    sources = set(pieces) | {name for part in parts for name in part.sources()}
    if absent := [name for name in state if (name in renamed) == (name in sources)]:
        raise ValueError(f"{absent[0]} is {'saved twice' if absent[0] in renamed else 'not saved'}")
    before = sum(state[name].numel() for name in sources)
    after = sum(math.prod(part.shape) - part.zeros() for part in parts)
    if before != after:
        raise ValueError(f"{before} elements become {after}")
    return renamed, {name: tuple(parts) for name, parts in pieces.items()}


class _ViewTracking(TorchDispatchMode):
    """A mode without copies, in which ``chunk.contiguous()`` stays a view. It records tensors that must be copied."""

    def __init__(self, stored: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.stored = stored
        self._names = {id(tensor): name for name, tensor in stored.items()}
        self._zeros: list[torch.Tensor] = []
        self._made: dict[int, tuple[torch.Tensor, Joined]] = {}  # keeps the tensor, so that its id stays unique

    def piece(self, tensor: torch.Tensor, saved: str | None = None) -> tuple[str, Piece] | None:
        """Return the first stored tensor whose elements are in ``tensor``, and the piece; None for a computed tensor.

        ``saved``: the name in the file; None for a part of a joined tensor.
        """
        base = tensor if base_of(tensor) is None else base_of(tensor)
        view = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        name = self._names.get(id(base))
        if name is not None:
            return name, Piece((saved or name) if name else "", *view)
        made = self._made.get(id(base))
        if made is None:
            return None
        piece = Piece(saved or "", *view, made[1])
        return next(piece.sources()), piece

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ATEN.clone.default:
            return args[0]
        if func in (UNSAFE_VIEW, _ATEN.view.default):
            try:
                return func(*args)
            except RuntimeError:  # it would be a view of a copy
                sizes = torch.empty(args[0].shape, device="meta").view(args[1]).shape
                return self._note(args[0].new_empty(sizes), [args[0]], 0)
        result = func(*args, **kwargs)
        if func is _ATEN.new_zeros.default:  # padding rows of a table
            self._zeros.append(result)  # keeps it, so that its id stays unique
            self._names[id(result)] = ""
        if func in (_ATEN.cat.default, _ATEN.stack.default):
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            stacked = func is _ATEN.stack.default
            self._note(result, args[0], dim % result.ndim if stacked else dim, stacked=stacked)
        return result

    def _note(
        self, result: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int, stacked: bool = False
    ) -> torch.Tensor:
        """Record the parts of a joined tensor."""
        parts = []
        for tensor in tensors:
            found = self.piece(tensor)
            if found is None:
                return result
            part = found[1]
            if stacked:
                shape, stride = ((*sizes[:dim], 1, *sizes[dim:]) for sizes in (part.shape, part.stride))
                part = Piece(part.name, shape, stride, part.offset, part.joined)
            parts.append(part)
        joined = Joined(dim % max(1, len(parts[0].shape)), tuple(parts))
        if math.prod(joined.shape()) == result.numel():
            self._made[id(result)] = result, joined
        return result
