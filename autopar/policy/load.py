"""Reading policy files: YAML with line numbers, duplicate keys refused, ``extends`` merged.

``extends: [fragments/attention_qkvo, fragments/mlp_gated]`` lays the named files under this one. A key of this file
replaces theirs, ``~`` deletes it. Two of the named files that say different things about the same key are an error
unless this file decides: order never does.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from autopar.errors import PolicyError, nearest
from autopar.policy.parse import parse_policy
from autopar.policy.schema import KINDS, Node, Policy, Where

__all__ = ["load_policy", "policy_files", "policy_folder", "read_user_policy"]

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # safe either way; the C one is ten times faster


@functools.cache
def policy_folder() -> Path:
    """The folder of the policies that come with autopar: inside the wheel, or beside the package in a checkout."""
    inside = Path(__file__).resolve().parents[1] / "_policies"
    return inside if inside.is_dir() else Path(__file__).resolve().parents[2] / "policies"


@functools.lru_cache(maxsize=8)
def policy_files(folder: Path | None = None) -> tuple[Path, ...]:
    """All policy files (not fragments), sorted by name."""
    return tuple(sorted((folder or policy_folder()).glob("*.yaml")))


@functools.lru_cache(maxsize=512)
def load_policy(path: Path) -> Policy:
    """Read one policy file.

    Raises:
        PolicyError: with file and line.
    """
    return parse_policy(path.stem, _extend(_read_file(path), path.parent, (path,)))


def read_user_policy(source: str | Path | Mapping[str, Any] | Policy) -> Policy:
    """A policy from a path, a dict, YAML text, or ready.

    ``extends`` finds files beside the given file first, then those that come with autopar.
    """
    if isinstance(source, Policy):
        return source
    if isinstance(source, Mapping):
        node = _from_plain(source, "policy dict", ())
        return parse_policy("user", _extend(node, policy_folder(), ()))
    text = str(source)
    if isinstance(source, Path) or "\n" not in text:
        path = Path(source)
        if not path.is_file():
            raise PolicyError(f"policy file '{path}' does not exist; a policy is a path, a dict or YAML text")
        return load_policy(path.resolve())
    return parse_policy("user", _extend(_compose(text, "policy text"), policy_folder(), ()))


def _extend(node: Node, folder: Path, seen: tuple[Path, ...]) -> Node:
    if not isinstance(node.value, dict):
        raise PolicyError("a policy must hold keys", node.where)
    own = dict(node.value)
    extends = own.pop("extends", None)
    towers = own.get("towers")
    if towers is not None and isinstance(towers.value, dict):  # a tower extends by itself
        inner = {
            name: _extend(tower, folder, seen) if isinstance(tower.value, dict) and "extends" in tower.value else tower
            for name, tower in towers.value.items()
        }
        own["towers"] = Node(inner, towers.where)
    if extends is None:
        return _overlay(Node({}, node.where), Node(own, node.where))
    names = extends.value if isinstance(extends.value, list) else [extends]
    base: Node | None = None
    for name in names:
        path = _find(str(name.value), folder, name.where)
        if path in seen:
            raise PolicyError(f"'{name.value}' extends itself", name.where)
        layer = _extend(
            _read_file(path), path.parent if path.parent.name != "fragments" else path.parent.parent, (*seen, path)
        )
        base = layer if base is None else _merge(base, layer, Node(own, node.where), ())
    if base is None:
        raise PolicyError("'extends' names no file", extends.where)
    return _overlay(base, Node(own, node.where))


def _find(name: str, folder: Path, where: Where) -> Path:
    for root in (folder, policy_folder()):
        path = (root / f"{name}.yaml").resolve()
        if path.is_file() and path.is_relative_to(root.resolve()):
            return path
    known = [str(p.relative_to(policy_folder()).with_suffix("")) for p in policy_folder().rglob("*.yaml")]
    raise PolicyError(f"'extends' names '{name}', which does not exist.{nearest(name, known)}", where)


def _merge(left: Node, right: Node, decider: Node | None, path: tuple[str, ...]) -> Node:
    """Union of two trees that must not contradict each other, unless ``decider`` has a word on the same key."""
    if not (isinstance(left.value, dict) and isinstance(right.value, dict)) or _is_rule(left) or _is_rule(right):
        if decider is None and _shape(left) != _shape(right):
            raise PolicyError(f"'{'.'.join(path)}' contradicts {right.where}; say here which holds", left.where)
        return left
    merged = dict(left.value)
    for key, entry in right.value.items():
        below = decider.value.get(key) if decider is not None and isinstance(decider.value, dict) else decider
        merged[key] = _merge(merged[key], entry, below, (*path, key)) if key in merged else entry
    return Node(merged, left.where)


def _overlay(base: Node, top: Node) -> Node:
    """``top`` over ``base``: keys of sections merge, rules and everything else replace, ``~`` deletes."""
    if not isinstance(top.value, dict) or _is_rule(top):
        return top
    below = base.value if isinstance(base.value, dict) and not _is_rule(base) else {}
    merged = dict(below)
    for key, entry in top.value.items():
        if entry.value is not None:
            merged[key] = _overlay(below.get(key, Node({}, entry.where)), entry)
        elif key in below:
            del merged[key]
        else:
            raise PolicyError(
                f"'{key}' has no value; '~' deletes a key, but nothing that is extended has this one."
                f"{nearest(key, below)}",
                entry.where,
            )
    return Node(merged, top.where)


def _is_rule(node: Node) -> bool:
    return isinstance(node.value, dict) and bool({*KINDS, "count"} & set(node.value))


def _shape(node: Node) -> Any:
    if isinstance(node.value, dict):
        return {key: _shape(entry) for key, entry in node.value.items()}
    return [_shape(entry) for entry in node.value] if isinstance(node.value, list) else node.value


@functools.lru_cache(maxsize=512)
def _read_file(path: Path) -> Node:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"policy file '{path}' cannot be read: {error}") from error
    root = policy_folder().resolve()
    resolved = path.resolve()
    shown = Path("policies") / resolved.relative_to(root) if resolved.is_relative_to(root) else path
    return _compose(text, str(shown))


def _compose(text: str, file: str) -> Node:
    try:
        tree = yaml.compose(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else 1
        raise PolicyError(f"cannot be parsed as YAML: {getattr(error, 'problem', error)}", Where(file, line)) from error
    if tree is None:
        raise PolicyError("is empty", Where(file, 1))
    return _from_yaml(tree, file)


def _from_yaml(tree: yaml.Node, file: str) -> Node:
    where = Where(file, tree.start_mark.line + 1)
    if isinstance(tree, yaml.MappingNode):
        content: dict[str, Node] = {}
        for key_node, value_node in tree.value:
            key, place = str(key_node.value), Where(file, key_node.start_mark.line + 1)
            if key in content:
                raise PolicyError(f"key '{key}' stands here and in line {content[key].where.line}", place)
            value = _from_yaml(value_node, file)
            content[key] = Node(value.value, place)
        return Node(content, where)
    if isinstance(tree, yaml.SequenceNode):
        return Node([_from_yaml(item, file) for item in tree.value], where)
    loader = yaml.SafeLoader("")
    try:
        return Node(loader.construct_object(tree, deep=True), where)
    except yaml.YAMLError as error:
        raise PolicyError(f"has a value that plain YAML does not know: {tree.value!r}", where) from error


def _from_plain(data: Any, file: str, path: tuple[str, ...]) -> Node:
    where = Where(file, ".".join(path) or "top")
    if isinstance(data, Mapping):
        return Node({str(k): _from_plain(v, file, (*path, str(k))) for k, v in data.items()}, where)
    if isinstance(data, (list, tuple)):
        return Node([_from_plain(item, file, path) for item in data], where)
    return Node(data, where)
