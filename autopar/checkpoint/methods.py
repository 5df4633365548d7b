"""The methods of a parallelized model: ``save_parallelized`` and others, and those of transformers that it refuses.

Methods that speak of the whole model (``save_pretrained``, ``num_parameters``) are replaced where a rank holds a part
of it: they raise, or answer for the whole model.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autopar.checkpoint.state import STATE, State, parameters_elsewhere, state_of
from autopar.checkpoint.state_dict import (
    MODEL_SHARD,
    USE_INSTEAD,
    ModelShard,
    attach_hooks,
    describe_ranks,
    detach_hooks,
    fqn_modifiers,
    shard_of,
)
from autopar.distributed.mesh import MPU
from autopar.errors import CheckpointError, ConfigError
from autopar.plan.plan import Plan
from autopar.swap import bind, unbind

_OWNER = "checkpoints"


def save_parallelized(
    self: nn.Module,
    directory: str | os.PathLike[str] | None = None,
    merge_checkpoints: bool = False,
    max_shard_size: int | str = "5GB",
    format: str = "safetensors",
    timeout: float = 20.0,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    async_save: bool = False,
    adapter_only: bool = False,
    tokenizer: Any = None,
    **others: Any,
) -> None:
    """Save the model, and what training needs to continue. Every rank calls it, with the same arguments.

    The folder appears whole or not at all: a save that is killed leaves the previous checkpoint as it was. A checkpoint
    in ``directory`` is replaced, also one in Hugging Face's form (do not save into the folder of the base model); other
    files there (a tokenizer) are kept.

    Args:
        directory: The folder to make, on a file system that all nodes share. Also called ``save_directory``.
        merge_checkpoints: True to write the files of the reference model's ``save_pretrained`` instead of shards.
        max_shard_size: The largest size of a file of weights, with ``merge_checkpoints``.
        format: ``safetensors`` or ``bin``, with ``merge_checkpoints``.
        timeout: The seconds to wait for the other ranks to call.
        optimizer: The optimizer to save, in the layout of the parameters, with the fp32 weights and the loss scale of
            half precision, and the random state of every rank.
        lr_scheduler: A scheduler, whose ``state_dict()`` is saved.
        extra: The user's data: numbers, text, lists, dicts, tensors; the same on all ranks. An
            :class:`~autopar.checkpoint.ShardedDict` in it (an EMA) is saved like the optimizer's state, and each rank
            gets its shards back, on any mesh.
        keep_last: The number of checkpoints of the same series (``step-100``, ``step-200``) that remain, the ones saved
            last. Files in the folders of removed ones that no save has written stay there.
        async_save: True to copy to host memory, return, and write in the background. The next call raises an error
            of it and does nothing else, or ``model.wait_for_save()`` does: call that at the end of the script.
        adapter_only: True to write the adapters of a ``PeftModel`` alone, in the files of
            ``PeftModel.save_pretrained``. Other files in the folder stay there. Works with ``timeout`` only.
        tokenizer: A tokenizer or processor whose files go into the folder, so that a pipeline reads it as it is.
        others: Other arguments of ``save_pretrained`` and of OSLO, as long as they ask for what happens anyway.

    Raises:
        CheckpointError: The same on every rank, with everything as it was before: an argument is wrong, a rank did not
            call, died or could not write, or the model has changed since it was parallelized.
    """
    # Imported here, and where something is loaded or pushed: initialize loads none of it.
    from autopar.checkpoint.arguments import directory_of
    from autopar.checkpoint.save import save

    how: dict[str, Any] = {"merge_checkpoints": merge_checkpoints, "max_shard_size": max_shard_size, "format": format}
    how |= {"keep_last": keep_last, "async_save": async_save}
    training = {"optimizer": optimizer, "lr_scheduler": lr_scheduler, "extra": extra, "tokenizer": tokenizer}

    save_adapters = state_of(self).save_adapters

    def folder() -> object:
        if adapter_only and save_adapters is None:
            raise CheckpointError(
                f"adapter_only=True: {type(self).__name__} holds 0 models of PEFT (PeftModel); it must be one, which "
                "writes its adapters.\n  Make it with peft.get_peft_model before autopar.initialize."
            )
        return directory_of(save_parallelized, directory, others)

    if adapter_only and save_adapters is not None:
        save_adapters(self, folder, timeout, {**how, **training})
        return
    save(self, {"directory": folder, **how}, timeout, **training)


def wait_for_save(self: nn.Module) -> None:
    """Wait for a save with ``async_save=True``; every rank calls it.

    Raises:
        CheckpointError: the save failed, the same on every rank.
    """
    state_of(self).background.wait()


def from_parallelized(
    self: nn.Module,
    directory: str | os.PathLike[str] | None = None,
    timeout: float = 20.0,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any = None,
    extra: MutableMapping[str, Any] | None = None,
    verify: bool = True,
    **others: Any,
) -> nn.Module:
    """Load what ``save_parallelized`` wrote, in place, and return the model. Every rank calls it.

    Each rank reads the ranges that it holds now, straight from the shard files. Parameters keep their identity, device
    and dtype. Mesh, ZeRO stage and precision may differ from those of the save; with an optimizer, training continues
    from the saved fp32 weights wherever there are any.

    Args:
        directory: The folder of the checkpoint. Also called ``save_directory`` or ``path``.
        timeout: The seconds to wait for the other ranks to call.
        optimizer: An optimizer of the same parameters, whose state and param groups are filled. The random state of
            every rank is restored as well.
        lr_scheduler: A scheduler that gets the saved ``state_dict()``.
        extra: A dict that receives the saved ``extra``.
        verify: True to read every byte once first, each rank a share, and compare checksums.

    Raises:
        CheckpointError: The same on every rank, with the model as it was before: the checkpoint is incomplete, damaged,
            mixed or of another model, or a rank did not call or died.
    """
    from autopar.checkpoint.arguments import directory_of
    from autopar.checkpoint.load import load

    state_of(self).background.wait()
    training = {"optimizer": optimizer, "lr_scheduler": lr_scheduler, "extra": extra}
    load(self, lambda: directory_of(from_parallelized, directory, others), timeout, training, verify)
    return self


def attach(
    model: nn.Module,
    plan: Plan,
    mpu: MPU,
    hf_model: PreTrainedModel,
    hf_prefix: str = "",
    holders: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Give ``model``, the root model, its methods.

    Args:
        hf_model: The Hugging Face model in it, often ``model`` itself.
        hf_prefix: The path of ``hf_model`` in ``model``, with or without the last dot; ``""`` if it is the root.
        holders: The stages that hold each tensor, with a pipeline; the first of them writes it.

    Raises:
        ValueError: ``hf_model`` is at another path.
    """
    path = hf_prefix.rstrip(".")
    if model.get_submodule(path) is not hf_model:
        raise ValueError(f"{path!r} is not the path of the Hugging Face model")
    saved = plan.saved()
    left_out = {name: tensor for name, tensor in plan.tensors.items() if tensor.quantized}
    model.__dict__[STATE] = State(saved, mpu, path, dict(holders or {}), left_out)
    methods = {method.__name__: method for method in (save_parallelized, wait_for_save, from_parallelized)}
    bind(model, _OWNER, **methods, __reduce_ex__=_refuse_pickle, _fqn_modifiers=fqn_modifiers)
    for module in attach_hooks(model, plan, mpu):
        if isinstance(module, PreTrainedModel):
            bind(module, _OWNER, **_WHOLE_MODEL_METHODS)


