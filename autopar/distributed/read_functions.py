"""Functions of torch that are not elementwise, by name: of a shard they give another result than of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["DRAWS", "READS", "keeps_dim", "right_call"]

_NORMS = "norm linalg_norm linalg_vector_norm linalg_matrix_norm _foreach_norm sum nansum dist"
_DRAWS = """
    normal_ uniform_ bernoulli_ exponential_ cauchy_ log_normal_ geometric_ random_ rand_like randn_like randint_like
    bernoulli multinomial poisson normal dropout alpha_dropout kaiming_uniform_ kaiming_normal_
"""
_ALONG_A_DIM = """
    norm sum nansum mean nanmean std var std_mean var_mean max min amax amin aminmax argmax argmin median nanmedian mode
    quantile nanquantile sort argsort msort topk kthvalue prod cumsum cumprod cummax cummin logsumexp logcumsumexp
    softmax log_softmax softmin normalize count_nonzero linalg_norm linalg_vector_norm chunk split tensor_split unbind
    narrow select index_select roll flip gather take_along_dim
"""
_OTHERS = """
    unique unique_consecutive histc histogram bincount renorm renorm_ cdist pdist cosine_similarity cov corrcoef dot
    vdot inner outer ger matmul __matmul__ __rmatmul__ mm mv bmm addmm addmm_ addmv addmv_ addr addbmm baddbmm
    chain_matmul einsum tensordot linear bilinear embedding embedding_bag conv1d conv2d conv3d kron trace diag diagonal
    tril triu tril_ triu_ svd qr slogdet logdet det inverse pinverse cholesky matrix_power matrix_exp svd_lowrank
    pca_lowrank lobpcg cat concat concatenate stack hstack vstack dstack column_stack row_stack block_diag __getitem__
    __setitem__ __iter__ index_add_ index_copy_ index_fill_ index_put_ scatter scatter_ scatter_add scatter_add_ take
    put_ masked_scatter_ unfold fliplr flipud layer_norm rms_norm group_norm _foreach_max
"""
_OF_NORMS, DRAWS, _REDUCTIONS = (frozenset(names.split()) for names in (_NORMS, _DRAWS, _ALONG_A_DIM))
READS = _OF_NORMS | DRAWS | _REDUCTIONS | frozenset(_OTHERS.split())
_THIRD = "norm linalg_norm linalg_vector_norm topk kthvalue quantile nanquantile roll chunk split tensor_split"
_DIM_THIRD = frozenset(_THIRD.split())
_DEFAULT = {"topk": -1, "sort": -1, "argsort": -1, "kthvalue": -1, "mode": -1}
_DEFAULT |= {"chunk": 0, "split": 0, "tensor_split": 0, "unbind": 0}
_ALL = slice(None)


def keeps_dim(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], dim: int | None) -> bool:
    """Return whether a function of ``args[0]`` is elementwise along ``dim``, the one that is sharded.

    Args:
        dim: None if it is not known.
    """
    if name in ("__getitem__", "__setitem__"):
        return _index_keeps(args[1], args[0], dim)
    if name in ("max", "min") and isinstance(args[1] if len(args) > 1 else kwargs.get("other"), torch.Tensor):
        return True  # of two tensors, element by element
    if dim is None or name not in _REDUCTIONS:
        return False
    at = 2 if name in _DIM_THIRD else 1
    asked = kwargs.get("dim", kwargs.get("dims", args[at] if len(args) > at else _DEFAULT.get(name)))
    dims = asked if isinstance(asked, list | tuple) else [asked]
    if not dims or any(isinstance(one, bool) or not isinstance(one, int) for one in dims):
        return False
    return all(one % args[0].dim() != dim for one in dims)


def right_call(name: str, parameter: str, draws: bool) -> str:
    """Return, for a warning, what does to the whole parameter what ``name`` did to a shard."""
    call = f'with autopar.whole(model, "{parameter}"):'
    if draws:
        right = f"{call} draws the whole, alike on every rank; each keeps its shard of it."
    elif name in _OF_NORMS:
        right = (
            "torch.nn.utils.clip_grad_norm_ and get_total_norm take the norm of whole tensors; autopar.full(parameter) "
            f"is the whole one\n  for a loss; {call} it and its gradient are whole."
        )
    else:
        right = (
            f"{call} it and its gradient are whole, and may be changed;\n  autopar.full(parameter) returns the whole "
            "one, for a loss."
        )
    return f"  {right}\n  Where that is meant: warnings.filterwarnings('ignore', category=autopar.ShardWarning)."


def _index_keeps(index: Any, tensor: torch.Tensor, dim: int | None) -> bool:
    entries = [one for one in (index if isinstance(index, tuple) else [index]) if one is not None]
    if any(isinstance(one, torch.Tensor) and one.dtype == torch.bool for one in entries):
        return len(entries) == 1 and entries[0].shape == tensor.shape  # a mask
    place = next((n for n, one in enumerate(entries) if one is Ellipsis), None)
    if place is not None:
        entries[place : place + 1] = [_ALL] * (tensor.dim() - len(entries) + 1)
    all_of = [isinstance(one, slice) and one == _ALL for one in entries]
    return all(all_of) or (dim is not None and (len(entries) <= dim or all_of[dim]))
