"""Reads of a sharded parameter as if it were the full one: one warning for each line of user code.

[Note: shard reads] A sharded parameter knows that it is one: it is a :class:`ShardedParameter`, and torch passes each
function of it to :func:`_notice`. An elementwise function of a shard gives the shard of the full result, which is a
:class:`Part`, so that ``p.grad.abs().max()`` is seen, too. A function of :data:`READS` mixes elements along the sharded
dim, and warns at the line of user code. While the model runs, in backward passes (except in hooks of gradients) and in
steps of optimizers, the classes act as plain ones (:data:`switch`) and cost nothing. Dynamo sees plain tensors only.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.call_site import OURS, is_of_libraries, place_of_user
from autopar.errors import ShardWarning
from autopar.foreign.patches import BODIES
from autopar.foreign.tensors import (
    CALL,
    SAVE_STATE,
    current_backward,
    disabled_torch_function,
    leave_alone,
    let_foreach_take,
)
from autopar.layout import Layout

_TORCH = torch.__file__.rpartition("/")[0] + "/"
_SAVING, _DYNAMO = f"{_TORCH}serialization.py", f"{_TORCH}_dynamo/"
_INSIDE = ("optim/", "distributed/", "_subclasses/", "fx/", "nn/modules/module.py")
_QUIET = (*(f"{_TORCH}{name}" for name in _INSIDE), _DYNAMO, OURS)
_NEW_PARAMETER = nn.Parameter.__new__.__code__

# -- which functions -------------------------------------------------------------------------------------------------

_DRAWS = """
    normal_ uniform_ bernoulli_ exponential_ cauchy_ log_normal_ geometric_ random_ rand_like randn_like randint_like
    bernoulli multinomial poisson normal dropout alpha_dropout kaiming_uniform_ kaiming_normal_
"""
_REDUCTIONS = """
    norm sum nansum mean nanmean std var std_mean var_mean max min amax amin aminmax argmax argmin median nanmedian
    mode quantile nanquantile sort argsort msort topk kthvalue prod cumsum cumprod cummax cummin logsumexp
    logcumsumexp softmax log_softmax softmin normalize count_nonzero linalg_norm linalg_vector_norm chunk split
    tensor_split unbind narrow select index_select roll flip gather take_along_dim any all size __len__ index_add_
    index_copy_ index_fill_ scatter scatter_ scatter_add scatter_add_
"""
_OTHERS = """
    linalg_matrix_norm _foreach_norm dist mse_loss l1_loss smooth_l1_loss huber_loss kl_div cross_entropy nll_loss
    binary_cross_entropy poisson_nll_loss binary_cross_entropy_with_logits gaussian_nll_loss soft_margin_loss
    margin_ranking_loss cosine_embedding_loss numpy tolist __array__ __dlpack__
    unique unique_consecutive histc histogram bincount renorm renorm_ cdist pdist cosine_similarity cov corrcoef dot
    vdot inner outer ger matmul __matmul__ __rmatmul__ mm mv bmm addmm addmm_ addmv addmv_ addr addbmm baddbmm
    chain_matmul einsum tensordot linear bilinear embedding embedding_bag conv1d conv2d conv3d kron trace diag
    diagonal tril triu tril_ triu_ svd qr slogdet logdet det inverse pinverse cholesky matrix_power matrix_exp
    svd_lowrank pca_lowrank lobpcg cat concat concatenate stack hstack vstack dstack column_stack row_stack
    block_diag __getitem__ __setitem__ __iter__ index_put_ take put_ masked_scatter_ unfold fliplr flipud layer_norm
    rms_norm group_norm _foreach_max index_add index_copy index_fill index_put scatter_reduce scatter_reduce_
    masked_scatter select_scatter slice_scatter fill_diagonal_ nonzero argwhere masked_select pairwise_distance
    repeat tile pad interpolate as_strided trapezoid trapz cumulative_trapezoid batch_norm instance_norm gumbel_softmax
    numel nelement