def detach(model: nn.Module) -> None:
    """Undo :func:`attach`; every rank calls it. Raises CheckpointError if a save in the background failed."""
    try:
        state_of(model).background.close()
    finally:
        model.__dict__.pop(STATE, None)
        unbind(model, _OWNER)
        detach_hooks(model)


# -- methods of the whole model ---------------------------------------------------------------------------------------


PART = "this rank holds only its part of {model}: that of {ranks}.\n"
_EMBEDDINGS = (
    "the embeddings of this {model} lie on several ranks: this is {ranks}.\n"
    "  Set them before autopar.initialize, or after autopar.deparallelize(model)."
)
# Method -> what ConfigError says where the model is not whole on this rank.
_REFUSED = {
    "save_pretrained": PART + USE_INSTEAD,
    "should_save_on_this_rank": PART + USE_INSTEAD,  # save_pretrained asks it, also if called through the class
    "set_input_embeddings": _EMBEDDINGS,
    "set_output_embeddings": _EMBEDDINGS,
}


def refused(name: str, text: str) -> Callable[..., Any]:
    """Make a method that raises ConfigError if this rank holds a part of the model, else calls the class's method."""
    called = {"should_save_on_this_rank": "save_pretrained"}.get(name, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        shard = shard_of(self)
        if shard is not None:
            said = text.format(model=type(self).__name__, ranks=describe_ranks(shard.ranks(self)))
            raise ConfigError(f"{called}: {said}")
        return getattr(type(self), name)(self, *args, **kwargs)

    return method


def _num_parameters(self: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """Count the parameters of the full model, as before ``initialize``; no communication."""
    if shard_of(self) is None:
        return type(self).num_parameters(self, only_trainable, exclude_embeddings)
    return counted(self, only_trainable, exclude_embeddings)


def counted(self: Any, only_trainable: bool, exclude_embeddings: bool) -> int:
    """Count the parameters of the full model, of which this rank holds a part; no communication."""
    shard: ModelShard = vars(self)[MODEL_SHARD]
    found: dict[str, nn.Parameter] = dict(self.named_parameters(remove_duplicate=False))
    paths = {id(module): path for path, module in self.named_modules()}
    for module, order in parameters_elsewhere(self):
        if id(module) in paths:
            start = f"{paths[id(module)]}." if paths[id(module)] else ""
            found |= {start + name: p for name, p in order.items() if p is not None and start + name not in found}
    if exclude_embeddings:
        tables = {f"{path}.weight" for path, module in self.named_modules() if isinstance(module, nn.Embedding)}
        excluded = {id(found[name]) for name in tables if name in found}
        found = {name: parameter for name, parameter in found.items() if id(parameter) not in excluded}
    counts: dict[int, int] = {}
    for name, parameter in found.items():
        due = shard.planned(name) or shard.plan.tensors.get(shard.prefix + name)
        if parameter.requires_grad or not only_trainable:
            shape = parameter.shape if due is None else due.shape
            counts.setdefault(id(parameter), math.prod(shape))
    return sum(counts.values())


def _push_to_hub(self: Any, repo_id: str, *, max_shard_size: int | str = "50GB", **options: Any) -> str:
    """``push_to_hub`` of the full model, with transformers' arguments; every rank calls it, and rank 0 uploads once.

    Raises ConfigError for a model inside the parallelized one, and CheckpointError, the same on every rank.
    """
    from autopar.checkpoint.hf_weights import push_merged

    shard = shard_of(self)
    if shard is None:
        return type(self).push_to_hub(self, repo_id, max_shard_size=max_shard_size, **options)
    if STATE not in vars(self):
        return refused("push_to_hub", _REFUSED["save_pretrained"])(self)
    return push_merged(self, repo_id, max_shard_size, options)


_WHOLE_MODEL_METHODS: dict[str, Callable[..., Any]] = {
    "num_parameters": _num_parameters,
    "push_to_hub": _push_to_hub,
    **{name: refused(name, text) for name, text in _REFUSED.items() if hasattr(PreTrainedModel, name)},
}


def _refuse_pickle(self: Any, protocol: Any) -> Any:
    """``__reduce_ex__`` of a root model: copies go on, pickling raises ConfigError."""
    if sys._getframe(1).f_globals.get("__name__") == "copy":
        kind: Any = type(self)
        return kind.__reduce_ex__(self, protocol)
    shard = shard_of(self)
    part = "" if shard is None else f", and this rank holds only what {describe_ranks(shard.ranks(self))} has of it"
    raise ConfigError(
        f"{type(self).__name__} is parallelized and cannot be pickled (torch.save): it has process groups{part}.\n"
        f"{USE_INSTEAD}\n  Or pickle what autopar.deparallelize(model) gives back."
    )
