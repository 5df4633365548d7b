"""``state_dict`` and ``load_state_dict`` of a model that is not whole on this rank.

``state_dict()`` goes on working: copies of a model, averages of weights and ``load_state_dict`` of the same rank need
it. Pickling it (``torch.save``) also pickles its metadata, and with it a :class:`Mark` that warns. In the file the mark
is plain data, by which ``load_state_dict`` later knows another rank's part. Savers that do not pickle are known by
their names: those that mean to write the whole model raise.

``load_state_dict`` takes this rank's own dict or a whole plain model's, which a load hook shards by the plan before
torch looks at it. Which of the two a dict is, its shapes say; where both shapes are the same, so are the tensors. All
checks come before anything is changed, and nothing is communicated.
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
from transformers import PreTrainedModel

from autopar.call_site import calls, frames_of, warn_user
from autopar.compat.tensors import PLAIN, add_state_dict_hook, state_dict_hooks
from autopar.distributed.mesh import MPU
from autopar.errors import CheckpointError, ConfigError, listed
from autopar.layout import replica_rows
from autopar.plan.plan import Plan, TensorPlan
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
# What writes the whole model.
USE_INSTEAD = (
    "  Use model.save_parallelized(dir, merge_checkpoints=True), on every rank, for a folder that from_pretrained "
    "reads;\n  without merge_checkpoints, for one that model.from_parallelized reads, on any mesh."
)
_OF_DCP = (
    "torch.distributed.checkpoint reads state_dict(), and takes tensors of one name for the same on all ranks "
    "(autopar.checkpoint.to_dtensor_state_dict(model) makes a dict for it)"
)
_READERS = ("safetensors", "accelerate", "huggingface_hub", "torch.distributed.checkpoint")


class _Shared(NotCopied):
    """An object that copies of a model, or of its state dict, have together."""

    def __copy__(self) -> Any:
        return self


@dataclass(eq=False)
class ModelShard(_Shared):
    """This rank's part of a module; an attribute of the root model, and of every Hugging Face model inside it.

    Called as a pre-hook of ``load_state_dict`` on that module; on a block it acts only if that is loaded by itself.

    Attributes:
        plan: The plan of the root model.
        name: The class of the root model.
        tensors: Name in the root model's state dict -> plan of the tensor, without quantized weights.
        prefix: The prefix of the module's names in the root model's state dict.
        is_block: True for a part of a Hugging Face model, which may be all of another stage.
        warned: True once the user was warned that an optimizer's state is a shard.
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
        """Tell whether ``model`` holds less than all weights on this rank."""
        return self.plan.shards > 1 or self.mpu.pp.size > 1 or _over_replicas(model)

    def ranks(self, model: nn.Module) -> dict[str, list[int]]:
        """Return the axes over which its weights are sharded: rank and size on each."""
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
                f"load_state_dict(assign=True): the tensors of {self.name} are this rank's shards, and an optimizer "
                "and the other ranks rely on these very parameters.\n  Leave assign out: values are copied into them."
            )
        mark = metadata.get(_MARK)  # whose part it is, if that is known; a mark becomes plain data in a file
        mark = mark.ranks if isinstance(mark, Mark) else mark if isinstance(mark, Mapping) else None
        own = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
        is_whole = _check(self, self.ranks(model), own, entries, mark)
        for name, due, value in entries:
            if name not in own:
                del state[prefix + name]  # another stage's
                continue
            mine, local = own[name], value
            if is_whole and due.layout is not None and tuple(value.shape) == due.shape:
                local = due.layout.shard(value.detach(), self.mpu.shards.rank)
            if isinstance(mine, DTensor) and not isinstance(local, DTensor) and local.shape == mine.shape:
                mesh = mine.device_mesh  # ZeRO's stages 2 and 3; dims before the last one hold copies
                start, stop = replica_rows(mine.shape[0], mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1))
                rows, form = local.detach()[start:stop].to(mine.to_local().device), (mine.shape, mine.stride())
                local = DTensor.from_local(rows, mesh, mine.placements, run_check=False, shape=form[0], stride=form[1])
            state[prefix + name] = local


def _over_replicas(model: nn.Module) -> bool:
    return isinstance(next(model.parameters(), None), DTensor)


def shard_of(model: nn.Module) -> ModelShard | None:
    """Return the model's shard; None if it holds all weights on this rank."""
    shard: ModelShard | None = vars(model).get(MODEL_SHARD)
    return shard if shard is not None and shard.is_part(model) else None


class Mark(_Shared):
    """In the metadata of a partial state dict: whose it is. Pickling it warns, once; copying it does not."""

    def __init__(self, name: str, ranks: Mapping[str, list[int]]) -> None:
        self.name, self.ranks = name, dict(ranks)
        self.warned = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.warn("state_dict() is written to a file or sent to another process")
        return OrderedDict, (list(self.ranks.items()),)  # what torch.load reads with weights_only

    def warn(self, what: str) -> None:
        """Warn that this is one rank's part, the first time."""
        if not self.warned:
            self.warned = True
            warn_user(
                f"{what}: it is what {describe_ranks(self.ranks)} has of {self.name}, not all of it.\n{USE_INSTEAD}"
            )


def describe_ranks(ranks: Mapping[str, Any]) -> str:
    """Return ``tensor-parallel rank 0 of 2, pipeline rank 1 of 2``."""
    return ", ".join(f"{axis} {rank} of {size}" for axis, (rank, size) in ranks.items())


