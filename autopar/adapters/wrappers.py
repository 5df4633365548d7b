"""PEFT's modules around those of a model, seen through: a policy describes the model as it is without them.

PEFT is never imported here. A module can only be PEFT's where somebody else has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from autopar.errors import CheckpointError
from autopar.foreign.modules import own_modules

__all__ = [
    "check_merged",
    "is_adapted",
    "is_peft_model",
    "is_tuner",
    "plain_name",
    "saved_copies",
    "seen_through",
    "tuner_layers",
]


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
