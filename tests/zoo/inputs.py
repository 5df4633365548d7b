"""Steps of making inputs that need code: placeholders that are counted, words that move, labels of some heads.

Each gets the batch so far, and for whom it is (:class:`Scene`), and returns the batch; the data gives the rest.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.zoo.form import Batch

__all__ = ["STEPS"]

STEPS: dict[str, Callable[..., Batch]] = {}
