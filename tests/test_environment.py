"""Tests pass in any shell: what launchers, debugging or habits of colours leave in its environment changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import SET, cleaned

ROOT = Path(__file__).parents[1]

# Each of the first five fails or hangs one of DEPENDENT where the environment is not cleaned.
HOSTILE = {
    "a launcher": {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
    "transformers": {"TRANSFORMERS_VERBOSITY": "error", "USE_TORCH": "0", "HF_HUB_OFFLINE": "0"},
    "torch": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_CPP_LOG_LEVEL": "INFO", "TORCH_LOGS": "+distributed"},
    "python": {"PYTHONWARNINGS": "error", "PYTHONPROFILEIMPORTTIME": "1", "PYTHONSAFEPATH": "1"},
    "a terminal": {"FORCE_COLOR": "1", "GITHUB_ACTIONS": "true", "COLUMNS": "40", "TERM": "dumb", "LC_ALL": "C"},
    "a home that is not there": {"HOME": "/nowhere", "XDG_CACHE_HOME": "/nowhere", "HF_HOME": "/nowhere"},
    "pytest": {"PYTEST_ADDOPTS": "--color=yes"},
}
DEPENDENT = [
    "test_cli.py::test_merge_in_a_process_of_its_own",
    "test_cli.py::test_version_and_completion",
    "test_initialize.py::test_one_process_without_torchrun_in_a_fresh_interpreter",
    "checkpoint/test_from_pretrained_shards.py::test_untied_weights_of_a_config_that_ties",
]


def in_a_shell(settings: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Start pytest with these settings beside those of this process."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        command, env=inherited | settings, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.tier("sweep")
def test_tests_pass_in_a_hostile_shell() -> None:
    settings = {name: value for group in HOSTILE.values() for name, value in group.items()}
    done = in_a_shell(settings, *(f"tests/{name}" for name in DEPENDENT))
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert f"{len(DEPENDENT)} passed" in done.stdout


def test_pytest_refuses_to_run_without_assertions() -> None:
    """What cannot be cleaned any more once Python runs."""
    done = in_a_shell({"PYTHONOPTIMIZE": "1"}, "--collect-only", "tests/test_environment.py")
    assert done.returncode != 0
    assert "are you using python -O?" in done.stderr


def test_only_what_the_machine_needs_stays() -> None:
    hostile = {name: "hostile" for group in HOSTILE.values() for name in group}
    left = {"GITHUB_ACTIONS", "TERM", "HOME", "XDG_CACHE_HOME"}
    assert {name for name, value in cleaned(hostile).items() if value == "hostile"} == left
    needed = dict.fromkeys(("PATH", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "PYTEST_XDIST_WORKER", "UPDATE_DOCS"), "here")
    assert cleaned(needed) == needed | SET


def test_this_process_is_clean() -> None:
    """Beside what libraries set for themselves."""
    assert SET.items() <= os.environ.items()
    assert Path(os.environ["HF_HOME"]).is_dir()
    assert not sys.warnoptions
