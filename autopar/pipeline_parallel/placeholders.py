"""Placeholders: what stands in a module for a weight that another pipeline stage holds. Shape and dtype, no memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from autopar.errors import UnsupportedModelError
from autopar.foreign.tensors import no_overrides
from autopar.tensor_tracking import storage_key

__all__ = ["Placeholder", "make_placeholder", "scalar_placeholder"]

_NAMES = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_OPERATORS = frozenset(f"__i{name}__" for name in _NAMES)


class Placeholder(torch.Tensor):
    """A tensor of one number, expanded; views of it are placeholders, too, and what is computed from it is none.

    Code in front of the blocks runs on all stages. What it writes in place into weights (rescales them for inference,
    say) the stage that holds them writes as well, so a write into a placeholder is left out.

    Attributes:
        weight_name: its name.
        in_front: whether the code that runs now is in front of the blocks; None outside of a stage's forward.
    """

    weight_name: str
    in_front: Callable[[], bool | None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Leave out what would be written into a placeholder.

        Raises:
            UnsupportedModelError: the code behind a block writes, which the stage that holds the weight does not run.
        """
        first = args[0] if args else None
        if isinstance(first, Placeholder) and _writes(func) and first._is_left_out():
            return None if func is torch.Tensor.__setitem__ else first
        with no_overrides():
            result = func(*args, **(kwargs or {}))
            if type(result) is torch.Tensor and isinstance(first, Placeholder):
                key = storage_key(result)
                if key is not None and key == storage_key(first):
                    return _like(result, first)
        return result

    def _is_left_out(self) -> bool:
        """Check whether a write into it is left out. Outside of a stage's forward it is not: torch raises."""
        in_front = self.in_front()
        if in_front is False:
            raise UnsupportedModelError(
                "this model cannot be split into pipeline stages here: its code behind the first block writes in place "
                f"into {self.weight_name}, which another stage holds.\n  Use pipeline_parallel_size=1."
            )
        return bool(in_front)

    def __deepcopy__(self, memo: Any) -> Placeholder:
        """Copy it, without memory."""
        return _like(copy.deepcopy(self.as_subclass(torch.Tensor), memo), self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as a plain tensor."""
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def make_placeholder(parameter: torch.Tensor, name: str, device: torch.device) -> Placeholder:
    """Return what stands for a weight: of its shape and dtype, not a number."""
    placeholder = scalar_placeholder(parameter.dtype, device).expand(parameter.shape).as_subclass(Placeholder)
    placeholder.weight_name, placeholder.in_front = name, _nowhere
    return placeholder


def scalar_placeholder(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return one element that is not a number; 0 as an integer."""
    value = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device)


def _nowhere() -> None:
    return None


def _like(tensor: torch.Tensor, placeholder: Placeholder) -> Placeholder:
    made = tensor.as_subclass(Placeholder)
    made.weight_name, made.in_front = placeholder.weight_name, placeholder.in_front
    return made


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name.endswith("__"):
        return func is torch.Tensor.__setitem__ or name in _OPERATORS
    return bool(name.endswith("_")) and name not in ("requires_grad_", "detach_", "rename_")
