"""Patches of other libraries: a patched function calls a function of autopar, with the original as first argument.

The first model that needs the patches installs them, and the last one removes them. :func:`autopar.patches` lists the
installed patches. Function objects keep their identity, so code that imported them earlier is patched too. :data:`SETS`
names the modules of autopar that patch a library; the core does not import them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from autopar.errors import ConfigError

_Body = Callable[..., Any]

SETS = {
    "torch": "autopar.integrations.torch_clippers",
    "torch.distributed.fsdp._fully_shard": "autopar.integrations.dtensor_numbers",
    "accelerate.accelerator": "autopar.integrations.accelerate",
    "deepspeed.runtime.engine": "autopar.integrations.deepspeed",
}
"""Module of a library -> module of autopar whose ``install()`` patches it as soon as it is imported."""

BODIES: set[Any] = set()
"""Code objects of the functions that patched functions call. Walks of the stack skip them, like frames of torch."""


class Patch(NamedTuple):
    """A patched function of a library.

    Attributes:
        name: Full name of the patched function.
        version: Version of the library.
        body: Full name of the autopar function that it calls.
    """

    name: str
    version: str
    body: str


_installed: list[tuple[Patch, Callable[[], None]]] = []  # each with its undo function, in the order of installation
_holders: weakref.WeakSet[Any] = weakref.WeakSet()
_pending: dict[str, Callable[[], None]] = {}


def patches() -> list[Patch]:
    """Return the currently patched functions of torch, accelerate, DeepSpeed, diffusers and transformers.

    Patches are installed while a model exists that several ranks share.
    """
    return [patch for patch, _ in _installed]


def load() -> None:
    """Import the patch modules of imported libraries without installing patches, before processes are forked."""
    for module, home in SETS.items():
        if module in sys.modules and _exists(home):
            importlib.import_module(home)


def hold(user: Any) -> None:
    """Install the patches for a model, and keep them until ``user`` is deleted or released (:func:`release`)."""
    first = not any(True for _ in _holders)
    _holders.add(user)
    weakref.finalize(user, _remove_unheld).atexit = False
    if first:
        for module, home in SETS.items():
            when_imported(module, functools.partial(_install, home))


def release(user: Any) -> None:
    """Remove the patches unless another model holds them."""
    _holders.discard(user)
    _remove_unheld()


def _install(home: str) -> None:
    if _exists(home):
        importlib.import_module(home).install()


def _exists(home: str) -> bool:
    return importlib.util.find_spec(home.rpartition(".")[0]) is not None  # the folder of integrations can be deleted


def _remove_unheld() -> None:
    if any(True for _ in _holders):  # a WeakSet yields only living holders
        return
    _pending.clear()
    while _installed:
        _installed.pop()[1]()


# -- patch one function ------------------------------------------------------------------------------------------------


def patch_body(wrapper: Any, cell: str, body: _Body) -> _Body:
    """Patch the function in the closure ``cell`` of a decorated function, in place; return the original."""
    where = f"{wrapper.__module__}.{wrapper.__name__}"
    found = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True)).get(cell)
    if found is None:
        raise _changed(where)
    plain: _Body = found.cell_contents
    found.cell_contents = functools.wraps(plain)(functools.partial(body, plain))
    _note(where, body, functools.partial(setattr, found, "cell_contents", plain))
    return plain


def patch_member(holder: Any, name: str, body: _Body) -> None:
    """Patch a function of a module, or a method or property getter of a class."""
    where = f"{holder.__module__}.{holder.__name__}" if isinstance(holder, type) else holder.__name__
    member = vars(holder).get(name)
    if member is None:
        raise _changed(f"{where}.{name}")
    plain: Any = member.fget if isinstance(member, property) else member

    def method(*args: Any, **kwargs: Any) -> Any:
        return body(plain, *args, **kwargs)

    # A partial adds no stack frame; code that walks the stack skips only the frames of bodies.
    patched = functools.wraps(plain)(method if isinstance(holder, type) else functools.partial(body, plain))
    setattr(holder, name, property(patched) if isinstance(member, property) else patched)
    _note(f"{where}.{name}", body, functools.partial(setattr, holder, name, member))


def patch_setter(kind: type, name: str, body: _Body) -> None:
    """Patch the setter of a property that a class inherits."""
    plain = getattr(kind, name)

    def write(self: Any, value: Any) -> None:
        body(plain.__set__, self, value)

    setattr(kind, name, property(plain.__get__, write))
    _note(f"{kind.__module__}.{kind.__name__}.{name}", body, functools.partial(delattr, kind, name))


def patch_entry(table: dict[Any, _Body], name: str, key: Any, body: _Body) -> None:
    """Set a function in a dispatch table of a library; ``name``: name of the replaced function for :func:`patches`."""
    before = {key: table[key]} if key in table else {}

    def undo() -> None:
        del table[key]
        table.update(before)

    table[key] = body
    _note(name, body, undo)


def _changed(where: str) -> ConfigError:
    library = where.partition(".")[0]
    return ConfigError(
        f"{library} {_version(library)} has no {where}, which autopar must patch for a parallelized model\n"
        f"  Install a version of {library} that autopar supports."
    )


def _note(name: str, body: _Body, undo: Callable[[], None]) -> None:
    home = getattr(body, "func", body)
    BODIES.add(home.__code__)
    patch = Patch(name, _version(name.partition(".")[0]), f"{home.__module__}.{home.__qualname__}")
    _installed.append((patch, undo))


@functools.cache
def _version(library: str) -> str:
    return str(getattr(sys.modules[library], "__version__", "unknown"))


# -- patch a library that is imported later ----------------------------------------------------------------------------


class _AfterImport:
    """An import finder that runs the pending action of a module after its import."""

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
    """Call ``action`` now if ``module`` is imported, otherwise right after its import; import nothing."""
    if module in sys.modules:
        action()
        return
    _pending[module] = action
    if _AfterImport not in sys.meta_path:
        sys.meta_path.insert(0, _AfterImport)