class PartialStateDict(OrderedDict[str, Any]):
    """The result of ``state_dict()``; pickled as an ordinary ``OrderedDict``."""

    mark: Mark | None = None

    def items(self) -> Any:
        """Return the items; warn about savers that take this for a whole model's state dict."""
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
    """Return a tensor without the class that a feature gave it: :class:`_Shared` warns, and once is enough."""
    added = type(value) in PLAIN and type(value) is not torch.Tensor and not isinstance(value, nn.Parameter)
    return value.as_subclass(torch.Tensor) if added else value


class MarkPartial(_Shared):
    """State-dict hook of a root model and of the Hugging Face models inside it, which have one mark together."""

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
                    f"{package}'s {function}: this rank holds only its part of {shard.name}: that of "
                    f"{describe_ranks(ranks)}.\n{USE_INSTEAD}"
                )
            if module.startswith("torch.distributed.checkpoint") and function in _DCP:
                _refuse_full(shard, model)
                if shard.plan.shards > 1:
                    mark.warn(_OF_DCP)
        metadata[_MARK] = mark
        if prefix:
            return None  # part of another module's state dict, which goes on filling its own
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
    """Tell whether the tensors are whole. Raises CheckpointError if they are mixed, or another rank's.

    Args:
        own: The names of this rank's tensors.
        part: The ranks that the state dict is from; None if it does not say.
    """
    rank = shard.mpu.shards.rank
    whole: list[str] = []
    local: list[str] = []
    neither: list[str] = []
    for name, due, value in entries:
        shape, expected = tuple(value.shape), due.local_shape(rank)
        if shape == expected == due.shape:
            continue
        kind = whole if shape == due.shape else local if shape == expected else neither
        kind.append(f"{name}: {list(shape)} given, {list(due.shape)} whole, {list(expected)} here")
    is_part = bool(local) or not whole  # without a mark, shapes alone tell
    if part is not None and is_part and dict(part) != ranks:
        raise CheckpointError(
            f"load_state_dict: the state dict is what {describe_ranks(part)} had; this is {describe_ranks(ranks)}.\n"
            "  Load this rank's own, or a whole model's on every rank; for another mesh use model.save_parallelized "
            "and\n  model.from_parallelized."
        )
    if neither or (whole and local):
        what = "have neither the whole nor this rank's shape" if neither else "are whole, others this rank's shards"
        found = neither or [whole[0], local[0]]
        raise CheckpointError(
            f"load_state_dict: {len(neither) or len(whole)} tensors {what} ({describe_ranks(ranks)}):\n  "
            + "\n  ".join(found[:5])
        )
    if entries and not shard.is_block and not any(name in own for name, _, _ in entries):
        raise CheckpointError(
            f"load_state_dict: the state dict holds nothing of this rank ({describe_ranks(ranks)}), only what other "
            f"stages hold: {listed([name for name, _, _ in entries], 3)}"
        )
    return bool(whole)


def attach_hooks(model: nn.Module, plan: Plan, mpu: MPU) -> Iterator[nn.Module]:
    """Put hooks on a model that warn of taking a rank's part for all; yield its root and the models inside it."""
    mark, name = MarkPartial(), type(model).__name__
    tensors = {alias: t for t in plan.saved().tensors.values() for alias in (t.name, *t.aliases)}
    for path, module in model.named_modules():
        is_block = module is not model and not isinstance(module, PreTrainedModel)
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


# -- torch.distributed.checkpoint.state_dict, which reads the optimizer and asks each module of the model for names ----

_FUNCTIONS = ("get_optimizer_state_dict", "get_state_dict", "set_optimizer_state_dict", "set_state_dict")


def fqn_modifiers(self: nn.Module) -> dict[str, str]:
    """Tell torch's ``get_optimizer_state_dict`` and its kin, which ask each module for this, that a rank has a part.

    Raises:
        ConfigError: they are asked for whole tensors, which they would make of one rank's shards.
    """
    shard = shard_of(self)
    if shard is None:
        return {}
    _refuse_full(shard, self)
    for _, function in frames_of("torch.distributed.checkpoint.state_dict") if shard.plan.shards > 1 else ():
        if function in _FUNCTIONS[:2] and not shard.warned:
            shard.warned = True
            warn_user(
                f"torch's {function} reads an optimizer of {shard.name}: it is what "
                f"{describe_ranks(shard.ranks(self))} has of its state, not all of it.\n"
                "  autopar.checkpoint.to_dtensor_training_state(model, optimizer) makes a dict for "
                "torch.distributed.checkpoint."
            )
    return {}


def _refuse_full(shard: ModelShard, model: nn.Module) -> None:
    """Raise ConfigError in torch's functions that would make a full state dict of one rank's shards or stage."""
    if shard.plan.shards == 1 and shard.mpu.pp.size == 1:  # DTensors, which torch joins
        return
    for frame, function in frames_of("torch.distributed.checkpoint.state_dict"):
        options = frame.f_locals.get("options")
        full = getattr(options, "full_state_dict", False) or getattr(options, "broadcast_from_rank0", False)
        if full and function in ("get_model_state_dict", *_FUNCTIONS):
            raise ConfigError(
                f"torch's {function} with full_state_dict=True: {shard.name} is sharded without DTensors, and this is "
                f"the part of {describe_ranks(shard.ranks(model))}.\n{USE_INSTEAD}"
            )
