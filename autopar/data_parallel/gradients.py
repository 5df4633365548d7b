"""Gradients of a parallelized model: averaged over the replicas, clipped by a norm that counts each parameter once."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.compat.c10d import is_flat_parameter
from autopar.compat.patches import hold, release
from autopar.compat.tensors import local_part, own_parameters
from autopar.distributed.axis import Axis, device_of
from autopar.distributed.failures import FailureLog
from autopar.distributed.gloo_collectives import all_reduce
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError
from autopar.guards.model_changes import refuse_flat
from autopar.guards.step import forget, listen
from autopar.layout import Layout, replica_rows
from autopar.plan.plan import Plan

LAYER = "autopar_layer"  # of a parameter: the class of the layer that was constructed by hand


def counted_here(names: Iterable[str], plan: Plan, mpu: MPU) -> frozenset[str]:
    """Return the canonical names of this stage's parameters that no earlier stage holds. A collective of pp."""
    mine = frozenset(plan.canonical(name) for name in names)
    if mpu.pp.size == 1:
        return mine
    held: list[frozenset[str]] = [mine] * mpu.pp.size
    dist.all_gather_object(held, mine, group=mpu.pp.group)
    return mine.difference(*held[: mpu.pp.rank])


def tensor_norm(
    tensors: Mapping[str, torch.Tensor],
    plan: Plan,
    mpu: MPU,
    counted: frozenset[str],
    p: float,
    held: Iterable[torch.Tensor],
    *,
    of_stage: bool = False,
) -> torch.Tensor:
    """Return the p-norm over one model replica, a scalar in fp32 (fp64 for fp64 gradients); a collective of it.

    Elements that several ranks hold (replicated parameters, KV heads, tied weights) count once.

    Args:
        tensors: Gradients or weights by the names of their parameters.
        counted: Result of :func:`counted_here`.
        held: All parameters of this rank: the dtype of the norm, and whether FSDP2 has sharded them.
        of_stage: True for the norm of this stage alone; then a collective of its ranks.
    """
    parts = []
    for name, tensor in tensors.items():
        canonical = plan.canonical(name)
        if canonical in counted:
            layout = plan.tensors[canonical].layout
            apart = isinstance(tensor, DTensor) and canonical not in plan.experts  # replicas hold other rows
            parts += _parts(tensor, layout, mpu.tp if apart else mpu.shards, mpu.fsdp)
    held = list(held)
    sharded = any(isinstance(parameter, DTensor) for parameter in held)  # FSDP2 over dp x cp
    replica = mpu.shards if of_stage else mpu.shards_pp
    rows = mpu.copies if plan.experts else mpu.fsdp
    return _combine(parts, p, (replica, rows) if sharded else (replica,), mpu.device, held)


