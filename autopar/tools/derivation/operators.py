"""A table of operators by their effect on elements: move them, sum over dims, multiply matrices."""

from __future__ import annotations

from typing import Any

import torch

from autopar.foreign.operators import schema_of

__all__ = ["MOVES", "SHAPE_ONLY", "matrices_of", "reduced_dims"]

MOVES = frozenset({
    *("view", "_unsafe_view", "reshape", "_reshape_alias", "permute", "transpose", "t", "expand", "slice", "select"),
    *("unsqueeze", "squeeze", "split", "split_with_sizes", "chunk", "unbind", "clone", "contiguous", "detach", "alias"),
    *("_to_copy", "repeat", "roll", "flip", "cat", "stack", "unfold", "as_strided", "constant_pad_nd", "index_select"),
    *("index", "gather", "repeat_interleave", "lift_fresh", "diagonal", "copy", "copy_", "embedding", "movedim"),
    *("slice_scatter", "select_scatter", "tril", "triu", "view_as_real", "view_as_complex", "index_put", "index_put_"),
    *("pixel_shuffle", "pixel_unshuffle", "scatter", "take_along_dim", "split_copy", "expand_copy", "narrow"),
    *("_adaptive_avg_pool2d", "im2col", "avg_pool1d", "avg_pool2d"),
})  # fmt: skip
"""Operators that put elements elsewhere, in whole or in part, or leave them where they are."""

_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
SHAPE_ONLY = frozenset(getattr(torch.ops.aten, name).default for name in (*_LIKE, *_NEW))
"""Operators whose results have nothing of their arguments' values."""

_ALL_DIMS = {
    "sum",
    "mean",
    "prod",
    "amax",
    "amin",
    "var",
    "std",
    "any",
    "all",
    "norm",
    "linalg_vector_norm",
    "max",
    "min",
}
_ONE_DIM = {
    *("_softmax", "_log_softmax", "cumsum", "cumprod", "sort", "topk", "argmax", "argmin", "logsumexp", "logcumsumexp"),
    *("kthvalue", "median", "cummax", "_safe_softmax", "var_mean", "glu"),
}


def reduced_dims(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int] | None:
    """Return the dims of the first argument over which an operator sums or compares; None if it does neither."""
    name = str(schema_of(func).name).split("::")[-1]
    if name == "native_layer_norm":
        return [-1 - dim for dim in range(len(args[1]))]
    if name == "_fused_rms_norm":
        return [-1 - dim for dim in range(len(args[1]))]
    if name == "native_group_norm":
        return list(range(1, args[0].ndim))
    if name not in _ALL_DIMS | _ONE_DIM or name == "glu":
        return None
    if name in ("max", "min") and len(args) > 1 and isinstance(args[1], torch.Tensor):
        return None  # of two tensors
    names = [argument.name for argument in schema_of(func).arguments]
    dim: Any = kwargs.get("dim")
    if dim is None and "dim" in names and names.index("dim") < len(args):
        dim = args[names.index("dim")]
    if dim is None:
        dim = -1 if name in ("topk", "sort", "kthvalue", "median") and "dim" in names else None
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
