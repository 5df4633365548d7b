"""Show progress bars of long operations, all by one rule.

A bar appears on rank 0, on a terminal, after one second. ``transformers.logging.disable_progress_bar()`` and the
variable ``HF_HUB_DISABLE_PROGRESS_BARS=1`` hide all bars.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from huggingface_hub import constants
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars  # type: ignore[attr-defined]
from tqdm import tqdm

_DELAY = 1.0  # seconds


def progress_bar(verb: str, total: int, progress: bool | None = None, unit: str = "B") -> Any:
    """Make a progress bar over ``total`` units; ``progress``: True to show it, None for the rule above."""
    by_rule = sys.stderr.isatty() and _on_rank_zero() and not are_progress_bars_disabled()
    show, delay = (by_rule, _DELAY) if progress is None else (progress, 0.0)
    return tqdm(total=total, desc=verb, unit=unit, unit_scale=unit == "B", delay=delay, disable=not show)


@contextlib.contextmanager
def hidden_bars(only_transformers: bool = False) -> Iterator[None]:
    """Hide all bars in the block; with ``only_transformers`` rank 0 shows those of autopar and of downloads."""
    from transformers.utils import logging

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is False:  # the variable is 0: all bars are shown
        yield
        return
    of_transformers, of_rest = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    logging.disable_progress_bar()
    if of_rest and only_transformers and _on_rank_zero():
        enable_progress_bars()
    try:
        yield
    finally:
        if of_transformers:
            logging.enable_progress_bar()
        if of_rest:
            enable_progress_bars()


def _on_rank_zero() -> bool:
    return (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))) == 0
