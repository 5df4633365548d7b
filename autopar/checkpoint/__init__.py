"""Checkpoints: a folder of shards that appears whole or not at all, and its merging into a Hugging Face checkpoint."""

from autopar.checkpoint.attach import attach, detach
from autopar.checkpoint.format import Manifest
from autopar.checkpoint.merge import merge_checkpoint

__all__ = ["Manifest", "attach", "detach", "merge_checkpoint"]
