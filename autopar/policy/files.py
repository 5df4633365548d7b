"""Find and read policy files, and resolve ``extends``. Files of autopar are read once per process.

With ``extends: [fragments/attention_qkvo, fragments/mlp_gated]`` a file inherits the keys of the named files. Its keys
override inherited ones, and ``~`` deletes them. If two named files contradict each other in a key, this file must set
the key; the order of names does not decide. ``extends: {PATH: NAME}`` mounts a file under a path. A file with
``variants`` defines a policy for each variant, which inherits the remaining keys of the file.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from autopar.errors import PolicyError, nearest
from autopar.policy.schema import BY_EXPERT, KINDS
from autopar.policy.yaml_reader import Fail, Node, Where, plain, read_text, yaml_tree


@functools.cache
def policy_folder() -> Path:
    """Return the folder of autopar's policies: in the wheel, or next to the package in a checkout."""
    inside = Path(__file__).resolve().parents[1] / "_policies"
    return inside if inside.is_dir() else Path(__file__).resolve().parents[2] / "policies"


def reference() -> Path:
    """Return the path of the page that describes the form of a policy."""
    return policy_folder() / "README.md"


@functools.cache
def policy_files() -> tuple[Path, ...]:
    """List all policy files (not fragments), sorted by name."""
    return tuple(sorted(policy_folder().glob("*.yaml")))


@functools.cache
def policy_text(path: Path) -> str:
    """Return the text of a file of autopar; empty if it cannot be read, for which the parser raises."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


@functools.cache
def comes_with_autopar(path: Path) -> bool:
    """Return whether the file is one of autopar's policies."""
    return path.resolve().is_relative_to(policy_folder().resolve())


def policy_tree(path: Path) -> Node:
    """Read a file; a file of autopar is read once per process."""
    return _own_tree(path) if comes_with_autopar(path) else _read_file(path)


def _read_file(path: Path) -> Node:
    own = comes_with_autopar(path)
    shown = str(Path("policies") / path.resolve().relative_to(policy_folder().resolve()) if own else path)
    return compose(read_text(path, fail_in(shown)), shown)


_own_tree = functools.cache(_read_file)


def compose(text: str, file: str) -> Node:
    """Read a policy from its text; ``file``: the name in errors."""
    tree = yaml_tree(text, file, fail_in(file))
    if tree.value is None:
        raise PolicyError("is empty", tree.where)
    return tree


def fail_in(file: str) -> Fail:
    """Return a function that makes the errors of a file."""

    def fail(problem: str, line: int | str | None) -> PolicyError:
        return PolicyError(problem, Where(file, line)) if line else PolicyError(f"policy file '{file}' {problem}")

    return fail


_VARIANT = re.compile(r"[\w-]+")


class PolicyName(NamedTuple):
    """A policy: its file, and the name of the variant, if the file has variants."""

    path: Path
    variant: str = ""


class _Place(NamedTuple):
    """The place where names are resolved: ``folder``, then autopar's. ``seen``: the chain of extending policies."""

    folder: Path
    seen: tuple[PolicyName, ...]
    done: dict[PolicyName, Node]  # the user's policies that were read


_OWN_EXTENDED: dict[PolicyName, Node] = {}


def extended(name: PolicyName, done: dict[PolicyName, Node], seen: tuple[PolicyName, ...] = ()) -> Node:
    """Return the tree of a policy with all inherited keys; each policy is resolved once."""
    known = _OWN_EXTENDED if comes_with_autopar(name.path) else done
    if name not in known:
        folder = name.path.parent
        place = _Place(folder.parent if folder.name == "fragments" else folder, (*seen, name), done)
        root = policy_tree(name.path)
        if variants := variants_of(root):
            common = Node({key: entry for key, entry in root.value.items() if key != "variants"}, root.where)
            known[name] = _extend(variants[name.variant], place, _extend(common, place))
        else:
            known[name] = _extend(root, place)
    return known[name]


def user_tree(root: Node) -> Node:
    """Return the tree of a policy that is not in a file."""
    if names := list(variants_of(root)):
        raise PolicyError(f"expected one policy, got {len(names)} in 'variants': {', '.join(names)}", root.where)
    return _extend(root, _Place(policy_folder(), (), {}))


def variants_of(root: Node) -> dict[str, Node]:
    """Return the variants of a file by name; none if the file is one policy."""
    if not isinstance(root.value, dict) or "variants" not in root.value:
        return {}
    variants = root.value["variants"]
    if not isinstance(variants.value, dict) or not variants.value:
        raise PolicyError(f"'variants' must hold policies by name, not {plain(variants)!r}", variants.where)
    for name, own in variants.value.items():
        if not _VARIANT.fullmatch(name):
            raise PolicyError(f"'{name}' is not a name of a variant: letters, digits, '-' and '_'", own.where)
        if not isinstance(own.value, dict) or "match" not in own.value:
            raise PolicyError(f"variant '{name}' needs 'match' with the models that it describes", own.where)
    return dict(variants.value)


