"""Tools that the core calls when somebody asks for what they do: it knows their names, and imports none before."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["tool"]


def tool(name: str) -> Any:
    """Return a module of :mod:`autopar.tools`."""
    return importlib.import_module(f"autopar.tools.{name}")
