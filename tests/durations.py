"""How long tests take: what a tier may have, and how workers share it.

``tests/durations.json`` holds seconds of one case of each test function, as ``make durations`` measured them last, on
two cores. A run with ``--tier`` deals its tests to the workers by these seconds, so that all end at the same time, and
fails if a tier has outgrown its seconds in :mod:`tests.tiers` by a fifth. For that its own measurements are divided by
the speed of the machine: what its tests took against what is written down.
"""

import dataclasses
import json
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("durations.json")
_LEAST = 0.05  # seconds: shorter tests are not written down, and say nothing about speed
_LONG = 10.0  # seconds: nobody waits for such a test at the end of a run
_UNKNOWN = {True: 2.0, False: 0.02}  # seconds of a test of a later tier than check, of another one


class Durations:
    """Seconds of one case of each test function; others have a guess."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds

    @classmethod
    def read(cls, file: Path = FILE) -> "Durations":
        by_file = json.loads(file.read_text()) if file.exists() else {}
        return cls({f"{path}::{name}": s for path, listed in by_file.items() for name, s in listed.items()})

    def of(self, nodeid: str, later: bool = False) -> float:
        """Return the seconds of a test; ``later`` says that it is in a later tier than check."""
        return self.seconds.get(function_of(nodeid), _UNKNOWN[later])

    def updated(self, measured: dict[str, float]) -> "Durations":
        """Return these with others, measured by node id, in the place of what they had."""
        cases = defaultdict[str, list[float]](list)
        for nodeid, seconds in measured.items():
            cases[function_of(nodeid)].append(seconds)
        means = {name: round(statistics.fmean(listed), 2) for name, listed in cases.items()}
        kept = {name: seconds for name, seconds in self.seconds.items() if name not in means}
        return Durations(kept | {name: seconds for name, seconds in means.items() if seconds >= _LEAST})

    def write(self, file: Path = FILE) -> None:
        by_file = defaultdict[str, dict[str, float]](dict)
        for name, seconds in sorted(self.seconds.items()):
            path, _, function = name.partition("::")
            by_file[path][function] = seconds
        file.write_text(json.dumps(by_file, indent=1) + "\n")


def function_of(nodeid: str) -> str:
    """Return the node id without parameters."""
    return nodeid.partition("[")[0]


def speed(measured: dict[str, float], known: Durations) -> float:
    """Return how many times as long as written down tests took; 1 if too few are known.

    Some that take four times as long as the others have grown: they are not the machine's speed.
    """
    by_function = defaultdict[str, list[float]](list)
    for nodeid, seconds in measured.items():
        by_function[function_of(nodeid)].append(seconds)
    pairs = [
        (sum(listed), known.seconds[name] * len(listed))
        for name, listed in by_function.items()
        if name in known.seconds
    ]
    if len(pairs) < 20:
        return 1.0
    middle = statistics.median(took / was for took, was in pairs)
    alike = [(took, was) for took, was in pairs if took <= 4 * middle * was]
    return sum(took for took, _ in alike) / sum(was for _, was in alike)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What the dealing of tests has to know of one.

    Attributes:
        file: where it stands.
        ranks: that it runs on; 0 for one process.
        seconds: that it takes.
        together: whether one worker runs all such tests of the file, which share a long set-up.
    """

    file: str
    ranks: int
    seconds: float
    together: bool = False


def deal(costs: Sequence[Cost], workers: int, seed: int | None = None) -> list[int]:
    """Return an order of tests whose equal parts, one for each worker, take equally long.

    pytest-xdist begins with parts of equal numbers of tests, so parts are given equal seconds first, longest tests
    first, and then equal numbers, by moving the shortest. In its part a worker has what takes long first, then tests
    over most ranks, one world size after the other, and at the end, where workers take from each other, short ones.
    With ``seed`` it has them in any order, but for files whose tests stay together.
    """
    units = defaultdict[Any, list[int]](list)
    for place, cost in enumerate(costs):
        units[cost.file if cost.together else place].append(place)
    parts: list[list[list[int]]] = [[] for _ in range(workers)]
    sums = [0.0] * workers
    for unit in sorted(units.values(), key=lambda unit: -sum(costs[place].seconds for place in unit)):
        least = sums.index(min(sums))
        parts[least].append(unit)
        sums[least] += sum(costs[place].seconds for place in unit)
    number = [len(costs) // workers + (worker >= workers - len(costs) % workers) for worker in range(workers)]
    spare = [unit.pop() for part, most in zip(parts, number, strict=True) for unit in _shortest(part, most)]
    result = []
    for part, most in zip(parts, number, strict=True):
        part += [[spare.pop()] for _ in range(min(most - sum(map(len, part)), len(spare)))]
        if seed is not None:
            random.Random(seed).shuffle(part)
        places = [place for unit in part for place in unit]
        result += sorted(places, key=lambda place: (*_turn(costs[place]), place)) if seed is None else places
    return result + spare


def _turn(cost: Cost) -> tuple[bool, int, str]:
    """Return what comes first: long ones, most ranks, files one after the other."""
    return not (cost.together or cost.seconds >= _LONG), -cost.ranks, cost.file


def _shortest(part: list[list[int]], most: int) -> list[list[int]]:
    """Return the units of single tests, shortest last in the part, that are more than its number."""
    over = sum(map(len, part)) - most
    return [unit for unit in reversed(part) if len(unit) == 1][: max(0, over)]


def shown(seconds: float) -> str:
    """Return seconds in words: ``4 min 31 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
