"""Tiers, durations, the environment of the run, and which policies a change touches."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.changed import changed_files, reached
from tests.harness.environment import SET, cleaned
from tests.harness.tier_run import TierRun, grown, read_durations, shown, speed, write_durations
from tests.harness.tiers import MOST, TIERS, beyond, never_met, tier_of
from tests.scripts import ROOT, python

TIER = pytest.mark.tier
A, B = "tests/test_a.py", "tests/test_b.py"


def _item(*marks: Any, ranks: int = 0, case: str | None = None, file: str = A) -> Any:
    """Return what stands for a collected test."""
    function = SimpleNamespace(world_size=ranks) if ranks else SimpleNamespace()
    item = SimpleNamespace(nodeid=f"{file}::test_a" + (f"[{case}]" if case else ""), function=function)
    item.user_properties = []
    item.iter_markers = lambda name: [each.mark for each in marks if each.mark.name == name]
    item.get_closest_marker = lambda name: next(iter(item.iter_markers(name)), None)
    if case:
        item.callspec = SimpleNamespace(id=case)
    return item


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (_item(), "check"),
        (_item(ranks=2), "all"),
        (_item(TIER("test"), ranks=2), "test"),
        (_item(TIER("all")), "all"),
        (_item(TIER("test"), TIER("sweep"), ranks=2), "sweep"),
        (_item(TIER("test", only=("x",)), ranks=2, case="x"), "test"),
        (_item(TIER("test", only=("x",)), ranks=2, case="y"), "all"),
        (_item(TIER("test", only=("x",)), TIER("all"), ranks=2, case="x"), "all"),
    ],
)
def test_what_a_test_needs_and_its_marks_say_its_tier(item: Any, expected: str) -> None:
    assert tier_of(item) == expected


def test_marks_that_mean_nothing_are_errors() -> None:
    with pytest.raises(pytest.UsageError, match="test_a: no tier 'tset', there are check, test, all, sweep"):
        tier_of(_item(TIER("tset")))
    items = [_item(TIER("test", only=("x", "z")), case=case) for case in ("x", "y")]
    assert never_met(items) == [f"{A}::test_a[z]"]


def test_cases_beyond_the_seconds_of_their_test_are_late() -> None:
    cases = [_item(ranks=2, case=str(number)) for number in range(5)]
    names = [item.nodeid for item in cases]
    assert beyond(cases, lambda item: MOST / 2) == {*names[2:]}
    assert beyond(cases, lambda item: 2 * MOST) == {*names[1:]}, "the first one stays"
    assert beyond(cases, lambda item: MOST / 5) == set()
    assert beyond([_item(TIER("test"), ranks=2, case=each) for each in "ab"], lambda item: 2 * MOST) == set()
    kept = [_item(pytest.mark.every_case, ranks=2, case=each) for each in "ab"]
    assert beyond(kept, lambda item: 2 * MOST) == set()
    assert beyond([_item(ranks=2), _item(ranks=2, file=B)], lambda item: MOST) == set()


def test_durations_are_means_of_cases_and_come_back(tmp_path: Path) -> None:
    file = tmp_path / "durations.json"
    measured = {f"{A}::test_a[x]": 1.0, f"{A}::test_a[y]": 2.0, f"{A}::test_short": 0.01}
    write_durations({f"{B}::test_b": 2.0, f"{A}::test_short": 9.0}, measured, file)
    assert read_durations(file) == {f"{B}::test_b": 2.0, f"{A}::test_a": 1.5}


def test_a_tier_that_has_grown_is_named_on_a_slow_machine_too() -> None:
    seconds = TIERS["test"].seconds / 100
    known = {f"{A}::test_{number}": seconds for number in range(100)}
    slow = {name: 3 * taken for name, taken in known.items()}
    assert speed(slow, known) == pytest.approx(3)
    assert not grown(slow, dict.fromkeys(slow, "test"), known)
    more = slow | {f"{A}::test_new_{number}": 3 * seconds for number in range(30)}
    (line,) = grown(more, dict.fromkeys(more, "test"), known)
    taken, allowed = shown(130 * seconds), shown(TIERS["test"].seconds)
    assert line == (
        f"error: the tests of make test take {taken}, and may take {allowed} (measured at 3.0 x the seconds in "
        "tests/durations.json). Make them quicker, move some to a later tier, or raise it in tests/harness/tiers.py."
    )


def test_a_tier_leaves_the_later_ones_out_and_begins_with_the_files_that_take_longest() -> None:
    left: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))  # noqa: PLW0108 - called by name
    options = {"--tier": "test", "--record": False}
    config: Any = SimpleNamespace(getoption=options.get, hook=hook, args=[])
    quick, late, ranks = _item(), _item(ranks=2), _item(TIER("test"), ranks=4)
    long, last = _item(file=B), _item(file=B)
    items = [quick, late, long, ranks, last]
    run = TierRun(config)
    run.known = {f"{A}::test_a": 4.0, f"{B}::test_a": 5.0}  # without the later test, B is the longer one
    list(run.pytest_collection_modifyitems(config, items))
    assert items == [long, last, quick, ranks] and left == [late] and run.later == {"all": 4.0}
    assert [dict(each.user_properties)["tier"] for each in items] == ["check", "check", "check", "test"]


def test_a_change_reaches_what_extends_it() -> None:
    uses = {"a": set[str](), "b": {"a"}, "c": {"b", "x"}, "d": {"x"}}
    assert reached({"a"}, uses) == {"a", "b", "c"} and reached((), uses) == set()


def test_changed_files_are_those_of_the_branch_and_of_the_working_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.delenv("AUTOPAR_BASE", raising=False)
    assert changed_files(tmp_path) == set()
    git("init", "-b", "main")
    for name in ("old", "edited"):
        (tmp_path / name).write_text(name)
    git("add", ".")
    git("commit", "-m", "one")
    (tmp_path / "edited").write_text("other")
    (tmp_path / "new").write_text("new")
    assert changed_files(tmp_path) == {"edited", "new"}
    git("checkout", "-b", "branch", "--track")
    git("add", ".")
    git("commit", "-m", "two")
    assert changed_files(tmp_path) == {"edited", "new"}
    monkeypatch.setenv("AUTOPAR_BASE", "HEAD")
    assert changed_files(tmp_path) == set()


def test_pytest_refuses_to_run_without_assertions() -> None:
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", __file__)
    done = python(*command, folder=ROOT, PYTHONOPTIMIZE="1")
    assert done.returncode != 0
    assert "are you using python -O?" in done.stderr


def test_the_hooks_of_a_commit_are_the_lines_of_make_lint() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    _, _, lint = (ROOT / "Makefile").read_text().partition("\nlint: ")
    assert len(hooks) == 8 and not [hook["entry"] for hook in hooks if f"\n\t{hook['entry']}" not in lint]


def test_only_what_the_machine_needs_stays() -> None:
    hostile = ("RANK", "MASTER_ADDR", "TRANSFORMERS_VERBOSITY", "HF_HOME", "TORCH_LOGS", "PYTHONWARNINGS", "COLUMNS")
    assert not set(hostile) & cleaned(dict.fromkeys(hostile, "hostile")).keys()
    needed = dict.fromkeys(("PATH", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "PYTEST_XDIST_WORKER", "UPDATE_DOCS"), "here")
    assert cleaned(needed) == needed | SET
    assert SET.items() <= os.environ.items()
    assert Path(os.environ["HF_HOME"]).is_dir()
    assert not sys.warnoptions
