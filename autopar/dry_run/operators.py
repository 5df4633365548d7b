"""One table of operators: what each does to the elements of its arguments, and along which dims; and their results.

Trackers follow tensors through a run without data. They know what a mark means; this module knows what an operator
does. Most meta kernels are Python and take up to a millisecond, and the layers of a model ask for the same ones again
and again: results on meta tensors are computed once per operator and shapes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Self

import torch

from autopar.foreign.tensors import ITEM, schema_of
from autopar.tensor_tracking import PLAIN, TensorTracking, storage_key, tensors_in

CONSTANT = frozenset(("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"))
"""The result has the shape of the argument, and none of its values: one number everywhere."""

EMPTY = frozenset(("new_empty", "new_empty_strided", "empty_like"))
"""The same, with no values yet."""

RANDOM = frozenset(("rand_like", "randn_like"))
"""The same, with random numbers."""

SHAPE_ONLY = CONSTANT | EMPTY | RANDOM

SIZES = frozenset(("sym_size", "sym_stride", "sym_numel"))
"""The result is a size of the argument."""

MOVES = frozenset({
    *("view", "_unsafe_view", "reshape", "_reshape_alias", "permute", "transpose", "t", "expand", "slice", "select"),
    *("unsqueeze", "squeeze", "split", "split_with_sizes", "chunk", "unbind", "clone", "contiguous", "detach", "alias"),
    *("_to_copy", "repeat", "roll", "flip", "cat", "stack", "unfold", "as_strided", "constant_pad_nd", "index_select"),
    *("index", "gather", "repeat_interleave", "lift_fresh", "diagonal", "copy", "copy_", "embedding", "movedim"),
    *("slice_scatter", "select_scatter", "tril", "triu", "view_as_real", "view_as_complex", "index_put", "index_put_"),
    *("pixel_shuffle", "pixel_unshuffle", "scatter", "take_along_dim", "split_copy", "expand_copy", "narrow"),
    *("_adaptive_avg_pool2d", "im2col", "avg_pool1d", "avg_pool2d"),
})  # fmt: skip
"""Elements come to other places, in whole or in part, or stay; pools mean some, and keep the order of the others."""

ALONG = frozenset({
    *("_softmax", "_log_softmax", "softmax", "log_softmax", "_safe_softmax"),
    *("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"),
    *("sort", "argsort", "topk", "kthvalue", "mode", "median"),
})  # fmt: skip
"""An element of the result is made of all, or of some, of those along ``dim``."""

_SUMS = frozenset({
    *("sum", "mean", "prod", "amax", "amin", "var", "std", "any", "all", "norm", "linalg_vector_norm", "max", "min"),
    *("argmax", "argmin", "logsumexp", "var_mean"),
})  # fmt: skip
_LAST = frozenset(("topk", "sort", "argsort", "kthvalue", "median", "mode"))  # along the last dim, if no other is named
_NORMS = frozenset(("native_layer_norm", "_fused_rms_norm"))


def name_of(func: Any) -> str:
    """Return the name of an operator, without that of its overload."""
    return str(schema_of(func).name).split("::")[-1]


def reduced_dims(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int] | None:
    """Return the dims of the first argument over which an operator sums or compares; None if it does neither."""
    name = name_of(func)
    if name in _NORMS:
        return [-1 - dim for dim in range(len(args[1]))]
    if name == "native_group_norm":
        return list(range(1, args[0].ndim))
    if name not in _SUMS | ALONG:
        return None
    if name in ("max", "min") and len(args) > 1 and isinstance(args[1], torch.Tensor):
        return None  # of two tensors
    names = [argument.name for argument in schema_of(func).arguments]
    dim: Any = kwargs.get("dim")
    if dim is None and "dim" in names and names.index("dim") < len(args):
        dim = args[names.index("dim")]
    if dim is None:
        dim = -1 if name in _LAST and "dim" in names else None
    if dim is None or dim == []:
        return list(range(args[0].ndim))
    return [dim] if isinstance(dim, int) else list(dim)


def matrices_of(name: str, args: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    """Return the two factors of a product of matrices and what is added to it; None for another operator."""
    if name in ("mm", "bmm"):
        return args[0], args[1], None
    if name in ("addmm", "baddbmm"):
        return args[1], args[2], args[0]
    return None


_LIMIT = 5_000  # forms of an operator's arguments; a model needs some tens

_META = torch.device("meta")
_Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype
_Made = tuple[type | None, list[_Spec]]  # a tensor, or tensors in a tuple or list; none: the first argument

_results: dict[Any, tuple[bool | None, dict[Any, _Made]]] = {}  # of each operator: whether it writes, what it makes


def on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func``; what makes meta tensors, once for each form of the arguments: then make tensors of its form."""
    found = _results.get(func)
    if found is None:
        found = _results[func] = _writes(func), {}
    writes, known = found
    key = None if writes is None else _key(args, kwargs)
    if key is None:
        return func(*args, **kwargs)
    made = known.get(key)
    if made is not None:
        kind, specs = made
        if not specs:
            return args[0]
        tensors = [torch.empty_strided(shape, steps, dtype=dtype, device=_META) for shape, steps, dtype in specs]
        return tensors[0] if kind is None else kind(tensors)
    out = func(*args, **kwargs)
    made = _made_by(func, args, kwargs, key, out, writes)
    if made is not None:
        if len(known) >= _LIMIT:
            known.clear()
        known[key] = made
    return out


def _made_by(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any, out: Any, writes: bool | None
) -> _Made | None:
    """Return the form of a result; None if it is another one the next time."""
    if writes:
        return (None, []) if out is args[0] and _key(args, kwargs) == key else None  # it has the shape that it had
    listed = [out] if isinstance(out, torch.Tensor) else list(out) if type(out) in (tuple, list) else []
    given = {storage_key(x) for x in tensors_in((args, kwargs))}  # some views say that they are none: _unsafe_view
    made_anew = all(type(x) is torch.Tensor and x.is_meta and storage_key(x) not in given for x in listed)
    if not (listed and made_anew and (given or kwargs.get("device") is not None)):
        return None
    specs = [(tuple(value.shape), value.stride(), value.dtype) for value in listed]
    return None if isinstance(out, torch.Tensor) else type(out), specs


def _writes(func: Any) -> bool | None:
    """Return whether an operator writes to its first argument and returns that; None: views, or other writes."""
    schema = schema_of(func)
    shared = [value.alias_info is not None for value in (*schema.arguments, *schema.returns)]
    if not any(shared):
        return False
    in_place = len(schema.returns) == 1 and shared[0] and shared[-1] and sum(shared) == 2 and schema.is_mutable
    return True if in_place and torch.Tag.inplace_view not in func.tags else None


def _key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The key of the result's form; None if it could depend on something else."""
    try:
        return torch.get_default_dtype(), *map(_form, args), *map(_form, kwargs.items())
    except TypeError:
        return None


def _form(value: Any) -> Any:
    """The form of an argument. Raises ``TypeError`` where a result could depend on more."""
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
    """Follow tensors without values: what asks for values is told something that leads on."""

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
            args = (args[0], [place for index in args[1] for place in _places(index)], *args[2:])
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


def _places(index: Any) -> list[Any]:
    """An index as positions: a mask selects one element."""
    if isinstance(index, torch.Tensor) and index.dtype == torch.bool:
        return [index.new_empty(1, dtype=torch.long) for _ in range(index.ndim)]
    return [index]
