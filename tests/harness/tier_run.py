"""Pick the tests of a tier, order them, print what they took, and fail a tier that exceeds its seconds.

The files that take longest come first; pytest-xdist gives each worker the next file, so that its set-up runs once.
"""

import json
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import worlds
from tests.harness.tiers import TIERS, beyond, never_met, tier_of, up_to

DURATIONS = Path(__file__).parents[1] / "durations.json"
_LEAST = 0.05  # seconds: shorter tests are not recorded
_GROWN = 1.2  # a tier may exceed its seconds by a fifth


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=list(TIERS), help="run the tests of this tier and of those before it")
    parser.addoption("--after", choices=list(TIERS), help="leave out the tests of this tier, which have just run")
    parser.addoption("--seed", type=int, help="run the tests of a tier in an order drawn from this seed")
    parser.addoption("--record", action="store_true", help="write what tests took to tests/durations.json")


class TierRun:
    """Pick and order tests in a worker of pytest-xdist; add up seconds in the main process."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.known = config, read_durations()
        self.tier: str | None = config.getoption("--tier")
        self.in_worker = hasattr(config, "workerinput")
        self.later = Counter[str]()  # tier -> seconds that it would add
        self.tiers: dict[str, str] = {}
        self.measured = defaultdict[str, float](float)
        self.failed: set[str] = set()
        self.grown: list[str] = []
        self.start = time.monotonic()

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
        if self.tier is not None and not any("::" in each for each in config.args):
            for case in never_met(items):  # before -k deselects some
                raise pytest.UsageError(f"{case} is marked with a tier, and there is no such case")
        yield
        self._pick(config, items)

    def _pick(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        after = config.getoption("--after")
        wanted = up_to(self.tier or "sweep")[len(up_to(after)) if after else 0 :]
        late = beyond(items, self._seconds)
        taken, left, of_file = [], [], Counter[str]()
        for item in items:
            tier = "sweep" if item.nodeid in late else tier_of(item)
            item.user_properties.append(("tier", tier))
            (taken if tier in wanted else left).append(item)
            (of_file if tier in wanted else self.later)[_file_of(item) if tier in wanted else tier] += self._seconds(
                item
            )
        if left:
            config.hook.pytest_deselected(items=left)
        if self.tier is not None:
            taken.sort(key=lambda item: (-of_file[_file_of(item)], _file_of(item)))
            if (seed := config.getoption("--seed")) is not None:
                random.Random(seed).shuffle(taken)
        items[:] = taken

    def _seconds(self, item: pytest.Item) -> float:
        return self.known.get(function_of(item.nodeid), 0.02 if tier_of(item) == "check" else 2.0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        worlds.without_ranks = tier_of(item) == "check" and not item.get_closest_marker("ranks_if_needed")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.measured[report.nodeid] += report.duration
        if report.outcome != "passed":
            self.failed.add(report.nodeid)
        self.tiers[report.nodeid] = dict(report.user_properties).get("tier", "check")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.in_worker:
            self.config.workeroutput["later"] = dict(self.later)  # type: ignore[attr-defined]
            return
        passed = {name: seconds for name, seconds in self.measured.items() if name not in self.failed}
        if self.tier is not None:
            self.grown = grown(passed, self.tiers, self.known)
        if self.config.getoption("--record"):
            write_durations(self.known, passed)
        elif self.grown and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        self.later = Counter(getattr(node, "workeroutput", {}).get("later", self.later))  # each worker collects all

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.tier is None or self.in_worker:
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


def function_of(nodeid: str) -> str:
    """Return the node id without parameters."""
    return nodeid.partition("[")[0]


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def read_durations(file: Path = DURATIONS) -> dict[str, float]:
    """Return the seconds of one case of each test function."""
    by_file = json.loads(file.read_text())
    return {f"{path}::{name}": seconds for path, listed in by_file.items() for name, seconds in listed.items()}


def write_durations(known: dict[str, float], measured: dict[str, float], file: Path = DURATIONS) -> None:
    """Write the known seconds, with the means of the measured cases in place of the seconds of their functions."""
    cases = defaultdict[str, list[float]](list)
    for nodeid, seconds in measured.items():
        cases[function_of(nodeid)].append(seconds)
    means = {name: round(statistics.fmean(listed), 2) for name, listed in cases.items()}
    by_file = defaultdict[str, dict[str, float]](dict)
    for name, seconds in sorted((known | means).items()):
        if seconds >= _LEAST:
            path, _, function = name.partition("::")
            by_file[path][function] = seconds
    file.write_text(json.dumps(by_file, indent=1) + "\n")


def speed(measured: dict[str, float], known: dict[str, float]) -> float:
    """Return the median of measured by recorded seconds; 1 if fewer than 20 cases are known."""
    ratios = [seconds / known[name] for at, seconds in measured.items() if (name := function_of(at)) in known]
    return statistics.median(ratios) if len(ratios) >= 20 else 1.0


def grown(measured: dict[str, float], tiers: dict[str, str], known: dict[str, float]) -> list[str]:
    """Return a line for each tier whose tests take a fifth longer than it may, at the speed of this machine."""
    lines = []
    for tier in set(tiers.values()):
        of_tier = {nodeid: seconds for nodeid, seconds in measured.items() if tiers[nodeid] == tier}
        factor = speed(of_tier, known)
        seconds, allowed = sum(of_tier.values()) / factor, TIERS[tier].seconds
        if seconds > _GROWN * allowed:
            lines.append(
                f"error: the tests of {TIERS[tier].command} take {shown(seconds)}, and may take {shown(allowed)} "
                f"(measured at {factor:.1f} x the seconds in tests/durations.json). Make them quicker, move some to a "
                "later tier, or raise it in tests/harness/tiers.py."
            )
    return lines


def shown(seconds: float) -> str:
    """Return seconds in words: ``4 min 31 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
