"""Find the policy of a model: the user's, the one that lists its ``model_type``, or a derived one.

Policies list model types; they are never guessed. If no policy lists the type, but transformers ships a ``tp_plan``
with the model, the model can be sharded. A ``tp_plan`` has modules and styles, but not the units of their features, so
the policy is derived from the computations of ``forward``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeGuard

import torch.distributed as dist
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, __version__ as transformers_version

from autopar import registry
from autopar.compat.peft import uses_peft
from autopar.compat.transformers import tensor_plan
from autopar.errors import PolicyError, UnsupportedModelError, nearest, tell
from autopar.policy.files import policy_files, policy_text, reference
from autopar.policy.load import load_policies, own_policies, read_user_policy
from autopar.policy.schema import DERIVED, Policy


def model_inside(root: nn.Module, policy: Policy | None) -> tuple[str, Any]:
    """Return the path and the model in ``root`` that is parallelized.

    It is the Hugging Face model inside (often ``root`` itself). If the user's policy has no model types, or ``root``
    contains no Hugging Face model, it is ``root``.

    Raises:
        UnsupportedModelError: There is no Hugging Face model and no user's policy, or there are several models.
        ConfigError: The model has adapters, and the feature for them is not installed.
    """
    if uses_peft(root):
        registry.need("adapters", f"the adapters of {type(root).__name__} (PEFT)")
    if policy is not None and not ((policy.model_types or policy.library) and _hugging_face_models(root)):
        return "", root
    return hugging_face_model(root)


def hugging_face_model(root: nn.Module) -> tuple[str, PreTrainedModel]:
    """Return the path and the one Hugging Face model inside ``root`` (often ``root`` itself).

    Raises:
        UnsupportedModelError: The number of models is not one.
    """
    found = _hugging_face_models(root)
    found = [each for each in found if _has_policy(each[1])] or found if len(found) > 1 else found
    if len(found) == 1:
        return found[0]
    if not found:
        raise UnsupportedModelError(
            f"{type(root).__name__} must be or contain a Hugging Face model, or have a custom policy.\n"
            "  Pass a policy that lists the units of its weights:\n"
            "    policy = {'units': {'ffn': 'inferred'}, 'blocks': {'path': 'layers', 'modules':\n"
            "              {'norm': 'replicated', 'up': {'column': 'ffn'}, 'down': {'row': 'ffn'}}}}\n"
            "    model = autopar.initialize(model, config, policy=policy)\n"
            f"  The form is in {reference()}."
        )
    listed = ", ".join(f"{path} ({type(module).__name__})" for path, module in found)
    raise UnsupportedModelError(
        f"{type(root).__name__} must contain one Hugging Face model, got {len(found)}: {listed}.\n"
        f"  Or pass a policy without 'match' for {type(root).__name__}, with 'models: "
        f"[{', '.join(path for path, _ in found)}]' for these models."
    )


def _hugging_face_models(root: nn.Module) -> list[tuple[str, PreTrainedModel]]:
    """Return the outermost Hugging Face models in ``root``, with their paths."""
    if is_hugging_face_model(root):
        return [("", root)]
    found: list[tuple[str, PreTrainedModel]] = []
    for path, module in root.named_modules():
        inside = any(path.startswith(outer + ".") or not outer for outer, _ in found)
        if not inside and is_hugging_face_model(module):
            found.append((path, module))
    return found


def _has_policy(model: nn.Module) -> bool:
    """Return whether a model is of transformers, or of a library and has a policy: an autoencoder has none."""
    library = library_of(model)
    try:
        return library is None or library.policy(model) is not None
    except UnsupportedModelError:
        return False


def library_of(model: object) -> Any:
    """Return the entry of the table ``models`` that owns a model, or None (:class:`autopar.registry.Feature`)."""
    return next((library for _, library in registry.entries("models") if library.owns(model)), None)


def is_hugging_face_model(model: object) -> TypeGuard[PreTrainedModel]:
    """Return whether a module is a model of transformers, or of a library in the table ``models``."""
    return isinstance(model, PreTrainedModel) or library_of(model) is not None


def base_of(model: nn.Module) -> tuple[str, nn.Module]:
    """Return the path and the base model inside a task model; for other modules ``""`` and the module itself."""
    name = model.base_model_prefix if isinstance(model, PreTrainedModel) else ""
    base = getattr(model, name, None) if name else None
    return (name, base) if isinstance(base, nn.Module) else ("", model)


def config_of(model: nn.Module) -> Any:
    """Return the object with a model's counts: its ``config`` (or dict), or an empty object."""
    config: Any = getattr(model, "config", None)
    if isinstance(config, Mapping):
        return SimpleNamespace(**{str(name): value for name, value in config.items()})
    return SimpleNamespace() if config is None else config


def model_type_of(model: nn.Module) -> str:
    """Return the ``model_type`` of a model's config; for a module without one, the name of its class."""
    return str(getattr(config_of(model), "model_type", type(model).__name__))


