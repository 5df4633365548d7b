"""Count the memory and operations of code on the meta device: storages, saved tensors, live bytes.

Each storage that autograd saves counts once, while its graph is alive. Attention and dropout save the same tensors as
fused GPU kernels. On the meta device torch decomposes both: attention into a softmax of ``[batch, heads, seq, seq]``,
and dropout into a product with a mask of the input's dtype. Flash attention saves q, k, v, its output and one logarithm
per row (Dao et al., "FlashAttention", 2022). Dropout saves a mask of one byte per element.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from autopar.compat.tensors import (
    GROUPED_MM,
    ITEM,
    local_part,
    next_sequence_number,
    operator_of,
    run_backward,
    schema_of,
)
from autopar.dry_run.operators import on_meta
from autopar.tensor_tracking import TensorTracking, storage_key, tensors_in

_GROUPED = ("_grouped_mm", "grouped_mm_fallback")
_WIDEST_HEAD = 256  # maximum of flash attention


class Operation(NamedTuple):
    """One operation that is not a view.

    Attributes:
        flops: The FLOPs of matmuls.
        moved: The bytes read and written.
        attention: A flag for fused attention, whose backward recomputes the scores.
        frozen: A flag for a matmul with a frozen weight.
    """

    flops: int
    moved: int
    attention: bool = False
    frozen: bool = False

    @property
    def in_all(self) -> int:
        """The FLOPs of forward and backward."""
        return self.flops * (2 if self.frozen else 3)


class Storages(TensorTracking):
    """A dispatch mode that numbers the storages of tensors, and counts the bytes of live storages.

    Args:
        frozen: The weights without gradients.
        quantized: The frozen weights of 8 bits or fewer, which are dequantized before each matmul.

    Attributes:
        live, peak: The bytes of live storages, now and at the maximum since :meth:`reset_peak`.
        operations: A list to which each operation is appended, or None.
        keep: A callback for the results of each operator, including fused attention.
    """

    keep: Callable[[Any, Sequence[torch.Tensor]], None] | None = None

    def __init__(self, frozen: Iterable[torch.Tensor] = (), quantized: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._frozen = {storage_key(weight) for weight in frozen}
        self._quantized = {storage_key(weight): weight.nbytes for weight in quantized}
        self.numbers: dict[int | None, int] = {}  # numbers of live storages, by key
        self._sizes: dict[int, int] = {}  # bytes of counted storages, by key
        self._next = itertools.count(1)
        self.live = self.peak = 0
        self.operations: list[Operation] | None = None

    def resized(self, tensor: torch.Tensor) -> None:
        """Update the size of a storage after FSDP2 has resized it to allocate or free gathered weights."""
        key = storage_key(tensor)
        if key in self._sizes:
            self._count(key, tensor.untyped_storage().nbytes() - self._sizes[key])

    def _count(self, key: int, more: int) -> None:
        self._sizes[key] = self._sizes.get(key, 0) + more
        self.live += more
        self.peak = max(self.peak, self.live)

    def reset_peak(self) -> int:
        """Reset the peak to the live bytes, and return the live bytes."""
        self.peak = self.live
        return self.live

    def add_operation(self, flops: int, moved: int, *, attention: bool = False) -> None:
        """Record an operation that torch does not dispatch."""
        if self.operations is not None:
            self.operations.append(Operation(flops, moved, attention))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ITEM and args[0].is_meta:  # a test for padding: both branches are valid
            return {torch.bool: True}.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 1)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is GROUPED_MM and args[0].is_meta and args[0].dtype != torch.bfloat16:
            halves = [x.to(torch.bfloat16) for x in args[:2]]  # on the meta device torch supports only bfloat16
            return on_meta(func, (*halves, *args[2:]), kwargs).to(args[0].dtype)
        return on_meta(func, args, kwargs)

    def track(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        made = [local_part(tensor) for tensor in tensors_in(result)]
        given = [local_part(tensor) for tensor in tensors_in((args, kwargs))]
        known = {storage_key(tensor) for tensor in given}
        new = [tensor for tensor in made if storage_key(tensor) not in known]
        for tensor in new:
            self.number(tensor, counted=True)
        if self.keep is not None:
            self.keep(func, made)
        if not (new or schema_of(func).is_mutable):
            return  # a view
        dequantized = sum(self._quantized.get(key, 0) for key in known) if self._quantized else 0
        self.peak = max(self.peak, self.live + dequantized)
        if self.operations is None:
            return
        if dequantized:
            self.operations.append(Operation(0, dequantized))
        moved = sum(tensor.nbytes for tensor in (*given, *(made if new else ())))
        frozen = not known.isdisjoint(self._frozen)
        self.operations.append(Operation(_flops(func, args, kwargs, result), moved, frozen=frozen))

    def number(self, tensor: torch.Tensor, *, counted: bool = False) -> int:
        """Return the number of a tensor's storage. If ``counted``, add a new storage to the live bytes."""
        key = storage_key(tensor)
        if key is None:
            return -1
        number = self.numbers.get(key)
        if number is None:
            number = self.numbers[key] = next(self._next)
            storage = tensor.untyped_storage()
            if counted and tensor.is_meta:
                self._count(key, storage.nbytes())
            weakref.finalize(storage, self._end, key).atexit = False
        return number

    def _end(self, key: int) -> None:
        self.numbers.pop(key, None)
        self.live -= self._sizes.pop(key, 0)


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    packet = operator_of(func)
    if packet in flop_registry:
        try:
            return int(flop_registry[packet](*args, **kwargs, out_val=result))
        except (AssertionError, TypeError):  # torch's formula does not support these arguments
            return 0
    if packet.__name__ in _GROUPED:  # each row is multiplied by the matrix of one expert
        return 2 * args[0].numel() * int(args[1].shape[-1])
    return 0


class _Saved:
    """A saved tensor. It is freed together with the last node that saved it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class SavedTensor(NamedTuple):
    """A tensor that a node of the autograd graph has saved.

    Attributes:
        number, bytes: The number and size of its storage.
        node: The sequence number of the node.
    """

    saved: weakref.ref[_Saved]
    number: int
    bytes: int
    node: int


class SavedStorages:
    """Hooks for :class:`torch.autograd.graph.saved_tensors_hooks` that record saved tensors, except weights.

    Attributes:
        entries: The saved tensors.
        last: The last node that saved a tensor, and the number of operations recorded before it.
    """

    def __init__(self, storages: Storages, weights: Iterable[torch.Tensor]) -> None:
        self.last = (-1, 0)
        self.entries: list[SavedTensor] = []
        self._storages = storages
        self._weights = {storage_key(tensor) for tensor in weights}
        self._entered: dict[int, int] = {}  # a copy of an argument -> the argument

    def pack(self, tensor: torch.Tensor) -> Any:
        """Record a saved tensor."""
        node = next_sequence_number() - 1  # of the latest node
        self.last = node, len(self._storages.operations or ())
        if not self._counts(tensor):
            return tensor
        saved = _Saved(tensor)
        size = tensor.untyped_storage().nbytes()
        self.entries.append(SavedTensor(weakref.ref(saved), self.number(tensor), size, node))
        return saved

    @staticmethod
    def unpack(saved: Any) -> torch.Tensor:
        """Return the saved tensor."""
        return saved.tensor if isinstance(saved, _Saved) else saved

    def enter(self, inside: torch.Tensor, argument: torch.Tensor) -> None:
        """Count a copy of an argument as the argument."""
        self._entered[self._storages.number(inside)] = self.number(argument)

    def number(self, tensor: torch.Tensor) -> int:
        """Return the number of a storage. A copy has the number of its argument."""
        number = self._storages.number(tensor)
        return self._entered.get(number, number)

    def _counts(self, tensor: torch.Tensor) -> bool:
        return tensor.is_meta and storage_key(tensor) not in self._weights

    def numbered(self, tensors: Iterable[torch.Tensor]) -> dict[int, int]:
        """Return number -> bytes of the tensors' storages, except weights."""
        return {self.number(x): x.untyped_storage().nbytes() for x in filter(self._counts, tensors)}


def alive(entries: Iterable[SavedTensor], freed: Collection[int] = ()) -> dict[int, int]:
    """Return number -> bytes of the storages that nodes still save, excluding ``freed`` nodes."""
    waiting = (entry for entry in entries if entry.saved() is not None and entry.node not in freed)
    return {entry.number: entry.bytes for entry in waiting}


class FusedKernels(TorchFunctionMode):
    """A function mode that replaces attention and dropout by fused kernels, and records their operations."""

    def __init__(self, storages: Storages) -> None:
        super().__init__()
        self._storages = storages

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(func, *args, **kwargs)
        if func in (F.dropout, torch.dropout):
            return self._dropout(*args, **kwargs)
        if func in (torch.Tensor.backward, torch.autograd.backward):  # which may recompute blocks
            gradients = kwargs.get("gradient", kwargs.get("grad_tensors"))
            flags = (kwargs.get(name) for name in ("retain_graph", "create_graph", "inputs"))
            with self:
                return run_backward(args[0], gradients, *flags)
        return func(*args, **kwargs)

    def _attention(
        self,
        func: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if query.ndim != 4 or not query.is_meta or max(query.shape[-1], value.shape[-1]) > _WIDEST_HEAD:
            return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)  # added to the scores
        batch, heads, rows, width = query.shape
        flops = 2 * batch * heads * rows * key.shape[-2] * (width + value.shape[-1])
        moved = sum(x.nbytes for x in (query, query, key, value, attn_mask) if x is not None)
        flops //= 2 if is_causal else 1
        self._storages.add_operation(flops, moved, attention=True)
        logarithms = query.new_empty(batch, heads, rows, dtype=torch.float32)
        back = partial(self._storages.add_operation, flops * 5 // 2, 2 * moved)  # five products instead of two
        out: torch.Tensor = _Attention.apply(query, key, value, attn_mask, logarithms, back)
        if self._storages.keep is not None and not dropout_p:  # with dropout it is recomputed
            self._storages.keep(func, [out, logarithms])
        return out

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0.0:
            return input
        return torch.ops.aten.native_dropout(input, p, True)[0]


class _Attention(torch.autograd.Function):
    """Attention ``[batch, heads, seq, width] -> [batch, heads, seq, width of values]`` in flash attention's layout."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        logarithms: torch.Tensor,
        count_backward: Callable[[], None],
    ) -> torch.Tensor:
        batch, heads, rows, _ = query.shape
        if query.shape[-1] == value.shape[-1]:
            out = torch.empty_like(query)  # in the query's order of dims
        else:
            out = query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, mask, out, logarithms)
        ctx.count_backward = count_backward
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, mask, *_ = ctx.saved_tensors
        ctx.count_backward()
        gradients = [torch.empty_like(x) for x in (query, key, value)]
        of_mask = torch.empty_like(mask) if mask is not None and ctx.needs_input_grad[3] else None
        return (*gradients, of_mask, None, None)
