"""Rows and heads on ranks, and the tables of rows that follow: pure."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.errors import ConfigError
from autopar.features.context_parallel.attention import (
    _causal_rows,
    _of_rows,
    _with_whole_keys,
    heads_layout,
    keys_layout,
)
from autopar.features.context_parallel.lazy_rows import _clipped
from autopar.layout import rows_layout


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("length", [2, 3, 7, 16, 33])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_row_lies_on_one_rank_and_each_rank_has_two_at_least(ranks: int, length: int, zigzag: bool) -> None:
    layout = rows_layout(length, ranks, zigzag=zigzag)
    assert (layout is None) == (length < 2 * ranks)
    if layout is None:
        return
    rows = [layout.shard(torch.arange(length), rank, 0) for rank in range(ranks)]
    assert sorted(torch.cat(rows).tolist()) == list(range(length))
    sizes = [len(each) for each in rows]
    assert max(sizes) - min(sizes) <= (2 if zigzag else 1)
    assert min(sizes) > 1
    assert torch.equal(layout.unshard(rows, 0), torch.arange(length))


def test_zigzag_rows_look_at_as_many_keys_on_every_rank() -> None:
    looks = [int(_causal_rows(rows_layout(32, 4, zigzag=True), rank, torch.device("cpu")).sum()) for rank in range(4)]
    assert looks == [132, 132, 132, 132]
    looks = [int(_causal_rows(rows_layout(32, 4), rank, torch.device("cpu")).sum()) for rank in range(4)]
    assert looks == [36, 100, 164, 228]


@pytest.mark.parametrize("zigzag", [False, True])
def test_rows_of_a_mask_are_those_of_the_queries(zigzag: bool) -> None:
    layout = rows_layout(7, 2, zigzag=zigzag)
    causal = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    for rank in range(2):
        assert torch.equal(_of_rows(causal, layout, rank), _causal_rows(layout, rank, torch.device("cpu")))
    assert _of_rows(causal[:, :, :1], layout, 0).shape == (1, 1, 1, 7)  # one row for all


def test_masks_without_a_row_for_each_query_are_refused() -> None:
    for mask, kind in ((torch.ones(2, 7), r"\[2, 7\]"), ("blocks", "str")):
        call: Any = SimpleNamespace(mask=mask, given={})
        with pytest.raises(ConfigError, match=f"requires a mask of 4 dims; 'sdpa' attention got {kind}"):
            _with_whole_keys(rows_layout(7, 2), 0, "sdpa", call, False)


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize(("start", "stop"), [(0, 6), (1, 7), (2, 3), (0, 0)])
def test_shifted_rows_stay_on_their_ranks(start: int, stop: int, zigzag: bool) -> None:
    layout = rows_layout(7, 2, zigzag=zigzag)
    some = _clipped(layout, start, stop)
    assert some.size == stop - start
    for rank in range(2):
        held = [row for low, high in layout.ranges(rank) for row in range(low, high) if start <= row < stop]
        assert [row + start for low, high in some.ranges(rank) for row in range(low, high)] == held


def test_heads_go_with_their_key() -> None:
    layout = heads_layout(3, 4, 2)  # 3 keys of 4 query heads each
    assert [layout.ranges(rank) for rank in range(2)] == [((0, 8),), ((8, 12),)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "needed"),
    [
        (8, 2, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (8, 1, [(0, 1)] * 4),
        (6, 2, [(0, 1), (0, 2), (1, 2), (1, 2)]),  # 2, 2, 1 and 1 heads: the second rank's are of two groups
        (3, 3, [(0, 1), (1, 2), (2, 3), None]),
    ],
)
def test_of_few_keys_each_rank_gets_those_of_its_heads(heads: int, kv_heads: int, needed: list[Any]) -> None:
    layout = keys_layout(heads_layout(heads, 1, 4), kv_heads)
    assert [layout.ranges(rank) for rank in range(4)] == [() if each is None else (each,) for each in needed]
