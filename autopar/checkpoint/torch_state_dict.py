"""``get_optimizer_state_dict`` and its kin of ``torch.distributed.checkpoint`` with a model that is not whole here.

They read the optimizer, which nobody may have given to ``initialize``, and ask each module of the model for names.
"""

from __future__ import annotations

from torch import nn

from autopar.call_site import frames_of, warn_user
from autopar.checkpoint.state_dict import describe_ranks, shard_of, use_instead
from autopar.errors import ConfigError

__all__ = ["fqn_modifiers"]

_FUNCTIONS = ("get_optimizer_state_dict", "get_state_dict", "set_optimizer_state_dict", "set_state_dict")


def fqn_modifiers(self: nn.Module) -> dict[str, str]:
    """Tell torch's ``get_optimizer_state_dict`` and its kin, which ask each module for this, that a rank has a part.

    Raises:
        ConfigError: they are asked for whole tensors, which they would make of one rank's shards.
    """
    shard = shard_of(self)
    if shard is None or shard.plan.tp == 1:
        return {}
    for frame, function in frames_of("torch.distributed.checkpoint.state_dict"):
        if function not in _FUNCTIONS:
            continue
        options = frame.f_locals.get("options")
        if getattr(options, "full_state_dict", False) or getattr(options, "broadcast_from_rank0", False):
            raise ConfigError(
                f"torch's {function} with full_state_dict=True: {shard.name} is sharded without DTensors, and this is "
                f"the part of {describe_ranks(shard.ranks(self))}.\n{use_instead()}"
            )
        if function.startswith("get") and not shard.warned:
            shard.warned = True
            warn_user(
                f"torch's {function} reads an optimizer of {shard.name}: it is what "
                f"{describe_ranks(shard.ranks(self))} has of its state, not all of it.\n"
                "  autopar.checkpoint.to_dtensor_training_state(model, optimizer) makes a dict for "
                "torch.distributed.checkpoint."
            )
    return {}
