"""Masks of dropout: noted where they are drawn, and given to another model in the place of its own draws."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from autopar.context_parallel.rows_ahead import RowsAhead
from autopar.context_parallel.state import RowState
from autopar.foreign.autograd import in_backward
from autopar.foreign.operators import safe_softmax
from autopar.foreign.trees import tree_leaves
from autopar.tensor_tracking import TensorTracking

__all__ = ["DrawnMask", "DrawnStates", "MaskNotes", "Replay", "generator_state"]

_PRODUCTS = (F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout_)
_DROPOUTS = (*_PRODUCTS, F.alpha_dropout)


class DrawnMask(NamedTuple):
    """One draw of dropout.

    Attributes:
        module: path of the module that drew; ``shape``: of what was multiplied.
        state: of the generator before.
        rate: probability of a zero.
        kept: what was not dropped; None: it was no product (alpha dropout).
        scaled: whether all that was kept is multiplied by 1 / (1 - rate).
        whole: whether a module of a block had all rows, of which the rank keeps its own.
        keys: first row of a run, the first key that it sees, and the one behind the last.
    """

    module: str
    shape: tuple[int, ...]
    state: str
    rate: float
    kept: torch.Tensor | None
    scaled: bool = True
    whole: bool = False
    keys: tuple[tuple[int, int, int], ...] = ()


def generator_state(device: torch.device) -> str:
    """Return a digest of the state of the default generator of a device."""
    on_host = device.type in ("cpu", "meta")
    state = torch.get_rng_state() if on_host else torch.get_device_module(device).get_rng_state(device)
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()


class _Dropouts(TorchFunctionMode):
    """Puts :meth:`multiplied` in the place of dropout, and of that of fused attention, which is done step by step."""

    def __init__(self, stack: Sequence[str]) -> None:
        super().__init__()
        self.stack = stack

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            x = args[0] if args else kwargs["input"]
            if isinstance(x, RowsAhead):
                self.see(x)
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
        if func not in _PRODUCTS:
            return self.other(func, x, rate)
        plain = F.dropout if func is torch.dropout_ else func
        made = x * self.multiplied(x, rate, plain)
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
        return (weights * self.multiplied(weights, dropout_p, F.dropout)) @ value

    def multiplied(self, x: torch.Tensor, rate: float, dropout: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Return what ``x`` is multiplied by: 0 or 1 / (1 - rate)."""
        raise NotImplementedError

    def see(self, x: RowsAhead) -> None:
        """Note what a dropout in front of the blocks is given."""

    def other(self, func: Callable[..., torch.Tensor], x: torch.Tensor, rate: float) -> torch.Tensor:
        """Return what a dropout makes of ``x`` that is no product."""
        return func(x, rate, True)


class MaskNotes(_Dropouts):
    """Notes all masks that are drawn.

    Args:
        stack: paths of the modules that run, of :func:`~autopar.tools.verification.recording.running`.
        rows: of a model with context parallelism.

    Attributes:
        found: in the order of the draws.
        lengths: of the sequences that were cut into rows.
    """

    def __init__(self, stack: Sequence[str], rows: RowState | None = None) -> None:
        super().__init__(stack)
        self._rows = rows
        self.found: list[DrawnMask] = []
        self.lengths: set[int] = set()

    def multiplied(self, x: torch.Tensor, rate: float, dropout: Callable[..., torch.Tensor]) -> torch.Tensor:
        state = generator_state(x.device)
        factor = dropout(torch.ones_like(x), rate, True)
        kept = factor != 0
        scaled = bool(torch.allclose(factor[kept].double(), torch.tensor(1 / (1 - rate)).double(), rtol=1e-2))
        self._note(x, rate, state, kept.cpu(), scaled)
        return factor

    def other(self, func: Callable[..., torch.Tensor], x: torch.Tensor, rate: float) -> torch.Tensor:
        self._note(x, rate, generator_state(x.device), None, True)
        return func(x, rate, True)

    def see(self, x: RowsAhead) -> None:
        self.lengths.add(x.rows.size)

    def _note(self, x: torch.Tensor, rate: float, state: str, kept: torch.Tensor | None, scaled: bool) -> None:
        rows = self._rows
        self.lengths |= {layout.size for layout in rows.layouts()} if rows is not None else set()
        whole = rows is not None and rows.running > 0 and bool(rows.layouts()) and not rows.cutting
        seen = {} if rows is None else rows.seen_keys
        keys = tuple((low, start, stop) for (_, low), (_, start, stop) in seen.items())
        module = self.stack[-1] if self.stack else ""
        self.found.append(DrawnMask(module, tuple(x.shape), state, rate, kept, scaled, whole, keys))


class Replay(_Dropouts):
    """Gives a model masks, by the path of a module and how often it has drawn before; others are drawn."""

    def __init__(self, stack: Sequence[str], masks: Mapping[tuple[str, int], torch.Tensor]) -> None:
        super().__init__(stack)
        self._masks = masks
        self._calls: Counter[str] = Counter()

    def multiplied(self, x: torch.Tensor, rate: float, dropout: Callable[..., torch.Tensor]) -> torch.Tensor:
        mask = self._masks.get(self._site())
        return dropout(torch.ones_like(x), rate, True) if mask is None else mask.to(x) / (1 - rate)

    def other(self, func: Callable[..., torch.Tensor], x: torch.Tensor, rate: float) -> torch.Tensor:
        self._site()
        return func(x, rate, True)

    def _site(self) -> tuple[str, int]:
        module = self.stack[-1] if self.stack else ""
        self._calls[module] += 1
        return module, self._calls[module] - 1


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
