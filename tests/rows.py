"""Tables of rows instead of products: each pair of values once, and what the sweep has on top."""

from __future__ import annotations

from typing import Any

import pytest


def rows(quick: list[tuple[Any, ...]], every: list[tuple[Any, ...]], sweep: list[tuple[Any, ...]]) -> list[Any]:
    """Make parameters of rows: always, with the tests of every policy, and in the sweep alone."""
    marks = {"quick": (), "every": (pytest.mark.every,), "sweep": (pytest.mark.tier("sweep"),)}
    return [
        pytest.param(*row, id="-".join(map(str, row)), marks=marks[tier])
        for tier, table in (("quick", quick), ("every", every), ("sweep", sweep))
        for row in table
    ]
