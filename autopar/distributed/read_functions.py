"""Functions of torch that are not elementwise, by name: of a shard they give another result than of the whole.

And what the user's code is told that calls one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from autopar.call_site import is_of_libraries, place_of_user
from autopar.errors import ShardWarning
from autopar.foreign.modules import CALL

__all__ = [
    "CURVED",
    "DRAWS",
    "MIXERS",
    "NUMBERS",
    "READS",
    "TORCH",
    "explain",
    "frame_to_tell",
    "keeps_dim",
    "tell",
    "tell_at",
    "tell_hook",
    "tell_if_saved",
    "tell_mixed",
    "tell_number",
]

TORCH = torch.__file__.rpartition("/")[0] + "/"
_SAVING = f"{TORCH}serialization.py"
_STEP = Optimizer.profile_hook_step(lambda: None).__code__

_NORMS = "norm linalg_norm linalg_vector_norm linalg_matrix_norm _foreach_norm sum nansum dist"
_DRAWS = """
    normal_ uniform_ bernoulli_ exponential_ cauchy_ log_normal_ geometric_ random_ rand_like randn_like randint_like
    bernoulli multinomial poisson normal dropout alpha_dropout kaiming_uniform_ kaiming_normal_
"""
_ALONG_A_DIM = """
    norm sum nansum mean nanmean std var std_mean var_mean max min amax amin aminmax argmax argmin median nanmedian
    mode quantile nanquantile sort argsort msort topk kthvalue prod cumsum cumprod cummax cummin logsumexp
    logcumsumexp softmax log_softmax softmin normalize count_nonzero linalg_norm linalg_vector_norm chunk split
    tensor_split unbind narrow select index_select roll flip gather take_along_dim any all size __len__ index_add_
    index_copy_ index_fill_ scatter scatter_ scatter_add scatter_add_
"""
_LOSSES = """
    mse_loss l1_loss smooth_l1_loss huber_loss kl_div cross_entropy nll_loss binary_cross_entropy poisson_nll_loss
    binary_cross_entropy_with_logits gaussian_nll_loss soft_margin_loss margin_ranking_loss cosine_embedding_loss
"""
_LEAVES_TORCH = "numpy tolist __array__ __dlpack__"
_MIXERS = """
    cat concat concatenate stack hstack vstack dstack column_stack row_stack block_diag add add_ __add__ __radd__
    __iadd__ sub sub_ __sub__ __rsub__ __isub__ maximum minimum fmax fmin max min gt lt ge le __gt__ __lt__ __ge__
    __le__ logical_or logical_and logical_or_ logical_and_ bitwise_or bitwise_and __or__ __ror__ __and__ __rand__
    __ior__ __iand__ addcmul addcdiv hypot logaddexp __setitem__
"""
_CURVED = """
    clamp clamp_ clip clip_ clamp_min clamp_min_ clamp_max clamp_max_ norm linalg_vector_norm linalg_norm abs abs_ sign
    sign_ square square_ pow pow_ sqrt sqrt_ tanh softmax topk quantile max min amax amin gt lt ge le __gt__ __lt__
"""
_NUMBERS = "item __float__ __int__ __bool__ __index__ numel nelement tolist"
_OTHERS = """
    unique unique_consecutive histc histogram bincount renorm renorm_ cdist pdist cosine_similarity cov corrcoef dot
    vdot inner outer ger matmul __matmul__ __rmatmul__ mm mv bmm addmm addmm_ addmv addmv_ addr addbmm baddbmm
    chain_matmul einsum tensordot linear bilinear embedding embedding_bag conv1d conv2d conv3d kron trace diag
    diagonal tril triu tril_ triu_ svd qr slogdet logdet det inverse pinverse cholesky matrix_power matrix_exp
    svd_lowrank pca_lowrank lobpcg cat concat concatenate stack hstack vstack dstack column_stack row_stack
    block_diag __getitem__ __setitem__ __iter__ index_put_ take put_ masked_scatter_ unfold fliplr flipud layer_norm
    rms_norm group_norm _foreach_max index_add index_copy index_fill index_put scatter_reduce scatter_reduce_
    masked_scatter select_scatter slice_scatter fill_diagonal_ nonzero argwhere masked_select pairwise_distance
    repeat tile pad interpolate as_strided trapezoid trapz cumulative_trapezoid batch_norm instance_norm gumbel_softmax
    numel nelement
