"""The parts of PEFT that a sharded model computes exactly; all else is refused by name, before any change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from autopar.adapters.wrappers import tuner_layers
from autopar.errors import ConfigError

__all__ = ["check_adapters", "check_layer"]

_LAYERS = {  # module of PEFT -> classes, named as in it
    "peft.tuners.lora.layer": ("Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d", "ParamWrapper"),
    "peft.tuners.ia3.layer": ("Linear",),
}
_METHODS = ("LORA", "IA3", "PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING")
_SETTINGS = ("ensure_weight_tying", "layer_replication")
_INSTEAD = (
    "  What is exact over tensor-parallel ranks: LoRA (also rslora, lora_bias, several adapters, modules_to_save) and\n"
    "  IA3 on linear layers, LoRA on embeddings; without stages also prompts and prefixes. Others train on one rank."
)


def check_adapters(root: nn.Module, tp: int, pp: int = 1) -> None:
    """Check that the adapters of ``root`` compute on ``tp`` x ``pp`` ranks what they compute on one.

    Raises:
        ConfigError: names the first method, layer or setting that does not.
    """
    if tp == 1 and pp == 1:
        return
    for what in _unsupported(root, tp, pp):
        size = f"pipeline_parallel_size={pp}" if pp > 1 else f"tensor_parallel_size={tp}"
        raise ConfigError(f"{size} does not go together with {what}.\n{_INSTEAD}")


def check_layer(path: str, layer: Any) -> None:
    """Raise ConfigError unless the adapters of one layer can follow their base layer over tensor-parallel ranks."""
    for what in _of_layer(path, layer):
        raise ConfigError(f"tensor parallelism does not go together with {what}.\n{_INSTEAD}")


def _unsupported(root: nn.Module, tp: int, pp: int) -> Iterator[str]:
    for module in root.modules():
        configs = vars(module).get("_peft_config") or vars(module).get("peft_config") or {}
        for name, config in configs.items() if isinstance(configs, dict) else ():
            kind = getattr(getattr(config, "peft_type", None), "value", None)
            if kind is None:
                continue
            shown = f"{kind} (adapter '{name}')"
            if getattr(config, "is_prompt_learning", False) and pp > 1:
                yield f"PEFT's {shown}, which puts something in front of the sequence or of every layer's keys"
            if tp > 1 and kind not in _METHODS:
                yield f"PEFT's {shown}"
            for setting in _SETTINGS if tp > 1 else ():
                if getattr(config, setting, None):
                    yield f"{setting}={getattr(config, setting)!r} of PEFT's {shown}"
    for path, layer in tuner_layers(root) if tp > 1 else ():
        yield from _of_layer(path, layer)


def _of_layer(path: str, layer: Any) -> Iterator[str]:
    kind = next(c for c in type(layer).__mro__ if c.__module__.startswith("peft."))
    if kind is not type(layer) or kind.__name__ not in _LAYERS.get(kind.__module__, ()):
        method = kind.__module__.removeprefix("peft.tuners.").partition(".")[0]
        base = type(layer.get_base_layer()).__name__
        yield f"PEFT's {method} layer {kind.__name__} on a {base} (at {path})"
    variants = getattr(layer, "lora_variant", {})
    for name, variant in variants.items():
        yield f"PEFT's {type(variant).__name__.removesuffix('Variant')} of adapter '{name}' (at {path}): DoRA and such"
    if layer.base_layer is not layer.get_base_layer() and kind.__name__ != "ParamWrapper":  # those are nested
        yield f"adapters on adapters (at {path})"
