"""Recompute blocks in the backward pass instead of keeping their activations: ``activation_checkpointing``."""

from autopar.registry import Feature, Step

_SETUP = "autopar.features.activation_checkpointing.setup"

FEATURE = Feature(
    name="activation_checkpointing",
    about="recompute the activations of blocks in the backward pass",
    planners={"activation_checkpointing": f"{_SETUP}:plan"},
    steps={"recompute_blocks": Step(f"{_SETUP}:recompute_blocks", after="shard_layers")},
)
