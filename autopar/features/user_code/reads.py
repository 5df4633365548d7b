"""Watch user code between forwards: warn about reads of shards as if they were full, and find new hooks.

[Note: shard reads] A sharded parameter is a :class:`ShardedParameter`, and torch passes each function of it to
:func:`_notice`. An element-wise function of a shard returns the shard of the full result: a :class:`ShardedTensor`, so
that ``p.grad.abs().max()`` is detected too. A function that mixes elements along the sharded dim (:func:`_mixed_by`)
warns at the line of user code. While the model runs, in backward passes (except in gradient hooks), in optimizer steps
and in compiled code, these classes act like plain tensors at no cost.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.call_site import LIBRARIES, OURS, is_ours, place_of_user
from autopar.compat.patches import BODIES
from autopar.compat.tensors import (
    PLAIN,
    compiling,
    current_backward,
    disabled_torch_function,
    leave_alone,
    let_foreach_take,
    no_overrides,
)
from autopar.distributed.axis import Axis
from autopar.distributed.mesh import MPU
from autopar.errors import ShardWarning
from autopar.guards.step import untried
from autopar.layout import Layout
from autopar.pipeline_parallel.stage_weights import DRAWS
from autopar.plan.plan import Plan
from autopar.setup.steps import Given, Parallelized

_ALONG = """
    norm sum nansum mean nanmean std var std_mean var_mean max min amax amin aminmax argmax argmin median nanmedian
    mode quantile nanquantile sort argsort msort topk kthvalue prod cumsum cumprod cummax cummin logsumexp
    logcumsumexp softmax log_softmax softmin normalize count_nonzero linalg_norm linalg_vector_norm chunk split
    tensor_split unbind narrow select index_select flip gather take_along_dim any all size len index_add index_copy
    index_fill scatter scatter_add
"""
_OTHERS = """
    getitem setitem iter numpy tolist array dlpack numel nelement dist kl_div cross_entropy binary_cross_entropy
    binary_cross_entropy_with_logits unique histc histogram bincount renorm cdist cosine_similarity pairwise_distance
    cov corrcoef dot vdot inner outer matmul rmatmul mm mv bmm addmm addmv baddbmm einsum tensordot linear bilinear
    embedding embedding_bag conv1d conv2d conv3d kron trace diag diagonal tril triu svd qr slogdet logdet det inverse
    pinverse cholesky matrix_power matrix_exp cat concat concatenate hstack vstack roll block_diag index_put take put
    masked_scatter masked_select nonzero argwhere unfold repeat tile pad
"""
_ALONG_A_DIM = frozenset(_ALONG.split())
_READS = DRAWS.union(_ALONG.split(), _OTHERS.split())
"""Names of functions that are not element-wise, without underscores around them: ``normal`` for ``normal_``."""
_DIM_THIRD = {"norm", "linalg_norm", "linalg_vector_norm", "topk", "kthvalue", "chunk", "split", "tensor_split"}
_DEFAULT = dict.fromkeys(("topk", "sort", "argsort", "kthvalue", "mode"), -1)
_DEFAULT |= dict.fromkeys(("chunk", "split", "tensor_split", "unbind", "len"), 0)


def _mixed_by(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a shard whose elements ``name`` mixes along the sharded dim, or None."""
    part = next(_parts([*args, *kwargs.values()]), None)
    if part is None or not args:
        return part
    if part is not args[0]:
        if name == "setitem":  # warns if it writes a shard into a vector of all parameters
            return part if part is args[2] and args[0].dim() == 1 and args[0].numel() > part.numel() else None
        return None if name == "index_put" else part  # index_put writes the shard's values into another tensor
    shard = part.autopar_shard
    return None if _keeps(name, args, kwargs, shard.layout.dim if tuple(part.shape) == shard.here else None) else part


def _keeps(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], dim: int | None) -> bool:
    """Return whether a function of ``args[0]`` is element-wise along the sharded ``dim`` (None: unknown dim)."""
    if name in ("getitem", "setitem"):
        return _index_keeps(args[1], args[0], dim)
    if name in ("max", "min") and isinstance(args[1] if len(args) > 1 else kwargs.get("other"), torch.Tensor):
        return True  # the element-wise maximum of two tensors
    if kwargs.get("reduction") == "none" or (name == "size" and len(args) + len(kwargs) == 1):
        return True
    if dim is None or name not in _ALONG_A_DIM:
        return False
    at = 2 if name in _DIM_THIRD else 1
    asked = kwargs.get("dim", kwargs.get("dims", args[at] if len(args) > at else _DEFAULT.get(name)))
    dims = asked if isinstance(asked, list | tuple) else [asked]
    return bool(dims) and all(type(one) is int and one % args[0].dim() != dim for one in dims)


def _index_keeps(index: Any, tensor: torch.Tensor, dim: int | None) -> bool:
    entries = [one for one in (index if isinstance(index, tuple) else [index]) if one is not None]
    if any(isinstance(one, torch.Tensor) and one.dtype == torch.bool for one in entries):
        return len(entries) == 1 and entries[0].shape == tensor.shape  # a mask of single elements
    place = next((n for n, one in enumerate(entries) if one is Ellipsis), None)
    if place is not None:
        entries[place : place + 1] = [slice(None)] * (tensor.dim() - len(entries) + 1)
    all_of = [isinstance(one, slice) and one == slice(None) for one in entries]
    return all(all_of) or (dim is not None and (len(entries) <= dim or all_of[dim]))


class Switch(threading.local):
    """State of one thread: ``off`` while a function of a shard runs, ``in_hook`` inside a gradient hook."""

    off = in_hook = False


switch = Switch()


class _TorchFunction:
    """A ``__torch_function__`` that is disabled where shards act like plain tensors."""

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        if switch.off or (current_backward() != -1 and not switch.in_hook) or compiling() is not None:
            return disabled_torch_function
        return _notice


NOTICING = _TorchFunction()


def _notice(func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    """Call ``func``; warn first if it mixes elements of a shard, otherwise mark its results as shards too."""
    caller: FrameType = sys._getframe(1)
    kwargs = kwargs or {}
    switch.off = True
    try:
        if caller.f_code.co_filename.startswith(_NO_LINE):
            return func(*args, **kwargs)
        name = func.__name__.strip("_")
        if name in ("register_hook", "register_post_accumulate_grad_hook"):
            return func(args[0], _noticing(args[1], args[0].autopar_shard))
        reads = name in _READS or name.startswith("linalg_") or name.endswith(("_norm", "_loss"))
        mixed = _mixed_by(name, args, kwargs) if reads else None
        if mixed is not None:
            _warn(func.__name__, mixed, caller)
        result = func(*args, **kwargs)
        if mixed is None:
            results = result if isinstance(result, list | tuple) else (result,)
            sources: list[Sequence[Any]] = [[*args[:3], *kwargs.values()]] * len(results)
            if func is torch.autograd.grad or name.startswith("foreach"):
                of = args[0] if func is not torch.autograd.grad else args[1] if len(args) > 1 else kwargs["inputs"]
                sources = list(zip([of] if isinstance(of, torch.Tensor) else of))
            for one, given in zip(results, sources, strict=False):  # some in-place functions return None
                _let_be_noticed(one, name, given, caller, other_size=reads)
        return result
    finally:
        switch.off = False


def _is_shard(tensor: Any) -> bool:
    """Return whether a tensor is a shard; inside ``autopar.full_params`` parameters are full."""
    shard: Shard | None = tensor.autopar_shard
    return shard is not None and (not isinstance(tensor, nn.Parameter) or tuple(tensor.shape) == shard.here)


def _parts(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _parts(value)
        elif isinstance(value, Sharded) and _is_shard(value):
            yield value


def _let_be_noticed(result: Any, name: str, given: Sequence[Any], caller: FrameType, *, other_size: bool) -> None:
    """Mark ``result`` as a shard if it was computed from elements of a shard."""
    part = next(_parts(given), None) if type(result) in _PARTS else None
    like = (name == "to" or name.endswith("_as")) and part is not given[0]  # only the shape or dtype of part is used
    if part is None or like or not (other_size or result.numel() == part.numel()):
        return
    if caller.f_code is _NEW_PARAMETER:  # nn.Parameter requires a result of the same class
        if type(part) is ShardedTensor:
            _become(part, nn.Parameter)
        _become(result, type(part), getattr(part, "autopar_shard", None))
    elif _line(caller) is not None:
        _become(result, _PARTS[type(result)], part.autopar_shard)


def _noticing(hook: Any, shard: Shard | None) -> Any:
    """Wrap a hook on the gradient of a shard, so that reads inside it are detected."""

    @functools.wraps(hook)
    def run(tensor: Any) -> Any:
        before = switch.in_hook, switch.off
        switch.in_hook, switch.off = True, False
        if type(tensor) is torch.Tensor:
            tensor = tensor.as_subclass(ShardedTensor)
            tensor.autopar_shard = shard
        try:
            found = hook(tensor)
            return found._plain() if type(found) is ShardedTensor else found
        finally:
            switch.in_hook, switch.off = before

    return run


@dataclass(frozen=True)
class Shard:
    """The place of a shard in its parameter."""

    name: str
    full: tuple[int, ...]  # shape of the full parameter
    here: tuple[int, ...]  # shape of the shard
    layout: Layout
    rank: int  # rank on the axis of the shards
    warned: set[tuple[str, int]]  # lines of user code that already warned, for all shards of the model
    axis: str  # such as "tensor-parallel"
    joins: bool  # True if autopar.full_params gathers it; False with FSDP2, which shards it over replicas

    def held(self) -> str:
        """Return a description of the local part of the full parameter."""
        ranges = ", ".join(f"{start} to {stop - 1}" for start, stop in self.layout.ranges(self.rank)) or "none"
        return f"{self.axis} rank {self.rank}: shape {self.here} of {self.full}, {ranges} of dim {self.layout.dim}"


class Sharded:
    """Mixin for tensors that are shards. They are printed, copied and saved like plain tensors."""

    __slots__ = ()
    __torch_function__: Any = NOTICING  # disabled while a model runs or an optimizer steps
    autopar_shard: Shard | None = None

    def _plain(self: Any) -> Any:
        with no_overrides():
            made = type(self) is ShardedTensor  # keeps its graph
            same = self.as_subclass(torch.Tensor) if made else self.detach().requires_grad_(self.requires_grad)
        vars(same).update({name: value for name, value in vars(self).items() if name != "autopar_shard"})
        _become(same, _PLAIN_KINDS[type(self)])
        return same

    __copy__ = _plain

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        text, shard = repr(self._plain()), self.autopar_shard
        of = f" rank {shard.rank}'s shard of {shard.full}:" if shard is not None and _is_shard(self) else ":"
        return text.replace("Parameter containing:", f"Parameter containing{of}", 1)

    def __format__(self, spec: str) -> str:
        return format(self._plain(), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = copied = copy.deepcopy(self._plain(), memo)
            _become(copied, type(self), self.autopar_shard)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        if _is_shard(self):
            _warn("torch.save or pickle", self, sys._getframe(1))
        return self._plain().__reduce_ex__(protocol)


class ShardedParameter(Sharded, nn.Parameter):  # type: ignore[misc]
    """A parameter of which this rank holds a shard."""


class _LikeAnyTensor(type(torch.Tensor)):  # type: ignore[misc]  # assert_close compares tensors of related classes
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor)


class ShardedTensor(Sharded, torch.Tensor, metaclass=_LikeAnyTensor):  # type: ignore[misc]
    """The gradient of a shard, or the result of an element-wise function of a shard."""


class ShardedDTensor(Sharded, DTensor):  # type: ignore[misc]
    """A DTensor of ZeRO 2 and 3: the replica's rows of a tensor-parallel shard, which DTensor treats as full."""

    __slots__ = ()

    def full_tensor(self, **how: Any) -> torch.Tensor:
        """Gather the rows of all replicas; the result is still a tensor-parallel shard."""
        with no_overrides():
            joined = super().full_tensor(**how)
        if self.autopar_shard is not None and type(joined) is torch.Tensor:
            _become(joined, ShardedTensor, self.autopar_shard)
        return joined


_WATCHED: dict[type, type] = {nn.Parameter: ShardedParameter, DTensor: ShardedDTensor}
_PARTS: dict[type, type] = {torch.Tensor: ShardedTensor, DTensor: ShardedDTensor}
_PLAIN_KINDS: dict[type, type] = {ShardedParameter: nn.Parameter, ShardedTensor: torch.Tensor, ShardedDTensor: DTensor}


def watch(model: nn.Module, plan: Plan, mpu: MPU) -> None:
    """Watch reads of the sharded parameters of ``model``, except parameters of a library's tensor subclass."""
    PLAIN.update((ShardedParameter, ShardedTensor))
    let_foreach_take(_PLAIN_KINDS)
    warned = set[tuple[str, int]]()
    joins = not any(isinstance(parameter, DTensor) for parameter in model.parameters())  # not with ZeRO 2 and 3
    for name, parameter in model.named_parameters():
        own, kind = plan.tensors.get(plan.names.get(name, "")), _WATCHED.get(type(parameter))
        if own is None or own.layout is None or kind is None:
            continue
        rank, axis = (mpu.shards.rank, "expert") if name in plan.experts else (mpu.tp.rank, "tensor")
        full, here = tuple(own.shape), tuple(parameter.shape)
        if here != full:
            _become(parameter, kind, Shard(own.name, full, here, own.layout, rank, warned, f"{axis}-parallel", joins))


def unwatch(parameter: torch.Tensor) -> None:
    """Undo :func:`watch` for one parameter."""
    if isinstance(parameter, Sharded):
        _become(parameter, _PLAIN_KINDS[type(parameter)])


def _become(tensor: Any, kind: type, shard: Shard | None = None) -> None:
    tensor.__class__ = kind
    if shard is None:
        vars(tensor).pop("autopar_shard", None)
    else:
        tensor.autopar_shard = shard


# -- the step of initialize ------------------------------------------------------------------------------------------

_running: weakref.WeakSet[Watched] = weakref.WeakSet()
"""Models with a running forward."""


def watch_user_code(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Watch user code around ``model``. The step runs when the parameters are final."""
    if state.plan.shards > 1:
        watched = state.features["user_code"] = Watched(state.mpu.tp)
        state.region.beginning.append(watched.begin)
        state.region.ending.append(watched.end)
        watch(model, state.plan, state.mpu)
        _watch_steps()
        state.undo.append(lambda model, own: own.features.pop("user_code").undo(model))


class Watched:
    """A watched model: its forwards read shards as plain tensors, and call user hooks with full tensors."""

    def __init__(self, axis: Axis) -> None:
        self.axis, self._found = axis, False
        self._hooks: dict[nn.Module, Any] = {}  # hooks of the model, and of each inner model that was called directly

    def __deepcopy__(self, memo: dict[int, Any]) -> Watched:
        return Watched(self.axis)

    def begin(self, model: nn.Module) -> dict[str, str]:
        """Start a forward; return the places of user hooks, which ranks compare before any hook gathers."""
        _running.add(self)
        Sharded.__torch_function__ = disabled_torch_function  # avoids a Python call for each function
        if self.axis.size == 1:
            return {}
        hooks = self._hooks.get(model)
        if hooks is None:
            from autopar.features.user_code.hooks import FullTensorHooks

            hooks = self._hooks[model] = FullTensorHooks(model, self.axis)
        if not self._found and not any(hooks.dicts):
            return {}
        seen = {one: each.wrap() for one, each in self._hooks.items()}
        self._found = any(seen.values())  # look again in the next forward, even if all hooks are removed
        return seen[model]

    def end(self) -> None:
        """End the forward."""
        _running.discard(self)
        if not _running:
            Sharded.__torch_function__ = NOTICING

    def undo(self, model: nn.Module) -> None:
        """Restore the original hooks, and the torch classes of parameters."""
        for hooks in self._hooks.values():
            hooks.unwrap()
        for parameter in model.parameters():
            unwatch(parameter)


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if optimizer not in untried:  # an optimizer without a trial may read shards
        Sharded.__torch_function__ = disabled_torch_function


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_step(*_: Any) -> None:
    Sharded.__torch_function__ = NOTICING


# -- warnings --------------------------------------------------------------------------------------------------------

_TORCH = torch.__file__.rpartition("/")[0] + "/"
_NO_LINE = (f"{_TORCH}optim/", f"{_TORCH}distributed/", f"{_TORCH}fx/", OURS)  # calls from here are not user code
_NEW_PARAMETER = nn.Parameter.__new__.__code__


def _warn(name: str, part: Any, caller: FrameType) -> None:
    """Warn once per line of user code."""
    frame, shard = _line(caller), part.autopar_shard
    place = None if frame is None else place_of_user(frame)
    if place is None or place in shard.warned:
        return
    shard.warned.add(place)
    of = "" if isinstance(part, nn.Parameter) else "values of "
    gathered = f'  Use `with autopar.full_params(model, "{shard.name}"):`, inside which it and its gradient are full.\n'
    text = (
        f"{name} of {of}{shard.name} sees the shard of {shard.held()}.\n{gathered * shard.joins}"
        "  autopar.full_tensor(parameter) returns a full, differentiable tensor. clip_grad_norm_ and get_total_norm of "
        "torch.nn.utils,\n  model.num_parameters() and model.save_parallelized cover the full model.\n"
        "  To use the shard on purpose: warnings.filterwarnings('ignore', category=autopar.ShardWarning)."
    )
    warnings.warn_explicit(text, ShardWarning, *place)


def _line(caller: FrameType) -> FrameType | None:
    """Return the frame that called torch; None for compiled code and for libraries that support shards."""
    frame: FrameType | None = caller
    while frame is not None and (frame.f_code.co_filename.startswith(_TORCH) or frame.f_code in BODIES):
        frame = frame.f_back
    file = "" if frame is None else frame.f_code.co_filename
    compiled = file.startswith("<eval_with_key") or "torchinductor" in file
    if frame is None or compiled or is_ours(frame):
        return None
    top = str(frame.f_globals.get("__name__")).partition(".")[0]
    return None if top in LIBRARIES or top in ("megatron", "transformers_modules") else frame


for _code in (_TorchFunction.__get__, _notice, _mixed_by, _keeps, _parts, _is_shard, _let_be_noticed, _warn):
    leave_alone(_code.__code__)  # dynamo would compile them after a graph break
