"""Packages that ``make fetch`` installs beside the environment: others look for them, and torchao prints when imported.

Only ranks of their own put one on their path: ``@with_package("torchao", world_size=2)``.
"""

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.worlds import distributed

_CACHE = Path(__file__).parents[1] / ".cache"


def with_package(name: str, world_size: int, timeout: float = 240.0) -> Callable[..., Callable[..., None]]:
    """Run the decorated test on ranks of their own that have imported a package; skip it where that is not there."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def started(*args: Any, **kwargs: Any) -> None:
            import_package(name)
            body(*args, **kwargs)

        world = distributed(world_size, timeout)(started)

        @functools.wraps(body)
        def run(*args: Any, **kwargs: Any) -> None:
            need_package(name)
            world(*args, **kwargs)

        run.body, run.world_size = started, world_size  # type: ignore[attr-defined]
        run.__signature__ = inspect.signature(body)  # type: ignore[attr-defined]
        return run

    return decorate


def need_package(name: str) -> None:
    """Skip the test where a package is neither installed nor fetched."""
    module = name.replace("-", "_")
    if not (_CACHE / name / module).is_dir() and importlib.util.find_spec(module) is None:
        pytest.skip(f"{name} is not there: make fetch")


def put_on_path(name: str) -> None:
    """Let this process import a package; one that is installed goes first."""
    if (_CACHE / name).is_dir() and str(_CACHE / name) not in sys.path:
        sys.path.append(str(_CACHE / name))
    importlib.invalidate_caches()


def import_package(name: str) -> None:
    """Let transformers and PEFT find a package in this process."""
    put_on_path(name)
    module = name.replace("-", "_")
    import peft.import_utils
    from transformers.utils import import_utils

    importlib.import_module(module)
    for known in (import_utils, peft.import_utils):
        known_there = getattr(known, f"is_{module}_available", None)
        getattr(known_there, "cache_clear", bool)()
