"""torchao, which ``make fetch`` installs beside the environment: it prints when it is imported, and others look for it.

Only ranks of their own put it on their path: ``@with_torchao(world_size=2)``.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.worlds import distributed

__all__ = ["with_torchao"]

_FOLDER = Path(__file__).parents[1] / ".cache" / "torchao"


def with_torchao(world_size: int, timeout: float = 240.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test on ranks of their own that have imported torchao; skip it where that is not there."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def started(*args: Any, **kwargs: Any) -> None:
            _start()
            body(*args, **kwargs)

        world = distributed(world_size, timeout)(started)

        @functools.wraps(body)
        def run(*args: Any, **kwargs: Any) -> None:
            if not (_FOLDER / "torchao").is_dir() and importlib.util.find_spec("torchao") is None:
                pytest.skip("torchao is not there: make fetch")
            world(*args, **kwargs)

        run.body, run.world_size = started, world_size  # type: ignore[attr-defined]
        run.__signature__ = inspect.signature(body)  # type: ignore[attr-defined]
        return run

    return decorate


def _start() -> None:
    """Let transformers and PEFT find torchao in this process; one that is installed goes first."""
    if _FOLDER.is_dir():
        sys.path.append(str(_FOLDER))
    importlib.invalidate_caches()
    from transformers.utils import import_utils

    import_utils.is_torchao_available.cache_clear()
    import peft.import_utils
    import torchao  # noqa: F401

    peft.import_utils.is_torchao_available.cache_clear()
