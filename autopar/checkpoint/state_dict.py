"""``state_dict`` and ``load_state_dict`` of a model of which this rank holds only shards.

``state_dict()`` keeps working, because copies of a model, averages of weights and ``load_state_dict`` on the same rank
need it. Its metadata contains a :class:`Mark`, which warns when it is pickled (``torch.save``). In the file the mark is
plain data that identifies the rank. Savers that do not pickle are recognized by name and raise if they would write the
full model.

``load_state_dict`` takes this rank's dict, or the dict of a full model, which a hook shards by the plan. The shapes
show which; a tensor with equal shapes is the same in both. All checks precede the first change. There is no
communication.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.call_site import calls, frames_of, warn_user
from autopar.compat.tensors import PLAIN, add_state_dict_hook, state_dict_hooks
from autopar.distributed.mesh import MPU
from autopar.errors import CheckpointError, ConfigError, listed
from autopar.layout import replica_rows
from autopar.plan.plan import Plan, TensorPlan
from autopar.policy.match import is_hugging_face_model
from autopar.swap import NotCopied

MODEL_SHARD = "_autopar_shard"
_MARK = "autopar"
_WHOLE_MODEL_SAVERS = {
    "transformers": ("save_pretrained",),
    "peft": ("save_pretrained",),
    "accelerate": ("save_model", "save_state", "get_state_dict"),
    "safetensors": ("save_model",),
    "huggingface_hub": ("save_torch_model", "save_pretrained"),
    "sentence_transformers": ("save", "save_pretrained"),
}
_DCP = ("get_model_state_dict", "get_state_dict")
# The advice of errors and warnings: the calls that write the full model.
USE_INSTEAD = (
    "  Use model.save_parallelized(dir, merge_checkpoints=True), on every rank, for a folder that from_pretrained "
    "reads;\n  without merge_checkpoints, for one that model.from_parallelized reads, on any mesh."
)
_OF_DCP = (
    "torch.distributed.checkpoint reads state_dict(), and assumes that tensors of one name are identical on all ranks "
    "(use autopar.checkpoint.to_dtensor_state_dict(model) for it)"
)
_READERS = ("safetensors", "accelerate", "huggingface_hub", "torch.distributed.checkpoint")


class _Shared(NotCopied):
    """An object that copies of a model, or of its state dict, share."""

    def __copy__(self) -> Any:
        return self


@dataclass(eq=False)
class ModelShard(_Shared):
    """This rank's shards of a module; an attribute of the root model, and of every Hugging Face model inside it.

    It is also the pre-hook of ``load_state_dict`` on every module. On a submodule it acts only if user code loads that
    module directly.

    Attributes:
        plan: The plan of the root model.
        name: The class of the root model.
        tensors: Name in the root model's state dict -> plan of the tensor, without quantized weights.
        prefix: The prefix of the module's names in the root model's state dict.
        is_block: True for a submodule of a Hugging Face model, which may be completely on another stage.
        warned: True after the warning that an optimizer's state is a shard.
    """

    plan: Plan
    mpu: MPU
    name: str
    tensors: Mapping[str, TensorPlan]
    prefix: str
    is_block: bool
    warned: bool = False

    def planned(self, name: str) -> TensorPlan | None:
        """Return the plan of a tensor, by its name in this model's state dict."""
        return self.tensors.get(self.prefix + name)

    def is_part(self, model: nn.Module) -> bool:
        """Return whether this rank holds only a part of the weights of ``model``."""
        return self.plan.shards > 1 or self.mpu.pp.size > 1 or _over_replicas(model)

    def ranks(self, model: nn.Module) -> dict[str, list[int]]:
        """Return the axes over which the weights are sharded: name -> rank and size."""
        mpu = self.mpu
        axes = {"tensor-parallel rank": mpu.tp, "pipeline rank": mpu.pp}
        if self.plan.experts:
            axes["expert-parallel rank"] = mpu.ep
        axes = {name: axis for name, axis in axes.items() if axis.size > 1}
        if _over_replicas(model):
            axes["data-parallel rank"] = mpu.dp_cp
        return {name: [axis.rank, axis.size] for name, axis in axes.items()}

    def __call__(self, model: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        if (self.is_block and prefix) or not self.is_part(model):
            return
        entries = [
            (key.removeprefix(prefix), due, value)
            for key, value in state.items()
            if key.startswith(prefix) and isinstance(value, torch.Tensor)
            if (due := self.planned(key.removeprefix(prefix))) is not None
        ]
        if metadata.get("assign_to_params_buffers"):
            raise CheckpointError(
                f"load_state_dict(assign=True) is not supported: the parameters of {self.name} are this rank's shards "
                "and must stay the same objects.\n  Leave assign out. The values are then copied into the parameters."
            )
        mark = metadata.get(_MARK)  # the rank of the dict, if known; a mark becomes plain data in a file
        mark = mark.ranks if isinstance(mark, Mark) else mark if isinstance(mark, Mapping) else None
        own = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
        is_full = _check(self, self.ranks(model), own, entries, mark)
        for name, due, value in entries:
            if name not in own:
                del state[prefix + name]  # of another stage
                continue
            mine, local = own[name], value
            if is_full and due.layout is not None and tuple(value.shape) == due.shape:
                local = due.layout.shard(value.detach(), self.mpu.shards.rank)
            if isinstance(mine, DTensor) and not isinstance(local, DTensor) and local.shape == mine.shape:
                mesh = mine.device_mesh  # ZeRO stages 2 and 3; only the last dim shards
                start, stop = replica_rows(mine.shape[0], mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1))
                rows, form = local.detach()[start:stop].to(mine.to_local().device), (mine.shape, mine.stride())
                local = DTensor.from_local(rows, mesh, mine.placements, run_check=False, shape=form[0], stride=form[1])
            state[prefix + name] = local


