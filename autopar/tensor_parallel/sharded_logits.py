"""Logits whose vocabulary is sharded, and which are whole for whoever reads them: gathered then, and only then.

A language model's head makes ``[..., vocab/tp]`` on each rank. Most training steps take a cross entropy of it, which
:mod:`~autopar.tensor_parallel.loss` computes from the shards, and read nothing else; gathering ``[..., vocab]`` would
move more bytes than all blocks together. :class:`ShardedLogits` is the tensor ``[..., vocab]`` that the model's own
code passes on. What a loss does to logits on the way (:func:`~autopar.tensor_parallel.logits_shards.after`) and
``F.cross_entropy`` itself are done to the shards; any other operation gathers them and goes on with a plain tensor, in
the same autograd graph. So ``outputs.logits`` is what users know, by attribute, index or tuple.

Gathering is a collective, so the ranks of the axis meet first: a rank that reads alone gets an error, not a hang.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from autopar.distributed.barrier import meet
from autopar.distributed.collectives import all_gather
from autopar.errors import ConsistencyError
from autopar.tensor_parallel.chunked_loss import sharded_cross_entropy
from autopar.tensor_parallel.logits_shards import Shards, after

__all__ = ["PATIENCE", "ShardedLogits", "sharded_logits"]

PATIENCE = 60.0
"""Seconds that a rank which reads logits waits for the others of its axis to read them too."""

# What the tensor itself answers, without logits.
_FACTS = frozenset(
    (
        *(
            "shape",
            "size",
            "dim",
            "ndim",
            "numel",
            "nelement",
            "stride",
            "is_contiguous",
            "names",
            "__len__",
            "__hash__",
        ),
        *("dtype", "device", "layout", "get_device", "element_size", "itemsize", "is_floating_point", "is_complex"),
        *("requires_grad", "grad_fn", "is_leaf", "register_hook", "_backward_hooks", "is_inference", "is_meta"),
        *("is_cpu", "is_cuda", "is_mps", "is_xpu", "is_xla", "is_mkldnn", "is_sparse", "is_sparse_csr"),
        *("is_quantized", "is_nested", "is_same_size"),
    )
)
_COMMUTE = frozenset(("mul", "__mul__", "add", "__add__"))
_VIEWS = frozenset(("view", "reshape", "__getitem__", "detach", "float", "double", "to"))


class _Family:
    """Logits and their views: changing one in place changes all."""

    def __init__(self) -> None:
        self.whole: torch.Tensor | None = None  # of the first of them, once one was changed in place
        self.lost = False  # a loss was taken from the shards: no gradient of whole logits will exist


class ShardedLogits(torch.Tensor):
    """The whole logits ``[..., vocab]``, of which this rank has a shard; made by :func:`sharded_logits`.

    Raises:
        ConsistencyError: on reading, if other ranks of the axis do not read the same within :data:`PATIENCE`.
    """

    shards: Shards
    _family: _Family
    _path: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...]  # operations from the first of the family to this
    _first: ShardedLogits | None  # of the family; None: this one
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
        axis, layout = self.shards.axis, self.shards.layout
        held = ", ".join(f"{start} to {stop - 1}" for start, stop in layout.ranges(axis.rank)) or "none"
        place = f"{axis.name} rank {axis.rank} of {axis.size}"
        return f"ShardedLogits({list(self.shards.shape)}, {self.shards.dtype}: {place} has columns {held})"

    def whole(self) -> torch.Tensor:
        """Return the logits as a plain tensor, gathered. A collective of the axis the first time."""
        family = self._family
        if family.whole is not None:
            tensor = family.whole
            for operation, args, kwargs in self._path:
                tensor = operation(tensor, *args, **kwargs)
            return tensor
        if self._whole is None:
            _meet(self.shards)
            with torch.set_grad_enabled(self.requires_grad):
                self._whole = _Gather.apply(self)
        return self._whole

    def changed_in_place(self) -> torch.Tensor:
        """Return a plain tensor that shares its memory with those of all views. A collective the first time."""
        if self._family.whole is None:
            self._family.whole = (self if self._first is None else self._first).whole()
        return self.whole()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer from the shards what can be, gather for everything else."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
        elif name == "__set__":
            name = "set_"  # changes it
        if name in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        result = _from_shards(func, name, args, kwargs)
        if result is not None:
            return result
        if name == "retain_grad" and isinstance(first, ShardedLogits) and first._family.lost:
            raise RuntimeError(
                "retain_grad(): the loss was taken from sharded logits, so the whole ones get no gradient.\n"
                "  Gather them in every forward: loss: {gather_logits: always}"
            )
        target = kwargs.get("out")
        if target is None and _is_in_place(name):
            target = first
        plain = tree_map_only(
            ShardedLogits, lambda x: x.changed_in_place() if x is target else x.whole(), (args, kwargs)
        )
        return func(*plain[0], **plain[1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Gather for what does not come through Python."""
        plain = tree_map_only(ShardedLogits, _data, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def sharded_logits(shards: Shards, of: ShardedLogits | None = None, step: Any = None) -> ShardedLogits:
    """Return the whole logits of which ``shards`` are this rank's, with gradients to what those are made of.

    Args:
        of: logits that they share memory with, made by the operation ``step``: function, arguments, keyword arguments.
    """
    made: Any = _Wrap.apply(shards, *shards.inputs)
    made._node = made.grad_fn
    if of is None:
        made._family, made._first, made._path = _Family(), None, ()
    else:
        first = of if of._first is None else of._first
        made._family, made._first, made._path = of._family, first, (*of._path, step)
    return made


def _from_shards(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operation gives if the shards are enough for it, else None."""
    if name == "cat":
        return _cat(*args, **kwargs)
    if name in _COMMUTE and len(args) == 2 and not isinstance(args[0], ShardedLogits):
        args = (args[1], args[0])
    logits = args[0] if args else kwargs.get("input") if name == "cross_entropy" else None
    if not isinstance(logits, ShardedLogits) or logits._family.whole is not None:
        return None
    if logits.grad_fn is not logits._node:  # a function's output: its gradient takes another way than the shards'
        return None
    if any(isinstance(x, ShardedLogits) for x in tree_leaves((args[1:], kwargs)) if x is not logits):
        return None
    if name == "cross_entropy":
        return _cross_entropy(*args, **kwargs)
    if name == "contiguous":
        return logits
    shards = after(name, logits.shards, args[1:], kwargs)
    if shards is None:
        return None
    if shards is logits.shards and name != "clone":
        return logits
    if name in _VIEWS:
        return sharded_logits(shards, logits, (func, args[1:], kwargs))
    return sharded_logits(shards)


def _cat(tensors: Any, dim: int = 0, **kwargs: Any) -> ShardedLogits | None:
    listed = list(tensors)
    if kwargs or not all(
        isinstance(x, ShardedLogits) and x._family.whole is None and x.grad_fn is x._node for x in listed
    ):
        return None
    parts = [x.shards.settled() for x in listed]
    dims = len(parts[0].shape)
    if dim % dims == dims - 1 or len({(len(x.shape), x.layout.size, x.dtype, x.rows.dtype) for x in parts}) > 1:
        return None
    rows = torch.cat([x.rows for x in parts], dim)
    first = parts[0]
    return sharded_logits(Shards(rows, first.axis, first.layout, first.dtype, first.number))


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
    input._family.lost = True
    return loss.to(shards.dtype)


def _is_in_place(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
    return name.endswith("_")


def _data(logits: ShardedLogits) -> torch.Tensor:
    if logits._family.whole is not None:
        raise ConsistencyError(
            "logits that were changed in place are read by a function outside of Python: give it what the operation "
            "that changed them returned"
        )
    return logits.whole().detach()


def _meet(shards: Shards) -> None:
    """Raise unless all ranks of the axis are about to read the same."""
    what = f"logits {list(shards.shape)} of forward {shards.number}"
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
        return all_gather(shards.local(), shards.axis, shards.layout, -1).to(shards.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad
