"""Tables of rows instead of products: each pair of values once, and what later tiers have on top."""

from typing import Any

import pytest


def rows(**tiers: list[tuple[Any, ...]]) -> list[Any]:
    """Make parameters of rows, by the name of the tier that they are in."""
    return [
        pytest.param(*row, id="-".join(map(str, row)), marks=pytest.mark.tier(tier))
        for tier, table in tiers.items()
        for row in table
    ]
