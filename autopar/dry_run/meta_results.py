"""Results of operators on meta tensors, computed once per operator and shapes.

Most meta kernels are Python and take up to a millisecond; the layers of a model ask for the same ones again and again.
"""

from __future__ import annotations

import functools
from typing import Any, Self

import torch

from autopar.foreign.tensors import ITEM, schema_of, tree_flatten
from autopar.tensor_tracking import TensorTracking

__all__ = ["ValuelessTracking", "on_meta"]

_LIMIT = 20_000  # entries; a model needs some hundreds

_Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype

_results: dict[Any, tuple[type | None, list[_Spec]]] = {}


def on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func``; with meta tensors once for each form of the arguments, then make tensors of the same form."""
    key = _key(func, args, kwargs) if _is_functional(func) else None
    if key is None:
        return func(*args, **kwargs)
    known = _results.get(key)
    if known is not None:
        kind, specs = known
        made = [torch.empty_strided(*form, dtype=dtype, device="meta") for *form, dtype in specs]
        return made[0] if kind is None else kind(made)
    out = func(*args, **kwargs)
    listed = [out] if isinstance(out, torch.Tensor) else list(out) if type(out) in (tuple, list) else []
    if listed and all(type(value) is torch.Tensor and value.is_meta for value in listed):
        if len(_results) >= _LIMIT:
            _results.clear()
        specs = [(tuple(value.shape), value.stride(), value.dtype) for value in listed]
        _results[key] = (None if isinstance(out, torch.Tensor) else type(out), specs)
    return out


@functools.cache
def _is_functional(func: Any) -> bool:
    """Return whether an operator neither writes to its arguments nor returns views of them."""
    schema = schema_of(func)
    return not any(value.alias_info for value in (*schema.arguments, *schema.returns))


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The key of the result's form; None if it could depend on something else."""
    leaves, structure = tree_flatten((args, kwargs))
    parts: list[Any] = [func, structure, torch.get_default_dtype()]
    some = False
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if not leaf.is_meta:
                return None
            some = True
            parts.append((tuple(leaf.shape), leaf.stride(), leaf.dtype))
        elif leaf is None or isinstance(
            leaf, bool | int | float | str | torch.dtype | torch.device | torch.layout | torch.memory_format
        ):
            parts.append((type(leaf), leaf))  # 1, 1.0 and True make other dtypes
        else:
            return None
    return tuple(parts) if some else None


class ValuelessTracking(TensorTracking):
    """Follow tensors without values: what asks for values is told something that leads on."""

    def __enter__(self) -> Self:
        self._autocast = torch.autocast.__init__
        changed: Any = functools.partialmethod(_autocast, self._autocast)
        torch.autocast.__init__ = changed  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.autocast.__init__ = self._autocast  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ITEM:  # "is anything padded?": take some branch
            return {torch.bool: True}.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 1)
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:  # "which experts?": one of them
            return args[0].new_empty((1, args[0].ndim), dtype=torch.long)
        if func is torch.ops.aten.index.Tensor and args[0].is_meta:
            args = (args[0], [place for index in args[1] for place in _places(index)], *args[2:])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return on_meta(func, args, kwargs)


def _autocast(self: Any, plain: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
    """Make a context of another device in the place of meta's, which torch does not have; adapters turn it off."""
    plain(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)


def _places(index: Any) -> list[Any]:
    """An index as positions: a mask selects one element."""
    if isinstance(index, torch.Tensor) and index.dtype == torch.bool:
        return [index.new_empty(1, dtype=torch.long) for _ in range(index.ndim)]
    return [index]