def _extend(node: Node, place: _Place, common: Node | None = None) -> Node:
    """Return ``node`` with inherited keys: of files that it extends, and of ``common``, the keys of all variants."""
    if not isinstance(node.value, dict):
        raise PolicyError("a policy must hold keys", node.where)
    own = dict(node.value)
    layers = [] if common is None else [common]
    if "extends" in own:
        layers += _layers(own.pop("extends"), place)
    if _has(own.get("blocks"), "extends"):
        inside = dict(own["blocks"].value)
        layers += _layers(inside.pop("extends"), place, in_block=True)
        own["blocks"] = Node(inside, own["blocks"].where)
    if "blocks" in own and isinstance(own["blocks"].value, list):
        each = [_extend(Node({"blocks": entry}, entry.where), place).value for entry in own["blocks"].value]
        own["blocks"] = Node([one["blocks"] for one in each], own["blocks"].where)
        layers += [Node({"units": one["units"]}, node.where) for one in each if "units" in one]
    towers = own.get("towers")
    if towers is not None and isinstance(towers.value, dict):
        inner = {
            name: _extend(tower, place) if _has(tower, "extends") or _has(tower, "blocks", "extends") else tower
            for name, tower in towers.value.items()
        }
        own["towers"] = Node(inner, towers.where)
    top = Node(own, node.where)
    if _has(own.get("match"), "model_type"):  # the range in an extended file is for different model types
        for number, layer in enumerate(layers):
            if _has(layer, "match", "transformers"):
                kept = {key: entry for key, entry in layer.value["match"].value.items() if key != "transformers"}
                layers[number] = Node({**layer.value, "match": Node(kept, layer.where)}, layer.where)
    united = functools.partial(_merge, decider=top)
    return overlay(functools.reduce(united, layers) if layers else Node({}, node.where), top)


def _has(node: Node | None, *keys: str) -> bool:
    """Return whether ``node`` contains the nested keys."""
    for key in keys:
        if node is None or not isinstance(node.value, dict) or key not in node.value:
            return False
        node = node.value[key]
    return True


def _layers(extends: Node, place: _Place, *, in_block: bool = False) -> list[Node]:
    """Return the files that ``extends`` names; ``{PATH: file or files}`` mounts them under a path."""
    if in_block and not isinstance(extends.value, dict):
        raise PolicyError(
            f"'extends' in 'blocks' takes {{PATH: NAME}}, where PATH is a module of each block, not {plain(extends)!r}",
            extends.where,
        )
    found: list[Node] = []
    mount = _mounted_in_block if in_block else _mounted_in_model
    for entry in extends.value if isinstance(extends.value, list) else [extends]:
        if not isinstance(entry.value, dict):
            found.append(_named(entry, place))
            continue
        for path, names in entry.value.items():
            for name in names.value if isinstance(names.value, list) else [names]:
                tree = _named(name, place)
                if not _PATH.fullmatch(path):
                    raise PolicyError(f"'{path}' is not the path of a module to mount a file under", name.where)
                content = {key: part for key, part in tree.value.items() if key not in ("match", "loss")}
                found.append(mount(Node(content, tree.where), path, name))
    if not found:
        raise PolicyError("'extends' must name a file", extends.where)
    return found


def _named(name: Node, place: _Place) -> Node:
    """Return the tree of the policy or fragment with this name."""
    if not isinstance(name.value, str):
        raise PolicyError(f"'extends' takes names of files, or {{PATH: NAME}}, not {plain(name)!r}", name.where)
    found = _find(name.value, place.folder, name.where)
    if found in place.seen:
        raise PolicyError(f"'{name.value}' extends itself", name.where)
    if len(place.seen) > 50:
        raise PolicyError(f"'{name.value}' is extended through more than 50 files", name.where)
    return extended(found, place.done, place.seen)


def _find(name: str, folder: Path, where: Where) -> PolicyName:
    for root in (folder, policy_folder()):
        path = (root / f"{name}.yaml").resolve()
        if not (path.is_file() and path.is_relative_to(root.resolve())):
            continue
        variants = variants_of(policy_tree(path))
        if not variants:
            return PolicyName(path)
        if path.stem in variants:
            return PolicyName(path, path.stem)
        raise PolicyError(f"'{name}' is a file of several policies; name one: {', '.join(variants)}", where)
    known = _own_variants()
    if name in known:
        return PolicyName(known[name], name)
    files = [str(path.relative_to(policy_folder()).with_suffix("")) for path in policy_folder().rglob("*.yaml")]
    raise PolicyError(f"'extends' names '{name}', which does not exist.{nearest(name, [*files, *known])}", where)


