"""Which tests have passed on a tree: a run that was interrupted goes on where it stopped.

A tree is the content of every file that git tracks or would add, and the versions of all installed packages. With
another tree everything runs again. Passed tests are written down from time to time, each time after a look whether the
tree is still the same.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
_KEPT = 4  # trees
_EVERY = 40  # tests


def digest(root: Path = ROOT) -> str | None:
    """Of the tree and the installed packages; None without git."""
    try:
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    found = hashlib.sha256(sys.version.encode())
    for name in sorted(set(listed.decode().split("\0")) - {""}):
        file = root / name
        if file.is_file():
            found.update(f"{name}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    versions: dict[str, str] = {}
    for package in importlib.metadata.distributions():
        versions.setdefault(package.name.lower(), package.version)  # the first on the path is the one imported
    found.update(repr(sorted(versions.items())).encode())
    return found.hexdigest()[:20]


class Passed:
    """A plugin: leaves out what has passed if the run is told to (``--reuse``), and remembers what passes."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.reused, self.new = config, 0, list[str]()
        self.is_worker = hasattr(config, "workerinput")  # of pytest-xdist: its reports go to the main process
        cache = getattr(config, "cache", None)  # there is none with -p no:cacheprovider
        self.digest = digest() if cache is not None else None
        self.file = cache.mkdir("passed") / self.digest if cache is not None and self.digest else None
        self.failed: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if not self.config.getoption("--reuse") or self.file is None or not self.file.exists():
            return
        known = set(self.file.read_text().splitlines())
        left_out = [item for item in items if item.nodeid in known]
        self.reused = len(left_out)
        if left_out:
            self.config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item.nodeid not in known]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.failed.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid not in self.failed:
            self.new.append(report.nodeid)
            if len(self.new) >= _EVERY:
                self._write()

    def _write(self) -> None:
        if self.file is not None and not self.is_worker and self.new and digest() == self.digest:
            with self.file.open("a") as file:
                file.writelines(f"{name}\n" for name in self.new)
        self.new.clear()

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.is_worker:
            self.config.workeroutput["reused"] = self.reused  # type: ignore[attr-defined]
        elif self.file is not None:
            self._write()
            trees = sorted(self.file.parent.iterdir(), key=lambda file: file.stat().st_mtime)
            for old in trees[:-_KEPT]:
                old.unlink(missing_ok=True)
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.reused:
            session.exitstatus = pytest.ExitCode.OK

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        self.reused = max(self.reused, getattr(node, "workeroutput", {}).get("reused", 0))  # each collects all

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.reused and not self.is_worker:
            terminalreporter.write_line(f"{self.reused} tests have passed on exactly this tree before: not repeated")
