"""A sharded parameter that is read as if it were whole: the user's code is told, once for each of its lines.

A sharded parameter is a :class:`ShardedParameter`, which torch asks about each function that it is given. Elementwise
functions do the same to a shard as to that part of the whole, and nothing is said. Sums, products, sorts, slices and
random draws do not. An elementwise function of a shard gives a :class:`Part` to the user's code (to torch and to this
package a plain tensor), so that ``p.grad.abs().max()`` is seen, too.

Through pipeline stages all parameters are of this class: what is made of several of them is of this stage's alone.
DTensors of ZeRO 2 and 3 have classes of their own (:mod:`autopar.distributed.sharded_dtensors`).

While the model runs, in backward passes (but in the user's hooks of gradients) and in steps of optimizers the classes
are as plain ones to torch (:data:`switch`): they cost nothing there. Dynamo never sees more than plain ones.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from autopar.call_site import OURS
from autopar.distributed.read_functions import (
    CURVED,
    DRAWS,
    MIXERS,
    NUMBERS,
    READS,
    TORCH,
    explain,
    keeps_dim,
    tell,
    tell_hook,
    tell_if_saved,
    tell_mixed,
    tell_number,
)
from autopar.distributed.read_switch import Switch, aside, hidden, inside_hook, switch
from autopar.distributed.shard_place import Shard
from autopar.foreign.autograd import current_backward
from autopar.foreign.modules import SAVE_STATE
from autopar.foreign.tensors import disabled_torch_function, leave_alone, let_foreach_take

__all__ = [
    "NOTICING",
    "PLAIN",
    "LikePlain",
    "Part",
    "Shard",
    "ShardedParameter",
    "Switch",
    "aside",
    "become",
    "hidden",
    "inside_hook",
    "of_stage",
    "plain",
    "switch",
    "take_kind",
    "unwatch",
    "watch",
]

_CALLERS = ["overrides.py", "_tensor.py", "functional.py", "nn/functional.py", "autograd/__init__.py"]
_THROUGH = tuple(f"{TORCH}{name}" for name in _CALLERS)
_INIT, _DYNAMO, _MODULE = f"{TORCH}nn/init.py", f"{TORCH}_dynamo/", f"{TORCH}nn/modules/module.py"
_FOR_USERS = (*_THROUGH, f"{TORCH}nn/utils/", f"{TORCH}distributions/", _MODULE)  # for results that users asked for
_QUIET = (*(f"{TORCH}{name}" for name in ("optim/", "distributed/", "_subclasses/", "fx/")), _MODULE, _DYNAMO, OURS)
_FILLS = ("_no_grad_fill_", "_no_grad_zero_", "constant_", "ones_", "zeros_")  # of nn.init: alike everywhere
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_NEW_PARAMETER = nn.Parameter.__new__.__code__


class _TorchFunction:
    """``__torch_function__`` that is torch's disabled one where shards are as plain parameters."""

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        if switch.off or (current_backward() != -1 and not switch.in_hook):
            return disabled_torch_function
        if tensor is None and sys._getframe(1).f_code.co_filename.startswith(_DYNAMO):
            return disabled_torch_function
        return _notice


NOTICING = _TorchFunction()
"""``__torch_function__`` of a class whose reads are noticed."""


class ShardedParameter(nn.Parameter):
    """A parameter of which this rank has a part."""

    __torch_function__ = NOTICING
    autopar_shard: Shard | None = None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shard = self.autopar_shard
        of = "" if shard is None or not _is_cut(self) else f" rank {shard.rank}'s shard of {shard.whole}"
        with aside():
            return f"Parameter containing{of}:\n{self.as_subclass(torch.Tensor)!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        with aside():
            copied = super().__deepcopy__(memo)
        copied.autopar_shard = self.autopar_shard
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        _tell_if_pickled(self)
        with aside():
            plain = nn.Parameter(self.data, self.requires_grad)
        vars(plain).update({name: value for name, value in vars(self).items() if name != "autopar_shard"})
        return plain.__reduce_ex__(protocol)


class _LikeAnyTensor(type(torch.Tensor)):  # type: ignore[misc]  # assert_close compares tensors of related classes
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor)


