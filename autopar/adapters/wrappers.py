"""PEFT's modules around those of a model, seen through: a policy describes the model as it is without them.

PEFT is never imported here. A module can only be PEFT's where somebody else has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["base_path", "is_peft_model", "is_tuner", "saved_copies", "seen_through", "tuner_layers"]


def seen_through(module: Any) -> list[tuple[str, Any]]:
    """Return what a policy describes in place of ``module``, each with its path from there.

    Of a layer with adapters that is the base layer; of a module that is trained as a whole (``modules_to_save``) the
    original and every copy; of anything else the module itself, at ``""``.
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
    """Return the original in a ``modules_to_save`` wrapper and its copies, with their paths; else an empty list."""
    if not _is(module, ("peft.utils.other", "ModulesToSaveWrapper")):
        return []
    copies = [(f"modules_to_save.{name}", copy) for name, copy in module.modules_to_save.items()]
    return [("original_module", module.original_module), *copies]


def is_tuner(module: nn.Module) -> bool:
    """Tell whether ``module`` is what PEFT puts around a model with adapters (``LoraModel``)."""
    return _is(module, ("peft.tuners.tuners_utils", "BaseTuner"))


def tuner_layers(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield every layer of ``root`` that holds adapters, and its path."""
    for path, module in root.named_modules():
        if _is(module, _TUNERS) and isinstance(getattr(module, "base_layer", None), nn.Module):
            yield path, module


def base_path(layer: Any) -> str:
    """Return the path from a layer with adapters to its base layer: wrappers of parameters are nested."""
    steps = ["base_layer"]
    while _is(layer := layer.base_layer, _TUNERS):
        steps.append("base_layer")
    return ".".join(steps)


def is_peft_model(module: nn.Module) -> bool:
    """Tell whether ``module`` is a ``PeftModel``, which can save its adapters."""
    return _is(module, ("peft.peft_model", "PeftModel"))


_TUNERS = ("peft.tuners.tuners_utils", "BaseTunerLayer")


def _is(module: Any, kind: tuple[str, str]) -> bool:
    known = getattr(sys.modules.get(kind[0]), kind[1], None)
    return known is not None and isinstance(module, known)
