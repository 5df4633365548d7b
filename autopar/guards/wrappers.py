"""Refuse wrappers that average over the wrong ranks when they are made: DistributedDataParallel over all, say.

Tensor-parallel ranks and stages hold different shards under the same names. A wrapper that copies or averages
parameters over them makes one shard of all, silently where the shards are equally large. torch calls its global hooks
when a module becomes part of another one (``DistributedDataParallel`` registers what it wraps before it sends anything)
and before an optimizer steps; groups are compared there, and before a forward, on each rank by itself. The ranks of one
axis partition the world, so a group that reaches beyond the replicas of one of its ranks does for all, and every rank
raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from autopar.adapters import is_adapted, is_peft_model
from autopar.call_site import calls
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError
from autopar.foreign.groups import left_out_of_ddp, meshes_of_fsdp
from autopar.foreign.transformers import forget_own_adapters
from autopar.guards.process_hooks import forget, listen

_MESH = 'mesh=model.mpu.mesh["dp"]'


def group_call(mpu: MPU) -> str:
    """Return the call that gives the process group over which gradients are averaged."""
    joint = "with_context_parallel=True" if mpu.cp.size > 1 else ""
    return f"model.mpu.get_data_parallel_group({joint})"


def _mesh_of(mpu: MPU) -> str:
    return "mesh=model.mpu.dp_cp_mesh" if mpu.cp.size > 1 else _MESH


class WrapperCheck:
    """Check wrappers of ``model`` as long as it lives and is parallel, where ranks hold different shards.

    Args:
        shares_experts: replicas hold different experts.
        fully_sharded: autopar shards the parameters with ``fully_shard``, experts over other ranks than the rest.
    """

    def __init__(
        self, model: nn.Module, mpu: MPU, *, shares_experts: bool = False, fully_sharded: bool = False
    ) -> None:
        self.mpu, self._shares, self._fully_sharded = mpu, shares_experts, fully_sharded
        self._model = weakref.ref(model)
        self._checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._handle: Any = None
        if mpu.model.size > 1 or shares_experts or fully_sharded:
            listen(self)
            self._handle = model.register_forward_pre_hook(self._on_forward)
        self._kind = type(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> WrapperCheck:
        return self

    def remove(self) -> None:
        """Remove the hooks."""
        forget(self)
        if self._handle is not None:
            self._handle.remove()

    def before_registration(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
            if submodule is not None and self._is_ours(submodule.modules()):
                if self._fully_sharded:
                    raise ConfigError(
                        f"{type(module).__name__} around a model with zero.stage 2 or 3: torch's FSDP2 averages its "
                        "gradients over the replicas already.\n  Leave the wrapper out."
                    )
                _check_group(type(module).__name__, module.process_group, self.mpu)
                if self._shares:
                    self._leave_to_us(module, submodule)
                if isinstance(module, FullyShardedDataParallel):
                    vars(module)["clip_grad_norm_"] = refuse_flat
        elif isinstance(submodule, nn.SyncBatchNorm) and self._is_ours([module]):
            _check_group("SyncBatchNorm", submodule.process_group, self.mpu)
        elif name == "base_layer" and submodule is not None and is_adapted(module) and self._is_ours([submodule]):
            self._refuse_adapters()
        elif name == "base_model" and is_peft_model(module) and submodule is not None and self._is_ours([submodule]):
            self._refuse_adapters()  # prompts and prefixes: a PeftModel around the model itself

    def _leave_to_us(self, wrapper: Any, inside: nn.Module) -> None:
        """Check that a wrapper leaves the experts out, which other replicas hold others of."""
        states = (vars(module).get("_autopar") for module in inside.modules())  # of the model, or of a copy
        found = [state.dp.experts for state in states if state is not None and state.mpu is self.mpu]
        own = {parameter for experts in found for parameter in experts.parameters}
        names = {name for name, parameter in inside.named_parameters() if parameter in own}
        if names and not (isinstance(wrapper, DistributedDataParallel) and names <= left_out_of_ddp(wrapper)):
            raise ConfigError(
                f"{type(wrapper).__name__} would average experts over all replicas: with expert_parallel_size="
                f"{self.mpu.ep.size} above tensor_parallel_size={self.mpu.tp.size}\n  replicas hold different ones, "
                f"{min(names)} for instance. Wrap DistributedDataParallel around what\n  autopar.initialize returned "
                "itself, which has told it to leave them out."
            )
        for experts in found if isinstance(wrapper, DistributedDataParallel) else ():
            experts.inside(wrapper)

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        model = self._model()
        if model is None or optimizer in self._checked:
            return
        own = {id(parameter) for parameter in model.parameters()}
        parameters = [p for row in optimizer.param_groups for p in row["params"] if id(p) in own]
        group = getattr(optimizer, "process_group", None)  # ZeroRedundancyOptimizer's
        if parameters and isinstance(group, dist.ProcessGroup):
            _check_group(type(optimizer).__name__, group, self.mpu, averages=False)
            if self._shares and len(dist.get_process_group_ranks(group)) > 1:
                raise ConfigError(
                    f"{type(optimizer).__name__} would give one replica's experts to all: with expert_parallel_size="
                    f"{self.mpu.ep.size} above\n  tensor_parallel_size={self.mpu.tp.size} replicas hold different "
                    "ones. Use zero: {stage: 1} in autopar's config."
                )
        _check_meshes({parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)}, self.mpu)
        for parameter in parameters if self._shares and not self._fully_sharded else ():
            if isinstance(parameter, DTensor):
                raise ConfigError(_SHARDED.format(ep=self.mpu.ep.size, tp=self.mpu.tp.size))
        self._checked.add(optimizer)

    def _on_forward(self, model: nn.Module, *_: Any) -> None:
        if type(model) is self._kind:
            return
        found = {parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)}
        for module in model.modules():  # weights of the outermost are whole by now
            found |= meshes_of_fsdp(module)
        _check_meshes(found, self.mpu)
        self._kind = type(model)  # fully_shard has changed it

    def _is_ours(self, modules: Iterable[nn.Module]) -> bool:
        """Return whether the model, a part of it, or a copy of it is among ``modules``."""
        model = self._model()
        own = {id(module) for module in model.modules()} if model is not None else set()
        return any(id(m) in own or getattr(vars(m).get("_autopar"), "mpu", None) is self.mpu for m in modules)

    def _refuse_adapters(self) -> None:
        model = self._model()
        if model is not None and not hasattr(model, "peft_config"):
            forget_own_adapters(model)  # transformers' add_adapter begins with it
        raise ConfigError(
            f"PEFT would make adapters by the sizes of this rank's shards of {type(model).__name__}, which is "
            "parallelized.\n  Use autopar.integrations.get_peft_model(model, peft_config), and "
            "model.load_adapter(dir, 'default') if they are in files;\n  or put them in before: "
            "autopar.initialize(peft.get_peft_model(plain_model, peft_config), config)."
        )


_SHARDED = (
    "fully_shard would shard experts over all replicas: with expert_parallel_size={ep} above tensor_parallel_size={tp} "
    "replicas hold\n  different ones. Use DistributedDataParallel, autopar.average_gradients, or zero: {{stage: 3}}."
)


def refuse_flat(*_: Any, **__: Any) -> Any:
    """Raise ConfigError: where ``FullyShardedDataParallel`` has flattened shards, their norm cannot be told."""
    raise ConfigError(
        "clip_grad_norm_ of FullyShardedDataParallel takes the shards of this rank for the model, and what it has "
        f"flattened\n  cannot be told apart. Use torch.distributed.fsdp.fully_shard(model, {_MESH}) instead, and\n"
        "  autopar.clip_grad_norm_(model, max_norm)."
    )


def _check_group(what: str, group: Any, mpu: MPU, *, averages: bool = True) -> None:
    ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    remedy = f"process_group={group_call(mpu)}"
    if not set(ranks) <= set(mpu.dp_cp.ranks):
        if any(module.startswith("accelerate.") for module, _ in calls()):
            raise ConfigError(_in_accelerate(what, ranks, mpu))
        raise ConfigError(_explain(what, ranks, mpu, remedy))
    if averages:
        _check_context(what, ranks, mpu, remedy)


def _check_meshes(meshes: set[Any], mpu: MPU) -> None:
    for mesh in meshes:
        ranks = mesh.mesh.flatten().tolist()
        if not set(ranks) <= set(mpu.dp_cp.ranks):
            raise ConfigError(_explain("fully_shard", ranks, mpu, _mesh_of(mpu)))
        _check_context("fully_shard", ranks, mpu, _mesh_of(mpu))


def _check_context(what: str, ranks: Sequence[int], mpu: MPU, remedy: str) -> None:
    """Raise ConfigError if gradients are averaged over ``ranks`` without all that share this rank's sequences."""
    if not set(mpu.cp.ranks) <= set(ranks):
        raise ConfigError(
            f"{what} over ranks {_listed(ranks)} would leave out ranks that share their sequences: with "
            f"context_parallel_size={mpu.cp.size}\n  gradients are averaged over all ranks with the shard of rank "
            f"{mpu.rank}, {_listed(mpu.dp_cp.ranks)}. Give it {remedy}."
        )


