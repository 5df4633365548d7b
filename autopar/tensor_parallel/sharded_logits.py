"""Logits whose vocabulary is sharded, and which are whole for whoever reads them: gathered then, and only then.

A language model's head makes ``[..., vocab/tp]`` on each rank. Most training steps take a cross entropy of it, which
:mod:`~autopar.tensor_parallel.loss` computes from the shards, and read nothing else; gathering ``[..., vocab]`` would
move more bytes than all blocks together. :class:`ShardedLogits` is the tensor ``[..., vocab]`` that the model's own
code passes on. What a loss does to logits on the way (:func:`~autopar.tensor_parallel.logits_shards.after`) and
``F.cross_entropy`` itself are done to the shards; any other operation gathers them and goes on with a plain tensor, in
the same autograd graph, as do all views of them. So ``outputs.logits`` is what users know.

Gathering is a collective, so the ranks of the axis meet first: a rank that reads alone gets an error, not a hang.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from autopar.call_site import is_library
from autopar.distributed.barrier import meet
from autopar.distributed.collectives import all_gather
from autopar.tensor_parallel.chunked_loss import sharded_cross_entropy
from autopar.tensor_parallel.logits_shards import Change, Shards, after

__all__ = ["FACTS", "PATIENCE", "ShardedLogits", "sharded_logits"]

PATIENCE = 300.0
"""Seconds that a rank which reads logits waits for the others of its axis to read them too."""

# What the tensor itself answers, without logits.
FACTS = frozenset(
    (
        *("shape", "size", "dim", "ndim", "numel", "nelement", "stride", "is_contiguous", "names", "is_same_size"),
        *("__len__", "__hash__", "output_nr", "_version", "nbytes", "retains_grad"),
        *("dtype", "device", "layout", "get_device", "element_size", "itemsize", "is_floating_point", "is_complex"),
        *("requires_grad", "grad_fn", "is_leaf", "_backward_hooks", "_base", "is_inference", "is_meta"),
        *("is_cpu", "is_cuda", "is_mps", "is_xpu", "is_xla", "is_mkldnn", "is_sparse", "is_sparse_csr"),
        *("is_quantized", "is_nested"),
    )
)
# What makes another tensor of the same shape or type.
_LIKE = frozenset(
    (
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"),
    )
)
# What may share its memory with what it is made of: done again to the whole logits, if those are ever read.
_REPEATED = frozenset(("view", "reshape", "contiguous", "__getitem__", "detach"))
_COMMUTE = frozenset(("mul", "__mul__", "add", "__add__"))


class _Origin:
    """What the head made, and everything after it."""

    lost = False  # a loss was taken from the shards: no gradient of whole logits will exist


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


class ShardedLogits(torch.Tensor):
    """The whole logits ``[..., vocab]``, of which this rank has a shard; made by :func:`sharded_logits`.

    Raises:
        ConsistencyError: on reading, if other ranks of the axis do not read the same within :data:`PATIENCE`.
    """

    shards: Shards
    _origin: _Origin
    _family: _Family
    _source: Callable[[], ShardedLogits | None]  # what it was made of, if they may share memory and that still lives
    _step: Change
    _node: Any  # its place in the graph, as it was made
    _whole: torch.Tensor | None

    @staticmethod
    def __new__(cls, shards: Shards) -> ShardedLogits:
        """Make a tensor that has the shape of the whole logits and no memory; no graph, no family yet."""
        made: ShardedLogits = torch.Tensor._make_wrapper_subclass(
            cls, shards.shape, dtype=shards.dtype, device=shards.rows.device
        )
        made.shards, made._whole = shards, None
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self._family.is_whole:
            return repr(self._whole)
        axis, layout = self.shards.axis, self.shards.layout
        held = ", ".join(f"{start} to {stop - 1}" for start, stop in layout.ranges(axis.rank)) or "none"
        place = f"{axis.name} rank {axis.rank} of {axis.size}"
        return f"ShardedLogits({list(self.shards.shape)}, {self.shards.dtype}: {place} has columns {held})"

    def __format__(self, spec: str) -> str:
        return repr(self)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def whole(self) -> torch.Tensor:
        """Return the logits as a plain tensor, gathered. A collective of the axis the first time."""
        if self._whole is None:
            self._family.read()
        assert self._whole is not None
        return self._whole

    def materialize(self) -> None:
        """Make the plain tensor of these logits, from that of their source or by gathering."""
        source = self._source()
        if self._whole is not None:
            return
        if source is not None:
            source.materialize()
            assert source._whole is not None
            with torch.set_grad_enabled(self.requires_grad):
                self._whole = self._step(source._whole)
        else:
            _meet(self.shards)
            with torch.set_grad_enabled(self.requires_grad):
                self._whole = _Gather.apply(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer from the shards what can be, gather for everything else."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
        first = args[0] if args else None
        if isinstance(first, ShardedLogits) and not first._family.is_whole:
            if name in FACTS or (name == "register_hook" and first._origin.lost and _a_library_asks()):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if name in _LIKE:
                alike = torch.empty((), dtype=first.shards.dtype, device=first.shards.rows.device)
                return func(alike.expand(first.shards.shape), *args[1:], **kwargs)
        result = _from_shards(func, name, args, kwargs)
        if result is not None:
            return result
        listed = [x for x in tree_leaves((args, kwargs)) if isinstance(x, ShardedLogits)]
        if name in ("retain_grad", "register_hook", "grad") and any(x._origin.lost for x in listed):
            raise RuntimeError(
                f"{name} of logits: the loss was taken from sharded logits, so the whole ones get no gradient.\n"
                "  Gather them in every forward: loss: {gather_logits: always}"
            )
        plain = tree_map_only(ShardedLogits, lambda x: x.whole(), (args, kwargs))
        return func(*plain[0], **plain[1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Gather for what does not come through Python."""
        plain = tree_map_only(ShardedLogits, lambda x: x.whole().detach(), (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def sharded_logits(shards: Shards, source: ShardedLogits | None = None, step: Change | None = None) -> ShardedLogits:
    """Return the whole logits of which ``shards`` are this rank's, with gradients to what those are made of.

    Args:
        source: logits that they were made of, if not by the head.
        step: what made them, if they may share memory with ``source``.
    """
    if not torch.is_grad_enabled():
        shards = shards.detached()
    made: Any = _Wrap.apply(shards, *shards.inputs)
    made._origin = _Origin() if source is None else source._origin
    made._family, made._source, made._step = _Family(), lambda: None, step
    made._node = made.grad_fn
    if source is not None and step is not None:
        keeps = source.grad_fn is None or made.grad_fn is not None  # one without a graph must not keep that of another
        made._family, made._source = source._family, (lambda: source) if keeps else weakref.ref(source)
    made._family.members.append(weakref.ref(made))
    return made


def _from_shards(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operation gives if the shards are enough for it, else None."""
    if name == "cat":
        return _cat(*args, **kwargs)
    if name in _COMMUTE and len(args) == 2 and not isinstance(args[0], ShardedLogits):
        args = (args[1], args[0])
    logits = args[0] if args else kwargs.get("input") if name == "cross_entropy" else None
    if not isinstance(logits, ShardedLogits) or not _is_sharded(logits):
        return None
    if any(isinstance(x, ShardedLogits) for x in tree_leaves((args[1:], kwargs)) if x is not logits):
        return None
    if name == "cross_entropy":
        return _cross_entropy(*args, **kwargs)
    shards = after(name, logits.shards, args[1:], kwargs)
    if shards is None:
        return None
    if name in _REPEATED:
        copied = tree_map_only(torch.Tensor, torch.clone, (args[1:], kwargs))
        return sharded_logits(shards, logits, lambda whole: func(whole, *copied[0], **copied[1]))
    return logits if shards is logits.shards and name != "clone" else sharded_logits(shards, logits)


def _is_sharded(logits: ShardedLogits) -> bool:
    """Whether the shards still say what the logits are; not of what a function of C++ returned."""
    return not logits._family.is_whole and logits.grad_fn is logits._node


def _a_library_asks() -> bool:
    """Whether torch's own wrappers (FSDP) want to know when a gradient comes: they ask it of every output."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(("torch/_tensor.py", "torch/overrides.py")):
        frame = frame.f_back
    return is_library(frame)


def _cat(tensors: Any, dim: int = 0, **kwargs: Any) -> ShardedLogits | None:
    listed = list(tensors)
    if kwargs or not all(isinstance(x, ShardedLogits) and _is_sharded(x) for x in listed):
        return None
    parts = [x.shards.settled() for x in listed]
    first, dims = parts[0], len(parts[0].shape)
    same = all(x.axis is first.axis and x.layout == first.layout and len(x.shape) == dims for x in parts)
    if not same or dim % dims == dims - 1 or len({(x.dtype, x.rows.dtype) for x in parts}) > 1:
        return None
    return sharded_logits(replace(first, rows=torch.cat([x.rows for x in parts], dim)), listed[0])


def _cross_entropy(
    input: ShardedLogits,
    target: torch.Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """``F.cross_entropy`` with the classes in the last dim, ``[vocab]`` or ``[tokens, vocab]``."""
    shards = input.shards
    by_index = not target.is_floating_point() and target.shape == shards.shape[:-1]
    if len(shards.shape) > 2 or not by_index or any(x is not None for x in (weight, size_average, reduce)):
        return None
    loss = sharded_cross_entropy(shards, target, ignore_index, label_smoothing, reduction)
    input._origin.lost = True
    wide = not shards.rows.is_meta and torch.is_autocast_enabled(
        shards.rows.device.type
    )  # where torch computes losses in fp32
    return loss if wide else loss.to(shards.dtype)


def _meet(shards: Shards) -> None:
    """Raise unless all ranks of the axis are about to read the same."""
    what = f"logits {list(shards.shape)} of {shards.name}"
    meet(
        shards.axis,
        what,
        PATIENCE,
        "Whole logits are gathered when they are read, which takes every tensor-parallel rank: read them on all of\n"
        "  them (if rank == 0: around the print, not around the reading), or have them gathered in every forward:\n"
        "  loss: {gather_logits: always}",
    )


class _Wrap(torch.autograd.Function):
    """From what the shards are made of to the whole logits: their place in the graph."""

    @staticmethod
    def forward(ctx: Any, shards: Shards, *inputs: torch.Tensor) -> ShardedLogits:
        ctx.shards = shards
        ctx.save_for_backward(*inputs)
        return ShardedLogits(shards)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        shards: Shards = ctx.shards
        inputs = ctx.saved_tensors
        part = shards.layout.shard(grad, shards.axis.rank, -1)  # [..., vocab/tp]
        if shards.head is None:
            return None, part.to(inputs[0].dtype)
        held = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        with torch.enable_grad():
            local = shards.of_inputs(held).local()
        wanted = [x for x in held if x.requires_grad]
        found = iter(torch.autograd.grad(local, wanted, part.to(local.dtype)))
        return None, *(next(found) if x.requires_grad else None for x in held)


class _Gather(torch.autograd.Function):
    """From the whole logits to a plain tensor of the same values."""

    @staticmethod
    def forward(ctx: Any, logits: ShardedLogits) -> torch.Tensor:
        shards = logits.shards
        if shards.head is not None:
            shards.head.check()
        return all_gather(shards.local(), shards.axis, shards.layout, -1).to(shards.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad
