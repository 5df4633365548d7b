"""Memory and operations of code on the meta device: storages by number, how many bytes live, what operations cost."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from autopar.dry_run.meta_results import on_meta
from autopar.foreign.operators import GROUPED_MM, ITEM, operator_of, schema_of
from autopar.tensor_tracking import TensorTracking, storage_key, tensors_in

__all__ = ["Operation", "Storages"]

_GROUPED = ("_grouped_mm", "grouped_mm_fallback")


class Operation(NamedTuple):
    """One operation of a forward that is no view.

    Attributes:
        flops: of matrix products.
        moved: bytes read and written.
        attention: a fused attention, whose backward computes the scores again.
    """

    flops: int
    moved: int
    attention: bool = False


class Storages(TensorTracking):
    """A dispatch mode that numbers the storages of tensors, and adds up those that live.

    Attributes:
        count: of the storages that have a number; that of the last one.
        live, peak: bytes of the storages that live, and the most since :meth:`reset_peak`.
        operations: since :meth:`start_operations`; None: they are not noted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, int] = {}  # of storages that live
        self.count = 0
        self.live = self.peak = 0
        self.operations: list[Operation] | None = None

    def number(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage; one that lived before the mode gets one now, and is not counted."""
        return self._number(tensor, counted=False)

    def bytes(self, tensor: torch.Tensor) -> int:
        """Return the bytes of a tensor's whole storage."""
        return int(tensor.untyped_storage().nbytes())

    def reset_peak(self) -> int:
        """Let the peak begin again, at what lives now; returns that."""
        self.peak = self.live
        return self.live

    def start_operations(self) -> list[Operation]:
        """Note operations from now on, in the list that is returned."""
        self.operations = []
        return self.operations

    def add_operation(self, flops: int, moved: int, *, attention: bool = False) -> None:
        """Note an operation that torch does not see."""
        if self.operations is not None:
            self.operations.append(Operation(flops, moved, attention))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ITEM and args[0].is_meta:  # "is anything padded?": some branch
            return {torch.bool: True}.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 1)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is GROUPED_MM and args[0].is_meta and args[0].dtype != torch.bfloat16:
            halves = [x.to(torch.bfloat16) for x in args[:2]]  # without data torch knows it of bfloat16 only
            return on_meta(func, (*halves, *args[2:]), kwargs).to(args[0].dtype)
        return on_meta(func, args, kwargs)

    def track(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        made = list(tensors_in(result))
        given = list(tensors_in((args, kwargs)))
        known = {storage_key(tensor) for tensor in given}
        new = [tensor for tensor in made if storage_key(tensor) not in known]
        for tensor in new:
            self._number(tensor, counted=True)
        if self.operations is None or not (new or schema_of(func).is_mutable):
            return  # nobody asks, or a view
        moved = sum(tensor.numel() * tensor.element_size() for tensor in (*given, *(made if new else ())))
        self.operations.append(Operation(_flops(func, args, kwargs, result), moved))

    def _number(self, tensor: torch.Tensor, *, counted: bool) -> int:
        key = storage_key(tensor)
        if key is None:
            return -1
        number = self._numbers.get(key)
        if number is None:
            self.count += 1
            number = self._numbers[key] = self.count
            storage = tensor.untyped_storage()
            size = storage.nbytes() if counted and tensor.is_meta else 0
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._end, key, size).atexit = False
        return number

    def _end(self, key: int, size: int) -> None:
        self._numbers.pop(key, None)
        self.live -= size


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    packet = operator_of(func)
    if packet in flop_registry:
        try:
            return int(flop_registry[packet](*args, **kwargs, out_val=result))
        except (AssertionError, TypeError):  # a form that torch's formula does not know
            return 0
    if packet.__name__ in _GROUPED:  # each row meets the matrix of one expert
        return 2 * args[0].numel() * int(args[1].shape[-1])
    return 0
