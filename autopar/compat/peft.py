"""PEFT's modules around a model's, recognized and seen through: a policy describes the model without them.

PEFT is never imported here. A module can only be PEFT's where other code has imported it.
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

Init = tuple[nn.Module, Callable[[], Any]]  # a module, and what draws values of it


def _is(home: str, kind: str, module: Any) -> bool:
    known = getattr(sys.modules.get(home), kind, None)
    return known is not None and isinstance(module, known)


is_peft_model = partial(_is, "peft.peft_model", "PeftModel")  # which can save its adapters
is_tuner = partial(_is, "peft.tuners.tuners_utils", "BaseTuner")  # around a model with adapters (LoraModel)
is_adapted = partial(_is, "peft.tuners.tuners_utils", "BaseTunerLayer")  # around a layer (LoraLayer)
is_wrapper = partial(_is, "peft.utils.other", "AuxiliaryTrainingWrapper")  # a layer trained in full, or some rows
_is_saved = partial(_is, "peft.utils.other", "ModulesToSaveWrapper")  # a layer trained in full


swaps_features = attrgetter("_did_swap_in_out_features")  # of an adapted embedding: its features are exchanged


def seen_through(module: Any) -> list[tuple[str, Any]]:
    """Return the modules that a policy describes in place of ``module``, each with its path from there.

    A layer with adapters gives its base layer. A module that is trained in full (``modules_to_save``) gives the
    original and every copy. Anything else gives the module itself, at ``""``.
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
    """Return the original in a wrapper of PEFT (``modules_to_save``) and its copies, with paths; else nothing."""
    if not is_wrapper(module):
        return []
    if not _is_saved(module):  # trainable tokens, around a separate layer
        return [("token_adapter.base_layer", module.original_module)]
    copies = [(f"modules_to_save.{name}", copy) for name, copy in module.modules_to_save.items()]
    return [("original_module", module.original_module), *copies]


def uses_peft(root: nn.Module) -> bool:
    """Return whether PEFT has put anything into ``root`` or around it."""
    kinds = (is_adapted, is_wrapper, is_tuner, is_peft_model)
    return "peft" in sys.modules and any(kind(module) for module in root.modules() for kind in kinds)


def tuner_layers(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield every layer of ``root`` that holds adapters, and its path."""
    if "peft.tuners.tuners_utils" not in sys.modules:
        return
    for path, module in root.named_modules():
        if is_adapted(module) and isinstance(getattr(module, "base_layer", None), nn.Module):
            yield path, module


def enable_all(root: nn.Module) -> None:
    """Let all adapters of ``root`` run in its forward: none is disabled, inactive or merged. ``root`` is a copy."""
    for module in root.modules():
        if is_adapted(module) and isinstance(getattr(module, "base_layer", None), nn.Module):
            layer: Any = module
            names = {name for kind in layer.adapter_layer_names for name in getattr(layer, kind)}
            layer._disable_adapters, layer._active_adapter, layer.merged_adapters = False, sorted(names), []
        elif _is_saved(module):
            wrapper: Any = module
            wrapper._disable_adapters, wrapper._active_adapter = False, list(wrapper.modules_to_save)[:1]


def plain_name(model: nn.Module, name: str) -> str | None:
    """Return the name of a tensor of ``model`` in the model without adapters; None if it is an adapter's."""
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


# -- values of adapters ------------------------------------------------------------------------------------------------
# PEFT's own functions draw them: a model's ``_init_weights`` would draw them as it draws its linear layers. Adapters
# that are made from the values of the weights (PiSSA, OLoRA) have no place here: there are no values yet.


def adapter_parameters(root: nn.Module) -> set[int]:
    """Return ``id(parameter)`` of every adapter's, in layers that are not copies."""
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
        ConfigError: an adapter without memory is initialized from the values of the weights, or in a way not known.
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
                f"adapter '{name}' at {path} is initialized by {kind!r}, which a model that was built in lazy_init "
                "cannot do.\n  Leave init_lora_weights at True (or 'gaussian'), or build the model without lazy_init."
            )
