"""Plain causal attention of some rows to keys of all rows, without a table of rows by rows.

A run of rows needs the keys up to its last row, and no more: with zigzag rows that is as much on every rank. Long runs
are computed some queries at a time, and again in the backward pass, so that no more than the mask of one piece exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from autopar.layout import Layout

__all__ = ["causal_attention"]

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


def _pieces(runs: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int, int]]:
    """Yield where each piece begins among own rows, and its first row and the one behind its last."""
    place = 0
    for low, high in runs:
        size = max(_MOST // high, 16)
        for start in range(low, high, size):
            stop = min(start + size, high)
            yield place, start, stop
            place += stop - start
