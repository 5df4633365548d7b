"""Recognize PEFT's modules, and see through them: a policy describes the model without adapters.

This module never imports PEFT. A module can belong to PEFT only if other code has imported PEFT.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any

from torch import nn

from autopar.compat.tensors import own_modules
from autopar.errors import ConfigError

Init = tuple[nn.Module, Callable[[], Any]]  # a module, and the function that initializes its values


def _is(home: str, kind: str, module: Any) -> bool:
    known = getattr(sys.modules.get(home), kind, None)
    return known is not None and isinstance(module, known)


is_peft_model = partial(_is, "peft.peft_model", "PeftModel")  # can save its adapters
is_tuner = partial(_is, "peft.tuners.tuners_utils", "BaseTuner")  # around a model with adapters (LoraModel)
is_adapted = partial(_is, "peft.tuners.tuners_utils", "BaseTunerLayer")  # around a layer (LoraLayer)
is_wrapper = partial(_is, "peft.utils.other", "AuxiliaryTrainingWrapper")  # around a trained layer, or trained rows
_is_saved = partial(_is, "peft.utils.other", "ModulesToSaveWrapper")  # around a layer trained in full


swaps_features = attrgetter("_did_swap_in_out_features")  # of an adapted embedding: in and out features are swapped


def seen_through(module: Any) -> list[tuple[str, Any]]:
    """Return the modules that a policy describes in place of ``module``, each with its relative path.

    For a layer with adapters this is its base layer; for a module in ``modules_to_save`` the original and every copy;
    for any other module the module itself, at ``""``.
    """
    found = [("base_layer", module.base_layer)] if is_adapted(module) else saved_copies(module)
    if not found:
        return [("", module)]
    return [
        (f"{path}.{further}" if further else path, inside)
        for path, child in found
        for further, inside in seen_through(child)
    ]


def saved_copies(module: Any) -> list[tuple[str, Any]]:
    """Return the original in a PEFT wrapper (``modules_to_save``) and its copies, with paths; else an empty list."""
    if not is_wrapper(module):
        return []
    if not _is_saved(module):  # trainable tokens
        return [("token_adapter.base_layer", module.original_module)]
    copies = [(f"modules_to_save.{name}", copy) for name, copy in module.modules_to_save.items()]
    return [("original_module", module.original_module), *copies]


def uses_peft(root: nn.Module) -> bool:
    """Return whether ``root`` is a module of PEFT or contains one."""
    kinds = (is_adapted, is_wrapper, is_tuner, is_peft_model)
    return "peft" in sys.modules and any(kind(module) for module in root.modules() for kind in kinds)


def tuner_layers(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the path and the module of every layer of ``root`` that holds adapters."""
    if "peft.tuners.tuners_utils" not in sys.modules:
        return
    for path, module in root.named_modules():
        if is_adapted(module) and isinstance(getattr(module, "base_layer", None), nn.Module):
            yield path, module


def enable_all(root: nn.Module) -> None:
    """Enable, activate and unmerge all adapters of ``root``, so that its forward runs them; ``root`` is a copy."""
    for module in root.modules():
        if is_adapted(module) and isinstance(getattr(module, "base_layer", None), nn.Module):
            layer: Any = module
            names = {name for kind in layer.adapter_layer_names for name in getattr(layer, kind)}
            layer._disable_adapters, layer._active_adapter, layer.merged_adapters = False, sorted(names), []
        elif _is_saved(module):
            wrapper: Any = module
            wrapper._disable_adapters, wrapper._active_adapter = False, list(wrapper.modules_to_save)[:1]


def plain_name(model: nn.Module, name: str) -> str | None:
    """Return the name of a tensor of ``model`` in the model without adapters; None for a tensor of an adapter."""
    kept: list[str] = []
    module: Any = model
    for step in name.split("."):
        if is_adapted(module) and step != "base_layer":
            return None
        if is_wrapper(module) and step not in ("original_module", "token_adapter"):
            return None
        if not is_adapted(module) and not is_wrapper(module):
            kept.append(step)
        module = own_modules(module).get(step) if isinstance(module, nn.Module) else None
    return ".".join(kept)


# -- initial values of adapters ----------------------------------------------------------------------------------------
# PEFT's functions draw them, since a model's ``_init_weights`` would initialize them like its linear layers. Adapters
# that are computed from the weights (PiSSA, OLoRA) are not supported, because the weights have no values yet.


def adapter_parameters(root: nn.Module) -> set[int]:
    """Return ``id(parameter)`` of every adapter parameter, without those of copied layers."""
    return {
        id(parameter)
        for _, layer in tuner_layers(root)
        for name, child in layer.named_children()
        if name != "base_layer"
        for parameter in child.parameters()
    }


def adapter_inits(root: nn.Module) -> dict[int, list[Init]]:
    """Return ``id(layer)`` -> the steps that initialize its adapters, each with its module.

    Raises:
        ConfigError: An adapter without memory is initialized from the weights, or in an unknown way.
    """
    configs: dict[str, Any] = {}
    for module in root.modules():
        found = vars(module).get("peft_config")
        configs |= found if isinstance(found, dict) else {}
    return {id(layer): list(_steps(path, layer, configs)) for path, layer in tuner_layers(root)}


def _steps(path: str, layer: Any, configs: dict[str, Any]) -> Iterator[Init]:
    own = [child for name, child in layer.named_children() if name != "base_layer"]
    if not any(parameter.is_meta for child in own for parameter in child.parameters()):
        return
    for name in layer._get_available_adapters():
        config = configs.get(name)
        kind = getattr(config, "init_lora_weights", getattr(config, "init_ia3_weights", None))
        if kind in (True, "gaussian") and hasattr(layer, "reset_lora_parameters"):
            yield layer, partial(layer.reset_lora_parameters, name, kind)
        elif kind is True and hasattr(layer, "reset_ia3_parameters"):
            yield layer, partial(layer.reset_ia3_parameters, name)
        else:
            raise ConfigError(
                f"adapter '{name}' at {path} is initialized by {kind!r}, which is not supported with lazy_init.\n"
                "  Set init_lora_weights to True or 'gaussian', or build the model without lazy_init."
            )