class LikePlain:
    """A part that is shown, copied and saved as the plain tensor of the same memory, which ``_plain`` returns."""

    __slots__ = ()
    autopar_shard: Shard | None = None
    _plain: Callable[[], Any]

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(self._plain())

    def __format__(self, spec: str) -> str:
        plain = self._plain()
        return format(plain.item() if plain.dim() == 0 else plain, spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = copied = copy.deepcopy(self._plain(), memo)
            become(copied, type(self), self.autopar_shard)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        _tell_if_pickled(self)
        return self._plain().__reduce_ex__(protocol)


class Part(LikePlain, torch.Tensor, metaclass=_LikeAnyTensor):  # type: ignore[misc]
    """The result of an elementwise function of a shard, or its gradient. Saved as a plain tensor."""

    __torch_function__ = NOTICING

    def _plain(self) -> torch.Tensor:
        with aside():
            return self.as_subclass(torch.Tensor)


_WATCHED: dict[type, type] = {nn.Parameter: ShardedParameter}
_PARTS: dict[type, type] = {torch.Tensor: Part}
_KINDS: set[type] = {ShardedParameter, Part}
Switch.kinds = dict.fromkeys(_KINDS, NOTICING)
PLAIN = (torch.Tensor, nn.Parameter, *_KINDS)
"""Classes of tensors that have nothing of their own: what can be done with the first can be with all."""


def take_kind(kind: type, watched: type) -> None:
    """Let parameters of a class, and what is made of them, be noticed as tensors of the class ``watched`` of it."""
    _WATCHED[kind] = _PARTS[kind] = watched
    _KINDS.add(watched)
    Switch.kinds[watched] = NOTICING


def watch(parameter: torch.Tensor, shard: Shard) -> None:
    """Let reads of ``parameter`` be noticed. Not of a class that a library has made its own."""
    kind = _WATCHED.get(type(parameter))
    if kind is not None and (shard.here != shard.whole or shard.stage is not None):
        let_foreach_take(_KINDS)
        become(parameter, kind, shard)


def unwatch(parameter: torch.Tensor) -> None:
    """Undo :func:`watch`."""
    for kind, watched in _WATCHED.items():
        if type(parameter) is watched:
            become(parameter, kind)


def _tell_if_pickled(tensor: Any) -> None:
    """Warn if ``torch.save`` is what calls ``__reduce_ex__`` of a part, which calls this."""
    if _is_cut(tensor):
        tell_if_saved(tensor, sys._getframe(2))


def plain(tensor: Any) -> Any:
    """Return what is saved of a tensor in silence: where something else tells that it is a part."""
    return tensor._plain() if type(tensor) is Part else tensor


def of_stage(tensor: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Return the whole of a parameter of a stage, as it is with others: functions of it and of others are noticed."""
    shard = getattr(parameter, "autopar_shard", None)
    if shard is not None and shard.read is not None and type(tensor) in _PARTS:
        become(tensor, _PARTS[type(tensor)], shard.read)
    return tensor


def become(tensor: Any, kind: type, shard: Shard | None = None) -> None:
    """Change the class of a tensor, and of which parameter it is a part."""
    tensor.__class__ = kind
    if shard is None:
        vars(tensor).pop("autopar_shard", None)
    else:
        tensor.autopar_shard = shard


# -- what torch asks -------------------------------------------------------------------------------------------------


def _notice(func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    """Call ``func`` as it is; warn before, if it is not elementwise, else let its result be noticed."""
    caller: FrameType = sys._getframe(1)
    file, kwargs = caller.f_code.co_filename, kwargs or {}
    switch.off = True
    try:
        if file.startswith(_QUIET) and caller.f_code is not SAVE_STATE:
            return func(*args, **kwargs)
        name = func.__name__
        if name in _HOOKS and _is_for_users(caller):
            return func(args[0], _noticing(args[1], args[0]))
        initializer = _initializer(caller) if file == _INIT and name != "__get__" else None
        reads = name in READS or initializer is not None or name.startswith("linalg_")
        part = _mixed_by(name, args, kwargs) if reads else None
        if part is not None:
            draws = initializer is not None or name in DRAWS
            tell(initializer or name, part, caller, draws=draws, in_hook=switch.in_hook)
        mixed = _look_over_stage(name, args, kwargs, caller)
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            explain(error, next(_cut([*args, *kwargs.values()]), None))
            raise
        if func is torch.autograd.grad:
            _gradients(result, args[1] if len(args) > 1 else kwargs["inputs"], caller)
        elif not mixed:
            each, told = name.startswith("_foreach"), part is not None
            for n, one in enumerate(result if isinstance(result, list | tuple) else (result,)):
                if type(one) in _PARTS:
                    given = (args[0][n],) if each else args
                    _let_be_noticed(one, name, given, kwargs, caller, other_size=reads, told=told)
        return result
    finally:
        switch.off = False


def _initializer(frame: FrameType) -> str | None:
    """Return which function of ``nn.init`` is called; None for one that fills with one number."""
    name = None if frame.f_code.co_name in _FILLS else frame.f_code.co_name
    while name and frame.f_back is not None and frame.f_code.co_filename == _INIT:
        name, frame = frame.f_code.co_name, frame.f_back
    return name


def _is_shard(tensor: Any) -> bool:
    """Return whether a tensor is a part; a parameter is none inside of ``autopar.whole``."""
    shard: Shard | None = tensor.autopar_shard
    return shard is not None and (not isinstance(tensor, nn.Parameter) or tuple(tensor.shape) == shard.here)


def _is_cut(tensor: Any) -> bool:
    return _is_shard(tensor) and tensor.autopar_shard.layout is not None


def _cut(values: Any) -> Iterator[Any]:
    return (part for part in _parts(values) if part.autopar_shard.layout is not None)


def _look_over_stage(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], caller: Any) -> bool:
    """Tell the user's code if it makes one thing of weights of several blocks of a stage; return whether it does."""
    if switch.in_hook and name in CURVED:
        seen = next((part.autopar_shard for part in _parts(args)), None)
        if seen is not None and seen.stage is not None and seen.stage.microbatches > 1:
            tell_hook(name, seen, caller)
    if name in NUMBERS or (name in DRAWS and args):
        shard = args[0].autopar_shard if type(args[0]) in _KINDS and _is_shard(args[0]) else None
        if shard is not None and shard.stage is not None and not shard.stage.quiet:
            tell_number(name, shard, caller, in_hook=switch.in_hook)
        return False
    if name not in MIXERS:
        return False
    shards = [part.autopar_shard for part in _parts([*args, *kwargs.values()]) if part.autopar_shard.stage is not None]
    other = next((each for each in shards if each.block != shards[0].block), None)
    if other is not None and not other.stage.quiet:
        tell_mixed(name, shards[0], other, caller, in_hook=switch.in_hook)
    elif name == "__setitem__" and shards and type(args[0]) in _PARTS:  # into a vector of all
        become(args[0], _PARTS[type(args[0])], shards[0].read)
    return other is not None


def _parts(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _parts(value)
        elif type(value) in _KINDS and _is_shard(value):
            yield value


def _mixed_by(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the first part of which ``name`` mixes elements along the sharded dim; None if it does so of none."""
    part = next(_cut([*args, *kwargs.values()]), None)
    if name == "stack" and not (args[1:] or kwargs):
        return None  # side by side
    if name == "__setitem__" and part is not None and part is not args[0]:  # into a vector of all parameters
        return part if part is args[2] and args[0].dim() == 1 and args[0].numel() > part.numel() else None
    if part is None or not args or part is not args[0]:
        return None if name == "index_put_" else part  # values that go elsewhere
    shard = part.autopar_shard
    stacked = part.dim() - len(shard.here)
    dim = shard.layout.dim + stacked if tuple(part.shape)[stacked:] == shard.here and stacked in (0, 1) else None
    return None if keeps_dim(name, args, kwargs, dim) else part


def _let_be_noticed(
    result: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], caller: Any, *, other_size: bool, told: bool
) -> None:
    """Let reads of ``result`` be noticed, if it is made of, or written with, elements of a part in the user's code.

    Args:
        told: that it is not the whole one's: what others may not know of it is its stage.
    """
    part = next(_parts([*args[:3], *kwargs.values()]), None)
    if part is None or not (other_size or result.numel() == part.numel()):
        return
    shard = part.autopar_shard
    whole = shard.layout is None and result.numel() != part.numel()
    shard = shard.read if told or whole else shard
    if shard is None:
        return
    if (name == "to" or name.endswith("_as")) and part is not args[0]:
        return
    if caller.f_code is _NEW_PARAMETER:  # it asks for one of the same class
        if type(part) is Part:
            become(part, nn.Parameter)
            become(result, nn.Parameter)
        else:
            become(result, type(part), shard)
    elif _is_for_users(caller):
        become(result, _PARTS[type(result)], shard)


def _gradients(gradients: Any, inputs: Any, caller: Any) -> None:
    """Let reads of gradients be noticed, which ``torch.autograd.grad`` returned for shards to the user's code."""
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    for gradient, part in zip(gradients, inputs, strict=True) if _is_for_users(caller) else ():
        if type(gradient) in _PARTS and type(part) in _KINDS and _is_shard(part):
            become(gradient, _PARTS[type(gradient)], part.autopar_shard)


def _noticing(hook: Any, part: Any) -> Any:
    """Return a hook of a shard's gradient in which reads are noticed."""
    shard = part.autopar_shard if _is_shard(part) else None

    @functools.wraps(hook)
    def run(tensor: torch.Tensor) -> Any:
        if type(tensor) is torch.Tensor and shard is not None:
            tensor = tensor.as_subclass(Part)
            tensor.autopar_shard = shard
        with inside_hook():
            return plain(hook(tensor))

    return run


def _is_for_users(caller: Any) -> bool:
    """Return whether a result goes to the user's code."""
    file = caller.f_code.co_filename
    while file.startswith(_FOR_USERS):
        caller = caller.f_back
        file = caller.f_code.co_filename
    return not file.startswith((TORCH, OURS))


_OURS = (_TorchFunction.__get__, _notice, _mixed_by, _parts, _cut, _is_shard, _look_over_stage, _let_be_noticed)
for _code in (*_OURS, tell, tell_mixed, tell_number, explain, keeps_dim):
    leave_alone(_code.__code__)  # where a graph broke, dynamo would compile them
