"""Checkpoints: a folder of shards that appears whole or not at all, read on any mesh, and its Hugging Face form.

The public names are loaded when they are first used: a model is initialized without what saves and loads it.
"""

from typing import TYPE_CHECKING

from autopar.on_demand import lazy_names

if TYPE_CHECKING:
    from autopar.checkpoint.dtensor import load_dtensor_state_dict, to_dtensor_state_dict, to_dtensor_training_state
    from autopar.checkpoint.extra import ShardedDict
    from autopar.checkpoint.format import Manifest
    from autopar.checkpoint.methods import attach, detach
    from autopar.checkpoint.offline import merge_checkpoint, reshard_checkpoint
    from autopar.checkpoint.shards import check_checkpoint

__all__ = [
    "Manifest",
    "ShardedDict",
    "attach",
    "check_checkpoint",
    "detach",
    "load_dtensor_state_dict",
    "merge_checkpoint",
    "reshard_checkpoint",
    "to_dtensor_state_dict",
    "to_dtensor_training_state",
]

_HOMES = {
    "Manifest": "format",
    "ShardedDict": "extra",
    "attach": "methods",
    "check_checkpoint": "shards",
    "detach": "methods",
    "load_dtensor_state_dict": "dtensor",
    "merge_checkpoint": "offline",
    "reshard_checkpoint": "offline",
    "to_dtensor_state_dict": "dtensor",
    "to_dtensor_training_state": "dtensor",
}

__getattr__, __dir__ = lazy_names(__name__, {name: f"{__name__}.{home}" for name, home in _HOMES.items()})