"""
_THIRD = """
    norm linalg_norm linalg_vector_norm topk kthvalue quantile nanquantile roll chunk split tensor_split
"""
DRAWS, _ALONG_A_DIM, _DIM_THIRD = (frozenset(names.split()) for names in (_DRAWS, _REDUCTIONS, _THIRD))
READS = DRAWS | _ALONG_A_DIM | frozenset(_OTHERS.split())
"""Functions that are not elementwise: of a shard they give another result than of the full tensor."""
_DEFAULT = dict.fromkeys(("topk", "sort", "argsort", "kthvalue", "mode"), -1)
_DEFAULT |= dict.fromkeys(("chunk", "split", "tensor_split", "unbind", "__len__"), 0)
_ALL = slice(None)


def _keeps_dim(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], dim: int | None) -> bool:
    """Return whether a function of ``args[0]`` is elementwise along ``dim``, the sharded one; None if not known."""
    if name in ("__getitem__", "__setitem__"):
        return _index_keeps(args[1], args[0], dim)
    if name in ("max", "min") and isinstance(args[1] if len(args) > 1 else kwargs.get("other"), torch.Tensor):
        return True  # of two tensors, element by element
    if kwargs.get("reduction") == "none" or (name == "size" and len(args) + len(kwargs) == 1):
        return True
    if dim is None or name not in _ALONG_A_DIM:
        return False
    at = 2 if name in _DIM_THIRD else 1
    asked = kwargs.get("dim", kwargs.get("dims", args[at] if len(args) > at else _DEFAULT.get(name)))
    dims = asked if isinstance(asked, list | tuple) else [asked]
    if not dims or any(isinstance(one, bool) or not isinstance(one, int) for one in dims):
        return False
    return all(one % args[0].dim() != dim for one in dims)


def _index_keeps(index: Any, tensor: torch.Tensor, dim: int | None) -> bool:
    entries = [one for one in (index if isinstance(index, tuple) else [index]) if one is not None]
    if any(isinstance(one, torch.Tensor) and one.dtype == torch.bool for one in entries):
        return len(entries) == 1 and entries[0].shape == tensor.shape  # a mask
    place = next((n for n, one in enumerate(entries) if one is Ellipsis), None)
    if place is not None:
        entries[place : place + 1] = [_ALL] * (tensor.dim() - len(entries) + 1)
    all_of = [isinstance(one, slice) and one == _ALL for one in entries]
    return all(all_of) or (dim is not None and (len(entries) <= dim or all_of[dim]))


# -- when ------------------------------------------------------------------------------------------------------------


class Switch(threading.local):
    """Whether shards act as plain parameters for now, in this thread; ``hide`` is for all threads."""

    off = False
    in_hook = False  # a user's hook that a backward pass calls
    generating = False
    _hidden = False
    kinds: ClassVar[dict[Any, Any]] = {}  # class of shards -> its __torch_function__

    def hide(self, hidden: bool) -> None:
        """Disable ``__torch_function__`` of the classes, so that decoding pays no Python overhead."""
        if hidden is not Switch._hidden:
            Switch._hidden = hidden
            for kind, noticing in Switch.kinds.items():
                kind.__torch_function__ = disabled_torch_function if hidden else noticing


switch = Switch()


@contextmanager
def _switched(hide: bool | None = None, **values: bool) -> Iterator[None]:
    before, was_hidden = {name: getattr(switch, name) for name in values}, Switch._hidden
    vars(switch).update(values)
    if hide is not None:
        switch.hide(hide)
    try:
        yield
    finally:
        vars(switch).update(before)
        if hide is not None:
            switch.hide(was_hidden)


def hidden() -> AbstractContextManager[None]:
    """Hide the classes inside of ``with``, around ``generate``, whose steps may be compiled."""
    return _switched(hide=True, generating=True)


aside = functools.partial(_switched, off=True)
"""Take shards as plain parameters inside of ``with``."""


def inside_hook() -> AbstractContextManager[None]:
    """Notice reads inside of ``with``: a user's hook runs, though the model or a backward pass does, too."""
    return _switched(hide=switch.generating, off=False, in_hook=True)


