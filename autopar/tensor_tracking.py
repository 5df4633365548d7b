"""Follow tensors through operations: the base of the dispatch modes. And tensors that are gathered when read."""

from __future__ import annotations

from collections.abc import Iterator
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
)

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of values that are known by themselves: no tensor is in them."""


class TensorTracking(TorchDispatchMode):
    """A dispatch mode that looks at every operation, and keeps no tensor that one returned, or copies.

    Attributes:
        answer: Function that carries out collectives instead of their backends, in a rehearsal; else None.
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
        """Note what ``func`` made of its arguments."""
        raise NotImplementedError

    def as_one(self, kind: str, group: Any) -> AbstractContextManager[None]:
        """Note one collective of that kind over a group, and none of the operations inside."""
        return nullcontext()


@contextmanager
def as_one(kind: str, group: Any) -> Iterator[Any]:
    """Let modes note the communication inside as one collective: it takes messages, or goes through a store.

    Yields:
        The ``answer`` of a mode that carries out collectives; None outside of a rehearsal.
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
    elif type(value) in (tuple, list):  # of an operation; torch takes ten times as long
        for each in value:
            yield from tensors_in(each)
    elif type(value) is dict:
        yield from tensors_in([*value.values()])
    elif not isinstance(value, PLAIN):
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def parts_of(tensor: Any) -> list[torch.Tensor]:
    """Return the tensors that one without memory is made of, as its method ``made_of`` says; another tensor itself."""
    made_of = getattr(type(tensor), "made_of", None)
    return [tensor] if made_of is None else [x for part in made_of(tensor) for x in parts_of(part)]


def storage_key(tensor: torch.Tensor) -> int | None:
    """Return a number that views of a tensor have in common while one lives; None without a storage (sparse)."""
    try:
        return storage_id(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None


def written_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the arguments that an operation writes into, by its schema."""
    if not schema_of(func).is_mutable:
        return []
    return [
        tensor
        for place, argument in enumerate(schema_of(func).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))
    ]


# -- tensors that are gathered when they are read ---------------------------------------------------------------------
# A subclass says what an operation makes of parts; before any other operation the tensor becomes a plain, full one.

# Answered by the tensor itself, without its elements.
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


class LazyGatherTensor(torch.Tensor):
    """A tensor that has the full shape and no memory."""

    @property
    def is_full(self) -> bool:
        """Whether code has read it."""
        raise NotImplementedError

    def full(self) -> torch.Tensor:
        """Return the plain tensor; always the same one. Gradients go through it, whoever reads it first."""
        raise NotImplementedError

    def held(self) -> str:
        """Return what this rank has of it, for a print."""
        raise NotImplementedError

    def made_of(self) -> list[torch.Tensor]:
        """Return the tensors to follow in its place (:func:`autopar.tensor_tracking.parts_of`), without gathering."""
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
        """Return what an operation gives if the parts are enough for it, else None."""
        return None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer from parts what can be, read for everything else."""
        kwargs, name = kwargs or {}, name_of(func)
        first = args[0] if args else None
        if isinstance(first, LazyGatherTensor) and not first.is_full:
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
        args, kwargs = tree_map_only(LazyGatherTensor, lambda x: x.full(), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Read for what does not come through Python."""
        args, kwargs = tree_map_only(LazyGatherTensor, lambda x: x.full().detach(), (args, kwargs or {}))
        return func(*args, **kwargs)


def name_of(func: Any) -> str:
    """Return the name of a function, or of the attribute that is asked for."""
    name = getattr(func, "__name__", "")
    return func.__self__.__name__ if name == "__get__" else name


def without_overrides(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch that no class is asked about."""
    with no_overrides():
        return func(*args, **kwargs)
