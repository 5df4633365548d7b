"""Which policy describes a model. ``model_type`` is listed in the policies and never guessed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version

from autopar.errors import PolicyError, UnsupportedModelError
from autopar.policy.advice import advice
from autopar.policy.described_model import config_of, hugging_face_model
from autopar.policy.given_policy import derived_policy, ships_plan
from autopar.policy.load import load_policies, own_policies, policy_files, policy_text, read_user_policy
from autopar.policy.schema import Policy

__all__ = ["DERIVED", "find_policy", "policies_of", "supported_model_types"]

DERIVED = "derived"
"""Name of a policy that was derived because none lists the model type."""


def supported_model_types() -> dict[str, str]:
    """Return model_type -> name of the policy that describes it (of several, of the last)."""
    return {kind: policy.name for policy in own_policies().values() for kind in policy.model_types}


def find_policy(model: nn.Module, policy: str | Path | Mapping[str, Any] | Policy | None = None) -> Policy:
    """Find the policy of ``model``: the user's if given (path, dict or YAML text), else the one that matches.

    For a model type that no policy lists one is derived, if transformers ships a ``tp_plan`` with the model.

    Raises:
        UnsupportedModelError: no file lists the model type, and none can be derived; says which policy is nearest and
            how to use it.
        PolicyError: two files match, or the user's policy is for another model type.
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
    config = model.config
    listed = policies_of(config.model_type)
    found = [candidate for candidate in listed if _fits(candidate, model)]
    if len(found) > 1:
        raise PolicyError(
            f"{' and '.join(str(p.where) for p in found)} both match model_type {config.model_type}: "
            "narrow one of them with match.config"
        )
    if not found:
        reason = f"no policy lists model_type '{config.model_type}' of {type(model).__name__}"
        if not listed:
            try:
                if ships_plan(model):
                    return replace(derived_policy(model), name=DERIVED)
            except UnsupportedModelError as error:
                reason = f"{reason}, and {error}"
            reason = f"{reason.rstrip('.')}."
        else:
            conditions = "; ".join(
                " and ".join(
                    [f"{p.name} wants {dict(p.config)}"] + ([f"class {' or '.join(p.classes)}"] if p.classes else [])
                )
                for p in listed
            )
            reason = f"no policy fits this config of model_type '{config.model_type}': {conditions}."
        raise UnsupportedModelError(reason + advice(model, supported_model_types()))
    _check_version(found[0], config)
    return found[0]


def policies_of(model_type: str) -> list[Policy]:
    """Return the policies that list the type. Only files whose lists hold it are parsed: a few of some hundreds."""
    word = re.compile(rf"(?<![\w.-]){re.escape(model_type)}(?![\w.-])")
    listed = (policy for path in policy_files() if _may_list(path, model_type, word) for policy in load_policies(path))
    return [policy for policy in listed if model_type in policy.model_types]


_LISTS = re.compile(r"model_type\W*?:[ \t]*(\[[^]]*\]|[^\s#,{}\[\]]+)?")


def _may_list(path: Path, model_type: str, word: re.Pattern[str]) -> bool:
    text = policy_text(path)
    if model_type not in text:  # it lists others, or cannot be read, or takes them from what it extends
        return "model_type" not in text
    lists = _LISTS.findall(text)
    return not all(lists) or any(word.search(listed) for listed in lists)


def _fits(policy: Policy, model: PreTrainedModel) -> bool:
    if policy.classes and not {kind.__name__ for kind in type(model).__mro__} & set(policy.classes):
        return False
    return all(getattr(model.config, key, None) == value for key, value in policy.config.items())


def _check_version(policy: Policy, config: PretrainedConfig) -> None:
    wanted = policy.range_of(config.model_type)
    try:
        versions = SpecifierSet(wanted)
    except InvalidSpecifier as error:
        raise PolicyError(f"'{wanted}' is no version range", policy.where) from error
    if not versions.contains(transformers_version, prereleases=True):
        raise UnsupportedModelError(
            f"the policy for model_type '{config.model_type}' holds for transformers {wanted}, "
            f"installed is {transformers_version} ({policy.where})."
        )
