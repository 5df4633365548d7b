"""Functions of a library that call autopar's, with the library's own as their first argument."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["exchange_body", "exchange_member", "exchange_name", "when_imported"]

_Body = Callable[..., Any]
_pending: dict[str, Callable[[], None]] = {}


class _AfterImport:
    """A finder that finds nothing by itself, and does what waits for a module when others have loaded it."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        action = _pending.pop(name, None)
        spec = importlib.util.find_spec(name) if action is not None else None
        if action is None or spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            action()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def when_imported(module: str, action: Callable[[], None]) -> None:
    """Call ``action`` now if ``module`` is imported, otherwise as soon as it is: nothing is imported for it."""
    if module in sys.modules:
        action()
        return
    _pending[module] = action
    if _AfterImport not in sys.meta_path:
        sys.meta_path.insert(0, _AfterImport)


def exchange_body(wrapper: Any, cell: str, body: _Body, modules: Iterable[Any], again: _Body) -> _Body:
    """Exchange the function inside a decorated one, also for those who have imported that before; return the plain one.

    Args:
        wrapper: the decorated function.
        cell: the name of the decorator's argument, in whose closure the function lies.
        modules: where names that mean ``wrapper`` are exchanged, if another version does not decorate it.
        again: decorates what they then mean.
    """
    cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
    found = cells.get(cell)
    plain: _Body = found.cell_contents if found is not None else wrapper
    ours = functools.wraps(plain)(functools.partial(body, plain))
    if found is not None:
        found.cell_contents = ours
        return plain
    for module in modules:
        for alias in [alias for alias, value in vars(module).items() if value is wrapper]:
            setattr(module, alias, again(ours))
    return plain


def exchange_name(holder: Any, name: str, body: _Body) -> None:
    """Exchange a function that its own module looks up by name."""
    plain = getattr(holder, name)
    setattr(holder, name, functools.wraps(plain)(functools.partial(body, plain)))


def exchange_member(kind: type, name: str, body: _Body) -> None:
    """Exchange a method, or what a property returns, of a class."""
    member: Any = vars(kind)[name]
    plain: Any = member.fget if isinstance(member, property) else member

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return body(plain, self, *args, **kwargs)

    setattr(kind, name, property(method) if isinstance(member, property) else method)