"""
_OF_NORMS, DRAWS, _REDUCTIONS = (frozenset(names.split()) for names in (_NORMS, _DRAWS, _ALONG_A_DIM))
MIXERS, NUMBERS, CURVED = (frozenset(names.split()) for names in (_MIXERS, _NUMBERS, _CURVED))
READS = _OF_NORMS | DRAWS | _REDUCTIONS | frozenset((_OTHERS + _LOSSES + _LEAVES_TORCH).split())
_SIZES = ("numel", "nelement", "size", "__len__")
_THIRD = "norm linalg_norm linalg_vector_norm topk kthvalue quantile nanquantile roll chunk split tensor_split"
_DIM_THIRD = frozenset(_THIRD.split())
_DEFAULT = {"topk": -1, "sort": -1, "argsort": -1, "kthvalue": -1, "mode": -1}
_DEFAULT |= {"chunk": 0, "split": 0, "tensor_split": 0, "unbind": 0, "__len__": 0}
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
    if kwargs.get("reduction") == "none" or (name == "size" and len(args) + len(kwargs) == 1):
        return True
    if dim is None or name not in _REDUCTIONS:
        return False
    at = 2 if name in _DIM_THIRD else 1
    asked = kwargs.get("dim", kwargs.get("dims", args[at] if len(args) > at else _DEFAULT.get(name)))
    dims = asked if isinstance(asked, list | tuple) else [asked]
    if not dims or any(isinstance(one, bool) or not isinstance(one, int) for one in dims):
        return False
    return all(one % args[0].dim() != dim for one in dims)


def _index_keeps(index: Any, tensor: torch.Tensor, dim: int | None) -> bool:
    entries = [one for one in (index if isinstance(index, tuple) else [index]) if one is not None]
    if any(isinstance(one, torch.Tensor) and one.dtype == torch.bool for one in entries):
        return len(entries) == 1 and entries[0].shape == tensor.shape  # a mask
    place = next((n for n, one in enumerate(entries) if one is Ellipsis), None)
    if place is not None:
        entries[place : place + 1] = [_ALL] * (tensor.dim() - len(entries) + 1)
    all_of = [isinstance(one, slice) and one == _ALL for one in entries]
    return all(all_of) or (dim is not None and (len(entries) <= dim or all_of[dim]))


# -- what is told ----------------------------------------------------------------------------------------------------


def tell(name: str, part: Any, caller: FrameType, *, draws: bool = False, in_hook: bool = False) -> None:
    """Warn at the user's line, unless a library that knows shards, a layer or an optimizer asks."""
    shard = part.autopar_shard

    def text() -> str:
        what = f"{name} of {'' if isinstance(part, nn.Parameter) else 'values of '}{shard.name}"
        held = f"{what} sees the shard of {shard.axis} rank {shard.rank}: {shard.held()}.\n"
        return held + _right_call(name, shard, draws)

    tell_at(frame_to_tell(caller), shard.told, text, in_hook=in_hook)


def tell_mixed(name: str, one: Any, other: Any, caller: FrameType, *, in_hook: bool) -> None:
    """Warn at the user's line, likewise, that a function takes weights of several blocks for those of the model.

    Args:
        one, other: places of two of them.
    """
    what = name.strip("_")
    tell_at(frame_to_tell(caller), one.told, lambda: one.stage.explain(what, one.name, other.name), in_hook=in_hook)


def tell_hook(name: str, shard: Any, caller: FrameType) -> None:
    """Warn at the user's line in a hook of a gradient that a function of one micro-batch's is not linear."""
    what = name.strip("_")
    tell_at(frame_to_tell(caller), shard.told, lambda: shard.stage.explain_hook(what, shard.name), in_hook=True)