def clip_factor(max_norm: float, norm: torch.Tensor) -> torch.Tensor:
    """Return the factor by which gradients of that norm are clipped, a scalar of at most 1."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


@torch.no_grad()
def scale_gradients(parameters: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply gradients by ``factor``, in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            local = local_part(parameter.grad)
            local.mul_(factor.to(local.device, local.dtype))


def own_axis(model: nn.Module) -> Axis | None:
    """Return the axis of a model that was built of parallel layers by hand, or None; several axes raise."""
    axes = {id(tp): tp for module in model.modules() if isinstance(tp := vars(module).get("tp"), Axis)}
    if len({axis.ranks for axis in axes.values()}) > 1:
        raise ConfigError(f"the parallel layers of {type(model).__name__} lie on {len(axes)} different groups")
    return next(iter(axes.values()), None)


def own_norm(model: nn.Module, axis: Axis, p: float = 2.0) -> torch.Tensor:
    """Return the p-norm of the gradients of a model that was built of parallel layers; a collective of their axis."""
    held = list(model.parameters())
    sharded = {
        id(own_parameters(module).get(name))
        for module in model.modules()
        for name in vars(module).get("autopar_layouts", ())
    }
    counted = [each for each in held if each.grad is not None and (axis.rank == 0 or id(each) in sharded)]
    if any(isinstance(parameter, DTensor) for parameter in held):
        raise ConfigError("clip_grad_norm_: FSDP over a model of parallel layers built by hand is not supported")
    return _combine([each.grad for each in counted if each.grad is not None], p, (axis,), device_of(axis), held)


def _parts(gradient: torch.Tensor, layout: Layout | None, axis: Axis, replicas: Axis) -> list[torch.Tensor]:
    """Return the parts of a local gradient that this rank counts, of what the ranks of ``axis`` hold together."""
    local = local_part(gradient)
    if layout is None:
        return [local] if axis.rank == 0 else []
    layout = layout.of_first(axis.size)
    if not layout.replicated:
        return [local]
    ranges = layout.owned_local(axis.rank)
    if isinstance(gradient, DTensor) and layout.dim == 0:
        first, _ = replica_rows(gradient.shape[0], replicas.rank, replicas.size)
        rows = [(max(start - first, 0), min(stop - first, local.shape[0])) for start, stop in ranges]
        ranges = tuple((start, stop) for start, stop in rows if start < stop)
    return [local.narrow(layout.dim, start, stop - start) for start, stop in ranges]


def _combine(
    parts: list[torch.Tensor], p: float, over: Sequence[Axis], device: torch.device, held: Sequence[torch.Tensor]
) -> torch.Tensor:
    axes = [axis for axis in over if axis.size > 1]
    dtype = torch.float64 if any(parameter.dtype == torch.float64 for parameter in held) else torch.float32
    parts = [part for part in parts if part.numel()]
    if parts:
        norms = torch.stack([torch.linalg.vector_norm(part, p, dtype=dtype).to(device) for part in parts])
    else:
        norms = torch.zeros(1, dtype=dtype, device=device)
    if math.isinf(p):
        pair = torch.stack([norms.nan_to_num(nan=0.0, posinf=math.inf).max(), norms.isnan().any().to(dtype)])
        for axis in axes:
            all_reduce(pair, op=dist.ReduceOp.MAX, group=axis.group)  # gloo's MAX loses nan
        return pair[0] if pair[1] == 0 else pair[0] * math.nan
    total = norms.pow(p).sum()
    for axis in axes:
        all_reduce(total, group=axis.group)
    return total.pow(1 / p)


class ReplicaNorm:
    """The norm over all ranks of one model replica; ``scaled``: gradients are scaled until the optimizer steps."""

    def __init__(self, model: nn.Module, plan: Plan, mpu: MPU, failures: FailureLog, *, scaled: bool) -> None:
        self.plan, self.mpu, self.failures, self.scaled = plan, mpu, failures, scaled
        self._model = weakref.ref(model)
        self._counted: frozenset[str] | None = None
        if mpu.model.size > 1 or mpu.shards.size > 1:
            hold(self)  # torch's clippers, accelerate and DeepSpeed ask for it
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
        return self.model is not None and self.mpu.alive

    def remove(self) -> None:
        """Leave the model's parameters to torch from now on."""
        forget(self)
        release(self)

    def of(self, tensors: Mapping[str, torch.Tensor], norm_type: float, *, single: bool = False) -> torch.Tensor:
        """Return the norm of gradients (or weights), by the names of their parameters; a collective of the replica.

        Scaled gradients, and those that ``FullyShardedDataParallel`` has flattened, raise.

        Args:
            single: True for one parameter; then a collective of the stage.
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
        with self.failures.wait("the norm of the gradients", self.mpu.shards_pp.ranks):
            held = dict(self._named())
            if single:
                counted = frozenset(map(self.plan.canonical, tensors))
                return tensor_norm(tensors, self.plan, self.mpu, counted, norm_type, held.values(), of_stage=True)
            if self._counted is None:
                self._counted = counted_here(held, self.plan, self.mpu)
            return tensor_norm(tensors, self.plan, self.mpu, self._counted, norm_type, held.values())

    def mine(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return those that are parameters of the model or gradients of them, by name."""
        owners: dict[Any, str] = {}  # by identity, or by place
        for name, parameter in self._named():
            owners[id(parameter)] = name
            if parameter.grad is not None:
                owners[_place(parameter.grad)] = name
        found = ((owners.get(id(tensor)) or owners.get(_place(tensor)), tensor) for tensor in tensors)
        return {name: tensor for name, tensor in found if name is not None}

    def made(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return those that are made of shards of the model, such as copies, by the names of their parameters."""
        named = ((getattr(parameter, "autopar_shard", self), name) for name, parameter in self._named())
        owners = {id(shard): name for shard, name in named}
        found = ((owners.get(id(getattr(tensor, "autopar_shard", None))), tensor) for tensor in tensors)
        return {name: tensor for name, tensor in found if name is not None}

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        model = self.model
        return iter(()) if model is None else model.named_parameters()


def _place(tensor: torch.Tensor) -> Any:
    """Return where a tensor lies: ``gradient.detach()`` is another object over the same memory."""
    local = local_part(tensor)
    return id(tensor) if local.is_sparse or local.numel() == 0 else (local.data_ptr(), local.shape, local.stride())


# -- what users call ---------------------------------------------------------------------------------------------------


def average_gradients(model: nn.Module) -> None:
    """Average the gradients of a parallelized model over data parallel, in place; every rank calls it.

    For loops without ``DistributedDataParallel``, after the last backward of a step; also after ``execute_pipeline``
    inside ``no_sync``. A gradient that some replicas lack counts as zero there.
    """
    with _averaged(model, early=False):
        pass


@contextmanager
def average_in_backward(model: nn.Module) -> Iterator[None]:
    """Average the gradients of a parallelized model over data parallel while the backward inside runs.

    Use it in place of :func:`average_gradients`, around the last ``loss.backward()`` of a step. From the second step on
    each bucket of gradients starts as soon as it is complete; until the end of the block its gradients are None.
    """
    with _averaged(model, early=True):
        yield


@contextmanager
def _averaged(model: nn.Module, *, early: bool) -> Iterator[None]:
    root, state = _parallelized(model)
    with state.dp.replicas.averaged(root, early=early) as arm:
        if early:
            arm()
        yield
    if state.pp is not None:
        state.pp.unaveraged = False


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Clip the gradients of a parallelized model to ``max_norm`` and return their norm, the same on every rank.

    Elements that several ranks hold (replicated parameters, KV heads, tied weights) count once.
    ``torch.nn.utils.clip_grad_norm_`` of parameters of a parallelized model does the same, on every rank of a replica.
    Gradients must be averaged over data parallel already.

    Args:
        model: A parallelized model, or a model of ``ColumnParallelLinear`` layers; or a wrapper such as
            ``DistributedDataParallel`` around it.
        max_norm: Largest norm that is not clipped.
        norm_type: p of the p-norm; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: True to raise, on every rank, if the norm is nan or infinite.

    Returns:
        The norm before clipping, a scalar in fp32 (fp64 for fp64 gradients).

    Raises:
        ConfigError: the model is not parallelized, its precision is fp16, or an argument is not a positive number.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
    """
    if not max_norm >= 0:
        raise ConfigError(f"max_norm must be a number of at least 0, not {max_norm}")
    if not norm_type > 0:
        raise ConfigError(f"norm_type must be above 0, not {norm_type}")
    axis = None if any("_autopar" in vars(module) for module in model.modules()) else own_axis(model)
    norm = _norm(model, norm_type) if axis is None else own_norm(model, axis, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {norm.item()}, which is not finite"
        )
    scale_gradients(model.parameters(), clip_factor(max_norm, norm))
    return norm


def _norm(model: nn.Module, norm_type: float) -> torch.Tensor:
    root, state = _parallelized(model)
    if state.dp.fully_sharded is not None:
        state.dp.fully_sharded.reshard()  # the gradients are those of shards
    gradients = {name: p.grad for name, p in root.named_parameters() if p.grad is not None}  # a tied one comes once
    return state.dp.norm.of(gradients, norm_type)


def _parallelized(model: nn.Module) -> tuple[nn.Module, Any]:
    for module in model.modules():  # through wrappers
        state = vars(module).get("_autopar")
        if state is not None:
            return module, state
    raise ConfigError(
        f"{type(model).__name__} is not parallelized: use torch.nn.utils.clip_grad_norm_, or autopar.initialize first"
    )
