"""Arguments of OSLO's and transformers' savers and loaders: accepted where they mean the same, else explained."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from autopar.errors import CheckpointError, nearest

__all__ = ["place"]

_HUB = "save with merge_checkpoints=True, then upload the folder on rank 0, with huggingface_hub.upload_folder"
_RANKS = "leave it out: every rank calls it, writes what it holds, and rank 0 writes the config"
_SELF = "it fills this model in place, on its devices and in its dtypes; autopar.from_pretrained makes a new one"

# Name -> values that ask for what happens anyway, and what to do instead of others.
_SAVING: dict[str, tuple[tuple[Any, ...], str]] = {
    "save_config": ((None, True), "the config is always saved, since nothing can be loaded without it"),
    "state_dict": ((None,), "the tensors of the model are saved; load others with model.load_state_dict before"),
    "save_function": (
        (None,),
        "files are safetensors; merge_checkpoints=True, format='bin' writes what torch.save does",
    ),
    "mapping": ((None,), "what is sharded and how is the policy's: autopar.initialize(model, config, policy=...)"),
    "is_main_process": ((None,), _RANKS),
    "save_on_each_node": ((None, False), _RANKS + "; all nodes share one folder"),
    "safe_serialization": ((None, True), "use merge_checkpoints=True, format='bin'; shards are always safetensors"),
    "push_to_hub": ((None, False), _HUB),
    "repo_id": ((None,), _HUB),
    "token": ((None,), _HUB),
    "commit_message": ((None,), _HUB),
    "variant": ((None,), "rename the files afterwards; transformers' names are written"),
    "save_peft_format": ((None, True), "adapters are saved as part of the model, under its own names"),
    "save_original_format": ((None, True), "merged files always have the names of the hub"),
    "distributed_checkpoint": ((None, False), "give autopar.checkpoint.to_dtensor_state_dict(model) to torch's savers"),
    "scheduler": ((), "its name here is lr_scheduler"),
    "tokenizer": ((None,), "call tokenizer.save_pretrained(folder) on rank 0 afterwards"),
    "step": ((), "put it into extra={'step': ...}"),
    "epoch": ((), "put it into extra={'epoch': ...}"),
}
_LOADING: dict[str, tuple[tuple[Any, ...], str]] = {
    "device_map": ((None,), _SELF),
    "map_location": ((None,), _SELF),
    "dtype": ((None,), _SELF),
    "torch_dtype": ((None,), _SELF),
    "config": ((None,), _SELF),
    "mapping": ((None,), "what is sharded and how is the policy's: autopar.initialize(model, config, policy=...)"),
    "strict": (
        (None, True),
        "the checkpoint must hold exactly the model's tensors; autopar.from_pretrained is for others",
    ),
    "weights_only": ((None, True), "nothing in such a folder is ever unpickled"),
    "merge_checkpoints": (
        (None, False),
        "merged folders are read by autopar.from_pretrained and plain from_pretrained",
    ),
    "scheduler": ((), "its name here is lr_scheduler"),
}
_PLACES = {"save_parallelized": ("save_directory",), "from_parallelized": ("save_directory", "path")}


def place(method: Callable[..., Any], directory: object, others: Mapping[str, Any]) -> object:
    """The folder that a call names, by one of its names.

    Args:
        method: ``save_parallelized`` or ``from_parallelized``.
        directory: given by this name; None if it was not.
        others: keywords that are none of the method's.

    Raises:
        CheckpointError: a keyword means something else here, or nothing; or the folder is named twice.
    """
    name, habits = method.__name__, _SAVING if method.__name__ == "save_parallelized" else _LOADING
    aliases = _PLACES[name]
    known = [key for key in inspect.signature(method).parameters if key not in ("self", "others")]
    for key, value in others.items():
        if key in aliases:
            continue
        if key not in habits:
            raise CheckpointError(f"{name} has no argument {key!r}.{nearest(key, [*known, *aliases])}")
        accepted, advice = habits[key]
        if not any(value is same for same in accepted):
            raise CheckpointError(f"{name} does not take {key}={_shown(value)}: {advice}")
    given = {key: value for key, value in (("directory", directory), *others.items()) if key in ("directory", *aliases)}
    named = {key: value for key, value in given.items() if value is not None}
    if len(named) > 1:
        (one, first), (other, second), *_ = named.items()
        raise CheckpointError(
            f"{name} got {one}={first!r} and {other}={second!r}, which are the same argument: pass one"
        )
    return next(iter(named.values()), None)


def _shown(value: object) -> str:
    """A state dict would fill pages."""
    return repr(value) if isinstance(value, bool | int | float | str | None) else f"<{type(value).__name__}>"
