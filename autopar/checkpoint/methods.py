"""The methods of a parallelized model for saving and loading, and its replacements of transformers' methods.

Methods of transformers that need the full model (``save_pretrained``, ``num_parameters``) are replaced where a rank
holds only shards: they raise, or return the result for the full model.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from autopar.checkpoint.state import STATE, State, parameters_elsewhere, state_of
from autopar.checkpoint.state_dict import (
    USE_INSTEAD,
    attach_hooks,
    describe_ranks,
    detach_hooks,
    fqn_modifiers,
    shard_of,
)
from autopar.distributed.mesh import MPU
from autopar.errors import CheckpointError, ConfigError
from autopar.plan.plan import Plan
from autopar.policy.match import is_hugging_face_model
from autopar.swap import bind, unbind

Model = TypeVar("Model", bound=nn.Module)
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
    """Save the model and the state that training needs to continue. Every rank calls it with the same arguments.

    An interrupted save leaves the previous checkpoint. A checkpoint in ``directory`` is replaced, also one in Hugging
    Face's form (do not save into the folder of the base model). The user's files there (a tokenizer) are kept.

    Args:
        directory: The folder to make, on a file system that all nodes share. Alias: ``save_directory``.
        merge_checkpoints: True to write the files of the reference model's ``save_pretrained`` instead of shards.
        max_shard_size: The maximum size of a file of weights, with ``merge_checkpoints``.
        format: ``safetensors`` or ``bin``, with ``merge_checkpoints``.
        timeout: The seconds to wait for the other ranks to call.
        optimizer: The optimizer to save, with the fp32 weights and the loss scale of half precision, and the random
            state of every rank.
        lr_scheduler: The scheduler to save, by its ``state_dict()``.
        extra: The user's data: numbers, text, lists, dicts and tensors, identical on all ranks. A value may be an
            :class:`~autopar.checkpoint.ShardedDict` (an EMA), whose shards load on any mesh.
        keep_last: The number of checkpoints of the series (``step-100``, ``step-200``) to keep, counted from the last
            save. Older ones are deleted, except for files in them that no save has written.
        async_save: True to copy to host memory, return, and write in the background. If that fails, the next call or
            ``model.wait_for_save()`` raises; call the latter at the end of the script.
        adapter_only: True to write only the adapters of a ``PeftModel``, in the form of ``PeftModel.save_pretrained``.
            Works with ``timeout`` only. Other files in the folder are kept.
        tokenizer: A tokenizer or processor to save into the folder.
        others: Further arguments of ``save_pretrained`` and of OSLO, if they ask for the default behavior.

    Raises:
        CheckpointError: An argument is wrong, a rank did not call, failed or could not write, or the model has changed
            since it was parallelized. Identical on all ranks; nothing has changed.
    """
    # Imported here, because initialize does not need it.
    from autopar.checkpoint.arguments import directory_of
    from autopar.checkpoint.save import save

    how: dict[str, Any] = {"merge_checkpoints": merge_checkpoints, "max_shard_size": max_shard_size, "format": format}
    how |= {"keep_last": keep_last, "async_save": async_save}
    training = {"optimizer": optimizer, "lr_scheduler": lr_scheduler, "extra": extra, "tokenizer": tokenizer}

    save_adapters = state_of(self).save_adapters

    def folder() -> object:
        if adapter_only and save_adapters is None:
            raise CheckpointError(
                f"adapter_only=True needs a PeftModel; got {type(self).__name__}, which contains none.\n"
                "  Make it with peft.get_peft_model before autopar.initialize."
            )
        for name, value in {**how, **training}.items() if adapter_only else ():
            if value not in (None, False, "safetensors", "5GB"):
                raise CheckpointError(
                    f"adapter_only=True is not supported with {name}={value!r}: files of adapters cannot store it\n"
                    "  Remove adapter_only to save the full model with its adapters and training state."
                )
        return directory_of(save_parallelized, directory, others)

    if adapter_only and save_adapters is not None:
        save_adapters(self, folder, timeout, {})
        return
    save(self, {"directory": folder, **how}, timeout, **training)


def wait_for_save(self: nn.Module) -> None:
    """Wait for a save with ``async_save=True``; every rank calls it.

    Raises:
        CheckpointError: The save failed. Identical on all ranks.
    """
    state_of(self).background.wait()


def from_parallelized(
    self: Model,
    directory: str | os.PathLike[str] | None = None,
    timeout: float = 20.0,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any = None,
    extra: MutableMapping[str, Any] | None = None,
    verify: bool = True,
    **others: Any,
) -> Model:
    """Load a checkpoint of ``save_parallelized`` in place, and return the model. Every rank calls it.

    Each rank reads only its ranges from the shard files. Parameters keep their identity, device and dtype. The mesh,
    the ZeRO stage and the precision may differ from the save. With an optimizer, training continues from the saved
    fp32 weights, if there are any.

    Args:
        directory: The folder of the checkpoint. Aliases: ``save_directory``, ``path``.
        timeout: The seconds to wait for the other ranks to call.
        optimizer: An optimizer of the same parameters, to be filled. The random state of every rank is restored too.
        lr_scheduler: A scheduler that loads the saved ``state_dict()``.
        extra: A dict that receives the saved ``extra``.
        verify: True to compare all checksums first; the ranks share the work.
        others: Further arguments of transformers' and OSLO's loaders, if they ask for the default behavior.

    Raises:
        CheckpointError: The checkpoint is incomplete, damaged, mixed or of another model, or a rank did not call or
            failed. Identical on all ranks; nothing has changed.
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
    """Add the methods to ``model``, the root model.

    Args:
        hf_model: The Hugging Face model in ``model``, often ``model`` itself.
        hf_prefix: The path of ``hf_model`` in ``model``, with or without the last dot; ``""`` if it is the root.
        holders: Tensor name -> the stages that hold it, with a pipeline; the first of them writes it.
    """
    path = hf_prefix.rstrip(".")
    saved = plan.saved()
    left_out = {name: tensor for name, tensor in plan.tensors.items() if tensor.quantized}
    model.__dict__[STATE] = State(saved, mpu, path, dict(holders or {}), left_out)
    methods = {method.__name__: method for method in (save_parallelized, wait_for_save, from_parallelized)}
    bind(model, _OWNER, **methods, __reduce_ex__=_refuse_pickle, _fqn_modifiers=fqn_modifiers)
    for module in attach_hooks(model, plan, mpu):
        if is_hugging_face_model(module):
            bind(module, _OWNER, **{name: m for name, m in _WHOLE_MODEL_METHODS.items() if hasattr(module, name)})


