"""The base of dispatch modes that follow tensors through operations, and of tensors that are gathered lazily."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from autopar.compat.tensors import (
    TorchDispatchMode,
    dispatch_modes,
    no_overrides,
    schema_of,
    storage_id,
    tree_leaves,
    tree_map_only,
    tree_map_with_path,
)

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of values that contain no tensor."""


class TensorTracking(TorchDispatchMode):
    """A dispatch mode that observes every operation, without keeping or copying tensors.

    Attributes:
        answer: The function that runs collectives in a rehearsal instead of their backends; otherwise None.
    """

    answer: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self.run(func, args, kwargs)
        self.track(func, args, kwargs, result)
        return result

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation."""
        return func(*args, **kwargs)

    def track(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record the result of ``func``."""
        raise NotImplementedError

    def as_one(self, kind: str, group: Any) -> AbstractContextManager[None]:
        """Record one collective of this kind over a group instead of the operations in the block."""
        return nullcontext()


@contextmanager
def as_one(kind: str, group: Any) -> Iterator[Any]:
    """Make modes record the communication in the block (messages, or a store) as one collective.

    Yields:
        The ``answer`` of a mode that runs collectives; None outside of a rehearsal.
    """
    with ExitStack() as stack:
        modes = [mode for mode in dispatch_modes() if isinstance(mode, TensorTracking)]
        for mode in modes:
            stack.enter_context(mode.as_one(kind, group))
        yield next((mode.answer for mode in modes if mode.answer is not None), None)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors in a nested value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (tuple, list):  # the results of operations; torch's tree functions are ten times slower
        for each in value:
            yield from tensors_in(each)
    elif type(value) is dict:
        yield from tensors_in([*value.values()])
    elif not isinstance(value, PLAIN):
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def map_tensors(change: Callable[[Any, torch.Tensor], Any], value: Any) -> Any:
    """Return a nested value with each tensor replaced by ``change(path, tensor)``."""
    return tree_map_with_path(lambda path, x: change(path, x) if isinstance(x, torch.Tensor) else x, value)


def parts_of(tensor: Any) -> list[torch.Tensor]:
    """Return ``tensor.made_of()`` for a tensor without memory, otherwise the tensor itself."""
    made_of = getattr(type(tensor), "made_of", None)
    return [tensor] if made_of is None else [x for part in made_of(tensor) for x in parts_of(part)]


def storage_key(tensor: torch.Tensor) -> int | None:
    """Return a number that is shared by the views of a tensor while one exists; None without a storage (sparse)."""
    try:
        return storage_id(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None


def written_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the arguments that an operation mutates, by its schema."""
    if not schema_of(func).is_mutable:
        return []
    return [
        tensor
        for place, argument in enumerate(schema_of(func).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))
    ]


# -- tensors that are gathered lazily ---------------------------------------------------------------------------------
# A subclass defines the operations that work on its parts; any other operation first gathers the full tensor.

# Attributes and methods that need no elements.
_FACTS = {
    *("shape", "size", "dim", "ndim", "numel", "nelement", "stride", "is_contiguous", "names", "is_same_size"),
    *("__len__", "__hash__", "output_nr", "_version", "nbytes", "retains_grad"),
    *("dtype", "device", "layout", "get_device", "element_size", "itemsize", "is_floating_point", "is_complex"),
    *("requires_grad", "grad_fn", "is_leaf", "_backward_hooks", "_base", "is_inference", "is_meta"),
    *("is_cpu", "is_cuda", "is_mps", "is_xpu", "is_xla", "is_mkldnn", "is_sparse", "is_sparse_csr"),
    *("is_quantized", "is_nested"),
}
# Functions that make another tensor of the same shape or type.
LIKE = {
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_empty", "new_empty_strided", "new_full", "new_tensor"),
}


class LazyGatherTensor(torch.Tensor):
    """A tensor that has the full shape and no memory."""

    @property
    def is_full(self) -> bool:
        """Whether code has read the tensor, so that it is gathered."""
        raise NotImplementedError

    def full(self) -> torch.Tensor:
        """Return the gathered tensor, always the same object, so that all gradients go through it."""
        raise NotImplementedError

    def held(self) -> str:
        """Return a text about the parts on this rank, for ``repr``."""
        raise NotImplementedError

    def made_of(self) -> list[torch.Tensor]:
        """Return the tensors to follow instead, without gathering (:func:`autopar.tensor_tracking.parts_of`)."""
        raise NotImplementedError

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self.is_full:
            return repr(self.full())
        with no_overrides():
            return f"{type(self).__name__}({list(self.shape)}, {self.dtype}: {self.held()})"

    def __format__(self, spec: str) -> str:
        return repr(self)

    @classmethod
    def from_parts(cls, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation if the parts suffice, otherwise None."""
        return None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Use the parts if possible, otherwise gather the tensor."""
        kwargs, name = kwargs or {}, name_of(func)
        first = args[0] if args else None
        if isinstance(first, LazyGatherTensor) and not first.is_full:
            if name in _FACTS:
                with no_overrides():
                    return func(*args, **kwargs)
            if name in LIKE:
                with no_overrides():
                    alike = torch.empty((), dtype=first.dtype, device=first.device).expand(first.shape)
                return func(alike, *args[1:], **kwargs)
        result = cls.from_parts(func, name, args, kwargs)
        if result is not None:
            return result
        args, kwargs = tree_map_only(LazyGatherTensor, lambda x: x.full(), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Gather the tensor for operations that do not come through Python."""
        args, kwargs = tree_map_only(LazyGatherTensor, lambda x: x.full().detach(), (args, kwargs or {}))
        return func(*args, **kwargs)


def name_of(func: Any) -> str:
    """Return the name of a function, or of the attribute of a getter."""
    name = getattr(func, "__name__", "")
    return func.__self__.__name__ if name == "__get__" else name


def without_overrides(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch without ``__torch_function__`` of any class."""
    with no_overrides():
        return func(*args, **kwargs)
