"""Average the gradients of a parallelized model over replicas, and clip them by a norm over the full model."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from autopar.distributed.collectives import gathered
from autopar.distributed.failures import FailureLog
from autopar.distributed.gloo_collectives import all_reduce
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError
from autopar.guards.model_changes import refuse_flat
from autopar.guards.step import forget, listen
from autopar.layout import Layout, replica_rows
from autopar.plan.plan import Plan

LAYER = "autopar_layer"  # attribute of a parameter: the class of its parallel layer, if user code built the layer


def counted_here(names: Iterable[str], plan: Plan, mpu: MPU) -> frozenset[str]:
    """Return the canonical names of this stage's parameters that no earlier stage holds. A collective of pp."""
    mine = frozenset(plan.canonical(name) for name in names)
    if mpu.pp.size == 1:
        return mine
    return mine.difference(*gathered(mine, mpu.pp.group)[: mpu.pp.rank])


def tensor_norm(
    tensors: Mapping[str, torch.Tensor],
    plan: Plan,
    mpu: MPU,
    counted: frozenset[str],
    p: float,
    held: Iterable[torch.Tensor],
    owners: Mapping[str, int] | None = None,
    *,
    of_stage: bool = False,
) -> torch.Tensor:
    """Return the p-norm over a model replica, a scalar in fp32 (fp64 for fp64 gradients). A collective of the replica.

    Elements that several ranks hold (replicated parameters, KV heads, tied weights) count once.

    Args:
        tensors: Parameter name -> gradient or weight.
        counted: The result of :func:`counted_here`.
        held: All parameters of this rank, for the dtype of the norm and to detect FSDP2.
        owners: Parameter name -> the only rank of the replicas with its gradient; then a collective of all replicas.
        of_stage: True for the norm of this stage alone; then a collective of its ranks.
    """
    parts = []
    for name, tensor in tensors.items():
        canonical = plan.canonical(name)
        expert = canonical in plan.experts
        if canonical in counted and (owners is None or owners[name] == (mpu.copies if expert else mpu.dp_cp).rank):
            layout = plan.tensors[canonical].layout
            apart = not expert and (owners is not None or isinstance(tensor, DTensor))  # replicas hold different rows
            parts += _parts(tensor, layout, mpu.tp if apart else mpu.shards, mpu.fsdp)
    held = list(held)
    sharded = owners is not None or any(isinstance(parameter, DTensor) for parameter in held)  # over dp x cp
    replica = mpu.shards if of_stage else mpu.shards_pp
    rows = mpu.copies if plan.experts else mpu.fsdp
    return _combine(parts, p, (replica, rows) if sharded else (replica,), mpu.device, held)


