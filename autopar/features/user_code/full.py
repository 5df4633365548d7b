"""Full parameters on every rank: :func:`full_params` inside a ``with`` block, :func:`full_tensor` differentiably.

With them, user code (pruning, editing, initializing, averaging, penalties) sees the tensors of the single-process model
on each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from autopar.checkpoint.hf_weights import gather_full, sharding
from autopar.compat.tensors import own_parameters
from autopar.data_parallel.fully_sharded import FullySharded
from autopar.data_parallel.gradients import ReplicaNorm
from autopar.distributed import collectives
from autopar.distributed.axis import Axis
from autopar.distributed.digest import extremes, sum_of_bits
from autopar.distributed.rng import Generators, sync_generators
from autopar.errors import ConfigError, ConsistencyError, nearest
from autopar.guards.step import listeners
from autopar.layout import Layout
from autopar.pipeline_parallel.stage_weights import put_back
from autopar.setup.steps import Parallelized

_Numbers = tuple[int, int]
"""Digests of a parameter and of its gradient."""


@dataclass
class _Held:
    """A parameter inside :func:`full_params`, with its local shard, which is empty if another stage holds it."""

    name: str
    parameter: nn.Parameter
    layout: Layout | None
    shard: torch.Tensor
    gradient: torch.Tensor | None
    before: _Numbers = (0, 0)


@contextmanager
def full_params(
    model: nn.Module, names: str | Iterable[str] | None = None, *, grads: bool = True
) -> Iterator[nn.Module]:
    """Hold full parameters on every rank inside ``with``, also of other stages; afterwards restore the shards.

    The ``Parameter`` objects stay, and changes are kept. Every rank must enter it, make the same changes, and must not
    run the model inside. With replicas or stages, all ranks draw the random numbers of rank 0 inside::

        with autopar.full_params(model, "model.layers.3.mlp"):
            weight = model.model.layers[3].mlp.up_proj.weight
            weight.data[weight.abs() < weight.abs().quantile(0.3)] = 0

    Args:
        model: Model from ``initialize``, or a wrapper such as ``DistributedDataParallel`` around it.
        names: Names of parameters, or of modules for all their parameters. Default: all. Each rank needs memory for
            these full parameters in addition to its shards.
        grads: True for full gradients too; missing ones are zeros. False or ``zero.reduce_scatter`` hides gradients.

    Yields:
        The model from ``initialize``.

    Raises:
        ConfigError: The model is not parallelized, a name is unknown, ``zero.stage`` is 2 or 3, the model runs inside,
            or the shape or dtype of a parameter has changed.
        ConsistencyError: Ranks changed a parameter in different ways. All ranks then restore their earlier shards.
    """
    root = next((module for module in model.modules() if "_autopar" in vars(module)), None)  # through wrappers
    if root is None:
        raise ConfigError(f"full_params requires a model from autopar.initialize, got {type(model).__name__}")
    model, state = root, vars(root)["_autopar"]
    if state.config.fully_sharded:
        stage = state.config.zero_stage
        raise ConfigError(f"full_params is not supported with zero.stage {stage} (FSDP2)\n  Use module.unshard().")
    chosen = _chosen(state, names)
    mpu, generators, grads = state.mpu, Generators.now(), grads and state.dp.norm.owners is None
    alone = mpu.world_size == mpu.shards.size
    with state.failures.wait("autopar.full_params", range(mpu.world_size)):
        held = _gather(model, state, chosen, grads)
        if not alone:
            world = Axis("world", dist.group.WORLD, range(mpu.world_size), mpu.rank)
            sync_generators(mpu.model if mpu.model.size == mpu.world_size else world)
    models = {model, state.inner_of(model)}
    hooks = [module.register_forward_pre_hook(_refuse_forward, prepend=True) for module in models]
    changed = False
    try:
        yield model
        with state.failures.wait("the end of autopar.full_params", range(mpu.world_size)):
            _compare(state, held, grads)
        changed = True
    finally:
        _give_back(model, state, held, changed=changed)
        for hook in hooks:
            hook.remove()
        if not alone:
            generators.restore()


def full_tensor(tensor: torch.Tensor, of: torch.Tensor | None = None) -> torch.Tensor:
    """Return the full parameter as a differentiable tensor, for penalties and other code that needs all elements.

    The result is identical on all tensor-parallel ranks, and the local shard gets its slice of the gradient. A
    replicated tensor or a parameter of a plain model is returned unchanged. With ``zero.stage`` 2 and 3 the rows of
    other replicas are gathered too, and the gradient of the shard is the mean over replicas. A collective of the
    tensor-parallel ranks; with ``zero.stage`` 2 and 3 of the ranks of all replicas::

        loss = model(**batch).loss + 0.1 * (autopar.full_tensor(model.lm_head.weight) - start).norm()

    Args:
        tensor: Parameter of a parallelized model, or its gradient.
        of: Parameter to which ``tensor`` belongs, if ``tensor`` is a result of ``torch.autograd.grad`` or an optimizer
            state.

    Raises:
        ConfigError: The tensor belongs to no parallelized model on this rank, or lacks the shape of the shard.
    """
    asked = tensor if of is None else of
    for model in listeners(ReplicaNorm):
        name = next(iter(model.mine([asked]) or model.made([asked])), None)
        if name is None:
            continue
        due = model.plan.tensors[model.plan.canonical(name)]
        if due.quantized:
            raise ConfigError(f"full_tensor is not supported with quantized weights, got {name} ({due.quantized})")
        axis, layout = sharding(due, model.plan, model.mpu)
        ranks = sorted({*axis.ranks, *model.mpu.fsdp.ranks}) if isinstance(tensor, DTensor) else axis.ranks
        if layout is not None and tuple(tensor.shape) != due.local_shape(axis.rank):
            raise ConfigError(
                f"full_tensor expected the local shard of {name} with shape {list(due.local_shape(axis.rank))}, got "
                f"{list(tensor.shape)}"
            )
        with model.failures.wait(f"autopar.full_tensor({name})", ranks):
            rows = _rows_of_replicas(tensor)
            if layout is None:
                return rows
            summed = collectives.sum_replicas(rows, axis, layout) if layout.replicated else rows
            return collectives.gather(summed, axis, layout, layout.dim)
    if isinstance(tensor, DTensor):
        for sharded in listeners(FullySharded):
            over = sharded.axis_of(tensor.device_mesh)
            if over is not None:
                with sharded.failures.wait("autopar.full_tensor", over.ranks):
                    return _rows_of_replicas(tensor)
    of_plain_model = isinstance(asked, nn.Parameter) and asked.numel() > 0
    parallel = any(model.mpu.shards.size > 1 or model.mpu.pp.size > 1 for model in listeners(ReplicaNorm))
    if parallel and not of_plain_model:
        raise ConfigError(
            "full_tensor expected a parameter of a parallelized model on this rank, or its gradient, got a tensor of "
            f"shape {list(tensor.shape)}\n  Call it on the ranks of the parameter's stage. For another tensor pass its "
            "parameter: full_tensor(tensor, of=parameter)."
        )
    return tensor


def _rows_of_replicas(tensor: torch.Tensor) -> torch.Tensor:
    """Gather the rows that ZeRO 2 and 3 keep on other replicas; the gradient is a mean over replicas."""
    if not isinstance(tensor, DTensor):
        return tensor
    replicas = tensor.device_mesh.size()
    joined = tensor.full_tensor(grad_placements=[Partial()] * tensor.device_mesh.ndim)
    if joined.requires_grad:
        joined.register_hook(lambda gradient: gradient / replicas)
    return joined


def _refuse_forward(module: nn.Module, args: Any) -> None:
    raise ConfigError(
        f"{type(module).__name__} must not run inside autopar.full_params, where its layers hold full weights\n"
        "  Leave the with block first."
    )


def _chosen(state: Parallelized, names: str | Iterable[str] | None) -> list[str]:
    """Return the canonical names of the chosen parameters, in the order of the state dict."""
    plain = state.plan.saved().tensors
    every = {name: tensor.name for tensor in plain.values() for name in (tensor.name, *tensor.aliases)}
    if names is None:
        return list(plain)
    wanted: set[str] = set()
    for asked in [names] if isinstance(names, str) else names:
        found = {own for name, own in every.items() if not asked or name == asked or name.startswith(f"{asked}.")}
        form = state.plan.quantized().get(asked)
        if form is not None:
            raise ConfigError(f"full_params is not supported with quantized weights, got {asked} ({form})")
        if not found:
            parents = {name.rsplit(".", n)[0] for name in every for n in range(1, name.count(".") + 1)}
            known = [*sorted(parents), *every]
            raise ConfigError(f"full_params: there is no parameter or module '{asked}'.{nearest(asked, known)}")
        wanted |= found
    return [name for name in plain if name in wanted]


# -- gather and restore ------------------------------------------------------------------------------------------------


@torch.no_grad()
def _gather(model: nn.Module, state: Parallelized, chosen: Sequence[str], grads: bool) -> list[_Held]:
    elsewhere: dict[str, torch.dtype] = {}  # dtypes of parameters of other stages, which return to their modules
    if state.pp is not None:
        put_back(model, state.pp.released)
        placeholders = state.pp.released.placeholders
        elsewhere = {state.plan.canonical(name): placeholder.dtype for name, placeholder in placeholders.items()}
    own = dict[str, nn.Parameter]()
    for name, parameter in model.named_parameters():
        first = own.setdefault(state.plan.canonical(name), parameter)
        if first is not parameter and state.mpu.pp.size == 1:
            raise ConfigError(f"full_params: {name} must still be tied, as it was when the model was parallelized")
    kept, mpu = [name for name in chosen if name in own], state.mpu
    graded = [int(own[name].grad is not None) for name in kept]
    if mpu.shards_pp.size > 1 and kept:
        graded, _ = extremes(graded, mpu.shards_pp.group)
    held = []
    for name, has in zip(kept, graded, strict=True):
        parameter, due, holders = own[name], state.plan.tensors[name], state.stages.holders(name)
        given = due, state.plan, mpu, holders, elsewhere.get(name, parameter.dtype)
        here = mpu.pp.rank in holders
        one = _Held(name, parameter, due.layout, parameter.data, parameter.grad if here else None)
        parameter.grad = gradient = None
        if has and grads:
            mine = one.gradient if one.gradient is not None else torch.zeros_like(parameter.data)
            gradient = gather_full(mine, *given)
        parameter.data = gather_full(parameter.data, *given)
        if gradient is not None:
            parameter.grad = gradient.to(parameter.dtype)
        one.before = _numbers(parameter)
        held.append(one)
    return held


def _numbers(parameter: nn.Parameter) -> _Numbers:
    return int(sum_of_bits(parameter.data)), 0 if parameter.grad is None else int(sum_of_bits(parameter.grad)) + 1


@torch.no_grad()
def _compare(state: Parallelized, held: list[_Held], grads: bool) -> None:
    """Raise on all ranks unless all of them made the same changes."""
    mpu = state.mpu
    shapes = [one for one in held if one.parameter.shape != state.plan.tensors[one.name].shape]
    weights, gradients = zip(*(_numbers(one.parameter) for one in held), strict=True) if held else ((), ())
    largest, least = extremes([len(shapes), *weights], None)
    of_gradients = extremes([*gradients], mpu.tp_pp.group) if mpu.tp_pp.size > 1 and grads else ([], [])
    if largest[0]:
        named = ", ".join(f"{one.name} is {list(one.parameter.shape)} now" for one in shapes[:3]) or "on another rank"
        raise ConfigError(f"full_params: parameters must keep their shape: {named}. Nothing was changed")
    pairs = [*zip(held, largest[1:], least[1:], strict=True)]
    pairs += [*zip(held, *of_gradients, strict=True)] if of_gradients[0] else []
    unlike = list(dict.fromkeys(one.name for one, high, low in pairs if high != low))
    if unlike:
        raise ConsistencyError(
            f"full_params: ranks have changed {unlike[0]} in different ways ({len(unlike)} of {len(held)} parameters). "
            "Nothing was changed.\n  Make identical changes on all ranks: without `if rank == 0`, and with random "
            "numbers from torch's default\n  generator, or from a generator with the same seed."
        )


@torch.no_grad()
def _give_back(model: nn.Module, state: Parallelized, held: list[_Held], *, changed: bool) -> None:
    """Restore shards and placeholders, with ``changed`` from the new values. No communication."""
    rank = state.mpu.shards.rank
    for one in held:
        parameter, here = one.parameter, state.mpu.pp.rank in state.stages.holders(one.name)
        now, gradient = parameter.data, parameter.grad
        before, after = one.before, _numbers(parameter) if changed else one.before
        parameter.grad = None
        parameter.data = one.shard
        if not here:
            continue
        if after[0] != before[0]:
            one.shard.copy_(now if one.layout is None else one.layout.shard(now, rank))
        if after[1] == before[1]:
            parameter.grad = one.gradient
        elif gradient is not None:
            parameter.grad = gradient if one.layout is None else one.layout.shard(gradient, rank)
    if state.pp is None:
        return
    released = state.pp.released
    paths = {id(module): path for path, module in model.named_modules()}
    for module, order in released.orders:
        for name, emptied in order.items():
            if id(emptied) in released.parameters:
                del own_parameters(module)[name]
                vars(module)[name] = released.placeholders[f"{paths[id(module)]}.{name}".lstrip(".")]
