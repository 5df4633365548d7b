"""Logits that are gathered lazily, when code reads them.

[Note: sharded logits] The head of a language model computes ``[..., vocab/tp]`` on each rank; with context parallelism
``[batch, seq/cp, vocab]``. Most training steps only need the cross entropy, which is computed from the shards.
Gathering ``[..., vocab]`` would move more bytes than all blocks together. So the head returns :class:`ShardedLogits`,
a tensor with the full shape and no memory. Typical operations of a loss (index, flatten, cast, scale, cap, add a bias)
and ``F.cross_entropy`` run on the shards; with ``loss.chunk`` indexing and flattening even run on ``[..., hidden]``,
before the product of the head. Any other operation gathers the logits and continues with a plain tensor in the same
autograd graph. A view shares memory with its source: reading one of them makes all of them plain, and an in-place
change of one changes all. Gathering is a collective, so the ranks of the axis synchronize first, and a rank that reads
alone raises an error.
"""

from __future__ import annotations

import math
import operator
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from autopar.call_site import is_of_library
from autopar.compat.tensors import tree_leaves, tree_map_only, version_of, wrapper_subclass
from autopar.distributed.agree import meet
from autopar.distributed.autograd_functions import any_order, keep_none, refuse_again
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import all_gather, copy, scatter
from autopar.errors import ConsistencyError
from autopar.layout import Layout
from autopar.tensor_parallel.loss import sharded_cross_entropy
from autopar.tensor_tracking import LazyGatherTensor, without_overrides

Change = Callable[[torch.Tensor], torch.Tensor]
Gradients = Callable[..., Sequence[torch.Tensor | None]]
_ADVICE = (
    "Reading logits gathers them, so every {ranks} rank must read them: put `if rank == 0:` around the\n"
    "  print, not around the read (logits.argmax(-1), logits.cpu()). Or gather them in the forward: under\n"
    "  torch.no_grad(), or always with loss: {{gather_logits: always}}. loss: {{read_timeout: ...}} waits longer."
)


