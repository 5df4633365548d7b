"""Change the class, methods or storage of an object that keeps its identity.

A mixin is put before the class of a layer, a block or an output, instead of a wrapper around it. Its name, parameters
and ``isinstance`` checks do not change. torch's FSDP2 does the same (``torch/distributed/fsdp/_fully_shard``).

Bound methods have owners: tensor parallelism, the pipeline and checkpoints. An owner never replaces a method of another
owner and unbinds only its methods, so the order does not matter.

A module's view of the model's config shares its state but has local sizes: attention that reads
``self.config.num_attention_heads`` must see this rank's number, while the model's config keeps the full number.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from copy import deepcopy
from types import MethodType
from typing import Any, Self

import torch
from torch import nn

from autopar.compat.tensors import swap_implementation

_OWNERS = "_autopar_methods"


class NotCopied:
    """An object that copies of a model share: ``copy.deepcopy`` returns the object itself."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


@functools.cache
def mixed_class(mixin: type, plain: type, name: str = "") -> Any:
    """Return the class ``(mixin, plain)``, one for each pair.

    Args:
        name: The name of the class; by default ``plain``'s, by which transformers finds recorded outputs.
    """
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__} if not name else {}
    return type(name or plain.__name__, (mixin, plain), {**names, "_autopar_plain": plain})


def swap(target: Any, mixin: type, **attributes: Any) -> None:
    """Put ``mixin`` before the class of ``target``, unless it is there, and set ``attributes`` on ``target``."""
    kind: Any = type(target)
    if not isinstance(target, mixin):
        target.__class__ = mixed_class(mixin, kind)
    for name, value in attributes.items():
        setattr(target, name, value)


def plain_class(target: Any, mixin: type) -> Any:
    """Return the class of ``target`` before :func:`swap`, or its class if it was not swapped."""
    kinds: tuple[Any, ...] = type(target).__mro__
    return next((kind._autopar_plain for kind in kinds if kind.__mro__[1:2] == (mixin,)), kinds[0])


def unswap(target: Any, mixin: type, *attributes: str) -> None:
    """Undo :func:`swap`, and delete ``attributes``. Raises TypeError if a later mixin is still in place."""
    kind: Any = type(target)
    if isinstance(target, mixin):
        if mixin is not kind.__mro__[1]:
            raise TypeError(f"{mixin.__name__} must be the last swap of a {kind.__name__}: undo later swaps first")
        target.__class__ = kind._autopar_plain
    for name in attributes:
        vars(target).pop(name, None)


@contextmanager
def replaced(entries: MutableMapping[str, Any], changes: Mapping[str, Any]) -> Iterator[None]:
    """Replace entries of a mapping in the block, such as the attributes in ``vars(module)``, and restore them."""
    before = {name: entries[name] for name in changes}
    entries.update(changes)
    try:
        yield
    finally:
        entries.update(before)


class Proxy:
    """An object with some attributes replaced."""

    def __init__(self, target: Any, **own: Any) -> None:
        self._target = target
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def argument_names(module: Any) -> tuple[str, ...]:
    """Return the argument names of the forward of a module or a class of modules."""
    return tuple(_arguments_of(module if isinstance(module, type) else type(module)))


def not_taken(module: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Return the names that a module's forward does not take. With ``**kwargs`` it takes all of them."""
    kind: Any = type(module)
    arguments = _arguments_of(kind)
    every = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in arguments.values())
    return frozenset() if every else frozenset(names) - arguments.keys()


@functools.cache
def _arguments_of(kind: Any) -> Mapping[str, inspect.Parameter]:
    while (swapped := next((each for each in kind.__mro__ if "_autopar_plain" in vars(each)), None)) is not None:
        kind = swapped._autopar_plain  # also below FSDP2's class
    found = inspect.signature(inspect.unwrap(kind.forward)).parameters
    return {name: each for name, each in found.items() if name != "self"}


def given_by_name(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return ``(name, value)`` for the arguments of a forward, in the order of the call."""
    names = argument_names(module)
    given = [(names[place] if place < len(names) else f"argument {place}", x) for place, x in enumerate(args)]
    return [*given, *kwargs.items()]


def change_given(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[str, Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a forward with each value replaced by ``change(name, value)``."""
    values = [change(name, value) for name, value in given_by_name(module, args, kwargs)]
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))


def bind(module: nn.Module, owner: str, **methods: Callable[..., Any]) -> None:
    """Bind methods to ``module``; ``copy.deepcopy`` binds them to the copy.

    Raises:
        RuntimeError: Another owner has bound a method of the same name.
    """
    owners: dict[str, str] = module.__dict__.setdefault(_OWNERS, {})
    for name, function in methods.items():
        if owners.setdefault(name, owner) != owner:
            raise RuntimeError(f"{type(module).__name__}.{name} belongs to {owners[name]}; {owner} cannot replace it")
        module.__dict__[name] = MethodType(function, module)


def unbind(model: nn.Module, owner: str) -> None:
    """Remove the methods of ``owner`` from ``model`` and its submodules."""
    for module in model.modules():
        owners: dict[str, str] = module.__dict__.get(_OWNERS, {})
        for name in [name for name, other in owners.items() if other == owner]:
            del owners[name]
            module.__dict__.pop(name, None)
        if not owners:
            module.__dict__.pop(_OWNERS, None)


def replace_storage(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Replace the storage of a parameter, also by one on another kind of device, which ``parameter.data =`` cannot do.

    The object stays the same, so optimizers, ties and lists of parameters remain valid.
    """
    other = nn.Parameter(data, requires_grad=parameter.requires_grad)
    vars(other).update(vars(parameter))
    if weakref.getweakrefs(parameter):  # an LSTM has weak references; they stay valid
        swap_implementation(parameter, other)
    else:
        torch.utils.swap_tensors(parameter, other)


class _View:
    """The first mixin in the MRO. Its __init_subclass__ keeps transformers from turning the view into a dataclass."""

    _autopar_whole: Any
    _autopar_values: dict[str, Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = config_view(deepcopy(type(self)._autopar_whole, memo))
        for name, value in type(self)._autopar_values.items():
            set_value(copied, name, value)
        memo[id(self)] = copied
        return copied


def config_view(config: Any) -> Any:
    """Make a config that shares the state (``__dict__``) of ``config``; :func:`set_value` overrides single values."""
    kind: Any = type(type(config).__name__, (_View, type(config)), {})
    kind._autopar_whole, kind._autopar_values = config, {}
    view = object.__new__(kind)
    object.__setattr__(view, "__dict__", config.__dict__)
    return view


def set_value(view: Any, name: str, value: Any) -> None:
    """Override a value of the config in a view of :func:`config_view`."""
    name = (getattr(view, "attribute_map", None) or {}).get(name, name)
    kind: Any = type(view)
    kind._autopar_values[name] = value
    setattr(kind, name, property(lambda self: type(self)._autopar_values[name]))


def view_of_config(module: Any) -> Any:
    """Return the module's view of its config; the config itself is kept as ``_autopar_config``."""
    if "_autopar_config" not in vars(module):
        module._autopar_config = module.config
        module.config = config_view(module.config)
    return module.config


def drop_value(module: Any, name: str) -> None:
    """Undo :func:`set_value` on the module's view; after the last value, restore the config itself."""
    if "_autopar_config" not in vars(module):
        return
    kind: Any = type(module.config)
    if kind._autopar_values.pop(name, None) is not None:
        delattr(kind, name)
    if not kind._autopar_values:
        module.config = vars(module).pop("_autopar_config")
