"""What a model returns on request from all of its layers, which no stage of a pipeline has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from autopar.errors import ConfigError

__all__ = ["refuse_collected"]

_COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")


def refuse_collected(model: nn.Module, stages: int, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError if the model is to return what it collects from all of its layers, in several stages.

    Args:
        arguments: of its forward; its config may ask for it too.
    """
    if not isinstance(model, PreTrainedModel):
        return
    config = model.config
    configs = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    for name in _COLLECTED if stages > 1 else ():
        if arguments.get(name) or any(getattr(each, name, False) for each in configs):
            raise ConfigError(
                f"{name}=True collects from every layer of {type(model).__name__}, which is cut into {stages} pipeline "
                "stages: each has only its own. Leave it out"
                + (" (config.output_router_logits: the routers' auxiliary loss)." if "router" in name else ".")
            )
