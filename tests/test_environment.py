"""Tests pass in any shell: what launchers, debugging or habits of colours leave in its environment changes nothing."""

import os
import sys
from pathlib import Path

import yaml

from tests.environment import SET, cleaned
from tests.scripts import ROOT, python


def test_pytest_refuses_to_run_without_assertions() -> None:
    """What cannot be cleaned any more once Python runs."""
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


def test_this_process_is_clean() -> None:
    """Beside what libraries set for themselves."""
    assert SET.items() <= os.environ.items()
    assert Path(os.environ["HF_HOME"]).is_dir()
    assert not sys.warnoptions
