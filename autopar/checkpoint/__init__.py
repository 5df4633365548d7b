"""Checkpoints: a folder of shards that appears whole or not at all, read on any mesh, and its Hugging Face form."""

from autopar.checkpoint.dtensor import to_dtensor_state_dict
from autopar.checkpoint.dtensor_optimizer import load_dtensor_state_dict, to_dtensor_training_state
from autopar.checkpoint.format import Manifest
from autopar.checkpoint.methods import attach, detach
from autopar.checkpoint.offline.check import check_checkpoint
from autopar.checkpoint.offline.merge import merge_checkpoint
from autopar.checkpoint.offline.reshard import reshard_checkpoint

__all__ = [
    "Manifest",
    "attach",
    "check_checkpoint",
    "detach",
    "load_dtensor_state_dict",
    "merge_checkpoint",
    "reshard_checkpoint",
    "to_dtensor_state_dict",
    "to_dtensor_training_state",
]
