"""Merge policy trees: what ``extends`` lays under a file, and a fragment that is mounted under a path."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from autopar.errors import PolicyError, nearest
from autopar.policy.schema import BY_EXPERT, KINDS
from autopar.policy.yaml_reader import Node, Where, plain

_PATH = re.compile(r"([\w-]+|\*)\??(\.([\w-]+|\*)\??)*")
_OF_BLOCK = re.compile(r"(?<![\w.])block\.")
_IN_MODEL = (
    "prefix",
    "every_stage",
    "suffix",
    "attributes",
    "inputs",
)  # sections whose keys are paths in the base model
_IN_BLOCK = ("modules", "attributes", "inputs")


def overlay(base: Node, top: Node) -> Node:
    """Lay ``top`` over ``base``: keys of sections merge, rules and everything else replace, ``~`` deletes."""
    if not isinstance(top.value, dict) or _is_rule(top):
        return top
    below = base.value if isinstance(base.value, dict) and not _is_rule(base) else {}
    merged = dict(below)
    for key, entry in top.value.items():
        if entry.value is not None:
            merged[key] = overlay(below.get(key, Node({}, entry.where)), entry)
        elif key in below:
            del merged[key]
        else:
            raise PolicyError(
                f"'{key}' has no value; '~' deletes a key, but nothing that is extended has this one."
                f"{nearest(key, below)}",
                entry.where,
            )
    return Node(merged, top.where)


def merge(layers: Iterable[Node], decider: Node) -> Node:
    """Unite trees that must not contradict each other, unless ``decider`` has a word on the same key."""
    first, *others = layers
    for layer in others:
        first = _merge(first, layer, decider, ())
    return first


def _merge(left: Node, right: Node, decider: Node | None, path: tuple[str, ...]) -> Node:
    if not (isinstance(left.value, dict) and isinstance(right.value, dict)) or _is_rule(left) or _is_rule(right):
        if decider is None and plain(left) != plain(right):
            raise PolicyError(f"'{'.'.join(path)}' contradicts {right.where}; say here which holds", left.where)
        return left
    merged = dict(left.value)
    for key, entry in right.value.items():
        below = decider.value.get(key) if decider is not None and isinstance(decider.value, dict) else decider
        merged[key] = _merge(merged[key], entry, below, (*path, key)) if key in merged else entry
    return Node(merged, left.where)


def _is_rule(node: Node) -> bool:
    return isinstance(node.value, dict) and bool({*KINDS, BY_EXPERT, "count"} & set(node.value))


def mounted_in_model(tree: Node, path: str, name: str, where: Where) -> Node:
    """Return the tower ``tree`` with all its paths below ``path`` of the base model. ``name`` is its file."""
    _check_path(path, where)
    content = {key: entry for key, entry in tree.value.items() if key not in ("match", "loss")}
    _allow(content, ("units", "config", "blocks", "models", "without_kernels", *_IN_MODEL), name, path, where)
    for section in _IN_MODEL:
        if section in content:
            content[section] = _below(content[section], path)
    if "models" in content and isinstance(content["models"].value, list):
        listed = [Node(f"{path}.{entry.value}", entry.where) for entry in content["models"].value]
        content["models"] = Node(listed, content["models"].where)
    blocks = content.get("blocks")
    if blocks is not None and isinstance(blocks.value, dict) and "path" in blocks.value:
        start = blocks.value["path"]
        content["blocks"] = Node({**blocks.value, "path": Node(f"{path}.{start.value}", start.where)}, blocks.where)
    return Node(content, tree.where)


def mounted_in_block(tree: Node, path: str, name: str, where: Where) -> Node:
    """Return the fragment ``tree`` with its modules, and its ``block.x``, below ``path`` of each block."""
    _check_path(path, where)
    content = {key: entry for key, entry in tree.value.items() if key not in ("match", "loss")}
    _allow(content, ("units", "blocks"), name, path, where)
    blocks = content.get("blocks")
    if blocks is not None and isinstance(blocks.value, dict):
        _allow(blocks.value, _IN_BLOCK, name, path, where, "blocks.")
        content["blocks"] = Node(
            {section: _below(entry, path) for section, entry in blocks.value.items()}, blocks.where
        )
    inside = "block." + path.replace("?", "") + "."

    def moved(text: str, place: Where) -> str:
        if "*" in path and _OF_BLOCK.search(text):
            raise PolicyError(f"'{text}' is of one module; '{name}' is mounted under '{path}', which are many", place)
        return _OF_BLOCK.sub(inside, text)

    return _texts(Node(content, tree.where), moved)


def _below(section: Node, path: str) -> Node:
    if not isinstance(section.value, dict):
        return section
    return Node({f"{path}.{key}": entry for key, entry in section.value.items()}, section.where)


def _texts(node: Node, change: Callable[[str, Where], str]) -> Node:
    """Return ``node`` with every text changed, except keys."""
    if isinstance(node.value, dict):
        return Node({key: _texts(entry, change) for key, entry in node.value.items()}, node.where)
    if isinstance(node.value, list):
        return Node([_texts(entry, change) for entry in node.value], node.where)
    return Node(change(node.value, node.where), node.where) if isinstance(node.value, str) else node


def _check_path(path: str, where: Where) -> None:
    if not _PATH.fullmatch(path):
        raise PolicyError(f"'{path}' is no path of a module, under which a file can be mounted", where)


def _allow(
    content: dict[str, Node], known: tuple[str, ...], name: str, path: str, where: Where, section: str = ""
) -> None:
    for key, entry in content.items():
        if key not in known:
            raise PolicyError(
                f"'{name}' cannot be mounted under '{path}': it has '{section}{key}' ({entry.where}). "
                f"What is mounted has {', '.join(section + other for other in known)}",
                where,
            )
