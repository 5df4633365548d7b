"""Following tensors through a forward: which are whole, which live in the sharded region, which carry a gradient.

Every tensor is of one kind:

* *constant*: made from nothing, or from other constants,
* *input*: made from the model's inputs alone (masks, positions, pixels): nothing flows back through it,
* *parameter*: made from whole parameters and inputs, with the names of those parameters,
* *whole*: an activation, the same on all ranks, with a whole gradient,
* *shared*: an activation inside the region: this rank's part, or at least with this rank's part of the gradient.

What a shared tensor meets becomes shared. A whole parameter it meets has a partial gradient, which somebody must sum; a
whole activation it meets has one too, and nobody ever sums that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.tensor_parallel.meta_results import on_meta

__all__ = ["Follow"]


class _Kind(NamedTuple):
    name: str  # input, parameter, whole, shared
    origins: frozenset[str] = frozenset()


_INPUT, _WHOLE, _SHARED = _Kind("input"), _Kind("whole"), _Kind("shared")


class Follow(TorchDispatchMode):
    """A dispatch mode that gives each tensor its kind.

    Args:
        mixed: called when a whole activation that carries a gradient meets a shared one.

    Attributes:
        inside: whole parameters that met shared tensors.
        summed_inside, summed_outside: parameters whose gradient is summed, by what they met.
    """

    def __init__(self, mixed: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._kinds = WeakTensorKeyDictionary()
        self._names: dict[int, str] = {}
        self._mixed = mixed
        self.inside: set[str] = set()
        self.summed_inside: set[str] = set()
        self.summed_outside: set[str] = set()

    def parameter(self, name: str, parameter: torch.Tensor) -> None:
        """A whole parameter."""
        self._kinds[parameter] = _Kind("parameter", frozenset([name]))
        self._names[id(parameter)] = name

    def inputs(self, values: Any) -> None:
        """The model's inputs."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor):
                self._kinds[leaf] = _INPUT

    def shared(self, value: Any) -> bool:
        """Whether a tensor lives in the region."""
        return isinstance(value, torch.Tensor) and self._kinds.get(value) == _SHARED

    def carries_gradient(self, value: Any) -> bool:
        """Whether a tensor is a whole activation through which a gradient flows."""
        kind = self._kinds.get(value) if isinstance(value, torch.Tensor) else None
        return kind is not None and kind.name in ("whole", "parameter")

    def mark(self, value: Any, shared: bool) -> None:
        """Say of every tensor in ``value`` what it is now."""
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                self._kinds[leaf] = _SHARED if shared else _WHOLE

    def mark_shared(self, x: torch.Tensor) -> torch.Tensor:
        self.mark(x, True)
        return x

    def mark_whole(self, x: torch.Tensor) -> torch.Tensor:
        self.mark(x, False)
        return x

    def alias(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` as another tensor that is in the region."""
        return self.mark_shared(torch.empty_like(x))

    def summed(self, x: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter as another tensor whose gradient is summed."""
        used = torch.empty_like(x)
        name = self._names.get(id(parameter))
        if name is not None:
            self._kinds[used] = _Kind("parameter", frozenset(["+" + name]))
        return used

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:  # "is anything padded?": some branch has to be taken
            return {torch.bool: True}.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 1)
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:  # "which experts?": one of them
            return args[0].new_empty((1, args[0].ndim), dtype=torch.long)
        if func is torch.ops.aten.index.Tensor and args[0].is_meta:
            args = (args[0], [place for index in args[1] for place in _places(index)], *args[2:])
        out = on_meta(func, args, kwargs or {})
        kinds = [
            kind
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor) and (kind := self._kinds.get(leaf)) is not None
        ]
        if kinds and func not in _SHAPE_ONLY:
            kind = self._combine(kinds)
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self._give(leaf, kind)
        return out

    def _combine(self, kinds: list[_Kind]) -> _Kind:
        origins = frozenset().union(*(kind.origins for kind in kinds))
        names = {kind.name for kind in kinds}
        summed = {name[1:] for name in origins if name.startswith("+")}
        if "shared" in names:
            self.inside |= {name for name in origins if not name.startswith("+")}
            self.summed_inside |= summed
            if "whole" in names:
                self._mixed()
            return _SHARED
        if "whole" in names:
            self.summed_outside |= summed
            return _WHOLE
        return _Kind("parameter", origins) if "parameter" in names else _INPUT

    def _give(self, tensor: torch.Tensor, kind: _Kind) -> None:
        if kind.name in ("whole", "parameter") and not tensor.is_floating_point():
            kind = _INPUT
        self._kinds[tensor] = kind
        base = tensor._base
        if base is not None and kind == _SHARED and self._kinds.get(base) is None:
            self._kinds[base] = kind  # a slice of a fresh tensor was written to


def _places(index: Any) -> list[Any]:
    """An index as places: a mask picks one."""
    if isinstance(index, torch.Tensor) and index.dtype == torch.bool:
        return [index.new_empty(1, dtype=torch.long) for _ in range(index.ndim)]
    return [index]


_SHAPE_ONLY = {  # the result has nothing of the argument's values
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.new_ones.default,
    torch.ops.aten.new_full.default,
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.ones_like.default,
    torch.ops.aten.full_like.default,
}
