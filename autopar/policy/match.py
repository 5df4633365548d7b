"""Which policy describes a model. ``model_type`` is listed in the policies and never guessed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version

from autopar.errors import PolicyError, UnsupportedModelError, nearest
from autopar.policy.inside import config_of, hugging_face_model
from autopar.policy.load import load_policy, policy_files, read_user_policy
from autopar.policy.schema import Policy

__all__ = ["find_policy", "supported_model_types"]


def supported_model_types() -> dict[str, str]:
    """model_type -> name of the policy file that describes it."""
    return {kind: path.stem for path in policy_files() for kind in load_policy(path).model_types}


def find_policy(model: nn.Module, policy: str | Path | Mapping[str, Any] | Policy | None = None) -> Policy:
    """The policy of ``model``: the user's if given (path, dict or YAML text), else the one file that matches.

    Raises:
        UnsupportedModelError: no file lists the model type (names the closest that one does).
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
    listed = [load_policy(path) for path in policy_files()]
    listed = [candidate for candidate in listed if config.model_type in candidate.model_types]
    found = [candidate for candidate in listed if _fits(candidate, model)]
    if len(found) > 1:
        raise PolicyError(
            f"{' and '.join(str(p.where) for p in found)} both match model_type {config.model_type}: "
            "narrow one of them with match.config"
        )
    if not found:
        reason = f"no policy lists model_type '{config.model_type}' of {type(model).__name__}."
        if listed:
            conditions = "; ".join(
                " and ".join(
                    [f"{p.name} wants {dict(p.config)}"] + ([f"class {' or '.join(p.classes)}"] if p.classes else [])
                )
                for p in listed
            )
            reason = f"no policy fits this config of model_type '{config.model_type}': {conditions}."
        kinds = supported_model_types()
        hint = nearest(config.model_type, kinds)
        raise UnsupportedModelError(
            f"{reason}{hint}\n{_closest(model)}"
            "  A policy of your own fits in too: autopar.initialize(model, config, policy='my.yaml'); "
            "its form is in policies/README.md.\n"
            f"  Listed: {', '.join(sorted(kinds))}."
        )
    _check_version(found[0], config)
    return found[0]


def _closest(model: PreTrainedModel) -> str:
    """The policy whose module names are most like the model's, and how to try it; empty if none is like it."""
    base = f"{model.base_model_prefix}."
    own = {_end(path.removeprefix(base)) for path, module in model.named_modules() if path and module._parameters}
    scores: list[tuple[int, float, int, str]] = []
    for file in policy_files():
        policy = load_policy(file)
        sections = [policy.head, *(s for tower in policy.towers for s in (tower.prefix, tower.blocks, tower.suffix))]
        named = {_end(path): path for section in sections for path in section}
        same = len(own & set(named))
        missing = sum(name not in own and "?" not in path for name, path in named.items())
        alike = difflib.SequenceMatcher(None, policy.name, str(model.config.model_type)).ratio()
        scores.append((same - missing, alike, same, policy.name))
    _, _, same, name = max(scores)
    if 2 * same < len(own):
        return ""
    return (
        f"  Closest in structure is {name} ({same} of {len(own)} kinds of modules). If the model is stored like that: "
        f"policy={{'extends': '{name}', 'match': {{'model_type': '{model.config.model_type}'}}}}\n"
    )


def _end(path: str) -> str:
    """The last two names of a path behind its last number, without marks."""
    names = [name.removesuffix("?") for name in path.split(".")]
    behind = max((place + 1 for place, name in enumerate(names) if name.isdigit() or name == "*"), default=0)
    return ".".join(names[behind:][-2:])


def _fits(policy: Policy, model: PreTrainedModel) -> bool:
    if policy.classes and not {kind.__name__ for kind in type(model).__mro__} & set(policy.classes):
        return False
    return all(getattr(model.config, key, None) == value for key, value in policy.config.items())


def _check_version(policy: Policy, config: PretrainedConfig) -> None:
    try:
        wanted = SpecifierSet(policy.transformers)
    except InvalidSpecifier as error:
        raise PolicyError(f"'{policy.transformers}' is no version range", policy.where) from error
    if not wanted.contains(transformers_version, prereleases=True):
        raise UnsupportedModelError(
            f"the policy for model_type '{config.model_type}' holds for transformers {policy.transformers}, "
            f"installed is {transformers_version} ({policy.where})."
        )
