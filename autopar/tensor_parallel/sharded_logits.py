"""Logits of which a rank has a part, and which are gathered when code reads them, and only then.

A language model's head makes ``[..., vocab/tp]`` on each rank, with context parallelism ``[batch, rows/cp, vocab]``.
Most training steps take a cross entropy of it, which is computed from the parts, and read nothing else; gathering
``[..., vocab]`` would move more bytes than all blocks together. :class:`ShardedLogits` is the whole tensor that the
model's own code passes on. Operations of a loss on the logits, and ``F.cross_entropy`` itself, are done to the parts
(:mod:`~autopar.tensor_parallel.logits_shards`; of a feature that shares out rows, its own). Any other operation
gathers them and goes on with a plain tensor, in the same autograd graph. So ``outputs.logits`` is what users know.

A view shares memory with what it was taken from, so as soon as one of a family is read, all are whole, and a change in
place of one is seen by all. Gathering is a collective, so the ranks of the axis meet first: a rank that reads alone
gets an error, not a hang.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from autopar.call_site import is_of_library
from autopar.compat.tensors import no_overrides, tree_leaves, tree_map_only, wrapper_subclass
from autopar.distributed.agree import meet
from autopar.distributed.autograd_functions import any_order, keep_none, refuse_again
from autopar.distributed.axis import Axis
from autopar.layout import Layout

Change = Callable[[torch.Tensor], torch.Tensor]
Gradients = Callable[..., Sequence[torch.Tensor | None]]


# -- tensors that are gathered when they are read ---------------------------------------------------------------------
# A subclass says what an operation makes of parts; before any other operation the tensor becomes a plain, full one.

# What the tensor itself answers, without its elements.
_FACTS = {
    *("shape", "size", "dim", "ndim", "numel", "nelement", "stride", "is_contiguous", "names", "is_same_size"),
    *("__len__", "__hash__", "output_nr", "_version", "nbytes", "retains_grad"),
    *("dtype", "device", "layout", "get_device", "element_size", "itemsize", "is_floating_point", "is_complex"),
    *("requires_grad", "grad_fn", "is_leaf", "_backward_hooks", "_base", "is_inference", "is_meta"),
    *("is_cpu", "is_cuda", "is_mps", "is_xpu", "is_xla", "is_mkldnn", "is_sparse", "is_sparse_csr"),
    *("is_quantized", "is_nested"),
}
# What makes another tensor of the same shape or type.
_LIKE = {
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"),
}


class WholeOnRead(torch.Tensor):
    """A tensor that has the shape of the whole and no memory."""

    @property
    def is_whole(self) -> bool:
        """Whether somebody has read it."""
        raise NotImplementedError

    def whole(self) -> torch.Tensor:
        """Return the plain tensor; always the same one. Gradients go through it, whoever reads it first."""
        raise NotImplementedError

    def held(self) -> str:
        """Return what this rank has of it, for a print."""
        raise NotImplementedError

    def made_of(self) -> list[torch.Tensor]:
        """Return the tensors to follow in its place (:func:`autopar.tensor_tracking.parts_of`), without gathering."""
        raise NotImplementedError

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self.is_whole:
            return repr(self.whole())
        with no_overrides():
            return f"{type(self).__name__}({list(self.shape)}, {self.dtype}: {self.held()})"

    def __format__(self, spec: str) -> str:
        return repr(self)

    @classmethod
    def from_parts(cls, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what an operation gives if the parts are enough for it, else None."""
        return None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer from parts what can be, read for everything else."""
        kwargs, name = kwargs or {}, name_of(func)
        first = args[0] if args else None
        if isinstance(first, WholeOnRead) and not first.is_whole:
            if name in _FACTS:
                with no_overrides():
                    return func(*args, **kwargs)
            if name in _LIKE:
                with no_overrides():
                    alike = torch.empty((), dtype=first.dtype, device=first.device).expand(first.shape)
                return func(alike, *args[1:], **kwargs)
        result = cls.from_parts(func, name, args, kwargs)
        if result is not None:
            return result
        args, kwargs = tree_map_only(WholeOnRead, lambda x: x.whole(), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Read for what does not come through Python."""
        args, kwargs = tree_map_only(WholeOnRead, lambda x: x.whole().detach(), (args, kwargs or {}))
        return func(*args, **kwargs)


def name_of(func: Any) -> str:
    """Return the name of a function, or of the attribute that is asked for."""
    name = getattr(func, "__name__", "")
    return func.__self__.__name__ if name == "__get__" else name


