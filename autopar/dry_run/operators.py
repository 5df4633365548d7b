"""Operators of a run without data: sets of names by their effect on elements, and a cache of results.

Most meta kernels are written in Python, take up to a millisecond and repeat in each layer. So each result on meta
tensors is computed once per operator and shapes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Self

import torch

from autopar.compat.tensors import ITEM, schema_of
from autopar.tensor_tracking import PLAIN, TensorTracking, storage_key, tensors_in

CONSTANT = frozenset(("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"))
"""The result has the shape of the argument, and one value everywhere."""

EMPTY = frozenset(("new_empty", "new_empty_strided", "empty_like"))
"""The result has the shape of the argument, and uninitialized values."""

SIZES = frozenset(("sym_size", "sym_stride", "sym_numel"))
"""The result is a size of the argument."""

ALONG = frozenset({
    *("_softmax", "_log_softmax", "softmax", "log_softmax", "_safe_softmax"),
    *("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"),
    *("sort", "argsort", "topk", "kthvalue", "mode", "median"),
})  # fmt: skip
"""An element of the result depends on several elements along ``dim``."""

REDUCTIONS = frozenset({
    *("sum", "mean", "prod", "amax", "amin", "var", "std", "any", "all", "norm", "linalg_vector_norm", "max", "min"),
    *("argmax", "argmin", "logsumexp", "var_mean"),
})  # fmt: skip
NORMS = frozenset(("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm"))


def name_of(func: Any) -> str:
    """Return the name of an operator without its overload."""
    return str(schema_of(func).name).split("::")[-1]


def arguments_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation by name, with their defaults."""
    named = {a.name: a.default_value for a in schema_of(func).arguments if a.has_default_value()}
    named.update(zip((a.name for a in schema_of(func).arguments), args, strict=False))
    return {**named, **kwargs}


def dims_of(x: torch.Tensor, given: dict[str, Any]) -> list[int]:
    """Return the dims of ``x`` along which an operation with these arguments works; all dims if it names none."""
    if "normalized_shape" in given:
        return [-1 - dim for dim in range(len(given["normalized_shape"]))]
    named = next((given[name] for name in ("dim", "dims") if given.get(name) not in (None, [])), None)
    return list(range(x.ndim)) if named is None else [named] if isinstance(named, int) else list(named)


def reduced_dims(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int] | None:
    """Return the dims of the first argument that an operator reduces or compares over, or None."""
    name = name_of(func)
    if name == "native_group_norm":
        return list(range(1, args[0].ndim))
    return dims_of(args[0], arguments_of(func, args, kwargs)) if name in REDUCTIONS | NORMS | ALONG else None


_LIMIT = 5_000  # cached forms per operator; a model needs a few dozen

Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides, dtype."""


def form_of(tensor: torch.Tensor) -> Form:
    """Return the form of a tensor on the meta device."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def tensor_of(form: Form) -> torch.Tensor:
    """Return a tensor of this form on the meta device."""
    shape, strides, dtype = form
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


_Made = tuple[type | None, list[Form]]  # None for a tensor, else the type of the sequence

_results: dict[Any, dict[Any, _Made] | None] = {}  # results of each operator; None if it writes or returns views


def on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func``; on meta tensors only once per form of the arguments, then return tensors of the same forms."""
    if func not in _results:
        schema = schema_of(func)
        shares = any(value.alias_info is not None for value in (*schema.arguments, *schema.returns))
        _results[func] = None if shares else {}
    known = _results[func]
    key = None if known is None else _key(args, kwargs)
    if known is None or key is None:
        return func(*args, **kwargs)
    if key in known:
        kind, forms = known[key]
        return tensor_of(forms[0]) if kind is None else kind(map(tensor_of, forms))
    out = func(*args, **kwargs)
    listed = [out] if isinstance(out, torch.Tensor) else list(out) if type(out) in (tuple, list) else []
    given = {storage_key(x) for x in tensors_in((args, kwargs))}  # detects views without an alias in the schema
    made_anew = all(type(x) is torch.Tensor and x.is_meta and storage_key(x) not in given for x in listed)
    if listed and made_anew and (given or kwargs.get("device") is not None):
        if len(known) >= _LIMIT:
            known.clear()
        known[key] = None if isinstance(out, torch.Tensor) else type(out), list(map(form_of, listed))
    return out


def _key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a key that determines the form of the result; None if the form could depend on something else."""
    try:
        return torch.get_default_dtype(), *map(_form, args), *map(_form, kwargs.items())
    except TypeError:
        return None


def _form(value: Any) -> Any:
    """Return the form of an argument; raise TypeError if the result could depend on more."""
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            raise TypeError
        return value.shape, value.stride(), value.dtype
    if type(value) in (tuple, list):
        return type(value), *map(_form, value)
    if isinstance(value, PLAIN):
        return type(value), value  # with the type, since 1, 1.0 and True give different dtypes
    raise TypeError


class ValuelessTracking(TensorTracking):
    """Follow tensors without values; code that reads values gets arbitrary ones."""

    def __enter__(self) -> Self:
        self._autocast = autocast_on_meta()
        self._autocast.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._autocast.__exit__(None, None, None)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ITEM:  # "is anything padded?": take either branch
            return {torch.bool: True}.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 1)
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:  # "which experts?": one expert
            return args[0].new_empty((1, args[0].ndim), dtype=torch.long)
        if func is torch.ops.aten.index.Tensor and args[0].is_meta:
            masks = [index.ndim if index is not None and index.dtype == torch.bool else 0 for index in args[1]]
            places = [[index] if not mask else [index.new_empty(1, dtype=torch.long)] * mask  # a mask selects one
                      for index, mask in zip(args[1], masks, strict=True)]  # fmt: skip
            args = (args[0], [place for each in places for place in each], *args[2:])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return on_meta(func, args, kwargs)


@contextlib.contextmanager
def autocast_on_meta() -> Iterator[None]:
    """Let code disable autocast for the meta device, as adapters do for the device of a tensor."""
    plain = torch.autocast.__init__
    changed: Any = functools.partialmethod(_autocast, plain)
    torch.autocast.__init__ = changed  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = plain  # type: ignore[method-assign]


def _autocast(self: Any, plain: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
    """Initialize the context for the CPU instead of the meta device, which torch does not support."""
    plain(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)
