"""PEFT's modules around those of a model, seen through: a policy describes the model as it is without them.

PEFT is never imported here. A module can only be PEFT's where somebody else has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from autopar.errors import CheckpointError, ConfigError
from autopar.foreign.tensors import own_modules


def seen_through(module: Any) -> list[tuple[str, Any]]:
    """Return what a policy describes in place of ``module``, each with its path from there.

    A layer with adapters gives its base layer. A module that is trained as a whole (``modules_to_save``) gives the
    original and every copy. Anything else gives the module itself, at ``""``.
    """
    found = [("base_layer", module.base_layer)] if _is(module, _TUNERS) else saved_copies(module)
    if not found:
        return [("", module)]
    return [
        (f"{path}.{further}" if further else path, inside)
        for path, child in found
        for further, inside in seen_through(child)
    ]


def saved_copies(module: Any) -> list[tuple[str, Any]]:
    """Return the original in a wrapper of PEFT (``modules_to_save``) and its copies, with paths; else nothing."""
    if not _is(module, _WRAPPERS):
        return []
    if not _is(module, _SAVED):  # trainable tokens, around a layer of their own
        return [("token_adapter.base_layer", module.original_module)]
    copies = [(f"modules_to_save.{name}", copy) for name, copy in module.modules_to_save.items()]
    return [("original_module", module.original_module), *copies]


def is_tuner(module: nn.Module) -> bool:
    """Tell whether ``module`` is what PEFT puts around a model with adapters (``LoraModel``)."""
    return _is(module, ("peft.tuners.tuners_utils", "BaseTuner"))


def is_adapted(module: nn.Module) -> bool:
    """Tell whether ``module`` is what PEFT puts around a layer (``LoraLayer``)."""
    return _is(module, _TUNERS)


def tuner_layers(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield every layer of ``root`` that holds adapters, and its path."""
    if _TUNERS[0] not in sys.modules:
        return
    for path, module in root.named_modules():
        if _is(module, _TUNERS) and isinstance(getattr(module, "base_layer", None), nn.Module):
            yield path, module


def enable_all(root: nn.Module) -> None:
    """Let all adapters of ``root`` run in its forward: none is disabled, inactive or merged. ``root`` is a copy."""
    for module in root.modules():
        if _is(module, _TUNERS) and isinstance(getattr(module, "base_layer", None), nn.Module):
            layer: Any = module
            names = {name for kind in layer.adapter_layer_names for name in getattr(layer, kind)}
            layer._disable_adapters, layer._active_adapter, layer.merged_adapters = False, sorted(names), []
        elif _is(module, _SAVED):
            wrapper: Any = module
            wrapper._disable_adapters, wrapper._active_adapter = False, list(wrapper.modules_to_save)[:1]


def plain_name(model: nn.Module, name: str) -> str | None:
    """Return what a tensor of ``model`` is called in the model without adapters; None if it is an adapter's."""
    kept: list[str] = []
    module: Any = model
    for step in name.split("."):
        if _is(module, _TUNERS) and step != "base_layer":
            return None
        if _is(module, _WRAPPERS) and step not in ("original_module", "token_adapter"):
            return None
        if not _is(module, _TUNERS) and not _is(module, _WRAPPERS):
            kept.append(step)
        module = own_modules(module).get(step) if isinstance(module, nn.Module) else None
    return ".".join(kept)


def check_merged(model: nn.Module) -> None:
    """Check that the weights of the plain model in ``model`` are all that it computes with.

    Raises:
        CheckpointError: adapters are active that are not merged into them.
    """
    for path, module in model.named_modules():
        whole = _is(module, _TUNERS) and (module.merged or module.disable_adapters)
        if whole or not (_is(module, _TUNERS) or _is(module, _WRAPPERS)):
            continue
        what = "was trained as a whole (modules_to_save)" if _is(module, _WRAPPERS) else "has adapters"
        raise CheckpointError(
            f"merge_checkpoints=True: {path} {what}, for which a Hugging Face checkpoint has no place.\n"
            "  adapter_only=True writes adapters as PEFT does. After model.merge_adapter(), those of layers are part "
            "of the weights,\n  and are saved with them."
        )


def is_peft_model(module: nn.Module) -> bool:
    """Tell whether ``module`` is a ``PeftModel``, which can save its adapters."""
    return _is(module, ("peft.peft_model", "PeftModel"))


_WRAPPERS = ("peft.utils.other", "AuxiliaryTrainingWrapper")
_SAVED = ("peft.utils.other", "ModulesToSaveWrapper")
_TUNERS = ("peft.tuners.tuners_utils", "BaseTunerLayer")


def _is(module: Any, kind: tuple[str, str]) -> bool:
    known = getattr(sys.modules.get(kind[0]), kind[1], None)
    return known is not None and isinstance(module, known)


# -- the parts of PEFT that a sharded model computes exactly; all else is refused by name, before any change -----------

_LAYERS = {  # module of PEFT -> classes, named as in it
    "peft.tuners.lora.layer": ("Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d", "ParamWrapper"),
    "peft.tuners.lora.bnb": ("Linear4bit", "Linear8bitLt"),
    "peft.tuners.lora.torchao": ("TorchaoLoraLinear",),
    "peft.tuners.ia3.layer": ("Linear",),
}
_METHODS = ("LORA", "IA3", "PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING")
_SETTINGS = ("ensure_weight_tying", "layer_replication")
_INSTEAD = (
    "  What is exact over tensor-parallel ranks: LoRA (also rslora, DoRA, lora_bias, several adapters,\n"
    "  modules_to_save) and IA3 on linear layers, LoRA on embeddings; without stages also prompts and prefixes.\n"
    "  Others train on one rank."
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
    for name, variant in getattr(layer, "lora_variant", {}).items():
        if type(variant).__name__ != "DoraLinearVariant":
            shown = type(variant).__name__.removesuffix("Variant")
            yield f"PEFT's {shown} of adapter '{name}' (at {path}), a variant of LoRA"
        elif isinstance(layer.lora_dropout[name], nn.Dropout):
            yield f"lora_dropout of adapter '{name}' (at {path}), a DoRA: it multiplies with the whole weight then"
    if layer.base_layer is not layer.get_base_layer() and kind.__name__ != "ParamWrapper":  # those are nested
        yield f"adapters on adapters (at {path})"