@functools.cache
def _own_variants() -> dict[str, Path]:
    """Return variant -> file for autopar's policies."""
    files = [path.resolve() for path in policy_files() if "variants:" in policy_text(path)]
    return {name: path for path in files for name in variants_of(policy_tree(path))}


_PATH = re.compile(r"([\w-]+|\*)\??(\.([\w-]+|\*)\??)*")
_OF_BLOCK = re.compile(r"(?<![\w.])block\.")
_IN_MODEL = ("prefix", "every_stage", "suffix", "attributes", "inputs")  # their keys are paths in the base model
_IN_BLOCK = ("modules", "attributes", "inputs")


def overlay(base: Node, top: Node) -> Node:
    """Override ``base`` by ``top``: sections are merged, other values are replaced, and ``~`` deletes a key."""
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
                f"'{key}' has no value; '~' deletes a key, but no extended file has this key.{nearest(key, below)}",
                entry.where,
            )
    return Node(merged, top.where)


def _merge(left: Node, right: Node, decider: Node | None, path: tuple[str, ...] = ()) -> Node:
    """Merge two trees. A contradiction raises unless ``decider`` sets the same key."""
    if not (isinstance(left.value, dict) and isinstance(right.value, dict)) or _is_rule(left) or _is_rule(right):
        if decider is None and plain(left) != plain(right):
            raise PolicyError(f"'{'.'.join(path)}' contradicts {right.where}; set it in this file", left.where)
        return left
    merged = dict(left.value)
    for key, entry in right.value.items():
        below = decider.value.get(key) if decider is not None and isinstance(decider.value, dict) else decider
        merged[key] = _merge(merged[key], entry, below, (*path, key)) if key in merged else entry
    return Node(merged, left.where)


def _is_rule(node: Node) -> bool:
    return isinstance(node.value, dict) and bool({*KINDS, BY_EXPERT, "count"} & set(node.value))


def _mounted_in_model(tree: Node, path: str, name: Node) -> Node:
    """Return the tower ``tree`` with all paths below ``path`` of the base model; ``name``: its file."""
    content = dict(tree.value)
    _allow(content, ("units", "config", "blocks", "models", "without_kernels", *_IN_MODEL), path, name)
    for section in _IN_MODEL:
        if section in content:
            content[section] = _below(content[section], path)
    if "models" in content and isinstance(content["models"].value, list):
        listed = [Node(f"{path}.{entry.value}", entry.where) for entry in content["models"].value]
        content["models"] = Node(listed, content["models"].where)
    if "blocks" in content:
        content["blocks"] = _blocks_below(content["blocks"], path)
    return Node(content, tree.where)


def _blocks_below(blocks: Node, path: str) -> Node:
    if isinstance(blocks.value, list):
        return Node([_blocks_below(each, path) for each in blocks.value], blocks.where)
    if not isinstance(blocks.value, dict) or "path" not in blocks.value:
        return blocks
    start = blocks.value["path"]
    return Node({**blocks.value, "path": Node(f"{path}.{start.value}", start.where)}, blocks.where)


def _mounted_in_block(tree: Node, path: str, name: Node) -> Node:
    """Return the fragment ``tree`` with its modules and its ``block.x`` below ``path`` of each block."""
    content = dict(tree.value)
    _allow(content, ("units", "blocks"), path, name)
    blocks = content.get("blocks")
    if blocks is not None and isinstance(blocks.value, dict):
        _allow(blocks.value, _IN_BLOCK, path, name, "blocks.")
        below = {section: _below(entry, path) for section, entry in blocks.value.items()}
        content["blocks"] = Node(below, blocks.where)
    inside = "block." + path.replace("?", "") + "."

    def moved(text: str, place: Where) -> str:
        if "*" in path and _OF_BLOCK.search(text):
            raise PolicyError(
                f"'{text}' needs one module, but '{name.value}' is mounted under several ('{path}')", place
            )
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


def _allow(content: dict[str, Node], known: tuple[str, ...], path: str, name: Node, section: str = "") -> None:
    for key, entry in content.items():
        if key not in known:
            raise PolicyError(
                f"'{name.value}' cannot be mounted under '{path}': it has '{section}{key}' ({entry.where}). "
                f"A mounted file has {', '.join(section + other for other in known)}",
                name.where,
            )