def _over_replicas(model: nn.Module) -> bool:
    return isinstance(next(model.parameters(), None), DTensor)


def shard_of(model: nn.Module) -> ModelShard | None:
    """Return the model's ModelShard; None if this rank holds all weights."""
    shard: ModelShard | None = vars(model).get(MODEL_SHARD)
    return shard if shard is not None and shard.is_part(model) else None


class Mark(_Shared):
    """The rank of a partial state dict, in its metadata. Pickling it warns once; copying it does not."""

    def __init__(self, name: str, ranks: Mapping[str, list[int]]) -> None:
        self.name, self.ranks = name, dict(ranks)
        self.warned = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.warn("state_dict() is written to a file or sent to another process")
        return OrderedDict, (list(self.ranks.items()),)  # which torch.load reads with weights_only

    def warn(self, what: str) -> None:
        """Warn, once, that the dict holds only the shards of one rank."""
        if not self.warned:
            self.warned = True
            warn_user(
                f"{what}: it holds only the shards of {self.name} on {describe_ranks(self.ranks)}.\n{USE_INSTEAD}"
            )


def describe_ranks(ranks: Mapping[str, Any]) -> str:
    """Return ``tensor-parallel rank 0 of 2, pipeline rank 1 of 2``."""
    return ", ".join(f"{axis} {rank} of {size}" for axis, (rank, size) in ranks.items())


class PartialStateDict(OrderedDict[str, Any]):
    """The result of ``state_dict()``; pickled as an ordinary ``OrderedDict``."""

    mark: Mark | None = None

    def items(self) -> Any:
        """Return the items; warn if a saver reads them as the state dict of a full model."""
        caller = sys._getframe(1)
        module = str(caller.f_globals.get("__name__"))
        if self.mark is not None and module.startswith(_READERS) and caller.f_code.co_name != "_find_shared_tensors":
            if not module.startswith("torch"):
                self.mark.warn(f"{module.partition('.')[0]} reads state_dict()")
            elif "tensor-parallel rank" in self.mark.ranks:
                self.mark.warn(_OF_DCP)
        return super().items()

    def __reduce_ex__(self, protocol: Any) -> Any:
        attributes = {name: value for name, value in vars(self).items() if name != "mark"}
        return OrderedDict, (), attributes, None, ((name, _plain(value)) for name, value in super().items())


def _plain(value: Any) -> Any:
    """Return a tensor without the tensor subclass of a feature."""
    added = type(value) in PLAIN and type(value) is not torch.Tensor and not isinstance(value, nn.Parameter)
    return value.as_subclass(torch.Tensor) if added else value