def without_overrides(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch that no class is asked about."""
    with no_overrides():
        return func(*args, **kwargs)


# -- logits ------------------------------------------------------------------------------------------------------------


class LogitsPart(ABC):
    """This rank's part of whole logits. Immutable.

    Attributes:
        layout: of the dim that is sharded over ``axis``.
        name: which logits they are, in words that are the same on all ranks.
        kind, advice: what the layout counts, and what to do instead of reading on one rank, for messages.
        gets_every_gradient: whether every gradient of the logits comes by its first input.
    """

    axis: Axis
    layout: Layout
    dtype: torch.dtype
    name: str
    kind: ClassVar[str]
    advice: ClassVar[str]
    gets_every_gradient: ClassVar[bool] = False

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole logits."""

    @property
    @abstractmethod
    def inputs(self) -> list[torch.Tensor]:
        """The tensors that receive gradients."""

    @property
    def saved(self) -> Sequence[torch.Tensor]:
        """The tensors that :meth:`gradients` is to be given."""
        return ()

    @abstractmethod
    def detached(self) -> LogitsPart:
        """Return the same part without gradients."""

    @abstractmethod
    def gradients(self) -> Gradients:
        """Return a function of the whole logits' gradient, and of ``saved``: the gradients of ``inputs``."""

    def gradients_again(self) -> Gradients:
        """Return the same function, differentiable; here one that refuses that."""
        return refuse_again

    @abstractmethod
    def gathered(self) -> torch.Tensor:
        """Return the whole logits. A collective of the axis."""

    @abstractmethod
    def after(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LogitsPart | None:
        """Return the part after ``whole.name(*args, **kwargs)``, or None if that needs the whole logits."""

    @abstractmethod
    def cross_entropy(
        self, target: torch.Tensor, ignore_index: int, label_smoothing: float, reduction: str
    ) -> torch.Tensor | None:
        """Return ``F.cross_entropy`` of the whole logits, or None if that needs them."""


# What may share its memory with what it is made of: done again to the whole logits, if those are ever read.
_REPEATED = frozenset(("view", "reshape", "contiguous", "__getitem__", "detach"))
_COMMUTE = frozenset(("mul", "__mul__", "add", "__add__"))
_OF_GRADIENTS = ("retain_grad", "register_hook", "grad")


class _Origin:
    """The head's output, and everything made of it."""

    lost = False  # a loss was taken from the parts: no gradient of whole logits will exist


class _Family:
    """Logits and what may share memory with them: as soon as one is read, all are whole."""

    def __init__(self) -> None:
        self.members: list[weakref.ref[ShardedLogits]] = []  # in the order in which they were made
        self.is_whole = False

    def read(self) -> None:
        """Make plain tensors of all of them. A collective of the axis."""
        living = [member for ref in self.members if (member := ref()) is not None]
        with torch.inference_mode(False):
            for member in living:
                member.materialize()
        self.is_whole = True


class ShardedLogits(WholeOnRead):
    """The whole logits, of which this rank has a part; made by :func:`sharded_logits`.

    Raises:
        ConsistencyError: on reading, if other ranks of the axis do not read the same within its ``read_timeout``.
    """

    part: LogitsPart
    _origin: _Origin
    _family: _Family
    _source: Callable[[], ShardedLogits | None]  # what it was made of, if they may share memory and that still lives
    _step: Change | None
    _node: Any  # its place in the graph, as it was made
    _whole: torch.Tensor | None

    @staticmethod
    def __new__(cls, part: LogitsPart) -> ShardedLogits:
        """Make a tensor that has the shape of the whole logits and no memory; no graph, no family yet."""
        made: ShardedLogits = wrapper_subclass(cls, part.shape, dtype=part.dtype, device=part.inputs[0].device)
        made.part, made._whole = part, None
        return made

    def held(self) -> str:
        """Return which columns or rows this rank has."""
        part, axis = self.part, self.part.axis
        held = ", ".join(f"{start} to {stop - 1}" for start, stop in part.layout.ranges(axis.rank)) or "none"
        return f"{axis.name} rank {axis.rank} of {axis.size} has {part.kind} {held}"

    def made_of(self) -> list[torch.Tensor]:
        """Return the full logits if they are there; else the inputs of this rank's part."""
        return [self.whole()] if self.is_whole else self.part.inputs

    @property
    def is_whole(self) -> bool:
        """Whether somebody has read it."""
        return self._family.is_whole

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def whole(self) -> torch.Tensor:
        """Return the logits as a plain tensor, gathered. A collective of the axis the first time."""
        if self._whole is None:
            self._family.read()
        assert self._whole is not None
        return self._whole

    def gathered(self) -> torch.Tensor:
        """Return a plain tensor with the same place in the graph, where all ranks are known to do so. A collective."""
        gathered: torch.Tensor = _Gather.apply(self)
        return gathered

    def materialize(self) -> None:
        """Make the plain tensor of these logits, from that of their source or by gathering."""
        source = self._source()
        if self._whole is not None:
            return
        if source is not None:
            source.materialize()
        with torch.set_grad_enabled(self.requires_grad):
            if source is None:
                _meet(self.part)
                self._whole = self.gathered()
            else:
                assert source._whole is not None and self._step is not None
                self._whole = self._step(source._whole)

    def has_parts(self) -> bool:
        """Return whether the part still says what the logits are; not of what a function of C++ returned."""
        return not self._family.is_whole and self.grad_fn is self._node

    def after(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what an operation makes of this rank's part, ``args`` being those after the logits; else None."""
        if name == "cross_entropy":
            return _cross_entropy(self, *args, **kwargs)
        part = self.part.after(name, args, kwargs)
        if part is None:
            return None
        if name in _REPEATED:
            copied = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
            return sharded_logits(part, self, lambda whole: func(whole, *copied[0], **copied[1]))
        return self if part is self.part and name != "clone" else sharded_logits(part, self)

    @classmethod
    def from_parts(cls, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do to the part what can be done to it; raise if gradients are asked for that will not exist."""
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
                f"{name} of logits: the loss was taken from a part of them on each rank, so the whole ones get no "
                "gradient.\n  Gather them in every forward: loss: {gather_logits: always}"
            )
        return None

    def hook_for_a_library(self, func: Any, hook: Any) -> Any:
        """Register a hook for torch's own wrappers (FSDP), which ask every output when a gradient comes; or None."""
        if self.part.gets_every_gradient:
            return self.part.inputs[0].register_hook(hook)
        return without_overrides(func, (self, hook), {}) if self._origin.lost else None


def sharded_logits(part: LogitsPart, source: ShardedLogits | None = None, step: Change | None = None) -> ShardedLogits:
    """Return the whole logits of which ``part`` is this rank's, with gradients to what that is made of.

    Args:
        source: logits that they were made of, if not by the head.
        step: what made them, if they may share memory with ``source``.
    """
    if not torch.is_grad_enabled():
        part = part.detached()
    made: ShardedLogits = _Wrap.apply(part, *part.inputs)
    made._origin = _Origin() if source is None else source._origin
    made._family, made._source, made._step, made._whole = _Family(), lambda: None, step, None
    made._node = without_overrides(lambda: made.grad_fn, (), {})
    if source is not None and step is not None:
        keeps = source.grad_fn is None or made._node is not None  # one without a graph must not keep that of another
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
    """``F.cross_entropy`` with the classes in the last dim, ``[vocab]`` or ``[tokens, vocab]``."""
    by_index = not target.is_floating_point() and target.shape == logits.part.shape[:-1] and target.ndim < 2
    if not by_index or not (weight is size_average is reduce is None):
        return None
    loss = logits.part.cross_entropy(target, ignore_index, label_smoothing, reduction)
    logits._origin.lost |= loss is not None
    return loss


def _meet(part: LogitsPart) -> None:
    """Raise unless all ranks of the axis are about to read the same."""
    meet(part.axis, f"logits {list(part.shape)} of {part.name}", part.axis.read_timeout, part.advice)


class _Wrap(torch.autograd.Function):
    """From what the part is made of to the whole logits: their place in the graph."""

    @staticmethod
    def forward(ctx: Any, part: LogitsPart, *inputs: torch.Tensor) -> ShardedLogits:
        keep_none(ctx)
        ctx.gradients, ctx.again = part.gradients(), part.gradients_again()
        ctx.save_for_backward(*part.saved)
        return ShardedLogits(part)

    @staticmethod
    @any_order(lambda ctx, grad: (None, *ctx.again(grad, *ctx.saved_tensors)))
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return None, *ctx.gradients(grad, *ctx.saved_tensors)


class _Gather(torch.autograd.Function):
    """From the whole logits to a plain tensor of the same values."""

    @staticmethod
    def forward(ctx: Any, logits: ShardedLogits) -> torch.Tensor:
        keep_none(ctx)
        return logits.part.gathered()

    @staticmethod
    @any_order(lambda ctx, grad: grad)
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad
