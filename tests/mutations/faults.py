"""The list of planted faults: what it holds, and what must be true of it."""

import ast
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.harness.tiers import TIERS

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("faults.yaml")

MECHANISMS = (
    *("layers", "regions", "embeddings", "experts", "loss", "logits", "sequence", "context"),
    *("gradients", "averaging", "clipping", "zero", "precision", "optimizer state", "data", "checks"),
    *("pipeline", "p2p", "schedules", "micro-batches", "stages"),
    *("save", "load", "reshard", "merge", "rotation", "storage"),
    *("mesh", "agreement", "failures", "rng", "transport"),
    *("layout", "policies", "policy language", "plan", "dry run", "derivation", "config"),
    *("peft", "lazy init", "planner", "verification", "trainer", "patches", "steps"),
)


@dataclass(frozen=True)
class Fault:
    """A small change of one file that makes it wrong, and the test that fails then."""

    name: str
    mechanism: str
    file: str
    find: str
    replace: str
    caught_by: str

    def planted(self, text: str) -> str:
        """Return the file's text with the fault."""
        return text.replace(self.find, self.replace)


def read(file: Path = LIST) -> list[Fault]:
    """Read the list."""
    return [Fault(**entry) for entry in yaml.safe_load(file.read_text())]


def problems(faults: list[Fault], root: Path = ROOT) -> list[str]:
    """Say what is wrong with the list: texts that are not there once, tests that do not exist."""
    found = []
    for number, fault in enumerate(faults, 1):
        path = root / fault.file
        count = path.read_text().count(fault.find) if path.is_file() else 0
        if count != 1:
            found.append(f"{number} {fault.name}: its text is {count} times in {fault.file}, not once")
        elif path.suffix == ".py" and not _compiles(fault.planted(path.read_text())):
            found.append(f"{number} {fault.name}: {fault.file} is no Python with it")
        if fault.find == fault.replace:
            found.append(f"{number} {fault.name}: it changes nothing")
        if fault.mechanism not in MECHANISMS:
            found.append(f"{number} {fault.name}: {fault.mechanism!r} is no mechanism of the list")
        file, _, rest = fault.caught_by.partition("::")
        function = rest.partition("[")[0]
        test = root / file
        if not test.is_file() or f"\ndef {function}(" not in test.read_text():
            found.append(f"{number} {fault.name}: there is no test {fault.caught_by}")
    names = [fault.name for fault in faults]
    return found + [f"two faults are called {name!r}" for name in sorted(set(names)) if names.count(name) > 1]


_COLLECT = """
import sys
import pytest

class Tiers:
    def pytest_collection_finish(self, session):
        for item in session.items:
            print(dict(item.user_properties)["tier"], item.nodeid)

options = ["-q", "--collect-only", "-p", "no:cacheprovider", "--tier", "sweep"]
sys.exit(pytest.main([*options, *sys.argv[1:]], plugins=[Tiers()]))
"""


def tiers_of(faults: Sequence[Fault]) -> list[str]:
    """Return for each fault the first tier that runs the test which catches it; a fresh process collects them."""
    files = sorted({fault.caught_by.partition("::")[0] for fault in faults})
    command = [sys.executable, "-c", _COLLECT, *files]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    order, found = list(TIERS), dict[str, str]()
    for tier, _, case in (line.partition(" ") for line in listed):
        for name in (case, case.partition("[")[0]) if tier in order else ():
            found[name] = min(tier, found.get(name, tier), key=order.index)
    return [found[fault.caught_by] for fault in faults]


def _compiles(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True
