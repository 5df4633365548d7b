"""Tensors of which a rank has a part, and which become whole when code reads them, and only then.

A subclass says what an operation makes of parts; before any other one the tensor becomes a plain, whole one. That may
be a collective, so the ranks of an axis meet first, and a rank that reads alone gets an error, not a hang.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.compat.tensors import no_overrides, tree_map_only

# What the tensor itself answers, without its elements.
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

    def parts(self) -> list[torch.Tensor]:
        """Return the tensors that this rank has of it; their gradients and origins are those of the whole."""
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
            if name in FACTS:
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


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return what this rank has of a tensor that is whole on reading, without reading it; of any other one itself."""
    if not isinstance(tensor, WholeOnRead):
        return [tensor]
    return [x for part in ([tensor.whole()] if tensor.is_whole else tensor.parts()) for x in parts_of(part)]


def name_of(func: Any) -> str:
    """Return the name of a function, or of the attribute that is asked for."""
    name = getattr(func, "__name__", "")
    return func.__self__.__name__ if name == "__get__" else name


def without_overrides(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch that no class is asked about."""
    with no_overrides():
        return func(*args, **kwargs)
