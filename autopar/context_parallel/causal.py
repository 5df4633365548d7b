"""Attention of some rows to keys of all rows, which leaves out keys that none of them sees.

Under plain causal attention a run of rows needs the keys up to its last row, and no more: with zigzag rows that is as
much on every rank. No table of rows by rows is made: long runs are computed some queries at a time, and again in the
backward pass, so that no more than the mask of one piece exists. Under a mask that the model made (windows, documents,
padding) a run needs the keys from the first to the last one that it lets through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from autopar.layout import Layout

__all__ = ["causal_attention", "masked_attention", "seen_keys"]

_MOST = 1 << 24
"""Entries of a mask that are made at a time."""


def causal_attention(
    function: Callable[..., Any],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: Layout,
    rank: int,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Compute attention of this rank's ``query``, ``[batch, heads, rows/cp, d]``, to ``key``, ``[..., rows, d]``.

    Args:
        function: of transformers, which takes a mask; rows see themselves and what is before them.

    Returns:
        ``[batch, rows/cp, heads, d]``.
    """
    runs = rows.ranges(rank)
    pieces = list(_pieces(runs))
    again = len(pieces) > len(runs) and torch.is_grad_enabled()

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        device = query.device
        mask = torch.arange(start, stop, device=device)[:, None] >= torch.arange(stop, device=device)
        out: torch.Tensor = function(module, query, key, value, mask[None, None], **{**kwargs, "is_causal": False})[0]
        return out

    found = []
    for place, start, stop in pieces:
        given = (query[:, :, place : place + stop - start], key[:, :, :stop], value[:, :, :stop], start, stop)
        found.append(checkpoint(attend, *given, use_reentrant=False) if again else attend(*given))
    return torch.cat(found, 1) if len(found) > 1 else found[0]


def masked_attention(
    function: Callable[..., Any],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    runs: tuple[tuple[int, int], ...],
    kwargs: dict[str, Any],
    known: dict[tuple[int, int], tuple[torch.Tensor, int, int]],
) -> torch.Tensor:
    """Compute attention of ``query``, ``[batch, heads, rows/cp, d]``, to the keys that each run of rows sees.

    Args:
        mask: of all rows, ``[batch, 1 or heads, rows, rows]``.
        runs: own rows.
        known: filled with the keys that are seen, by mask and run: blocks share masks.

    Returns:
        ``[batch, rows/cp, heads, d]``.
    """
    found, place = [], 0
    for low, high in runs:
        of_run, name = mask[:, :, low:high], (id(mask), low)
        if name not in known:
            known[name] = (mask, *seen_keys(of_run))
        _, start, stop = known[name]
        queries = query[:, :, place : place + high - low]
        keys, values = key[:, :, start:stop], value[:, :, start:stop]
        found.append(function(module, queries, keys, values, of_run[..., start:stop], **kwargs)[0])
        place += high - low
    return torch.cat(found, 1) if len(found) > 1 else found[0]


def seen_keys(mask: torch.Tensor) -> tuple[int, int]:
    """Return the first key that some row of ``[batch, heads, rows, keys]`` sees, and the one behind the last.

    All keys, if a row sees none: what its softmax makes of that depends on all of them.
    """
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    keys = seen.any(2).any(0).any(0).nonzero()  # [keys that are seen, 1]
    if not keys.numel() or not bool(seen.any(-1).all()):
        return 0, mask.shape[-1]
    return int(keys[0]), int(keys[-1]) + 1


def _pieces(runs: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int, int]]:
    """Yield where each piece begins among own rows, and its first row and the one behind its last."""
    place = 0
    for low, high in runs:
        size = max(_MOST // high, 16)
        for start in range(low, high, size):
            stop = min(start + size, high)
            yield place, start, stop
            place += stop - start
