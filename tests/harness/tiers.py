"""Which tests run when: four tiers, each with the tests of those before it (see tests/README.md)."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest


class Tier(NamedTuple):
    command: str
    seconds: float  # of tests that it may add to the tiers before it, on the machine of tests/durations.json


TIERS = {
    "check": Tier("make check", 180),
    "test": Tier("make test", 540),
    "all": Tier("make test-all", 2900),
    "sweep": Tier("make sweep", 20000),
}
_ORDER = list(TIERS)
MOST = 0.6  # seconds of the cases of one test in all; the remaining ones are in sweep, unless it is every_case


def tier_of(item: pytest.Item) -> str:
    """Return the latest tier of the marks of a collected test, of which ``only=("llama-2",)`` names some parameters."""
    case = item.callspec.id if hasattr(item, "callspec") else ""
    marked = [mark.args[0] for mark in item.iter_markers("tier") if case in mark.kwargs.get("only", (case,))]
    for name in marked:
        if name not in TIERS:
            raise pytest.UsageError(f"{item.nodeid}: no tier {name!r}, there are {', '.join(TIERS)}")
    return max(marked, key=_ORDER.index) if marked else ("all" if ranks_of(item) else "check")


def beyond(items: Iterable[pytest.Item], seconds_of: Callable[[pytest.Item], float]) -> set[str]:
    """Return the node ids of cases in ``all`` that do not fit into the seconds of their test."""
    taken, found = Counter[str](), set[str]()
    for item in items:
        function = item.nodeid.partition("[")[0]
        if tier_of(item) == "all" and item.get_closest_marker("every_case") is None:
            if taken[function] and taken[function] + seconds_of(item) > MOST:
                found.add(item.nodeid)
            else:
                taken[function] += seconds_of(item)
    return found


def never_met(items: Iterable[pytest.Item]) -> list[str]:
    """Return the parameters that marks name and no collected test has."""
    named, met = set[tuple[str, str]](), set[tuple[str, str]]()
    for item in items:
        function, _, case = item.nodeid.partition("[")
        met.add((function, case.removesuffix("]")))
        for mark in item.iter_markers("tier"):
            named |= {(function, each) for each in mark.kwargs.get("only", ())}
    return sorted(f"{function}[{case}]" for function, case in named - met)


def up_to(tier: str) -> list[str]:
    """Return a tier and those before it."""
    return _ORDER[: _ORDER.index(tier) + 1]


def ranks_of(item: pytest.Item) -> int:
    """Return how many ranks a test runs on; 0 for one in a single process."""
    return int(getattr(getattr(item, "function", None), "world_size", 0))


def mainly(first: Any, *others: Any, later: str = "all") -> list[Any]:
    """Return parameters of which the first is in the test's own tier and the others are in a later one."""
    return [first, *in_tier(later, others)]


def in_tier(tier: str, values: Iterable[Any]) -> list[Any]:
    """Return parameters, one value each, that are in a tier, or in the test's own if that is later."""
    return [pytest.param(value, marks=pytest.mark.tier(tier)) for value in values]


def rows(**tiers: list[tuple[Any, ...]]) -> list[Any]:
    """Return parameters of several values, by the name of the tier that they are in."""
    return [
        pytest.param(*row, id="-".join(map(str, row)), marks=pytest.mark.tier(tier))
        for tier, table in tiers.items()
        for row in table
    ]
