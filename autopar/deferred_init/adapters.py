"""The initial values of PEFT's adapters on a lazily built model: drawn by PEFT's own functions, shard by shard kept.

A model's ``_init_weights`` would draw them as it draws its own linear layers. Adapters that are made from the values of
the weights (PiSSA, OLoRA) have no place here: there are no values yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

from autopar.adapters.wrappers import tuner_layers
from autopar.errors import ConfigError
from autopar.foreign.transformers import adapters_available

__all__ = ["adapter_inits", "adapter_parameters"]


def adapter_parameters(root: nn.Module) -> set[int]:
    """Return ``id(parameter)`` of every adapter's, in layers that are not whole copies."""
    return {
        id(parameter)
        for _, layer in tuner_layers(root)
        for name, child in layer.named_children()
        if name != "base_layer"
        for parameter in child.parameters()
    }


def adapter_inits(root: nn.Module) -> dict[int, list[tuple[nn.Module, Callable[[], Any]]]]:
    """Return ``id(layer)`` -> the steps that initialize its adapters, each with its module.

    Raises:
        ConfigError: an adapter without memory is initialized from the values of the weights, or in a way not known.
    """
    configs: dict[str, Any] = {}
    for module in root.modules():
        found = vars(module).get("peft_config")
        configs |= found if isinstance(found, dict) else {}
    return {id(layer): list(_steps(path, layer, configs)) for path, layer in tuner_layers(root)}


def _steps(path: str, layer: Any, configs: dict[str, Any]) -> Iterator[tuple[nn.Module, Callable[[], Any]]]:
    own = [child for name, child in layer.named_children() if name != "base_layer"]
    if not any(parameter.is_meta for child in own for parameter in child.parameters()):
        return
    for name in adapters_available(layer):
        config = configs.get(name)
        kind = getattr(config, "init_lora_weights", getattr(config, "init_ia3_weights", None))
        if kind in (True, "gaussian") and hasattr(layer, "reset_lora_parameters"):
            yield layer, partial(layer.reset_lora_parameters, name, kind)
        elif kind is True and hasattr(layer, "reset_ia3_parameters"):
            yield layer, partial(layer.reset_ia3_parameters, name)
        else:
            raise ConfigError(
                f"adapter '{name}' at {path} is initialized by {kind!r}, which a model that was built in lazy_init "
                "cannot do.\n  Leave init_lora_weights at True (or 'gaussian'), or build the model without lazy_init."
            )