class LogitsShard(ABC):
    """The local shard of logits. Immutable. See [Note: sharded logits].

    Attributes:
        axis: Axis of the ranks.
        layout: Layout of the sharded dim over ``axis``.
        name: Name of the logits, identical on all ranks.
        kind: Word for the units of the sharded dim, for messages.
        ranks: Word for the ranks of ``axis``, for messages.
        gets_every_gradient: True if every gradient of the logits flows through the first input.
    """

    axis: Axis
    layout: Layout
    dtype: torch.dtype
    name: str
    kind: ClassVar[str]
    ranks: ClassVar[str]
    gets_every_gradient: ClassVar[bool] = False

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the full logits."""

    @property
    @abstractmethod
    def inputs(self) -> list[torch.Tensor]:
        """The tensors that receive gradients."""

    @property
    def saved(self) -> Sequence[torch.Tensor]:
        """The tensors that :meth:`gradients` needs."""
        return ()

    @abstractmethod
    def detached(self) -> LogitsShard:
        """Return the same shard without gradients."""

    @abstractmethod
    def gradients(self) -> Gradients:
        """Return the function ``(gradient of the full logits, *saved) -> gradients of inputs``."""

    def gradients_again(self) -> Gradients:
        """Return a differentiable version of :meth:`gradients`; by default one that raises."""
        return refuse_again

    @abstractmethod
    def gathered(self) -> torch.Tensor:
        """Return the full logits. A collective of the axis."""

    @abstractmethod
    def after(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LogitsShard | None:
        """Return the shard of ``full.name(*args, **kwargs)``, or None if the operation needs the full logits."""

    @abstractmethod
    def cross_entropy(
        self, target: torch.Tensor, ignore_index: int, label_smoothing: float, reduction: str
    ) -> torch.Tensor | None:
        """Return ``F.cross_entropy`` computed from the shard, or None if it needs the full logits."""


# Results may share memory with the source, so these run again on the full logits if they are read.
_REPEATED = frozenset(("view", "reshape", "contiguous", "__getitem__", "detach"))
_COMMUTE = frozenset(("mul", "__mul__", "add", "__add__"))
_OF_GRADIENTS = ("retain_grad", "register_hook", "grad")


class _Origin:
    """The output of the head, shared by all logits made from it."""

    lost = False  # True: a loss was computed from the shards, so the full logits get no gradient


class _Family:
    """Logits that may share memory: reading one makes all of them plain."""

    def __init__(self) -> None:
        self.members: list[weakref.ref[ShardedLogits]] = []  # in the order of their creation
        self.is_full = False

    def read(self) -> None:
        """Turn all members into plain tensors. A collective of the axis."""
        living = [member for ref in self.members if (member := ref()) is not None]
        with torch.inference_mode(False):
            for member in living:
                member.materialize()
        self.is_full = True


class ShardedLogits(LazyGatherTensor):
    """The full logits, of which this rank holds a shard; created by :func:`sharded_logits`.

    Raises:
        ConsistencyError: On a read, if another rank of the axis does not read the same within its ``read_timeout``.
    """

    part: LogitsShard
    _origin: _Origin
    _family: _Family
    _source: Callable[[], ShardedLogits | None]  # returns the source if it may share memory and still lives
    _step: Change | None
    _node: Any  # grad_fn at creation
    _full: torch.Tensor | None

    @staticmethod
    def __new__(cls, part: LogitsShard) -> ShardedLogits:
        """Create a tensor with the shape of the full logits and no memory, without graph and family."""
        made: ShardedLogits = wrapper_subclass(cls, part.shape, dtype=part.dtype, device=part.inputs[0].device)
        made.part, made._full = part, None
        return made

    def held(self) -> str:
        """Return a description of the local columns or rows."""
        part, axis = self.part, self.part.axis
        held = ", ".join(f"{start} to {stop - 1}" for start, stop in part.layout.ranges(axis.rank)) or "none"
        return f"{axis.name} rank {axis.rank} of {axis.size} has {part.kind} {held}"

    def made_of(self) -> list[torch.Tensor]:
        """Return the full logits if they were read, else the inputs of the local shard."""
        return [self.full()] if self.is_full else self.part.inputs

    @property
    def is_full(self) -> bool:
        """True if code has read the logits."""
        return self._family.is_full

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def full(self) -> torch.Tensor:
        """Return the logits as a plain tensor. The first call is a collective of the axis."""
        if self._full is None:
            self._family.read()
        assert self._full is not None
        return self._full

    def gathered(self) -> torch.Tensor:
        """Return a plain tensor at the same place in the graph. A collective; call it only when all ranks do."""
        return _Gather.apply(self)

    def materialize(self) -> None:
        """Create the plain tensor of these logits, from the tensor of their source or by gathering."""
        source = self._source()
        if self._full is not None:
            return
        if source is not None:
            source.materialize()
        with torch.set_grad_enabled(self.requires_grad):
            if source is None:
                part, advice = self.part, _ADVICE.format(ranks=self.part.ranks)
                meet(part.axis, f"logits {list(part.shape)} of {part.name}", part.axis.read_timeout, advice)
                self._full = self.gathered()
            else:
                assert source._full is not None and self._step is not None
                self._full = self._step(source._full)

    def has_parts(self) -> bool:
        """Return whether the shard still describes the logits; False for results of C++ functions."""
        return not self._family.is_full and self.grad_fn is self._node

    def after(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result on the shard, or None if it needs the full logits; ``args`` follow the logits."""
        if name == "cross_entropy":
            return _cross_entropy(self, *args, **kwargs)
        part = self.part.after(name, args, kwargs)
        if part is None:
            return None
        if name in _REPEATED:
            copied = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
            return sharded_logits(part, self, lambda full: func(full, *copied[0], **copied[1]))
        return self if part is self.part and name != "clone" else sharded_logits(part, self)

    @classmethod
    def from_parts(cls, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply an operation to the shard if possible; raise for gradients that will not exist."""
        logits = args[0] if args else kwargs.get("input") if name == "cross_entropy" else None
        if name in _COMMUTE and len(args) == 2 and not isinstance(logits, cls):
            logits, args = args[1], (args[1], args[0])
        listed = [x for x in tree_leaves((args, kwargs)) if isinstance(x, ShardedLogits)]
        if isinstance(logits, cls) and len(listed) == 1 and logits.has_parts():
            rest, named = (args[1:], kwargs) if args else ((), {k: v for k, v in kwargs.items() if k != "input"})
            if name == "register_hook" and is_of_library(rest[0] if rest else named.get("hook")):
                hooked = logits.hook_for_a_library(func, *rest)
                if hooked is not None:
                    return hooked
            result = logits.after(func, name, rest, named)
            if result is not None:
                return result
        if name in _OF_GRADIENTS and any(x._origin.lost for x in listed):
            raise RuntimeError(
                f"{name} is not supported on sharded logits after the loss: the full logits get no gradient.\n"
                "  Gather them in every forward: loss: {gather_logits: always}"
            )
        return None

    def hook_for_a_library(self, func: Any, hook: Any) -> Any:
        """Register a hook of a torch wrapper (FSDP), which hooks every output; return None if that is impossible."""
        if self.part.gets_every_gradient:
            return self.part.inputs[0].register_hook(hook)
        return without_overrides(func, (self, hook), {}) if self._origin.lost else None


def sharded_logits(part: LogitsShard, source: ShardedLogits | None = None, step: Change | None = None) -> ShardedLogits:
    """Return the full logits with the local shard ``part``; gradients flow to its inputs.

    Args:
        source: Logits that they were computed from; None for the output of the head.
        step: Function that computed them from ``source``, if they may share memory.
    """
    if not torch.is_grad_enabled():
        part = part.detached()
    made: ShardedLogits = _Wrap.apply(part, *part.inputs)
    made._origin = _Origin() if source is None else source._origin
    made._family, made._source, made._step, made._full = _Family(), lambda: None, step, None
    made._node = without_overrides(lambda: made.grad_fn, (), {})
    if source is not None and step is not None:
        keeps = source.grad_fn is None or made._node is not None  # detached logits must not keep a graph alive
        made._family, made._source = source._family, (lambda: source) if keeps else weakref.ref(source)
    made._family.members.append(weakref.ref(made))
    return made


def _cross_entropy(
    logits: ShardedLogits,
    target: torch.Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """Compute ``F.cross_entropy`` of ``[vocab]`` or ``[tokens, vocab]``; None if it needs the full logits."""
    by_index = not target.is_floating_point() and target.shape == logits.part.shape[:-1] and target.ndim < 2
    if not by_index or not (weight is size_average is reduce is None):
        return None
    loss = logits.part.cross_entropy(target, ignore_index, label_smoothing, reduction)
    logits._origin.lost |= loss is not None
    return loss


class _Wrap(torch.autograd.Function):
    """Put the full logits into the graph, after the inputs of the shard."""

    @staticmethod
    def forward(ctx: Any, part: LogitsShard, *inputs: torch.Tensor) -> ShardedLogits:
        keep_none(ctx)
        ctx.gradients, ctx.again = part.gradients(), part.gradients_again()
        ctx.save_for_backward(*part.saved)
        return ShardedLogits(part)

    @staticmethod
    @any_order(lambda ctx, grad: (None, *ctx.again(grad, *ctx.saved_tensors)))
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return None, *ctx.gradients(grad, *ctx.saved_tensors)


class _Gather(torch.autograd.Function):
    """Gather the full logits into a plain tensor."""

    @staticmethod
    def forward(ctx: Any, logits: ShardedLogits) -> torch.Tensor:
        keep_none(ctx)
        return logits.part.gathered()

    @staticmethod
    @any_order(lambda ctx, grad: grad)
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Head(NamedTuple):
    """The product of the head: ``[..., hidden] -> [..., vocab/tp]``.

    Attributes:
        seen: Versions of the weights at the forward, and a flag for the backward pass.
    """

    weight: torch.Tensor  # [vocab/tp, hidden]
    bias: torch.Tensor | None  # [vocab/tp]
    seen: HeadState

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def check(self) -> None:
        """Raise ConsistencyError if the product would differ from the product in the forward."""
        state = self.seen
        if state.went_back or any(version_of(x) != version for x, version in state.versions):
            raise ConsistencyError(
                "logits are read after the backward pass or a step of the optimizer. The weights may have changed.\n"
                "  With loss.chunk a read computes the logits: read them before, or use loss: {chunk: 0}."
            )


class HeadState:
    def __init__(self, weights: list[torch.Tensor]) -> None:
        self.versions = [(x, version_of(x)) for x in weights]
        self.went_back = False


@dataclass(frozen=True)
class VocabShard(LogitsShard):
    """The local columns of the logits, or the input of the head that computes them.

    Attributes:
        rows: Local logits ``[..., vocab/tp]``, or hidden states ``[..., hidden]`` with a ``head``.
        layout: Layout of the vocabulary over ``axis``; each rank has one range.
        dtype: Dtype of the logits; ``rows`` may be narrower.
        chunk: Number of tokens per chunk of the loss, with a ``head``.
        head: Pending product ``[..., hidden] -> [..., vocab/tp]``; None if ``rows`` are logits.
        changes: Element-wise functions to apply after the product.
    """

    rows: torch.Tensor
    axis: Axis
    layout: Layout
    dtype: torch.dtype
    name: str = ""
    chunk: int = 0
    head: Head | None = None
    changes: tuple[Change, ...] = ()

    kind, ranks = "columns", "tensor-parallel"

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.rows.shape[:-1], self.layout.size)

    @property
    def inputs(self) -> list[torch.Tensor]:
        if self.head is None:
            return [self.rows]
        return [self.rows, *(x for x in (self.head.weight, self.head.bias) if x is not None)]

    def of_inputs(self, inputs: list[torch.Tensor]) -> VocabShard:
        """Return the same shard with other ``inputs``."""
        head = self.head
        if head is not None:
            head = Head(inputs[1], inputs[2] if len(inputs) > 2 else None, head.seen)
        return replace(self, rows=inputs[0], head=head)

    def detached(self) -> VocabShard:
        return self.of_inputs([x.detach() for x in self.inputs])

    def local(self) -> torch.Tensor:
        """Compute the local logits ``[..., vocab/tp]``; without a ``head`` they have the dtype of ``rows``."""
        if self.head is None:
            return self.rows
        local = self.head(self.rows)
        for change in self.changes:
            local = change(local)
        return local

    def settled(self) -> VocabShard:
        """Compute the pending product; return a shard without a ``head``."""
        if self.head is None:
            return self
        self.head.check()
        return replace(self, rows=self.local(), head=None, changes=())

    def change(self, function: Change) -> VocabShard:
        """Apply an element-wise function in the dtype of the logits."""
        dtype = self.dtype
        if self.head is None:
            return replace(self, rows=function(self.rows.to(dtype)))
        return replace(self, changes=(*self.changes, lambda x: function(x.to(dtype))))

    @property
    def saved(self) -> Sequence[torch.Tensor]:
        return () if self.head is None else self.inputs

    def gradients(self) -> Gradients:
        """Return a function that shards the full gradient and backpropagates through a pending product."""
        if self.head is None:
            return partial(_columns_of, self.axis, self.layout, self.rows.dtype)
        return lambda grad, *saved: self.through_head(
            saved, lambda local: scatter(grad, self.axis, self.layout, -1).to(local.dtype)
        )

    gradients_again = gradients

    def through_head(self, saved: Sequence[torch.Tensor], gradient_of: Change) -> Sequence[torch.Tensor | None]:
        """Return the gradients of ``saved`` inputs; ``gradient_of`` returns the gradient of the local logits."""
        again = torch.is_grad_enabled()
        with torch.enable_grad():  # views, so that other uses of a tied weight add no gradients here
            inputs = [x.view_as(x) if again else x.detach().requires_grad_(x.requires_grad) for x in saved]
            local = self.of_inputs(inputs).local()
        part = gradient_of(local)
        wanted = [x for x in inputs if x.requires_grad]
        found = iter(torch.autograd.grad(local, wanted, part, create_graph=again))
        return [next(found) if x.requires_grad else None for x in inputs]

    def gathered(self) -> torch.Tensor:
        if self.head is not None:
            self.head.check()
        return all_gather(self.local(), self.axis, self.layout, -1).to(self.dtype)

    def after(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> VocabShard | None:
        operation = _OPERATIONS.get(name)
        return None if operation is None else operation(self, *args, **kwargs)

    def cross_entropy(
        self, target: torch.Tensor, ignore_index: int, label_smoothing: float, reduction: str
    ) -> torch.Tensor:
        loss = sharded_cross_entropy(self, target, ignore_index, label_smoothing, reduction)
        device = self.rows.device.type
        return loss if device != "meta" and torch.is_autocast_enabled(device) else loss.to(self.dtype)  # as in torch


def _columns_of(axis: Axis, layout: Layout, dtype: torch.dtype, grad: torch.Tensor) -> Sequence[torch.Tensor | None]:
    return [scatter(grad, axis, layout, -1).to(dtype)]


def viewed_shape(before: Sequence[int], shape: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of ``view(*shape, **kwargs)`` for a tensor of shape ``before``; None if it is unknown."""
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    if kwargs or not sizes or {*map(type, sizes)} != {int}:
        return None
    known, total = math.prod([size for size in sizes if size != -1]), math.prod(before)
    if not known or not total:
        return None
    full = tuple([size if size != -1 else total // known for size in sizes])
    return full if math.prod(full) == total else None


def _reshape(shards: VocabShard, *shape: Any, **kwargs: Any) -> VocabShard | None:
    full = viewed_shape(shards.shape, shape, kwargs)
    if full is None or full[-1] != shards.layout.size:
        return None
    return replace(shards, rows=shards.rows.reshape(*full[:-1], shards.rows.shape[-1]))


def _index(shards: VocabShard, index: Any) -> VocabShard | None:
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(item is None or item is ... or isinstance(item, int | slice | torch.Tensor) for item in items):
        return None
    taken = sum(_dims(item) for item in items)
    dims = len(shards.shape)
    if taken >= dims:  # an index of the vocabulary must be a full slice
        last = items[-1]
        if taken > dims or not (isinstance(last, slice) and last == slice(None)):
            return None
    elif any(item is ... for item in items[:-1]) and not (isinstance(items[-1], slice) and items[-1] == slice(None)):
        return None  # items after an ellipsis reach the vocabulary
    return replace(shards, rows=shards.rows[index])


def _dims(item: Any) -> int:
    if item is None or item is ... or isinstance(item, bool):
        return 0
    return item.ndim if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8) else 1


def _to(shards: VocabShard, *args: Any, **kwargs: Any) -> VocabShard | None:
    wanted = [*args, *kwargs.values()]
    if set(kwargs) - {"dtype", "device"} or not wanted:
        return None
    dtype = shards.dtype
    for value in wanted:
        if isinstance(value, torch.dtype):
            dtype = value
        elif not isinstance(value, str | torch.device) or torch.device(value) != shards.rows.device:
            return None
    return _cast(shards, dtype)


def _cast(shards: VocabShard, dtype: torch.dtype) -> VocabShard | None:
    if not dtype.is_floating_point:
        return None
    if dtype == shards.dtype:
        return shards
    if torch.promote_types(dtype, shards.dtype) != dtype:  # a narrower dtype rounds
        shards = shards.change(lambda x: x.to(dtype))
    return replace(shards, dtype=dtype)


def _unary(function: Change) -> Callable[..., VocabShard | None]:
    return lambda shards, *args, **kwargs: None if args or kwargs else shards.change(function)


def _binary(function: Callable[[Any, Any], torch.Tensor]) -> Callable[..., VocabShard | None]:
    def operate(shards: VocabShard, *args: Any, **kwargs: Any) -> VocabShard | None:
        if len(args) != 1 or kwargs:
            return None
        other = args[0]
        if not isinstance(other, torch.Tensor):
            if not isinstance(other, int | float):
                return None
        else:
            if other.requires_grad or (other.ndim > 1 and other.numel() > 1):
                shards = shards.settled()  # ``other`` needs a gradient or differs by token
            fitting = _operand(shards, other)
            if fitting is None:
                return None
            other = fitting
        return shards.change(lambda x: function(x, other))

    return operate


def _operand(shards: VocabShard, other: torch.Tensor) -> torch.Tensor | None:
    """Return the local shard of ``other``, with summed gradients; None if the logits would change shape or dtype."""
    logits = torch.empty(shards.shape, dtype=shards.dtype, device="meta")
    try:
        same_shape = torch.broadcast_shapes(other.shape, shards.shape) == shards.shape
    except RuntimeError:
        return None
    if not same_shape or torch.result_type(logits, other.to("meta")) != shards.dtype:
        return None
    if other.device != shards.rows.device and other.ndim:
        return None
    if other.ndim and other.shape[-1] == shards.layout.size and shards.layout.size > 1:
        other = scatter(other, shards.axis, shards.layout, -1)
    else:
        other = copy(other, shards.axis)
    return other if shards.head is None else other.clone()  # the caller may change it before it is used


_OPERATIONS: dict[str, Callable[..., VocabShard | None]] = {
    "view": _reshape,
    "reshape": _reshape,
    "__getitem__": _index,
    "to": _to,
    "float": lambda shards: _cast(shards, torch.float32),
    "double": lambda shards: _cast(shards, torch.float64),
    "half": lambda shards: _cast(shards, torch.float16),
    "bfloat16": lambda shards: _cast(shards, torch.bfloat16),
    "detach": VocabShard.detached,
    **dict.fromkeys(("contiguous", "clone"), lambda shards: shards),
    "tanh": _unary(torch.tanh),
    **dict.fromkeys(("neg", "__neg__"), _unary(operator.neg)),
    **dict.fromkeys(("mul", "__mul__", "__rmul__"), _binary(operator.mul)),
    **dict.fromkeys(("div", "true_divide", "__truediv__"), _binary(torch.true_divide)),
    **dict.fromkeys(("add", "__add__", "__radd__"), _binary(operator.add)),
    **dict.fromkeys(("sub", "__sub__"), _binary(operator.sub)),
}
BY_ELEMENT = frozenset(_OPERATIONS) - {"view", "reshape", "__getitem__"}
"""Names of element-wise operations."""
