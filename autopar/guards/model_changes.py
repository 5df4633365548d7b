"""Check changes of a model by user code after ``initialize``: new modules in it, and wrappers around it.

A module that is added later (an adapter, a new head, a parametrization) would use this rank's shard as if it were the
full weight, with plausible but wrong results. So each forward first compares the module tree, by identity of objects,
which takes a fraction of a millisecond.

A wrapper that copies or averages parameters over ranks with different shards (DistributedDataParallel over all ranks)
would mix the shards, silently if they have equal sizes. torch calls global hooks before a module becomes a submodule
(``DistributedDataParallel`` registers its module before it communicates) and before an optimizer steps. There, and
before a forward, the wrapper's process group is checked. If a group is wrong for one of its ranks, it is wrong for all,
so every rank raises.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from autopar.compat.c10d import meshes_of_fsdp
from autopar.compat.peft import is_adapted, is_peft_model, tuner_layers
from autopar.compat.tensors import no_overrides, own_modules, own_parameters
from autopar.compat.transformers import OWN_ADAPTERS
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError, listed
from autopar.guards.step import forget, group_call, listen
from autopar.swap import NotCopied

_WHEN = (
    "  Add or replace modules (adapters, heads, parametrizations) before autopar.initialize, or call\n"
    "  autopar.deparallelize(model), change the model, and initialize it again."
)

_ADAPTERS = (
    "  Add adapters before: model = autopar.initialize(peft.get_peft_model(base_model, lora_config), config).\n"
    "  On a parallelized model use autopar.integrations.get_peft_model(model, lora_config).\n"
    "  If the base model is too large for one process, build it with its adapters in autopar.lazy_init()."
)


class _Seen(NamedTuple):
    module: nn.Module
    path: str
    kind: type[nn.Module]
    children: list[nn.Module | None]
    parameters: dict[str, nn.Parameter | None]  # direct parameters of the module
    shapes: dict[str, torch.Size | None]


class ModuleTree:
    """The module tree of a tensor-parallel model at the last check."""

    def __init__(self, model: nn.Module) -> None:
        self._remember(model)

    def _remember(self, model: nn.Module) -> None:
        self._seen = _look(model)
        self._modules = [seen.module for seen in self._seen]
        self._kinds = [seen.kind for seen in self._seen]
        self._sizes, self._objects = _contents(self._modules)
        self._parameters = [x for x in self._objects if isinstance(x, nn.Parameter) and not _is_packed(x)]
        self._shapes = list(map(_SHAPE, self._parameters))

    def _is_unchanged(self) -> bool:
        sizes, now = _contents(self._modules)
        with no_overrides():
            return (
                list(map(type, self._modules)) == self._kinds
                and sizes == self._sizes
                and all(map(operator.is_, now, self._objects))
                and list(map(_SHAPE, self._parameters)) == self._shapes
            )

    def check(self, model: nn.Module) -> bool:
        """Compare the tree with the last check; return True for a change that sharding supports.

        Supported changes: adding or removing modules without parameters, wrapping modules, replacing a parameter by one
        of the same shape, removing blocks, and FSDP's conversion of parameters to DTensors.

        Raises:
            ConfigError: Parameters are new, or a sharded parameter was resized, renamed, parametrized or replaced. The
                next forward raises again.
        """
        if self._is_unchanged():
            return False
        _check_parameters(model, self._seen)
        _check_layers(model, self._seen)
        self._remember(model)
        return True


def _is_packed(parameter: nn.Parameter) -> bool:
    """Return whether a parameter holds bytes of a quantized weight, which its library may repack."""
    return not parameter.is_floating_point() and not parameter.requires_grad


def _look(model: nn.Module) -> list[_Seen]:
    found = []
    for path, module in model.named_modules():
        parameters = dict(own_parameters(module))
        shapes = {name: None if p is None else p.shape for name, p in parameters.items()}
        found.append(_Seen(module, path, type(module), list(own_modules(module).values()), parameters, shapes))
    return found


_CHILDREN, _PARAMETERS = operator.attrgetter("_modules"), operator.attrgetter("_parameters")
_VALUES, _SHAPE = operator.methodcaller("values"), operator.attrgetter("shape")


def _contents(modules: Sequence[nn.Module]) -> tuple[list[int], list[Any]]:
    """Count and list the children and parameters of all modules. It runs in every forward, so it only calls C code."""
    held = [*map(_CHILDREN, modules), *map(_PARAMETERS, modules)]
    return list(map(len, held)), list(chain.from_iterable(map(_VALUES, held)))


def _check_parameters(model: nn.Module, before: list[_Seen]) -> None:
    """Raise ConfigError if a parameter is new and does not replace one of the same shape."""
    known = {id(parameter) for seen in before for parameter in seen.parameters.values()}
    shapes = {(id(seen.module), name): shape for seen in before for name, shape in seen.shapes.items()}
    new = []
    for path, module in model.named_modules():
        for name, parameter in own_parameters(module).items():
            if parameter is None or isinstance(parameter, DTensor) or _is_packed(parameter):
                continue
            place = (id(module), name)
            if place in shapes and shapes[place] == parameter.shape:
                continue
            if id(parameter) not in known:
                new.append(f"{path}.{name}" if path else name)
            elif place in shapes:
                was = shapes[place]
                raise ConfigError(
                    f"{path}.{name} of {type(model).__name__} must keep the shape of its shard.\n  On this rank the "
                    f"shape was {was and list(was)}, and is {list(parameter.shape)}.\n{_WHEN}"
                )
    if new:
        adapted = next(tuner_layers(model), None)
        raise ConfigError(
            f"{len(new)} parameters were added to {type(model).__name__} after autopar.initialize and are not sharded: "
            f"{listed(new, 3)}\n{_WHEN if adapted is None else _ADAPTERS}"
        )


def _check_layers(model: nn.Module, before: list[_Seen]) -> None:
    """Raise ConfigError if a parallel layer was changed, or removed from its parent."""
    now = {id(module) for module in model.modules()}
    parents = {id(child): seen for seen in before for child in seen.children if child is not None}
    for seen in before:
        plan: Any = vars(seen.module).get("autopar")
        if plan is None:
            continue
        if id(seen.module) not in now:
            parent = parents.get(id(seen.module))
            if parent is not None and id(parent.module) in now and not plan.gather_output:
                _refuse(model, seen, "was removed or replaced")
        elif not issubclass(type(seen.module), seen.kind):
            _refuse(model, seen, f"is a {type(seen.module).__name__} now (parametrized?)")
        elif list(held := own_parameters(seen.module)) != list(seen.parameters):
            if held.keys() == seen.parameters.keys() and all(held[name] is p for name, p in seen.parameters.items()):
                continue  # in another order: PEFT registers a parameter of experts again at the end
            now_held = ", ".join(held) or "no parameter"
            _refuse(model, seen, f"must have the parameters {', '.join(seen.parameters)}, but has {now_held}")


def _refuse(model: nn.Module, seen: _Seen, what: str) -> None:
    raise ConfigError(
        f"{seen.path} of {type(model).__name__}, a {seen.kind.__name__} since autopar.initialize, {what}: it would use "
        f"this rank's shard as if it were the full weight.\n{_WHEN}"
    )


# -- wrappers ----------------------------------------------------------------------------------------------------------

_MESH = 'mesh=model.mpu.mesh["dp"]'


class WrapperCheck(NotCopied):
    """Check the wrappers around ``model`` while it is parallelized, if ranks hold different shards.

    Args:
        shares_experts: True if replicas hold different experts.
        fully_sharded: True if autopar calls ``fully_shard``, with other ranks for experts than for the other layers.

    Attributes:
        when_wrapped: A function of a feature, called with a wrapper that averages gradients and the wrapped module.
    """

    def __init__(
        self, model: nn.Module, mpu: MPU, *, shares_experts: bool = False, fully_sharded: bool = False
    ) -> None:
        self.mpu, self._shares, self._fully_sharded = mpu, shares_experts, fully_sharded
        self._model, self._kind = weakref.ref(model), type(model)
        self.when_wrapped: Callable[[nn.Module, nn.Module], None] | None = None
        self._handle: Any = None
        if mpu.model.size > 1 or shares_experts or fully_sharded:
            listen(self)
            self._handle = model.register_forward_pre_hook(self._check_fully_sharded)

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
                        f"{type(module).__name__} is not supported around a model with zero.stage 2 or 3: torch's "
                        "FSDP2 averages its gradients already.\n  Leave the wrapper out."
                    )
                _check_group(type(module).__name__, module.process_group, self.mpu)
                if self.when_wrapped is not None:
                    self.when_wrapped(module, submodule)
                if isinstance(module, FullyShardedDataParallel):
                    vars(module)["clip_grad_norm_"] = refuse_flat
        elif isinstance(submodule, nn.SyncBatchNorm) and self._is_ours([module]):
            _check_group("SyncBatchNorm", submodule.process_group, self.mpu)
        elif name == "base_layer" and submodule is not None and is_adapted(module) and self._is_ours([submodule]):
            self._refuse_adapters()
        elif name == "base_model" and is_peft_model(module) and submodule is not None and self._is_ours([submodule]):
            self._refuse_adapters()  # for prompts and prefixes PeftModel wraps the model itself

    def when_new(self, optimizer: torch.optim.Optimizer) -> None:
        model = self._model()
        if model is None:
            return
        own = {id(parameter) for parameter in model.parameters()}
        parameters = [p for row in optimizer.param_groups for p in row["params"] if id(p) in own]
        group = getattr(optimizer, "process_group", None)  # of ZeroRedundancyOptimizer
        if parameters and isinstance(group, dist.ProcessGroup):
            _check_group(type(optimizer).__name__, group, self.mpu, averages=False)
            if self._shares and len(dist.get_process_group_ranks(group)) > 1:
                raise ConfigError(
                    f"{type(optimizer).__name__} is not supported with expert_parallel_size={self.mpu.ep.size} above "
                    f"tensor_parallel_size={self.mpu.tp.size}: replicas\n  hold different experts. Use zero: "
                    "{stage: 1} in autopar's config."
                )
        _check_meshes({parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)}, self.mpu)
        for parameter in parameters if self._shares and not self._fully_sharded else ():
            if isinstance(parameter, DTensor):
                raise ConfigError(
                    f"fully_shard is not supported with expert_parallel_size={self.mpu.ep.size} above "
                    f"tensor_parallel_size={self.mpu.tp.size}: replicas hold\n  different experts. Use "
                    "DistributedDataParallel, autopar.average_gradients, or zero: {stage: 3}."
                )

    def _check_fully_sharded(self, model: nn.Module, _: Any) -> None:
        if type(model) is self._kind:
            return
        found = {parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)}
        for module in model.modules():  # the outermost module's weights are gathered at this point
            found |= meshes_of_fsdp(module)
        _check_meshes(found, self.mpu)
        self._kind = type(model)  # fully_shard changes it; after an error the next forward checks again

    def _is_ours(self, modules: Iterable[nn.Module]) -> bool:
        """Return whether the model, a part of it, or a copy of it is among ``modules``."""
        model = self._model()
        own = {id(module) for module in model.modules()} if model is not None else set()
        return any(id(m) in own or getattr(vars(m).get("_autopar"), "mpu", None) is self.mpu for m in modules)

    def _refuse_adapters(self) -> None:
        model = self._model()
        if model is not None and not hasattr(model, "peft_config"):
            vars(model).pop(OWN_ADAPTERS, None)  # which transformers' add_adapter sets first
        raise ConfigError(
            f"PEFT cannot add adapters to {type(model).__name__}, which is parallelized: it would use the sizes of "
            "shards.\n  Use autopar.integrations.get_peft_model(model, peft_config), then "
            "model.load_adapter(dir, 'default') for saved adapters;\n  or add them before: "
            "autopar.initialize(peft.get_peft_model(base_model, peft_config), config)."
        )


def refuse_flat(*_: Any, **__: Any) -> Any:
    """Raise ConfigError, because the norm of parameters flattened by ``FullyShardedDataParallel`` is unknown."""
    raise ConfigError(
        "clip_grad_norm_ is not supported with FullyShardedDataParallel, whose flattened parameters mix shards and "
        f"full tensors\n  Use torch.distributed.fsdp.fully_shard(model, {_MESH}), and\n"
        "  autopar.clip_grad_norm_(model, max_norm)."
    )


def _check_group(what: str, group: Any, mpu: MPU, *, averages: bool = True) -> None:
    ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    remedy = f"process_group={group_call(mpu)}"
    if what == FullyShardedDataParallel.__name__ and not set(ranks) <= set(mpu.dp_cp.ranks):
        remedy += ";\n  with accelerate leave out fsdp_plugin: zero: {stage: 3} in the config is torch's FSDP2"
    _check_ranks(what, ranks, mpu, remedy, averages=averages)


def _check_meshes(meshes: set[Any], mpu: MPU) -> None:
    remedy = "mesh=model.mpu.dp_cp_mesh" if mpu.cp.size > 1 else _MESH
    for mesh in meshes:
        _check_ranks("fully_shard", mesh.mesh.flatten().tolist(), mpu, remedy)


def _check_ranks(what: str, ranks: Sequence[int], mpu: MPU, remedy: str, *, averages: bool = True) -> None:
    """Raise ConfigError if ``ranks`` hold different shards, or lack ranks that share this rank's sequences."""
    if not set(ranks) <= set(mpu.dp_cp.ranks):
        raise ConfigError(
            f"{what} over ranks {listed_ranks(ranks)} would mix different shards of the model: with "
            f"tensor_parallel_size={mpu.tp.size} and\n  pipeline_parallel_size={mpu.pp.size} the shard of rank "
            f"{mpu.rank} is on ranks {listed_ranks(mpu.dp_cp.ranks)}. Pass {remedy}."
        )
    if averages and not set(mpu.cp.ranks) <= set(ranks):
        raise ConfigError(
            f"{what} over ranks {listed_ranks(ranks)} would leave out ranks that share their sequences: with "
            f"context_parallel_size={mpu.cp.size}\n  gradients are averaged over all ranks with the shard of rank "
            f"{mpu.rank}, {listed_ranks(mpu.dp_cp.ranks)}. Pass {remedy}."
        )


def listed_ranks(ranks: Sequence[int]) -> str:
    """Return the first eight ranks as text."""
    return f"[{listed([*map(str, ranks)], 8)}]"
