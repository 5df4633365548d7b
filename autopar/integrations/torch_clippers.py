"""Patch torch's clippers and loss scalers, so that they cover the full parallelized model instead of local shards.

``torch.nn.utils.clip_grad_norm_``, ``get_total_norm`` and ``clip_grads_with_norm_`` (used by accelerate and
transformers) and ``torch.amp.GradScaler`` get plain tensors without their model. Their inner functions are patched, so
modules that imported them earlier are covered too. A patched function looks up whether a tensor belongs to a
parallelized model, and calls torch's function in all other cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad as torch_clip

from autopar.compat.patches import patch_body, patch_member
from autopar.data_parallel.gradients import LAYER, ReplicaNorm, clip_factor, scale_gradients
from autopar.data_parallel.precision import GradScaler, agree_on_found
from autopar.distributed.digest import extremes, of_text
from autopar.errors import ConfigError, ConsistencyError
from autopar.guards.step import listeners

_Given = list[tuple[ReplicaNorm, dict[str, torch.Tensor]]]


def _find(tensors: list[torch.Tensor]) -> tuple[_Given, list[torch.Tensor]]:
    """Return the tensors of each parallelized model, oldest model first, and all other tensors.

    An empty list comes from a pipeline stage without parameters; raise ConfigError if several models have stages.
    """
    given: _Given = [] if tensors else _empty_share()
    rest, find = tensors, ReplicaNorm.mine
    while True:  # the list may have a parameter and copies of it
        found = [(one, mine) for one in listeners(ReplicaNorm) if (mine := find(one, rest))]
        if not found and find is ReplicaNorm.made:
            return given, rest
        taken = {id(tensor) for _, mine in found for tensor in mine.values()}
        rest, find = [tensor for tensor in rest if id(tensor) not in taken], ReplicaNorm.made
        given += found


def _empty_share() -> _Given:
    staged = [one for one in listeners(ReplicaNorm) if (one.owners or one.mpu.pp.size > 1) and one.is_alive]
    if len(staged) > 1:
        raise ConfigError(
            "clipping is ambiguous: this rank's stage holds none of the parameters, and "
            f"{len(staged)} models have pipeline stages\n  Use autopar.clip_grad_norm_(model, max_norm)."
        )
    return [(one, {}) for one in staged]


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _refuse_layers(parameters: Iterable[torch.Tensor], name: str, instead: str) -> None:
    for parameter in parameters:
        layer = getattr(parameter, LAYER, None)
        if layer is not None:
            raise ConfigError(
                f"{name} is not supported with a {layer}, of which it sees only the local shard\n  Use {instead}."
            )


def _clip_grad_norm(
    plain: Callable[..., Any],
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Any:
    listed = _listed(parameters)
    given, rest = _find(listed)
    _refuse_layers(rest, "torch.nn.utils.clip_grad_norm_", "autopar.clip_grad_norm_(model, max_norm)")
    if not given:
        return plain(listed, max_norm, norm_type, error_if_nonfinite, foreach)
    gradients = [(one, {name: p.grad for name, p in mine.items() if p.grad is not None}) for one, mine in given]
    others, single = [p.grad for p in rest if p.grad is not None], isinstance(parameters, torch.Tensor)
    norm = _norm(gradients, others, float(norm_type), error_if_nonfinite, single=single)
    scale_gradients(listed, clip_factor(float(max_norm), norm))
    return norm


def _get_total_norm(
    plain: Callable[..., Any],
    tensors: Any,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Any:
    listed = _listed(tensors)
    given, rest = _find(listed)
    if not given:
        return plain(listed, norm_type, error_if_nonfinite, foreach)
    for one, _ in given:
        if one.mpu.pp.size > 1:
            raise ConfigError(
                f"torch.nn.utils.get_total_norm is not supported with {one.mpu.pp.size} pipeline stages\n"
                "  Use autopar.clip_grad_norm_(model, max_norm), which returns the norm of the full model."
            )
    return _norm(given, rest, float(norm_type), error_if_nonfinite)


def _clip_grads_with_norm(
    plain: Callable[..., Any], parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None
) -> None:
    listed = _listed(parameters)
    given, rest = _find(listed)
    _refuse_layers(rest, "torch.nn.utils.clip_grads_with_norm_", "autopar.clip_grad_norm_(model, max_norm)")
    if not given:
        plain(listed, max_norm, total_norm, foreach)
        return
    full = total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
    factor = clip_factor(float(max_norm), torch.as_tensor(full))
    for one, _ in given:
        _check_factor(one, factor)
    scale_gradients(listed, factor)


def _check_factor(one: ReplicaNorm, factor: torch.Tensor) -> None:
    """Raise ConsistencyError on all ranks of the replica if their factors differ. A collective of the replica."""
    value = factor.item()
    axis = one.mpu.shards_pp if one.plan.experts else one.mpu.model
    with one.failures.wait("torch.nn.utils.clip_grads_with_norm_", axis.ranks):
        largest, smallest = extremes([of_text(repr(value))], axis.group)
    if largest != smallest:
        raise ConsistencyError(
            f"clip_grads_with_norm_ must get the same norm on the ranks {list(axis.ranks)} of one model; this rank "
            f"would scale by {value:g}\n  Use torch.nn.utils.get_total_norm of all gradients, which is identical on "
            "all ranks, or\n  autopar.clip_grad_norm_(model, max_norm)."
        )


def _agree(one: ReplicaNorm, found: dict[torch.device, torch.Tensor], parameters: Iterable[torch.Tensor]) -> None:
    """Share an overflow on one rank with all ranks of the replica. A collective of the replica."""
    sharded = one.owners or any(isinstance(parameter, DTensor) for parameter in parameters)  # over dp x cp
    further = [one.mpu.dp_cp] if sharded else [one.mpu.shards] if one.plan.experts else []
    with one.failures.wait("torch.amp.GradScaler", one.mpu.model.ranks):
        for axis in (one.mpu.model, *further):
            agree_on_found(found, axis, one.mpu.device)


def _norm(
    given: _Given, rest: list[torch.Tensor], norm_type: float, error_if_nonfinite: bool, *, single: bool = False
) -> torch.Tensor:
    """Return the norm over tensors of parallelized models, and over full tensors ``rest``."""
    norms = [one.of(mine, norm_type, single=single) for one, mine in given]
    if rest:
        norms.append(_PLAIN["_get_total_norm"](rest, norm_type).to(norms[0]))
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            f"clipped: it is {norm.item()} on every rank."
        )
    return norm


def _unscale(plain: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``GradScaler._unscale_grads_``, which returns device -> 1.0 after an overflow."""
    found = plain(scaler, optimizer, *args, **kwargs)
    if isinstance(scaler, GradScaler):  # autopar's scaler has already agreed
        return found
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    given, rest = _find(parameters)
    _refuse_layers(rest, f"torch's {type(scaler).__name__}", "autopar.GradScaler(mpu)")
    for one, mine in given:
        _agree(one, found, mine.values())
    return found


_PLAIN: dict[str, Callable[..., Any]] = {}
_BODIES: dict[str, Callable[..., Any]] = {
    "_get_total_norm": _get_total_norm,
    "_clip_grads_with_norm_": _clip_grads_with_norm,
    "clip_grad_norm_": _clip_grad_norm,
}


def install() -> None:
    """Patch torch's clippers, which are ``no_grad`` wrappers, in their closures, and the scalers."""
    for name, body in _BODIES.items():
        _PLAIN[name] = patch_body(getattr(torch_clip, name), "func", body)
    for scaler in (torch.amp.GradScaler, ShardedGradScaler):
        patch_member(scaler, "_unscale_grads_", _unscale)
