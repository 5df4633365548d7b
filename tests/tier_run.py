"""A run of one tier: picks and deals its tests, says at the end how long they took, and holds the tier to its seconds.

``--tier test`` takes the tests of that tier and of those before it; ``--seed 7`` runs them in another order;
``--record`` writes down how long each test took. Without ``--tier`` every test that was asked for runs.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from tests import worlds
from tests.durations import Cost, Durations, deal, shown, speed
from tests.tiers import TIERS, beyond, never_met, ranks_of, tier_of, up_to

_GROWN = 1.2  # a tier may be a fifth over its seconds


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=list(TIERS), help="run the tests of this tier and of those before it")
    parser.addoption("--after", choices=list(TIERS), help="leave out the tests of this tier, which have just run")
    parser.addoption("--seed", type=int, help="run the tests of a tier in an order drawn from this seed")
    parser.addoption("--record", action="store_true", help="write what tests took to tests/durations.json")


class TierRun:
    """The plugin; in a worker of pytest-xdist it picks and deals, in the main process it counts."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.known = config, Durations.read()
        self.tier: str | None = config.getoption("--tier")
        self.input: dict[str, Any] | None = getattr(config, "workerinput", None)
        self.workers = 1 if self.input is None else int(self.input["workercount"])
        self.later = Counter[str]()  # tier -> seconds that it would add
        self.tiers: dict[str, str] = {}
        self.measured = defaultdict[str, float](float)
        self.failed: set[str] = set()
        self.grown: list[str] = []
        self.start = time.monotonic()

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
        if self.tier is not None and not any("::" in each for each in config.args):
            for case in never_met(items):  # before others leave out what was not asked for
                raise pytest.UsageError(f"{case} is marked with a tier, and there is no such case")
        yield
        self._pick(config, items)

    def _pick(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave in the tests of the tier, in the order in which workers take them."""
        wanted = up_to(self.tier) if self.tier is not None else list(TIERS)
        after = config.getoption("--after")
        wanted = wanted[len(up_to(after)) if after else 0 :]
        late = beyond(items, lambda item: _seconds(item, self.known))
        taken, left = [], []
        for item in items:
            tier = "sweep" if item.nodeid in late else tier_of(item)
            item.user_properties.append(("tier", tier))
            if tier in wanted:
                taken.append(item)
            else:
                left.append(item)
                self.later[tier] += _seconds(item, self.known)
        if left:
            config.hook.pytest_deselected(items=left)
        if self.tier is None:
            items[:] = taken
            return
        costs = [
            Cost(
                item.nodeid.partition("::")[0],
                ranks_of(item),
                _seconds(item, self.known),
                item.get_closest_marker("together") is not None,
            )
            for item in taken
        ]
        items[:] = [taken[place] for place in deal(costs, self.workers, config.getoption("--seed"))]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        may_need = item.get_closest_marker("ranks_if_needed") is not None
        worlds.without_ranks = tier_of(item) == "check" and not may_need

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.measured[report.nodeid] += report.duration
        if report.outcome != "passed":
            self.failed.add(report.nodeid)
        self.tiers[report.nodeid] = dict(report.user_properties).get("tier", "check")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.input is not None:
            self.config.workeroutput["later"] = dict(self.later)  # type: ignore[attr-defined]
            return
        passed = {name: seconds for name, seconds in self.measured.items() if name not in self.failed}
        if self.tier is not None:
            self.grown = _grown(passed, self.tiers, self.known)
        if self.config.getoption("--record"):
            self.known.updated(passed).write()
        elif self.grown and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        self.later = Counter(getattr(node, "workeroutput", {}).get("later", self.later))  # each collects all

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.tier is None or self.input is not None:
            return
        workers = int(getattr(self.config.option, "numprocesses", None) or 1)
        took, tests = shown(time.monotonic() - self.start), shown(sum(self.measured.values()))
        terminalreporter.write_line(f"{TIERS[self.tier].command}: {took}, with {tests} of tests in {workers} processes")
        following = list(TIERS)[len(up_to(self.tier)) :]
        if following and self.later[following[0]]:
            more = shown(self.later[following[0]] / 2)
            terminalreporter.write_line(f"{TIERS[following[0]].command} adds some {more} on 2 cores")
        for line in self.grown:
            terminalreporter.write_line(line, red=True)


def _seconds(item: pytest.Item, known: Durations) -> float:
    return known.of(item.nodeid, later=tier_of(item) != "check")


def _grown(measured: dict[str, float], tiers: dict[str, str], known: Durations) -> list[str]:
    """Return a line for each tier whose tests take a fifth longer than it may, at the speed of this machine."""
    sums, factors = Counter[str](), dict[str, float]()
    for tier in set(tiers.values()):
        of_tier = {nodeid: seconds for nodeid, seconds in measured.items() if tiers[nodeid] == tier}
        factors[tier] = speed(of_tier, known)
        sums[tier] = sum(of_tier.values()) / factors[tier]
    return [
        f"error: the tests of {TIERS[tier].command} take {shown(seconds)}, and may take {shown(TIERS[tier].seconds)} "
        f"(measured at {factors[tier]:.1f} x the seconds in tests/durations.json). Make them quicker, move some to a "
        "later tier, or raise it in tests/tiers.py."
        for tier, seconds in sums.items()
        if seconds > _GROWN * TIERS[tier].seconds
    ]
