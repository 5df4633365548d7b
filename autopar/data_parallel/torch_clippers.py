"""torch's own clippers and loss scalers, which see this rank's shards only, made right for a parallelized model.

``torch.nn.utils.clip_grad_norm_``, ``get_total_norm`` and ``clip_grads_with_norm_`` (accelerate and transformers call
them) and ``torch.amp.GradScaler`` get plain tensors, and nothing of torch's asks whose. So what these functions call is
exchanged, once a process: the function objects stay, also those that somebody imported before. The new bodies look
whether a tensor belongs to a parallelized model that is alive, and hand everything else to torch's.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad as torch_clip

from autopar.data_parallel.exchange import exchange_body, exchange_member
from autopar.data_parallel.grad_norm import clip_factor, counted_here, scale_gradients, tensor_norm
from autopar.data_parallel.loss_scale import GradScaler, agree_on_found
from autopar.data_parallel.process_hooks import forget, listen, listeners
from autopar.data_parallel.wrapper_check import refuse_flat
from autopar.distributed.digest import extremes, of_text
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError, ConsistencyError
from autopar.foreign.groups import is_flat_parameter, local_part
from autopar.plan.plan import Plan

__all__ = ["ReplicaNorm", "mark_layer"]

_LAYER = "autopar_layer"
_Given = list[tuple["ReplicaNorm", dict[str, torch.Tensor]]]


class ReplicaNorm:
    """The norm over all ranks of one model replica; alive as long as the model is parallelized.

    Args:
        scaled: gradients are those of a scaled loss until the optimizer steps.
    """

    def __init__(self, model: nn.Module, plan: Plan, mpu: MPU, failures: FailureLog, *, scaled: bool) -> None:
        self.plan, self.mpu, self.failures, self.scaled = plan, mpu, failures, scaled
        self._model = weakref.ref(model)
        self._counted: frozenset[str] | None = None
        if mpu.model.size > 1:
            _exchange_bodies()
            listen(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicaNorm:
        model = memo.get(id(self.model))  # the copy, whose parameters are others
        if not isinstance(model, nn.Module):
            return self
        return ReplicaNorm(model, self.plan, self.mpu, self.failures, scaled=self.scaled)

    @property
    def model(self) -> nn.Module | None:
        """The model, while it lives."""
        return self._model()

    @property
    def is_alive(self) -> bool:
        """Whether there are both the model and its process groups."""
        return self.model is not None and self.mpu.model_parallel_is_initialized()

    def remove(self) -> None:
        """Leave the model's parameters to torch from now on."""
        forget(self)

    def of(self, tensors: Mapping[str, torch.Tensor], norm_type: float, *, single: bool = False) -> torch.Tensor:
        """Return the norm of gradients (or weights), by the names of their parameters; a collective of the replica.

        Args:
            single: they are one parameter, of which other stages have nothing to say; a collective of the stage.

        Raises:
            ConfigError: they are scaled, flattened by ``FullyShardedDataParallel``, or of a parameter that was added
                after ``initialize``.
        """
        if self.scaled:
            raise ConfigError(
                "clip_grad_norm_ would clip scaled gradients: with precision.dtype fp16 the optimizer takes the loss "
                "scale off inside of step(). Write gradient_clipping into the config; optimizer.gradient_norm is the "
                "norm."
            )
        if not norm_type > 0:
            raise ConfigError(f"norm_type must be above 0, not {norm_type}")
        if any(is_flat_parameter(parameter) for _, parameter in self._named()):
            refuse_flat()
        with self.failures.wait("the norm of the gradients", self.mpu.tp_pp.ranks):
            held = dict(self._named())
            if single:
                counted = frozenset(map(self.plan.canonical, tensors))
                return tensor_norm(tensors, self.plan, self.mpu, counted, norm_type, held.values(), of_stage=True)
            if self._counted is None:
                self._counted = counted_here(held, self.plan, self.mpu)
            return tensor_norm(tensors, self.plan, self.mpu, self._counted, norm_type, held.values())

    def check_factor(self, factor: torch.Tensor) -> None:
        """Check that all ranks of the replica are about to scale alike; a collective of it.

        Raises:
            ConsistencyError: on all of them, if not.
        """
        value = factor.item()
        with self.failures.wait("torch.nn.utils.clip_grads_with_norm_", self.mpu.model.ranks):
            largest, smallest = extremes([of_text(repr(value))], self.mpu.model.group)
        if largest != smallest:
            raise ConsistencyError(
                f"clip_grads_with_norm_ was given another norm on each of the ranks {list(self.mpu.model.ranks)}: this "
                f"one would scale by {value:g}.\n  They hold one model, and would drift apart. "
                "torch.nn.utils.get_total_norm of all gradients is the same on every rank;\n"
                "  autopar.clip_grad_norm_(model, max_norm) does both."
            )

    def agree(self, found: dict[torch.device, torch.Tensor], parameters: Iterable[torch.Tensor]) -> None:
        """Make an overflow that one rank of the replica found that of all; a collective of it."""
        sharded = any(isinstance(parameter, DTensor) for parameter in parameters)  # FSDP2 over dp x cp
        with self.failures.wait("torch.amp.GradScaler", self.mpu.model.ranks):
            for axis in (self.mpu.model, self.mpu.dp_cp) if sharded else (self.mpu.model,):
                agree_on_found(found, axis, self.mpu.device)

    def mine(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return those that are parameters of the model or gradients of them, by name."""
        owners: dict[Any, str] = {}  # by identity, or by place
        for name, parameter in self._named():
            owners[id(parameter)] = name
            if parameter.grad is not None:
                owners[_place(parameter.grad)] = name
        found = ((owners.get(id(tensor)) or owners.get(_place(tensor)), tensor) for tensor in tensors)
        return {name: tensor for name, tensor in found if name is not None}

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        model = self.model
        return iter(()) if model is None else model.named_parameters()


def mark_layer(parameter: torch.Tensor, layer: str) -> None:
    """Note that ``parameter`` is the shard of a layer that was constructed by hand: torch's clippers refuse it."""
    _exchange_bodies()
    setattr(parameter, _LAYER, layer)


def _place(tensor: torch.Tensor) -> Any:
    """Return where a tensor lies: ``gradient.detach()`` is another object over the same memory."""
    local = local_part(tensor) if isinstance(tensor, DTensor) else tensor
    return id(tensor) if local.is_sparse or local.numel() == 0 else (local.data_ptr(), local.shape, local.stride())


def _find(tensors: list[torch.Tensor]) -> tuple[_Given, list[torch.Tensor]]:
    """Return the tensors of each parallelized model, in the order in which these were made, and what is left.

    No tensors at all are the share of a pipeline stage that holds none of those that other stages give.

    Raises:
        ConfigError: there are none, and several models have stages.
    """
    given: _Given = [] if tensors else _empty_share()
    for one in listeners(ReplicaNorm):
        mine = one.mine(tensors)
        if mine:
            given.append((one, mine))
    taken = {id(tensor) for _, mine in given for tensor in mine.values()}
    return given, [tensor for tensor in tensors if id(tensor) not in taken]


def _empty_share() -> _Given:
    staged = [one for one in listeners(ReplicaNorm) if one.mpu.pp.size > 1 and one.is_alive]
    if len(staged) > 1:
        raise ConfigError(
            f"this rank's stage holds none of the parameters, and {len(staged)} models have pipeline stages: which of "
            "them the other stages\n  clip cannot be told. Use autopar.clip_grad_norm_(model, max_norm)."
        )
    return [(one, {}) for one in staged]


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _refuse_layers(parameters: Iterable[torch.Tensor], name: str, instead: str) -> None:
    for parameter in parameters:
        layer = getattr(parameter, _LAYER, None)
        if layer is not None:
            raise ConfigError(
                f"{name} sees only this rank's shard of a {layer}, so that ranks would drift apart.\n  Use {instead}."
            )


# -- the bodies --------------------------------------------------------------------------------------------------------


def _clip_grad_norm(
    plain: Callable[..., Any],
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Any:
    """The body of ``torch.nn.utils.clip_grad_norm_``."""
    listed = _listed(parameters)
    given, rest = _find(listed)
    _refuse_layers(rest, "torch.nn.utils.clip_grad_norm_", "autopar.clip_grad_norm_(model, max_norm)")
    if not given:
        again = (each for each in listed) if isinstance(parameters, types.GeneratorType) else listed
        return plain(again, max_norm, norm_type, error_if_nonfinite, foreach)
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
    """The body of ``torch.nn.utils.get_total_norm``."""
    listed = _listed(tensors)
    given, rest = _find(listed)
    if not given:
        return plain(listed, norm_type, error_if_nonfinite, foreach)
    for one, _ in given:
        if one.mpu.pp.size > 1:
            raise ConfigError(
                f"torch.nn.utils.get_total_norm sees one of {one.mpu.pp.size} pipeline stages: loops that call it add "
                "up the stages themselves, and count tied weights twice.\n"
                "  Use autopar.clip_grad_norm_(model, max_norm), which returns the norm of the whole model."
            )
    return _norm(given, rest, float(norm_type), error_if_nonfinite)


def _clip_grads_with_norm(
    plain: Callable[..., Any], parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None
) -> None:
    """The body of ``torch.nn.utils.clip_grads_with_norm_``."""
    listed = _listed(parameters)
    given, rest = _find(listed)
    _refuse_layers(rest, "torch.nn.utils.clip_grads_with_norm_", "autopar.clip_grad_norm_(model, max_norm)")
    if not given:
        plain(listed, max_norm, total_norm, foreach)
        return
    whole = total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
    factor = clip_factor(float(max_norm), torch.as_tensor(whole))
    for one, _ in given:
        one.check_factor(factor)
    scale_gradients(listed, factor)


def _norm(
    given: _Given, rest: list[torch.Tensor], norm_type: float, error_if_nonfinite: bool, *, single: bool = False
) -> torch.Tensor:
    """Return the norm over tensors of parallelized models, and over others, which each rank holds whole."""
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
    """The body of ``GradScaler._unscale_grads_``, which returns what overflowed: device -> 1.0 if something did."""
    found = plain(scaler, optimizer, *args, **kwargs)
    if isinstance(scaler, GradScaler):  # has agreed already
        return found
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    given, rest = _find(parameters)
    _refuse_layers(rest, f"torch's {type(scaler).__name__}", "autopar.GradScaler(mpu)")
    for one, mine in given:
        one.agree(found, mine.values())
    return found


# -- the exchange ------------------------------------------------------------------------------------------------------

_PLAIN: dict[str, Callable[..., Any]] = {}
_BODIES: dict[str, Callable[..., Any]] = {
    "_get_total_norm": _get_total_norm,
    "_clip_grads_with_norm_": _clip_grads_with_norm,
    "clip_grad_norm_": _clip_grad_norm,
}


@functools.cache
def _exchange_bodies() -> None:
    """Let torch's functions call those above, with torch's as their first argument; once a process.

    Each of torch's is a wrapper (``no_grad``) around a function in its closure: that is exchanged. Where another torch
    has no such wrapper, the names in torch's modules are.
    """
    for name, body in _BODIES.items():
        again = torch.no_grad()
        _PLAIN[name] = exchange_body(getattr(torch_clip, name), "func", body, (torch_clip, nn.utils), again)
    for scaler in (torch.amp.GradScaler, ShardedGradScaler):
        exchange_member(scaler, "_unscale_grads_", _unscale)