def _explain(what: str, ranks: list[int], mpu: MPU, remedy: str) -> str:
    tp, pp = mpu.tp.size, mpu.pp.size
    return (
        f"{what} over ranks {_listed(ranks)} would take their different shards of the model for one: with "
        f"tensor_parallel_size={tp} and\n  pipeline_parallel_size={pp} the shard of rank {mpu.rank} is held by "
        f"{_listed(mpu.dp_cp.ranks)}. Give it {remedy}."
    )


def in_trainer(mpu: MPU) -> str:
    """Say why transformers' Trainer cannot train a parallelized model."""
    return (
        "transformers' Trainer would wrap the model in DistributedDataParallel over ranks "
        f"{_listed(range(mpu.world_size))}, which hold different shards\n"
        f"  of it: that of rank {mpu.rank} is held by {_listed(mpu.dp_cp.ranks)}. Use\n"
        "  autopar.integrations.ParallelTrainer(model=model, args=args, ...) instead, with the same arguments."
    )


def _in_accelerate(what: str, ranks: list[int], mpu: MPU) -> str:
    return (
        f"accelerate would wrap the model in {what} over ranks {_listed(ranks)}, which hold different "
        f"shards of it:\n  that of rank {mpu.rank} is held by {_listed(mpu.dp_cp.ranks)}. Leave fsdp_plugin and what "
        "configures it out: accelerator.prepare\n  wraps DistributedDataParallel around the replicas, and "
        "zero: {stage: 3} in autopar's config is torch's FSDP2."
    )


def _listed(ranks: Sequence[int]) -> str:
    first = ", ".join(map(str, ranks[:8]))
    return f"[{first}{', ...' if len(ranks) > 8 else ''}]"
