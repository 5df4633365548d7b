"""The model that a policy describes: a Hugging Face model, or a plain module; and where its counts are read."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from autopar.errors import UnsupportedModelError
from autopar.policy.files import reference
from autopar.policy.schema import Policy


def model_inside(root: nn.Module, policy: Policy | None) -> tuple[str, Any]:
    """The path and the model in ``root`` that is parallelized.

    That is the Hugging Face model inside (often ``root`` itself), or ``root`` if it holds none, or if the policy that
    was given matches no model type: then it describes ``root``.

    Raises:
        UnsupportedModelError: there is no Hugging Face model and no policy was given, or there are several.
    """
    if policy is not None and not policy.model_types:
        return "", root
    found = _hugging_face_models(root)
    if not found and policy is not None:
        return "", root
    return hugging_face_model(root)


def hugging_face_model(root: nn.Module) -> tuple[str, PreTrainedModel]:
    """The Hugging Face model inside ``root`` (often ``root`` itself) and its path.

    Raises:
        UnsupportedModelError: there is none, or more than one.
    """
    found = _hugging_face_models(root)
    if len(found) == 1:
        return found[0]
    if not found:
        raise UnsupportedModelError(
            f"{type(root).__name__} is no Hugging Face model and holds none: autopar has no policy for it.\n"
            "  A module of your own needs one that says what its weights are made of:\n"
            "    policy = {'units': {'ffn': 'inferred'}, 'blocks': {'path': 'layers', 'modules':\n"
            "              {'norm': 'replicated', 'up': {'column': 'ffn'}, 'down': {'row': 'ffn'}}}}\n"
            "    model = autopar.initialize(model, config, policy=policy)\n"
            f"  The form is in {reference()}."
        )
    listed = ", ".join(f"{path} ({type(module).__name__})" for path, module in found)
    raise UnsupportedModelError(
        f"{type(root).__name__} holds {len(found)} Hugging Face models: {listed}; one is supported.\n"
        f"  A policy without 'match' describes {type(root).__name__} as a whole; 'models: "
        f"[{', '.join(path for path, _ in found)}]' in it stands for the policies of these."
    )


def _hugging_face_models(root: nn.Module) -> list[tuple[str, PreTrainedModel]]:
    """The outermost ones."""
    if isinstance(root, PreTrainedModel):
        return [("", root)]
    found: list[tuple[str, PreTrainedModel]] = []
    for path, module in root.named_modules():
        inside = any(path.startswith(outer + ".") or not outer for outer, _ in found)
        if isinstance(module, PreTrainedModel) and not inside:
            found.append((path, module))
    return found


def base_of(model: nn.Module) -> tuple[str, nn.Module]:
    """The base model inside a task model, and its path; of anything else the model itself."""
    name = model.base_model_prefix if isinstance(model, PreTrainedModel) else ""
    base = getattr(model, name, None) if name else None
    return (name, base) if isinstance(base, nn.Module) else ("", model)


def config_of(model: nn.Module) -> Any:
    """Return the object with a model's counts: its ``config``, also a dict; an empty one if it has none."""
    config: Any = getattr(model, "config", None)
    if isinstance(config, Mapping):
        return SimpleNamespace(**{str(name): value for name, value in config.items()})
    return SimpleNamespace() if config is None else config


def model_type_of(model: nn.Module) -> str:
    """``model_type`` of its config; of a plain module the name of its class."""
    return str(getattr(config_of(model), "model_type", type(model).__name__))
