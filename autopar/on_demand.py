"""Public names of packages, whose modules are loaded when a name is first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str | Callable[[str], Any]], hint: Callable[[str], str] = lambda name: ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package whose public names are loaded when they are first used.

    Args:
        package: its ``__name__``.
        homes: name -> the module that has it (``package.name`` is that module itself), or a function that finds it.
        hint: what the error on a name that there is not ends with.
    """

    def find(name: str) -> Any:
        if name not in homes:
            more = hint(name)
            raise AttributeError(f"module '{package}' has no attribute '{name}'{'.' if more else ''}{more}")
        home = homes[name]
        if isinstance(home, str):
            module = importlib.import_module(home)
            value = module if home == f"{package}.{name}" else getattr(module, name)
        else:
            value = home(name)
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted({*vars(sys.modules[package]), *homes})
