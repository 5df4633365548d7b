"""Settings of the whole test run: no network, one thread, and which part of the tests marked ``every`` runs."""

from __future__ import annotations

import os
import subprocess
import zlib
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

torch.set_num_threads(1)

_PARTS = 16  # so that a run stays below 25 minutes on two cores


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every", action="store_true", help="all tests marked 'every', not the part of this commit")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the tests marked ``every`` keep one in sixteen, as the commit has it; all if one is asked for by name."""
    if config.getoption("--every") or config.getoption("keyword") or any("::" in arg for arg in config.args):
        return
    part = _commit() % _PARTS
    kept, left = [], []
    for item in items:
        elsewhere = item.get_closest_marker("every") and zlib.crc32(item.name.encode()) % _PARTS != part
        (left if elsewhere else kept).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def _commit() -> int:
    try:
        command = ["git", "rev-parse", "HEAD"]
        text = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout
        return int(text.strip()[:8], 16)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return 0