def detach(model: nn.Module) -> None:
    """Undo :func:`attach`; every rank calls it. Raises CheckpointError if a save in the background failed."""
    try:
        state_of(model).background.wait()
    finally:
        model.__dict__.pop(STATE, None)
        unbind(model, _OWNER)
        detach_hooks(model)


# -- methods of the full model -----------------------------------------------------------------------------------------


PART = "this rank holds only its shards of {model} ({ranks}).\n"
_EMBEDDINGS = (
    "the embeddings of {model} are sharded; this rank is {ranks}.\n"
    "  Set them before autopar.initialize, or after autopar.deparallelize(model)."
)
# Method -> the text of the ConfigError where a rank holds only shards of the model.
_REFUSED = {
    "save_pretrained": PART + USE_INSTEAD,
    "should_save_on_this_rank": PART + USE_INSTEAD,  # save_pretrained calls it, also if called through the class
    "set_input_embeddings": _EMBEDDINGS,
    "set_output_embeddings": _EMBEDDINGS,
}


def refused(name: str, text: str) -> Callable[..., Any]:
    """Make a method that raises ConfigError if this rank holds only shards, otherwise calls the class's method."""
    called = {"should_save_on_this_rank": "save_pretrained"}.get(name, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (shard := shard_of(self)) is not None:
            said = text.format(model=type(self).__name__, ranks=describe_ranks(shard.ranks(self)))
            raise ConfigError(f"{called}: {said}")
        return getattr(type(self), name)(self, *args, **kwargs)

    return method


def num_parameters(self: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """Count the parameters of the full model, as before ``initialize``, from this rank's shards; no communication."""
    shard = shard_of(self)
    if shard is None:
        return type(self).num_parameters(self, only_trainable, exclude_embeddings)
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
            counts.setdefault(id(parameter), math.prod(parameter.shape if due is None else due.shape))
    return sum(counts.values())


def _push_to_hub(self: Any, repo_id: str, *, max_shard_size: int | str = "50GB", **options: Any) -> str:
    """Upload the full model, with transformers' arguments; every rank calls it, and rank 0 uploads once.

    Raises ConfigError for a model inside the parallelized one, and CheckpointError, identical on all ranks.
    """
    from autopar.checkpoint.hf_weights import push_merged

    shard = shard_of(self)
    if shard is None:
        return type(self).push_to_hub(self, repo_id, max_shard_size=max_shard_size, **options)
    if STATE not in vars(self):
        return refused("push_to_hub", _REFUSED["save_pretrained"])(self)
    return push_merged(self, repo_id, max_shard_size, options)


_WHOLE_MODEL_METHODS: dict[str, Callable[..., Any]] = {
    "num_parameters": num_parameters,
    "push_to_hub": _push_to_hub,
    **{name: refused(name, text) for name, text in _REFUSED.items() if hasattr(PreTrainedModel, name)},
}


def _refuse_pickle(self: Any, protocol: Any) -> Any:
    """Replace ``__reduce_ex__`` of a root model: copying continues to work, pickling raises ConfigError."""
    if sys._getframe(1).f_globals.get("__name__") == "copy":
        kind: Any = type(self)
        return kind.__reduce_ex__(self, protocol)
    shard = shard_of(self)
    part = "" if shard is None else f", and this rank holds only its shards ({describe_ranks(shard.ranks(self))})"
    raise ConfigError(
        f"{type(self).__name__} is parallelized and cannot be pickled (torch.save): it has process groups{part}.\n"
        f"{USE_INSTEAD}\n  Or pickle the model after autopar.deparallelize(model)."
    )
