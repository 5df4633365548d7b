"""Operators of a run without data: sets of them by their effect on elements, and results of all.

Most meta kernels are Python and take up to a millisecond, and layers repeat the same ones: results on meta tensors are
computed once per operator and shapes.
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
"""The result has the shape of the argument, and none of its values: one number everywhere."""

EMPTY = frozenset(("new_empty", "new_empty_strided", "empty_like"))
"""The same, with no values yet."""

SIZES = frozenset(("sym_size", "sym_stride", "sym_numel"))
"""The result is a size of the argument."""

ALONG = frozenset({
    *("_softmax", "_log_softmax", "softmax", "log_softmax", "_safe_softmax"),
    *("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"),
    *("sort", "argsort", "topk", "kthvalue", "mode", "median"),
})  # fmt: skip
"""An element of the result is made of all, or of some, of those along ``dim``."""


def name_of(func: Any) -> str:
    """Return the name of an operator, without its overload's."""
    return str(schema_of(func).name).split("::")[-1]


_LIMIT = 5_000  # forms of an operator's arguments; a model needs some tens

Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides, dtype."""


def form_of(tensor: torch.Tensor) -> Form:
    """Return the form of a tensor on the meta device."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def tensor_of(form: Form) -> torch.Tensor:
    """Return a tensor on the meta device of that form."""
    shape, strides, dtype = form
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


_Made = tuple[type | None, list[Form]]  # a tensor, or tensors in a tuple or list

_results: dict[Any, dict[Any, _Made] | None] = {}  # results of each operator; None: it writes, or makes views


def on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func``, for meta tensors once for each form of the arguments; later make tensors of the results' forms."""
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
    given = {storage_key(x) for x in tensors_in((args, kwargs))}  # some views say that they are none: _unsafe_view
    made_anew = all(type(x) is torch.Tensor and x.is_meta and storage_key(x) not in given for x in listed)
    if listed and made_anew and (given or kwargs.get("device") is not None):
        if len(known) >= _LIMIT:
            known.clear()
        known[key] = None if isinstance(out, torch.Tensor) else type(out), list(map(form_of, listed))
    return out


def _key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the key of the result's form; None if it could depend on something else."""
    try:
        return torch.get_default_dtype(), *map(_form, args), *map(_form, kwargs.items())
    except TypeError:
        return None


def _form(value: Any) -> Any:
    """Return the form of an argument. Raise TypeError if a result could depend on more."""
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            raise TypeError
        return value.shape, value.stride(), value.dtype
    if type(value) in (tuple, list):
        return type(value), *map(_form, value)
    if isinstance(value, PLAIN):
        return type(value), value  # 1, 1.0 and True make other dtypes
    raise TypeError


class ValuelessTracking(TensorTracking):
    """Follow tensors without values; where code reads values it gets some with which it continues."""

    def __enter__(self) -> Self:
        self._autocast = autocast_on_meta()
        self._autocast.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._autocast.__exit__(None, None, None)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ITEM:  # "is anything padded?": take some branch
            return {torch.bool: True}.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 1)
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:  # "which experts?": one of them
            return args[0].new_empty((1, args[0].ndim), dtype=torch.long)
        if func is torch.ops.aten.index.Tensor and args[0].is_meta:
            masks = [index.ndim if index is not None and index.dtype == torch.bool else 0 for index in args[1]]
            places = [[index] if not mask else [index.new_empty(1, dtype=torch.long)] * mask  # it selects one element
                      for index, mask in zip(args[1], masks, strict=True)]  # fmt: skip
            args = (args[0], [place for each in places for place in each], *args[2:])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return on_meta(func, args, kwargs)


@contextlib.contextmanager
def autocast_on_meta() -> Iterator[None]:
    """Let code turn autocast off for the device of a tensor without values, as adapters do."""
    plain = torch.autocast.__init__
    changed: Any = functools.partialmethod(_autocast, plain)
    torch.autocast.__init__ = changed  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = plain  # type: ignore[method-assign]


def _autocast(self: Any, plain: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
    """Make a context of another device in the place of meta's, which torch does not have."""
    plain(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)