def convolutional(model: nn.Module) -> str:
    """Return the reason why a convolutional net has no policy; empty for any other model."""
    if not isinstance(model, PreTrainedModel) or "heads" in str(model.config.to_dict()):
        return ""
    if not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return ""
    return (
        f"{type(model).__name__} is a convolutional net, which autopar does not support.\n  Use torch's "
        "DistributedDataParallel, or fully_shard to shard weights and optimizer state."
    )


def advice(model_type: str, kinds: dict[str, str]) -> str:
    """Return the closest name, and the ways to get a policy."""
    hint = nearest(model_type, kinds, cutoff=0.7).strip()
    lines = [
        *([hint] if hint else []),
        "autopar.initialize(model, config, policy='derive') derives a policy from the computations of forward;",
        "'autopar policy new MODEL' (a folder or a name on the hub) also verifies and saves it.",
        f"'autopar policy check my.yaml' checks a policy without weights; its form is in {reference()}",
        "'autopar policy list' prints the model types with a policy.",
    ]
    return "".join(f"\n  {line}" for line in lines)


def supported_model_types() -> dict[str, str]:
    """Return model_type -> name of its policy (the last one of several)."""
    return {kind: policy.name for policy in own_policies().values() for kind in policy.model_types}


def find_policy(model: nn.Module, policy: str | Path | Mapping[str, Any] | Policy | None = None) -> Policy:
    """Find the policy of ``model``: the user's (path, dict or YAML text), otherwise the one that matches.

    If no policy lists the model type and transformers ships a ``tp_plan`` with the model, a policy is derived.

    Raises:
        UnsupportedModelError: No policy lists the model type, and none can be derived.
        PolicyError: Two policies match, or the user's policy is for another model type.
    """
    if policy is not None:
        chosen = read_user_policy(policy)
        kind = getattr(config_of(model), "model_type", None)
        if chosen.model_types and kind is not None and kind not in chosen.model_types:
            raise PolicyError(
                f"the policy is for model_type {', '.join(chosen.model_types)}, "
                f"{type(model).__name__} has model_type {kind}",
                chosen.where,
            )
        if isinstance(model, PreTrainedModel):
            _check_version(chosen, model.config)
        return chosen
    _, model = hugging_face_model(model)
    library = library_of(model)
    if library is not None:
        return library.policy(model)
    config = model.config
    listed = policies_of(config.model_type)
    kinds = {kind.__name__ for kind in type(model).__mro__}
    found = [
        each
        for each in listed
        if (not each.classes or kinds & set(each.classes))
        and all(getattr(config, key, None) == value for key, value in each.config.items())
    ]
    if len(found) > 1:
        raise PolicyError(
            f"{' and '.join(str(p.where) for p in found)} both match model_type {config.model_type}: "
            "restrict one of them with match.config"
        )
    if not found:
        if not listed and (reason := convolutional(model)):
            raise UnsupportedModelError(reason)
        reason = f"no policy lists model_type '{config.model_type}' of {type(model).__name__}"
        if not listed:
            try:
                if _ships_plan(model):
                    return replace(_derived_policy(model), name=DERIVED)
            except UnsupportedModelError as error:
                reason = f"{reason}, and {error}"
            reason = f"{reason.rstrip('.')}."
        else:
            wants = (f"{p.name} needs {dict(p.config)}" + (f" and class {' or '.join(p.classes)}" if p.classes else "")
                     for p in listed)  # fmt: skip
            reason = f"no policy supports this config of model_type '{config.model_type}': {'; '.join(wants)}."
        raise UnsupportedModelError(reason + advice(str(config.model_type), supported_model_types()))
    _check_version(found[0], config)
    return found[0]


class Described:
    """A policy and the model that it describes, found once for all plans of a model.

    Args:
        root: The user's model.
        prefix: The path in ``root`` of ``model``.
        model: The model that is parallelized: a Hugging Face model, or ``root``.
        policy: The policy of ``model``.
    """

    def __init__(self, root: nn.Module, prefix: str, model: Any, policy: Policy) -> None:
        self.root, self.prefix, self.model, self.policy = root, prefix, model, policy
        self._of_models: dict[int, Policy] = {}

    @classmethod
    def of(cls, root: nn.Module, policy: Policy | Described) -> Described:
        """Return ``policy`` if it is a :class:`Described`, otherwise find the model in ``root`` that it describes."""
        return policy if isinstance(policy, Described) else cls(root, *model_inside(root, policy), policy)

    def policy_of(self, inside: PreTrainedModel) -> Policy:
        """Return the policy of a Hugging Face model inside, found at the first call."""
        if id(inside) not in self._of_models:
            self._of_models[id(inside)] = find_policy(inside)
        return self._of_models[id(inside)]


def policies_of(name: str, library: str = "") -> list[Policy]:
    """Return the policies that list a model type, or a class of a library.

    Only files whose text contains it are parsed, a few of some hundreds.
    """
    word = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])")
    listed = (policy for path in policy_files() if _may_list(path, name, word) for policy in load_policies(path))
    return [policy for policy in listed if policy.library == library and name in policy.names]