def tell_number(name: str, shard: Any, caller: FrameType, *, in_hook: bool) -> None:
    """Warn at the user's line if it adds up numbers of several blocks, of which this is one, or draws some."""
    frame, draws = frame_to_tell(caller), name in DRAWS
    first = None if frame is None else shard.stage.first_of(shard.block, shard.name, frame, draws=draws)
    if first is not None:
        what, explain = f"a sum or the like of {name.strip('_')}", shard.stage.explain
        if draws:
            what, explain = name.strip("_"), shard.stage.explain_draw
        tell_at(frame, shard.told, lambda: explain(what, first, shard.name), in_hook=in_hook)


def frame_to_tell(caller: FrameType) -> FrameType | None:
    """Return the frame that asked torch; None if it is of a library that knows shards."""
    frame: FrameType | None = caller
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back
    return None if frame is None or is_of_libraries(frame) or _is_of_graph(frame) else frame


def tell_at(
    frame: FrameType | None, told: set[tuple[str, int]], text: Callable[[], str], *, in_hook: bool = False
) -> None:
    """Warn at the user's line, the first time, unless a layer or an optimizer asks."""
    place = None if frame is None else place_of_user(frame)
    if frame is None or place is None or place in told or (not in_hook and _inside_layer_or_step(frame)):
        return
    told.add(place)
    warnings.warn_explicit(text(), ShardWarning, *place)


def tell_if_saved(part: Any, caller: FrameType) -> None:
    """Warn if ``torch.save`` is what pickles a part."""
    if caller.f_code.co_filename == _SAVING:
        tell("torch.save", part, caller)


def explain(error: Exception, part: Any) -> None:
    """Add to an error of torch's about sizes or places that a tensor is a part."""
    if part is not None and not hasattr(error, "__notes__"):
        shard = part.autopar_shard
        held = f"autopar: {shard.name} is the shard of {shard.axis} rank {shard.rank} here: {shard.held()}."
        error.add_note(f"{held}\n{_right_call('', shard, draws=False)}")


def _right_call(name: str, shard: Any, draws: bool) -> str:
    """Return, for a warning, what does to the whole parameter what ``name`` did to a shard."""
    call = f'with autopar.whole(model, "{shard.name}"):' if shard.joins else ""
    if draws:
        right = f"{call} draws the whole, alike on every rank; each keeps its shard of it."
        right = right if call else "Before autopar.initialize the whole is drawn."
    elif name in _OF_NORMS:
        right = (
            "torch.nn.utils.clip_grad_norm_ and get_total_norm take the norm of whole tensors; autopar.full(parameter) "
            f"is the whole one\n  for a loss{f'; {call} it and its gradient are whole' if call else ''}."
        )
    elif name == "torch.save":
        right = (
            "model.save_parallelized(dir, merge_checkpoints=True) writes the whole model, extra={name: {...}} of it "
            f"what\n  you have computed of shards{f'; {call} it is whole' if call else ''}."
        )
    elif name in _SIZES:
        right = (
            f"model.num_parameters() counts the whole model; {f'{call} sizes are the whole ones;' if call else ''}\n"
            "  parameter.shape.numel() counts what is here."
        )
    else:
        changed = f"{call} it and its gradient are whole, and may be changed;\n  " if call else ""
        right = f"{changed}autopar.full(parameter) returns the whole one, for a loss."
    return f"  {right}\n  Where that is meant: warnings.filterwarnings('ignore', category=autopar.ShardWarning)."


def _is_of_graph(frame: FrameType) -> bool:
    """Return whether torch.compile made the code that runs there: of the model, mostly."""
    file = frame.f_code.co_filename
    return file.startswith("<eval_with_key") or "torchinductor" in file


def _inside_layer_or_step(frame: FrameType | None) -> bool:
    """Return whether a module of a parallelized model runs by itself, or an optimizer steps: they know shards."""
    while frame is not None:
        if frame.f_code is _STEP:
            return True
        module = frame.f_locals.get("self") if frame.f_code is CALL else None
        if isinstance(module, nn.Module) and any(hasattr(p, "autopar_shard") for p in module.parameters()):
            inside = any("_autopar" in vars(one) for one in module.modules())  # a wrapper around the model is none
            if "_autopar" in vars(module) or not inside:
                return True
        frame = frame.f_back
    return False
