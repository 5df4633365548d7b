"""Load policies: those that come with autopar by file or by name, and the user's from a path, a dict or YAML text."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.errors import PolicyError
from autopar.policy.files import (
    PolicyName,
    comes_with_autopar,
    compose,
    extended,
    fail_in,
    policy_files,
    policy_folder,
    policy_text,
    policy_tree,
    user_tree,
    variants_of,
)
from autopar.policy.parse import parse_policy
from autopar.policy.schema import Policy
from autopar.policy.yaml_reader import Node, plain_tree

__all__ = [
    "load_policies",
    "load_policy",
    "own_policies",
    "policy_files",
    "policy_folder",
    "policy_text",
    "read_user_policy",
]


@functools.cache
def own_policies() -> Mapping[str, Policy]:
    """Read all policies that come with autopar: name of the file, or of its variant -> policy."""
    found = {policy.name: policy for path in policy_files() for policy in load_policies(path)}
    return dict(sorted(found.items()))


def load_policies(path: Path) -> tuple[Policy, ...]:
    """Read the policy of a file, or those of its variants; of files that come with autopar once in a process.

    Raises:
        PolicyError: with file and line.
    """
    return _load_own(path) if comes_with_autopar(path) else _load(path)


def load_policy(path: Path) -> Policy:
    """Read the one policy of a file.

    Raises:
        PolicyError: with file and line; also for a file with variants, if none of them has the name of the file.
    """
    found = load_policies(path)
    if len(found) == 1:
        return found[0]
    names = [policy.name for policy in found]
    if path.stem in names:
        return found[names.index(path.stem)]
    raise PolicyError(
        f"{found[0].where.file} holds {len(found)} policies, and one is wanted. Write one that extends it: "
        f"{{extends: {names[0]}}}, or one of {', '.join(names[1:])}"
    )


def _load(path: Path) -> tuple[Policy, ...]:
    names = [PolicyName(path, name) for name in variants_of(policy_tree(path))] or [PolicyName(path)]
    done: dict[PolicyName, Node] = {}
    return tuple(parse_policy(name.variant or path.stem, extended(name, done)) for name in names)


_load_own = functools.cache(_load)


def _own(name: str) -> str:
    """Say what to do with the name of a policy that comes with autopar."""
    names = own_policies().keys() | {kind for policy in own_policies().values() for kind in policy.model_types}
    if name not in names:
        return ""
    return (
        f".\n  autopar comes with one of the name {name}, and finds it by the model's type: leave policy= out.\n"
        f"  One of your own can build on it: policy={{'extends': '{name}', ...}}"
    )


def read_user_policy(source: str | Path | Mapping[str, Any] | Policy, *, place: str = "policy dict") -> Policy:
    """Read a policy from a path, a dict, YAML text, or take a ready one.

    ``extends`` finds files beside the given file first, then those that come with autopar.

    Args:
        place: how errors call a dict.
    """
    if isinstance(source, Policy):
        return source
    text = "" if isinstance(source, Mapping) else str(source)
    if isinstance(source, Path) or (text and "\n" not in text):
        path = Path(text)
        if not path.is_file():
            raise PolicyError(
                f"policy file '{path}' does not exist; a policy is a path, a dict or YAML text{_own(text)}"
            )
        return load_policy(path.resolve())
    if isinstance(source, Mapping):
        root = plain_tree(source, place, fail_in(place))
    else:
        root = compose(text, "policy text")
    return parse_policy("user", user_tree(root))