class MarkPartial(_Shared):
    """The state-dict hook of a root model and of the Hugging Face models inside it, which share one mark."""

    def __init__(self) -> None:
        self._marks: dict[tuple[str, ...], Mark] = {}

    def __call__(self, model: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> Any:
        shard = shard_of(model)
        if shard is None:
            return None
        ranks = shard.ranks(model)
        mark = self._marks.setdefault(tuple(ranks), Mark(shard.name, ranks))
        for module, function in calls():
            package = module.partition(".")[0]
            if function in _WHOLE_MODEL_SAVERS.get(package, ()):
                raise ConfigError(
                    f"{package}'s {function} is not supported: this rank holds only its shards of {shard.name} "
                    f"({describe_ranks(ranks)}).\n{USE_INSTEAD}"
                )
            if function == "get_peft_model_state_dict":
                mark.warn("PEFT reads state_dict()")
            if module.startswith("torch.distributed.checkpoint") and function in _DCP:
                _refuse_full(shard, model)
                if shard.plan.shards > 1:
                    mark.warn(_OF_DCP)
        metadata[_MARK] = mark
        if prefix:
            return None  # the call of an outer module, whose dict continues to be filled
        result = PartialStateDict(state)
        vars(result).update(vars(state))
        result.mark = mark
        return result


def _check(
    shard: ModelShard,
    ranks: Mapping[str, list[int]],
    own: Container[str],
    entries: list[tuple[str, TensorPlan, torch.Tensor]],
    part: Mapping[str, list[int]] | None,
) -> bool:
    """Return whether the tensors are full. Raises CheckpointError if they are mixed, or of another rank.

    Args:
        own: The names of this rank's tensors.
        part: The ranks of the state dict; None if unknown.
    """
    rank = shard.mpu.shards.rank
    full: list[str] = []
    local: list[str] = []
    neither: list[str] = []
    for name, due, value in entries:
        shape, expected = tuple(value.shape), due.local_shape(rank)
        if shape == expected == due.shape:
            continue
        kind = full if shape == due.shape else local if shape == expected else neither
        kind.append(f"{name}: got {list(shape)}, expected {list(due.shape)} (full) or {list(expected)} (this rank)")
    is_part = bool(local) or not full  # without a mark, only the shapes show it
    if part is not None and is_part and dict(part) != ranks:
        raise CheckpointError(
            f"load_state_dict got the state dict of {describe_ranks(part)}; this is {describe_ranks(ranks)}.\n"
            "  Load this rank's dict, or the dict of a full model on every rank; for another mesh use "
            "model.save_parallelized and\n  model.from_parallelized."
        )
    if neither or (full and local):
        what = "have neither the full nor this rank's shape" if neither else "are full, but the rest are shards"
        found = neither or [full[0], local[0]]
        raise CheckpointError(
            f"load_state_dict: {len(neither) or len(full)} tensors {what} ({describe_ranks(ranks)}):\n  "
            + "\n  ".join(found[:5])
        )
    if entries and not shard.is_block and not any(name in own for name, _, _ in entries):
        raise CheckpointError(
            f"load_state_dict: the state dict has no tensor of this rank ({describe_ranks(ranks)}), only tensors of "
            f"other stages: {listed([name for name, _, _ in entries], 3)}"
        )
    return bool(full)


def attach_hooks(model: nn.Module, plan: Plan, mpu: MPU) -> Iterator[nn.Module]:
    """Register the state-dict hooks on a model; yield the root model and the Hugging Face models inside it."""
    mark, name = MarkPartial(), type(model).__name__
    tensors = {alias: t for t in plan.saved().tensors.values() for alias in (t.name, *t.aliases)}
    for path, module in model.named_modules():
        is_block = module is not model and not is_hugging_face_model(module)
        shard = ModelShard(plan, mpu, name, tensors, path and f"{path}.", is_block)
        module.register_load_state_dict_pre_hook(shard)
        if not is_block:
            module.__dict__[MODEL_SHARD] = shard
            add_state_dict_hook(module, mark)
            yield module


def detach_hooks(model: nn.Module) -> None:
    """Undo :func:`attach_hooks`."""
    for module in model.modules():
        module.__dict__.pop(MODEL_SHARD, None)
        for hooks, kind in zip(state_dict_hooks(module), (MarkPartial, ModelShard), strict=True):
            for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "hook", hook), kind)]:
                del hooks[key]


# -- torch.distributed.checkpoint.state_dict, which reads the optimizer and calls _fqn_modifiers of each module --------

_FUNCTIONS = ("get_optimizer_state_dict", "get_state_dict", "set_optimizer_state_dict", "set_state_dict")


def fqn_modifiers(self: nn.Module) -> dict[str, str]:
    """Warn in torch's ``get_optimizer_state_dict`` and related functions, which call this on each module.

    Raises:
        ConfigError: The call requests full tensors, which torch would make from one rank's shards.
    """
    shard = shard_of(self)
    if shard is None:
        return {}
    _refuse_full(shard, self)
    for _, function in frames_of("torch.distributed.checkpoint.state_dict") if shard.plan.shards > 1 else ():
        if function in _FUNCTIONS[:2] and not shard.warned:
            shard.warned = True
            warn_user(
                f"torch's {function} reads an optimizer of {shard.name}: it gets only the shards of the state on "
                f"{describe_ranks(shard.ranks(self))}.\n"
                "  Use autopar.checkpoint.to_dtensor_training_state(model, optimizer) for "
                "torch.distributed.checkpoint."
            )
    return {}


def _refuse_full(shard: ModelShard, model: nn.Module) -> None:
    """Raise ConfigError in torch's functions that would make a full state dict from one rank's shards or stage."""
    if shard.plan.shards == 1 and shard.mpu.pp.size == 1:  # DTensors, which torch joins
        return
    for frame, function in frames_of("torch.distributed.checkpoint.state_dict"):
        options = frame.f_locals.get("options")
        full = getattr(options, "full_state_dict", False) or getattr(options, "broadcast_from_rank0", False)
        if full and function in ("get_model_state_dict", *_FUNCTIONS):
            raise ConfigError(
                f"torch's {function} does not support full_state_dict=True here: {shard.name} is sharded without "
                f"DTensors, and this is {describe_ranks(shard.ranks(model))}.\n{USE_INSTEAD}"
            )