def clip_factor(max_norm: float, norm: torch.Tensor) -> torch.Tensor:
    """Return the factor that clips gradients of this norm, a scalar of at most 1."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


@torch.no_grad()
def scale_gradients(parameters: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply gradients by ``factor``, in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            local = local_part(parameter.grad)
            local.mul_(factor.to(local.device, local.dtype))


def own_axis(model: nn.Module) -> Axis | None:
    """Return the axis of a model whose parallel layers user code built, or None. Several axes raise ConfigError."""
    axes = {id(tp): tp for module in model.modules() if isinstance(tp := vars(module).get("tp"), Axis)}
    if len({axis.ranks for axis in axes.values()}) > 1:
        raise ConfigError(f"the parallel layers of {type(model).__name__} must share one group, got {len(axes)} groups")
    return next(iter(axes.values()), None)


def own_norm(model: nn.Module, axis: Axis, p: float = 2.0) -> torch.Tensor:
    """Return the p-norm of the gradients of a model whose parallel layers user code built. A collective of the axis."""
    held = list(model.parameters())
    sharded = {
        id(own_parameters(module).get(name))
        for module in model.modules()
        for name in vars(module).get("autopar_layouts", ())
    }
    counted = [each for each in held if each.grad is not None and (axis.rank == 0 or id(each) in sharded)]
    if any(isinstance(parameter, DTensor) for parameter in held):
        raise ConfigError("clip_grad_norm_ is not supported with FSDP over a model whose parallel layers you built")
    return _combine([each.grad for each in counted if each.grad is not None], p, (axis,), device_of(axis), held)


def _parts(gradient: torch.Tensor, layout: Layout | None, axis: Axis, replicas: Axis) -> list[torch.Tensor]:
    """Return the slices of a local gradient that this rank counts, so that each element counts once over ``axis``."""
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
    """The norm over all ranks of one model replica; ``scaled``: True if gradients stay scaled until ``step()``."""

    def __init__(
        self, model: nn.Module, plan: Plan, mpu: MPU, failures: FailureLog, *, scaled: bool, owned: bool = False
    ) -> None:
        self.owners: Callable[[], Mapping[torch.Tensor, int]] | None = None  # as of ReplicaGradients
        self.plan, self.mpu, self.failures, self.scaled = plan, mpu, failures, scaled
        self._model = weakref.ref(model)
        self._counted: frozenset[str] | None = None
        if mpu.model.size > 1 or mpu.shards.size > 1 or owned:
            hold(self)  # for torch's clippers, accelerate and DeepSpeed
            listen(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicaNorm:
        model = memo.get(id(self.model))  # the copied model
        if not isinstance(model, nn.Module):
            return self
        return ReplicaNorm(model, self.plan, self.mpu, self.failures, scaled=self.scaled)

    @property
    def model(self) -> nn.Module | None:
        """The model, while it lives."""
        return self._model()

    @property
    def is_alive(self) -> bool:
        """Whether both the model and its process groups still exist."""
        return self.model is not None and self.mpu.alive

    def remove(self) -> None:
        """Remove the norm, so that torch's functions work on the local shards again."""
        forget(self)
        release(self)

    def of(self, tensors: Mapping[str, torch.Tensor], norm_type: float, *, single: bool = False) -> torch.Tensor:
        """Return the norm of gradients or weights by parameter name. A collective of the replica.

        Scaled gradients, and gradients that ``FullyShardedDataParallel`` has flattened, raise ConfigError.

        Args:
            single: True for one parameter; then a collective of the stage.
        """
        if self.scaled:
            raise ConfigError(
                "clip_grad_norm_ is not supported with precision.dtype fp16: gradients are unscaled inside of step()\n"
                "  Write gradient_clipping into the config; optimizer.gradient_norm is the norm."
            )
        if not norm_type > 0:
            raise ConfigError(f"norm_type must be positive, got {norm_type}")
        if any(is_flat_parameter(parameter) for _, parameter in self._named()):
            refuse_flat()
        with self.failures.wait("the norm of the gradients", self.mpu.shards_pp.ranks):
            held, of = dict(self._named()), None if self.owners is None else self.owners()
            owners = None if of is None else {name: of.get(held[name], 0) for name in tensors}
            how = (norm_type, held.values(), owners)
            if single:
                counted = frozenset(map(self.plan.canonical, tensors))
                return tensor_norm(tensors, self.plan, self.mpu, counted, *how, of_stage=True)
            if self._counted is None:
                self._counted = counted_here(held, self.plan, self.mpu)
            return tensor_norm(tensors, self.plan, self.mpu, self._counted, *how)

    def mine(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors that are parameters of the model or their gradients, by name."""
        owners: dict[Any, str] = {}  # id or memory -> name
        for name, parameter in self._named():
            owners[id(parameter)] = name
            if parameter.grad is not None:
                owners[_place(parameter.grad)] = name
        found = ((owners.get(id(tensor)) or owners.get(_place(tensor)), tensor) for tensor in tensors)
        return {name: tensor for name, tensor in found if name is not None}

    def made(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors that derive from shards of the model, such as copies, by parameter name."""
        owners = {id(getattr(parameter, "autopar_shard", self)): name for name, parameter in self._named()}
        found = ((owners.get(id(getattr(tensor, "autopar_shard", None))), tensor) for tensor in tensors)
        return {name: tensor for name, tensor in found if name is not None}

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        model = self.model
        return iter(()) if model is None else model.named_parameters()


def _place(tensor: torch.Tensor) -> Any:
    """Return a key of the tensor's memory, which ``gradient.detach()`` shares."""
    local = local_part(tensor)
    return id(tensor) if local.is_sparse or local.numel() == 0 else (local.data_ptr(), local.shape, local.stride())


# -- functions for users -----------------------------------------------------------------------------------------------


def average_gradients(model: nn.Module) -> None:
    """Average the gradients of a parallelized model over the replicas, in place. Every rank calls it.

    Call it in a loop without ``DistributedDataParallel`` after the last backward of a step, or after
    ``execute_pipeline`` inside ``no_sync``. A missing gradient counts as zero.
    """
    with _averaged(model, early=False):
        pass


@contextmanager
def average_in_backward(model: nn.Module) -> Iterator[None]:
    """Average the gradients of a parallelized model over the replicas during the backward inside the block.

    Use it instead of :func:`average_gradients`, around the last ``loss.backward()`` of a step. From the second step on,
    each bucket of gradients is averaged as soon as it is complete. Its gradients are None until the end of the block.
    In shared memory (``cpu_transport``), all are averaged at the end of the block.
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
    """Clip the gradients of a parallelized model to ``max_norm`` and return their norm, identical on all ranks.

    Elements that several ranks hold (replicated parameters, KV heads, tied weights) count once. The gradients must be
    averaged over the replicas already. ``torch.nn.utils.clip_grad_norm_`` of a parallelized model's parameters does the
    same if every rank of a replica calls it.

    Args:
        model: A parallelized model, a model of ``ColumnParallelLinear`` layers, or a wrapper such as
            ``DistributedDataParallel`` around it.
        max_norm: The largest norm that is not clipped.
        norm_type: The p of the p-norm; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: True to raise, on every rank, if the norm is nan or infinite.

    Returns:
        The norm before clipping, a scalar in fp32 (fp64 for fp64 gradients).

    Raises:
        ConfigError: The model is not parallelized, its precision is fp16, or an argument is not a positive number.
        RuntimeError: The norm is not finite and ``error_if_nonfinite`` is set.
    """
    if not max_norm >= 0:
        raise ConfigError(f"max_norm must not be negative, got {max_norm}")
    if not norm_type > 0:
        raise ConfigError(f"norm_type must be positive, got {norm_type}")
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
        state.dp.fully_sharded.reshard()  # so that parameters are the shards, which have the gradients
    gradients = {name: p.grad for name, p in root.named_parameters() if p.grad is not None}  # a tied weight once
    return state.dp.norm.of(gradients, norm_type)


def _parallelized(model: nn.Module) -> tuple[nn.Module, Any]:
    for module in model.modules():  # through wrappers
        state = vars(module).get("_autopar")
        if state is not None:
            return module, state
    raise ConfigError(
        f"{type(model).__name__} is not parallelized\n  Use torch.nn.utils.clip_grad_norm_, or call "
        "autopar.initialize first."
    )
