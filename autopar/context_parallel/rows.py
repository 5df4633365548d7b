"""Which rows of the sequence, and which heads, lie on which rank of the context-parallel axis. Pure."""

from __future__ import annotations

from autopar.layout import Block, Layout, even_shards

__all__ = ["heads_layout", "keys_layout", "rows_layout"]


def rows_layout(length: int, ranks: int, *, zigzag: bool = False) -> Layout:
    """Return the layout of ``length`` rows along dim 1.

    Args:
        zigzag: two runs of rows for each rank, one from each end, so that under a causal mask all ranks have as much to
            compute (Llama 3, arXiv 2407.21783, section 3.3.2). Else one run.

    >>> rows_layout(8, 2).ranges(1), rows_layout(8, 2, zigzag=True).ranges(1)
    (((4, 8),), ((2, 6),))
    """
    if not zigzag:
        return Layout.of(1, [Block("row", length, 1, even_shards(length, ranks))])
    front, back = length - length // 2, length // 2
    mirrored = tuple(reversed(even_shards(back, ranks)))
    return Layout.of(1, [Block("row", front, 1, even_shards(front, ranks)), Block("row", back, 1, mirrored)])


def heads_layout(units: int, width: int, ranks: int) -> Layout:
    """Return the layout along dim 1 of ``units`` runs of ``width`` heads each; a rank may have none."""
    return Layout.of(1, [Block("heads", units, width, even_shards(units, ranks))])


def keys_layout(queries: Layout, kv_heads: int) -> Layout:
    """Return the KV heads that each rank's heads of ``queries`` look at, where the ranks are more than KV heads are.

    >>> keys_layout(heads_layout(6, 1, 4), 2).ranges(1)  # heads 2 and 3, of groups of three
    ((0, 2),)
    """
    each = queries.size // kv_heads
    held = [next(iter(queries.ranges(rank)), (0, 0)) for rank in range(queries.axis_size)]
    needed = tuple((low // each, -(-high // each)) if low < high else (0, 0) for low, high in held)
    return Layout.of(1, [Block("heads", kv_heads, 1, needed)])
