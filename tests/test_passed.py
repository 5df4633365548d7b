"""What has passed on a tree is left out when the same tree is tested again, and nothing else is."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import passed
from tests.passed import Passed, digest


class _Config:
    """As much of pytest's config as the plugin reads."""

    def __init__(self, folder: Path, reuse: bool = True) -> None:
        self.reuse = reuse
        self.cache = SimpleNamespace(mkdir=lambda name: folder)
        self.hook = SimpleNamespace(pytest_deselected=lambda items: None)

    def getoption(self, name: str) -> bool:
        assert name == "--reuse"
        return self.reuse


def _run(config: _Config, outcomes: dict[str, str]) -> list[str]:
    """Names of the tests that ran, each with what became of it: the part that failed, or nothing."""
    plugin = Passed(config)  # type: ignore[arg-type]
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in outcomes]
    plugin.pytest_collection_modifyitems(items)
    for item in items:
        for when in ("setup", "call", "teardown"):
            good = outcomes[item.nodeid] != when
            plugin.pytest_runtest_logreport(SimpleNamespace(passed=good, when=when, nodeid=item.nodeid))  # type: ignore[arg-type]
    plugin.pytest_sessionfinish(SimpleNamespace(), 0)  # type: ignore[arg-type]
    return [item.nodeid for item in items]


def test_only_what_has_passed_in_every_part_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passed, "digest", lambda: "a")
    outcomes = {"good": "", "wrong": "call", "untidy": "teardown", "unset": "setup"}
    assert _run(_Config(tmp_path), outcomes) == list(outcomes)
    assert _run(_Config(tmp_path), outcomes) == ["wrong", "untidy", "unset"]
    assert _run(_Config(tmp_path, reuse=False), outcomes) == list(outcomes)
    monkeypatch.setattr(passed, "digest", lambda: "b")
    assert _run(_Config(tmp_path), outcomes) == list(outcomes), "another tree"


def test_a_tree_that_changes_while_it_is_tested_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = iter(["a", "b", "a"])
    monkeypatch.setattr(passed, "digest", lambda: next(digests, "a"))
    _run(_Config(tmp_path), {"good": ""})
    assert _run(_Config(tmp_path), {"good": ""}) == ["good"]


def test_trees_of_long_ago_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abcdef":
        monkeypatch.setattr(passed, "digest", lambda name=name: name)
        _run(_Config(tmp_path), {"good": ""})
    assert len(list(tmp_path.iterdir())) == 4


def test_a_digest_is_of_all_that_git_would_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))  # TMPDIR may lie in a repository
    assert digest(tmp_path) is None, "no repository"
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / ".gitignore").write_text("left out\n")
    found = [digest(tmp_path)]
    for name, text in [("new.py", ""), ("new.py", "1"), ("other.py", "1"), ("left out", "1")]:
        (tmp_path / name).write_text(text)
        found.append(digest(tmp_path))
    assert len(set(found[:4])) == 4 and found[3] == found[4]
    (tmp_path / "other.py").unlink()
    assert digest(tmp_path) == found[2]
