"""One table of operators: what each does to the elements of its arguments, and along which dims.

Trackers follow tensors through a run without data. What a mark means is theirs; what an operator does is here.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.foreign.tensors import schema_of

__all__ = [
    "ALONG",
    "CONSTANT",
    "EMPTY",
    "MOVES",
    "RANDOM",
    "SHAPE_ONLY",
    "SIZES",
    "matrices_of",
    "name_of",
    "reduced_dims",
]

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