# -- what torch calls ------------------------------------------------------------------------------------------------


def _notice(func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    """Call ``func``; warn before, if it is not elementwise, else let its result be noticed."""
    caller: FrameType = sys._getframe(1)
    kwargs = kwargs or {}
    switch.off = True
    try:
        if caller.f_code.co_filename.startswith(_QUIET) and caller.f_code is not SAVE_STATE:
            return func(*args, **kwargs)
        name = func.__name__
        if name in ("register_hook", "register_post_accumulate_grad_hook"):
            return func(args[0], _noticing(args[1], args[0]))
        reads = name in READS or name.startswith("linalg_")
        mixed = _mixed_by(name, args, kwargs) if reads else None
        if mixed is not None:
            _warn(name, mixed, caller)
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, IndexError) as error:  # of sizes or indices
            part = next(_parts([*args, *kwargs.values()]), None)
            if part is not None and not hasattr(error, "__notes__"):
                error.add_note(
                    f"autopar: {part.autopar_shard.name} is the shard of {part.autopar_shard.held()}.\n{_FIX}"
                )
            raise
        if func is torch.autograd.grad:
            inputs = args[1] if len(args) > 1 else kwargs["inputs"]
            for gradient, of in zip(result, [inputs] if isinstance(inputs, torch.Tensor) else inputs, strict=True):
                _let_be_noticed(gradient, name, (of,), {}, caller, other_size=False)
        elif mixed is None:
            each = name.startswith("_foreach")
            for n, one in enumerate(result if isinstance(result, list | tuple) else (result,)):
                _let_be_noticed(one, name, (args[0][n],) if each else args, kwargs, caller, other_size=reads)
        return result
    finally:
        switch.off = False


def _is_shard(tensor: Any) -> bool:
    """Return whether a tensor is a shard; a parameter is none inside of ``autopar.whole``."""
    shard: Shard | None = tensor.autopar_shard
    return shard is not None and (not isinstance(tensor, nn.Parameter) or tuple(tensor.shape) == shard.here)


