"""Random draws of a forward: which module drew, from which state of the generator, and how much dropout kept."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import sqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from autopar.context_parallel.lazy_rows import LazyRows
from autopar.foreign.autograd import in_backward
from autopar.foreign.operators import safe_softmax
from autopar.foreign.trees import tree_leaves
from autopar.tensor_tracking import TensorTracking

__all__ = ["Draw", "DrawNotes", "DrawnStates", "generator_state"]

_PRODUCTS = (F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout_)


class Draw(NamedTuple):
    """One draw of dropout.

    Attributes:
        module: path of the module that drew; ``shape``: of what it dropped elements of.
        state: of the generator before.
        rate: probability of a zero; ``kept``: elements that are none; of alpha dropout neither is known.
        scaled: whether all that was kept is multiplied by 1 / (1 - rate).
    """

    module: str
    shape: tuple[int, ...]
    state: str
    rate: float = 0.0
    kept: int = 0
    scaled: bool = True

    @property
    def size(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


def generator_state(device: torch.device) -> str:
    """Return a digest of the state of the default generator of a device."""
    on_host = device.type in ("cpu", "meta")
    state = torch.get_rng_state() if on_host else torch.get_device_module(device).get_rng_state(device)
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()


class DrawNotes(TorchFunctionMode):
    """Notes the draws of dropout, and of that of fused attention, which is done step by step.

    Args:
        stack: paths of the modules that run, of :func:`~autopar.tools.verification.recording.running`.

    Attributes:
        found: in the order of the draws.
    """

    def __init__(self, stack: Sequence[str]) -> None:
        super().__init__()
        self.stack, self.found = stack, list[Draw]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS or func is F.alpha_dropout:
            x = args[0] if args else kwargs["input"]
            if isinstance(x, LazyRows):
                with self:  # it calls dropout of its own rows
                    return type(x).__torch_function__(func, types, args, kwargs)
            named = dict(zip(("p", "training", "inplace"), args[1:], strict=False)) | kwargs
            rate = float(named.get("p", 0.5))
            if named.get("training", named.get("train", True)) and rate > 0:
                return self._dropout(func, x, rate, inplace=bool(named.get("inplace")) or func is torch.dropout_)
        if func is F.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            named = dict(zip(names, args, strict=False)) | kwargs
            if named.get("dropout_p", 0.0) > 0:
                return self._attention(**named)
        return func(*args, **kwargs)

    def _dropout(self, func: Any, x: torch.Tensor, rate: float, *, inplace: bool) -> torch.Tensor:
        if func is F.alpha_dropout:
            self.found.append(Draw(self._module, tuple(x.shape), generator_state(x.device)))
            return func(x, rate, True, inplace)
        made = x * self._multiplied(x, rate, F.dropout if func is torch.dropout_ else func)
        return x.copy_(made) if inplace else made

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        scores = query @ key.transpose(-2, -1) * (1 / sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            hidden = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if hidden else scores + attn_mask
        weights = safe_softmax(scores, -1)
        return (weights * self._multiplied(weights, dropout_p, F.dropout)) @ value

    def _multiplied(self, x: torch.Tensor, rate: float, dropout: Any) -> torch.Tensor:
        """Return what ``x`` is multiplied by: 0 or 1 / (1 - rate)."""
        state = generator_state(x.device)
        factor: torch.Tensor = dropout(torch.ones_like(x), rate, True)
        kept = factor[factor != 0].double()
        scaled = bool(torch.allclose(kept, torch.full_like(kept, 1 / (1 - rate)), rtol=1e-2))
        self.found.append(Draw(self._module, tuple(x.shape), state, rate, kept.numel(), scaled))
        return factor

    @property
    def _module(self) -> str:
        return self.stack[-1] if self.stack else ""


class DrawnStates(TensorTracking):
    """Notes every random draw of a forward and of its backward, which has some where blocks are recomputed.

    Attributes:
        first, again: operator, shape of its argument and state of the generator, in the forward and in the backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first: set[tuple[str, tuple[int, ...], str]] = set()
        self.again: list[tuple[str, tuple[int, ...], str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            given = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)), None)
            if given is not None:
                draw = str(func), tuple(given.shape), generator_state(given.device)
                if not in_backward():
                    self.first.add(draw)
                else:
                    self.again.append(draw)
        return func(*args, **(kwargs or {}))
