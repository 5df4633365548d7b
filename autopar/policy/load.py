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

from autopar.errors import PolicyError, nearest
from autopar.policy.parse import parse_policy
from autopar.policy.schema import KINDS, Policy
from autopar.policy.yaml_reader import Fail, Node, Where, plain, plain_tree, read_text, yaml_tree

__all__ = ["load_policy", "policy_files", "policy_folder", "read_user_policy", "reference"]


_LONGEST_CHAIN = 50


@functools.cache
def policy_folder() -> Path:
    """The folder of the policies that come with autopar: inside the wheel, or beside the package in a checkout."""
    inside = Path(__file__).resolve().parents[1] / "_policies"
    return inside if inside.is_dir() else Path(__file__).resolve().parents[2] / "policies"


def reference() -> Path:
    """The page on the form of a policy, where this installation has it."""
    return policy_folder() / "README.md"


@functools.lru_cache(maxsize=8)
def policy_files(folder: Path | None = None) -> tuple[Path, ...]:
    """All policy files (not fragments), sorted by name."""
    return tuple(sorted((folder or policy_folder()).glob("*.yaml")))


def load_policy(path: Path) -> Policy:
    """Read one policy file; those that come with autopar once in a process.

    Raises:
        PolicyError: with file and line.
    """
    return _load_own(path) if _comes_with_autopar(path) else _load(path)


def _load(path: Path) -> Policy:
    return parse_policy(path.stem, _extend(_read_file(path), path.parent, (path,), {}))


_load_own = functools.cache(_load)


def read_user_policy(source: str | Path | Mapping[str, Any] | Policy) -> Policy:
    """A policy from a path, a dict, YAML text, or ready.

    ``extends`` finds files beside the given file first, then those that come with autopar.
    """
    if isinstance(source, Policy):
        return source
    if isinstance(source, Mapping):
        node = plain_tree(source, "policy dict", _fail("policy dict"))
        return parse_policy("user", _extend(node, policy_folder(), (), {}))
    text = str(source)
    if isinstance(source, Path) or "\n" not in text:
        path = Path(source)
        if not path.is_file():
            raise PolicyError(f"policy file '{path}' does not exist; a policy is a path, a dict or YAML text")
        return load_policy(path.resolve())
    return parse_policy("user", _extend(_compose(text, "policy text"), policy_folder(), (), {}))


_OWN_EXTENDED: dict[Path, Node] = {}


def _extended(path: Path, seen: tuple[Path, ...], done: dict[Path, Node]) -> Node:
    """The file with all that it extends, made once however many files name it."""
    known = _OWN_EXTENDED if _comes_with_autopar(path) else done
    if path not in known:
        folder = path.parent if path.parent.name != "fragments" else path.parent.parent
        known[path] = _extend(_read_file(path), folder, (*seen, path), done)
    return known[path]


def _extend(node: Node, folder: Path, seen: tuple[Path, ...], done: dict[Path, Node]) -> Node:
    if not isinstance(node.value, dict):
        raise PolicyError("a policy must hold keys", node.where)
    own = dict(node.value)
    extends = own.pop("extends", None)
    towers = own.get("towers")
    if towers is not None and isinstance(towers.value, dict):  # a tower extends by itself
        inner = {
            name: _extend(tower, folder, seen, done)
            if isinstance(tower.value, dict) and "extends" in tower.value
            else tower
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
        if len(seen) > _LONGEST_CHAIN:
            raise PolicyError(f"'{name.value}' is extended through more than {_LONGEST_CHAIN} files", name.where)
        layer = _extended(path, seen, done)
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
        if decider is None and plain(left) != plain(right):
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


@functools.cache
def _comes_with_autopar(path: Path) -> bool:
    return path.resolve().is_relative_to(policy_folder().resolve())


def _read_file(path: Path) -> Node:
    own = _comes_with_autopar(path)
    shown = str(Path("policies") / path.resolve().relative_to(policy_folder().resolve()) if own else path)
    return _compose(read_text(path, _fail(shown)), shown)


def _compose(text: str, file: str) -> Node:
    tree = yaml_tree(text, file, _fail(file))
    if tree.value is None:
        raise PolicyError("is empty", tree.where)
    return tree


def _fail(file: str) -> Fail:
    def fail(problem: str, line: int | str | None) -> PolicyError:
        return PolicyError(problem, Where(file, line)) if line else PolicyError(f"policy file '{file}' {problem}")

    return fail
