"""Names whose modules are loaded when somebody asks for them: the public ones of packages, and the tools."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def tool(name: str) -> Any:
    """Return a module of :mod:`autopar.tools`, of which the core imports none before."""
    return importlib.import_module(f"autopar.tools.{name}")


def lazy_names(
    package: str, homes: Mapping[str, str], hint: Callable[[str], str] = lambda name: ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package whose public names are loaded when they are first used.

    Args:
        package: its ``__name__``.
        homes: name -> the module that has it; ``package.name`` is that module itself.
        hint: what the error on a name that there is not ends with.
    """

    def find(name: str) -> Any:
        if name not in homes:
            more = hint(name)
            raise AttributeError(f"module '{package}' has no attribute '{name}'{'.' if more else ''}{more}")
        home = importlib.import_module(homes[name])
        value = home if homes[name] == f"{package}.{name}" else getattr(home, name)
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted({*vars(sys.modules[package]), *homes})