_KEYS = ("model_type", *registry.LIBRARIES)
_LISTS = re.compile(rf"(?:{'|'.join(_KEYS)})\W*?:[ \t]*(\[[^]]*\]|[^\s#,{{}}\[\]]+)?")


def _may_list(path: Path, name: str, word: re.Pattern[str]) -> bool:
    text = policy_text(path)
    if name not in text:  # unless it extends a file with types, or cannot be read
        return not any(key in text for key in _KEYS)
    lists = _LISTS.findall(text)
    return not all(lists) or any(word.search(listed) for listed in lists)


def _check_version(policy: Policy, config: PretrainedConfig) -> None:
    wanted = policy.range_of(config.model_type)
    try:
        versions = SpecifierSet(wanted)
    except InvalidSpecifier as error:
        raise PolicyError(f"'{wanted}' is not a version range", policy.where) from error
    if not versions.contains(transformers_version, prereleases=True):
        raise UnsupportedModelError(
            f"the policy for model_type '{config.model_type}' needs transformers {wanted}, "
            f"got {transformers_version} ({policy.where})."
        )


DERIVE = "derive"

_log = logging.getLogger(__name__)


def given_policy(
    model: nn.Module, policy: str | Path | Mapping[str, Any] | Policy | None, configured: str = ""
) -> Policy | None:
    """Return the user's policy for a model, or None; identical on all ranks.

    Args:
        policy: A path, dict, YAML text or :class:`Policy`; ``"derive"`` derives one from the model's structure.
        configured: The configuration's ``policy``, used if ``policy`` is None.

    Raises:
        PolicyError, UnsupportedModelError: It cannot be read or derived.
    """
    if policy is None and not configured:
        return None
    chosen = configured if policy is None else policy
    if isinstance(chosen, str | Path) and str(chosen) == DERIVE:
        return _derived_policy(hugging_face_model(model)[1])
    return read_user_policy(chosen)


def _derived_policy(model: PreTrainedModel) -> Policy:
    """Derive the policy of a model from one forward without data."""
    derive = registry.entry("policies", DERIVE, f"a policy that is derived from {type(model).__name__}")
    if not dist.is_initialized() or dist.get_rank() == 0:
        kind = type(model).__name__
        tell(_log, f"deriving a policy for {kind}: takes seconds, or minutes if forward loops in Python")
    return read_user_policy(derive(model), place=f"policy derived from {type(model).__name__}")


def _ships_plan(model: PreTrainedModel) -> bool:
    """Return whether transformers ships a ``tp_plan`` with the model for more than its head."""
    name, base = base_of(model)
    named = [str(pattern) for pattern in tensor_plan(model)]
    of_base = getattr(getattr(base, "config", None), "base_model_tp_plan", None)
    return bool(of_base) or any(pattern.startswith(f"{name}." if name else "") for pattern in named)


# The losses of transformers' classes by the end of their names. Other losses are means, unless a policy names them.
_USUAL = {
    "ForCausalLM": "loss_function",
    "ForConditionalGeneration": "loss_function",
    "ForSequenceClassification": "mean",
    "ForTokenClassification": "mean",
    "ForCTC": "other",
}


def loss_kind(model: Any, given: Policy | None = None) -> str | None:
    """Return the kind of the loss that a model computes, one of :data:`~autopar.policy.schema.LOSSES`, or None.

    The kind belongs to the class that defines ``forward``. A class that inherits it has the same loss; a class that
    defines ``forward`` or ``loss_function`` may have another one.

    Args:
        given: The user's policy, which may name any class. Policies of autopar name classes of transformers.
    """
    classes = [kind for kind in type(model).__mro__ if not kind.__module__.startswith("autopar.")]
    own = {"forward", "loss_function"} if isinstance(model, PreTrainedModel) else {"forward"}
    place = next(place for place, kind in enumerate(classes) if own & vars(kind).keys())
    maker, names = classes[place], [kind.__name__ for kind in classes[: place + 1]]
    said = next((given.loss[name] for name in names if name in given.loss), None) if given is not None else None
    if said is not None or not isinstance(model, PreTrainedModel) or not maker.__module__.startswith("transformers."):
        return said
    policies = policies_of(model.config.model_type)
    named = next((policy.loss[maker.__name__] for policy in policies if maker.__name__ in policy.loss), None)
    return named or _usual(model, maker) or ("mean" if policies else None)


def _usual(model: PreTrainedModel, maker: type) -> str | None:
    if maker.__name__.endswith("ForConditionalGeneration") and is_encoder_decoder(model):
        return None
    return next((kind for end, kind in _USUAL.items() if maker.__name__.endswith(end)), None)


def is_encoder_decoder(model: PreTrainedModel) -> bool:
    """Return whether a model, or its text model, has an encoder and a decoder."""
    configs = (model.config, getattr(model.config, "text_config", None))
    return any(getattr(each, "is_encoder_decoder", False) for each in configs)