def _parts(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _parts(value)
        elif type(value) in _KINDS and _is_shard(value):
            yield value


def _mixed_by(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the first shard of which ``name`` mixes elements along the sharded dim; None if it does so of none."""
    part = next(_parts([*args, *kwargs.values()]), None)
    if name == "stack" and not (args[1:] or kwargs):
        return None  # side by side
    if name == "__setitem__" and part is not None and part is not args[0]:  # into a vector of all parameters
        return part if part is args[2] and args[0].dim() == 1 and args[0].numel() > part.numel() else None
    if part is None or not args or part is not args[0]:
        return None if name == "index_put_" else part  # values that go elsewhere
    shard = part.autopar_shard
    stacked = part.dim() - len(shard.here)
    dim = shard.layout.dim + stacked if tuple(part.shape)[stacked:] == shard.here and stacked in (0, 1) else None
    return None if _keeps_dim(name, args, kwargs, dim) else part


def _let_be_noticed(
    result: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], caller: FrameType, *, other_size: bool
) -> None:
    """Let reads of ``result`` be noticed, if it is made of, or written with, elements of a shard."""
    part = next(_parts([*args[:3], *kwargs.values()]), None) if type(result) in _PARTS else None
    if part is None or not (other_size or result.numel() == part.numel()):
        return
    if (name == "to" or name.endswith("_as")) and part is not args[0]:
        return
    if caller.f_code is not _NEW_PARAMETER:
        if _user_frame(caller) is not None:
            _become(result, _PARTS[type(result)], part.autopar_shard)
    elif type(part) is Part:  # it requires a result of the same class
        _become(part, nn.Parameter)
        _become(result, nn.Parameter)
    else:
        _become(result, type(part), part.autopar_shard)


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


# -- the classes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """The place of a shard.

    Attributes:
        name: Name of the parameter.
        full: Shape of the full parameter.
        rank: Place of this rank among those that hold the shards.
        told: Lines of user code that were warned, of all shards of the model.
        axis: Name of the axis: ``tensor-parallel``.
        joins: Whether ``autopar.whole`` gathers it; it does not with FSDP2, which shards it over replicas.
    """

    name: str
    full: tuple[int, ...]
    layout: Layout
    rank: int
    told: set[tuple[str, int]]
    axis: str
    joins: bool = True

    @functools.cached_property
    def here(self) -> tuple[int, ...]:
        """Return the shape of the shard."""
        dim = self.layout.dim
        return (*self.full[:dim], self.layout.local_size(self.rank), *self.full[dim + 1 :])

    def held(self) -> str:
        """Return what of the full parameter is here."""
        ranges = ", ".join(f"{start} to {stop - 1}" for start, stop in self.layout.ranges(self.rank)) or "none"
        return f"{self.axis} rank {self.rank}: shape {self.here} of {self.full}, {ranges} of dim {self.layout.dim}"


class _TorchFunction:
    """``__torch_function__`` that is torch's disabled one where shards act as plain parameters."""

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        if switch.off or (current_backward() != -1 and not switch.in_hook):
            return disabled_torch_function
        if tensor is None and sys._getframe(1).f_code.co_filename.startswith(_DYNAMO):
            return disabled_torch_function
        return _notice


_NOTICING = _TorchFunction()


class ShardedParameter(nn.Parameter):
    """A parameter of which this rank has a shard. It is saved, pickled and compiled as a plain ``nn.Parameter``."""

    __torch_function__ = _NOTICING
    autopar_shard: Shard | None = None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shard = self.autopar_shard
        of = f" rank {shard.rank}'s shard of {shard.full}" if shard is not None and _is_shard(self) else ""
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
        _warn_if_saved(self)
        with aside():
            plain = nn.Parameter(self.data, self.requires_grad)
        vars(plain).update({name: value for name, value in vars(self).items() if name != "autopar_shard"})
        return plain.__reduce_ex__(protocol)


class _LikeAnyTensor(type(torch.Tensor)):  # type: ignore[misc]  # assert_close compares tensors of related classes
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor)


class _LikePlain:
    """A tensor that is shown, copied and saved as the plain one of the same memory, which ``_plain`` returns."""

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
            _become(copied, type(self), self.autopar_shard)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        _warn_if_saved(self)
        return self._plain().__reduce_ex__(protocol)


class Part(_LikePlain, torch.Tensor, metaclass=_LikeAnyTensor):  # type: ignore[misc]
    """The result of an elementwise function of a shard, or its gradient."""

    __torch_function__ = _NOTICING

    def _plain(self) -> torch.Tensor:
        with aside():
            return self.as_subclass(torch.Tensor)


class ShardedDTensor(_LikePlain, DTensor):  # type: ignore[misc]
    """A DTensor of ZeRO 2 and 3 (this replica's rows) of a tensor-parallel shard, or made of one.

    DTensor gives the norm of all replicas' rows. It does not know the tensor-parallel shards next to them.
    """

    __slots__ = ()
    __torch_function__ = _NOTICING

    def full_tensor(self, **how: Any) -> torch.Tensor:
        """Return the rows of all replicas: still a shard."""
        with aside():
            joined = super().full_tensor(**how)
        if self.autopar_shard is not None and type(joined) is torch.Tensor:
            _become(joined, Part, self.autopar_shard)
        return joined

    def _plain(self) -> Any:
        with aside():
            plain = super().detach().requires_grad_(self.requires_grad)
        vars(plain).update({name: value for name, value in vars(self).items() if name != "autopar_shard"})
        return plain


_WATCHED: dict[type, type] = {nn.Parameter: ShardedParameter, DTensor: ShardedDTensor}
_PARTS: dict[type, type] = {torch.Tensor: Part, DTensor: ShardedDTensor}
_KINDS: set[type] = {ShardedParameter, Part, ShardedDTensor}
Switch.kinds = dict.fromkeys(_KINDS, _NOTICING)
PLAIN = (torch.Tensor, nn.Parameter, ShardedParameter, Part)
"""Classes of tensors that add nothing: code that handles the first handles all of them."""


def watch(parameter: torch.Tensor, shard: Shard) -> None:
    """Warn of reads of ``parameter``; not where a library gave it a class."""
    kind = _WATCHED.get(type(parameter))
    if kind is not None and shard.here != shard.full:
        let_foreach_take(_KINDS)
        _become(parameter, kind, shard)


def unwatch(parameter: torch.Tensor) -> None:
    """Undo :func:`watch`."""
    for kind, watched in _WATCHED.items():
        if type(parameter) is watched:
            _become(parameter, kind)


def plain(tensor: Any) -> Any:
    """Return what is saved of a tensor without a warning: where another check warns."""
    return tensor._plain() if type(tensor) is Part else tensor


def _become(tensor: Any, kind: type, shard: Shard | None = None) -> None:
    tensor.__class__ = kind
    if shard is None:
        vars(tensor).pop("autopar_shard", None)
    else:
        tensor.autopar_shard = shard


# -- warnings --------------------------------------------------------------------------------------------------------


_FIX = (
    "  autopar.full(parameter) returns the full one, differentiable. clip_grad_norm_ and get_total_norm of "
    "torch.nn.utils,\n  model.num_parameters() and model.save_parallelized cover the full model.\n"
    "  If the shard is meant: warnings.filterwarnings('ignore', category=autopar.ShardWarning)."
)


def _warn(name: str, part: Any, caller: FrameType) -> None:
    """Warn at the user's line, the first time, unless a library that knows shards or a layer calls."""
    frame, shard = _user_frame(caller), part.autopar_shard
    place = None if frame is None else place_of_user(frame)
    if frame is None or place is None or place in shard.told or (not switch.in_hook and _inside_layer(frame)):
        return
    shard.told.add(place)
    of = "" if isinstance(part, nn.Parameter) else "values of "
    gathered = f'  with autopar.whole(model, "{shard.name}"): it and its gradient are full, and random numbers too;\n'
    warnings.warn_explicit(
        f"{name} of {of}{shard.name} sees the shard of {shard.held()}.\n{gathered * shard.joins}{_FIX}",
        ShardWarning,
        *place,
    )


def _warn_if_saved(tensor: Any) -> None:
    """Warn if ``torch.save`` calls ``__reduce_ex__`` of a shard, which calls this."""
    caller = sys._getframe(2)
    if _is_shard(tensor) and caller.f_code.co_filename == _SAVING:
        _warn("torch.save", tensor, caller)


def _user_frame(caller: FrameType) -> FrameType | None:
    """Return the frame that called torch; None if it is of a library that knows shards, or compiled."""
    frame: FrameType | None = caller
    while frame is not None and (frame.f_code.co_filename.startswith(_TORCH) or frame.f_code in BODIES):
        frame = frame.f_back
    file = "" if frame is None else frame.f_code.co_filename
    compiled = file.startswith("<eval_with_key") or "torchinductor" in file
    return None if frame is None or compiled or is_of_libraries(frame) else frame


def _inside_layer(frame: FrameType | None) -> bool:
    """Return whether a module of a parallelized model runs by itself: layers know shards."""
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code is CALL else None
        if isinstance(module, nn.Module) and any(hasattr(p, "autopar_shard") for p in module.parameters()):
            inside = any("_autopar" in vars(one) for one in module.modules())  # a wrapper around the model is none
            if "_autopar" in vars(module) or not inside:
                return True
        frame = frame.f_back
    return False


_HOT = (_TorchFunction.__get__, _notice, _mixed_by, _parts, _is_shard, _let_be_noticed, _warn, _keeps_dim)
for _code in _HOT:
    leave_alone(_code.__code__)  # where a graph broke, dynamo would compile them
