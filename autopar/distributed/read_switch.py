"""Where shards are as plain parameters to torch: while a model runs, in steps of optimizers, in our own code."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from autopar.foreign.tensors import disabled_torch_function

__all__ = ["Switch", "aside", "hidden", "inside_hook", "switch"]


class Switch(threading.local):
    """Whether torch takes shards as plain parameters for now, in this thread; what is hidden is so in all of them.

    It is off while a model runs and an optimizer steps.
    """

    off = False
    in_hook = False  # of the user's, which a backward pass calls
    generating = False
    _hidden = False
    kinds: ClassVar[dict[Any, Any]] = {}  # of shards -> their __torch_function__

    def hide(self, hidden: bool) -> None:
        """Let torch find its own function in the classes, so that nothing of Python is called, as for a token."""
        if hidden is not Switch._hidden:
            Switch._hidden = hidden
            for kind, noticing in Switch.kinds.items():
                kind.__torch_function__ = disabled_torch_function if hidden else noticing


switch = Switch()


@contextmanager
def hidden() -> Iterator[None]:
    """Let torch see plain classes inside of ``with``, around ``generate``, whose steps may be compiled."""
    before, switch.generating = switch.generating, True
    switch.hide(True)
    try:
        yield
    finally:
        switch.generating = before
        switch.hide(before)


@contextmanager
def aside() -> Iterator[None]:
    """Take shards as plain parameters inside of ``with``."""
    before, switch.off = switch.off, True
    try:
        yield
    finally:
        switch.off = before


@contextmanager
def inside_hook() -> Iterator[None]:
    """Notice reads inside of ``with``: a hook of the user's runs, though the model or a backward pass does, too."""
    before = switch.off, switch.in_hook
    is_hidden, switch.off, switch.in_hook = Switch._hidden, False, True
    switch.hide(switch.generating)
    try:
        yield
    finally:
        switch.off, switch.in_hook = before
        switch.hide(is_hidden)
