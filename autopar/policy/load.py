"""Load policies from autopar's files, a path, a dict or YAML text, with line numbers in errors.

``policies/README.md`` describes the form.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar import registry
from autopar.errors import PolicyError, nearest
from autopar.policy.files import (
    PolicyName,
    comes_with_autopar,
    compose,
    extended,
    fail_in,
    policy_files,
    policy_tree,
    user_tree,
    variants_of,
)
from autopar.policy.schema import (
    BY_EXPERT,
    HIDDEN,
    KINDS,
    LISTED,
    LOSSES,
    SUPPORTED,
    Input,
    Policy,
    Ratio,
    Rule,
    Tower,
    UnitRun,
    UnitSpec,
)
from autopar.policy.yaml_reader import Node, Where, plain, plain_tree

_TOWER = ("units", "prefix", "every_stage", "blocks", "suffix", "attributes", "inputs")
_TOP = ("match", *_TOWER, "towers", "head", "head_attributes", "models", "without_kernels", "loss")
_MATCH = ("model_type", "transformers", "config", "class", *registry.LIBRARIES)
_BLOCKS = ("path", "modules", "attributes", "inputs")


def _typed(kind: type | tuple[type, ...], words: str, node: Node, what: str) -> Any:
    if type(node.value) not in (kind if isinstance(kind, tuple) else (kind,)):
        raise PolicyError(f"'{what}' must be {words}, not {plain(node)!r}", node.where)
    return node.value


def _expression(node: Node, what: str) -> str:
    return str(node.value)


_text: Callable[[Node, str], str] = functools.partial(_typed, str, "text")
_flag: Callable[[Node, str], bool] = functools.partial(_typed, bool, "true or false")
_number: Callable[[Node, str], int] = functools.partial(_typed, int, "an integer")
_UNIT = {"count": _expression, "follows": _text, "replicate": _flag, "or_whole": _flag, "align": _number}
_OF_KINDS: dict[str, tuple[tuple[str, ...], Any]] = {  # key of a rule -> kinds with it, and its reader (None: a unit)
    **dict.fromkeys(("gather_output", "inside"), (("column",), _flag)),
    **dict.fromkeys(("split_input", "enter_output"), (("row",), _flag)),
    **dict.fromkeys(("opens", "closes", "sorted"), (("region",), _flag)),
    "dim": (("sharded", "gathered"), _number),
    "repeat": (("sharded",), _expression),
    "by_expert": (("region",), None),
    "within": (("norm_over",), None),
}


def parse_policy(name: str, root: Node) -> Policy:
    """Read a policy from its tree with resolved ``extends``.

    Raises:
        PolicyError: Unknown keys and rules, wrong types, undefined units, with file and line.
    """
    top = _mapping(root, _TOP, f"policy '{name}'")
    own = {"prefix", "suffix", "head"} if "match" not in top else set[str]()  # a custom module may have no blocks
    if not {"blocks", "towers", "models", *own} & set(top):
        raise PolicyError(f"policy '{name}' has no section 'blocks' (nor 'towers', nor 'models')", root.where)
    if "units" not in top and not {"models", "towers"} & set(top):
        raise PolicyError(f"policy '{name}' has no section 'units'", root.where)
    match = _mapping(top["match"], _MATCH, "'match'") if "match" in top else {}
    library = next((key for key in registry.LIBRARIES if key in match), "")
    if "match" in top and not {"model_type", library} & set(match):
        raise PolicyError("'match' has no 'model_type'", top["match"].where)
    if library and (others := {"model_type", "class", "transformers"} & set(match)):
        raise PolicyError(
            f"'match' has '{library}' and '{min(others)}', but a policy is for one library", top["match"].where
        )
    model_types = _parse_names(match, "model_type")
    classes = _parse_names(match, library or "class")
    transformers, ranges = _parse_versions(match, model_types or classes, library) if "match" in top else ("", {})
    units = _parse_units(top["units"], literal="match" not in top) if "units" in top else {}
    towers = [_parse_tower("", root.where, {key: top[key] for key in _TOWER if key in top}, units)]
    for tower, entry in _mapping(top["towers"], None, "'towers'").items() if "towers" in top else ():
        keys = _mapping(entry, (*_TOWER, "config"), f"tower '{tower}'")
        merged = {**units, **(_parse_units(keys["units"], units) if "units" in keys else {})}
        towers.append(_parse_tower(tower, entry.where, keys, merged))
    models = top.get("models", Node([], root.where))
    if not isinstance(models.value, list):
        raise PolicyError("'models' must be a list of paths", models.where)
    config = _mapping(match["config"], None, "'config'") if "config" in match else {}
    return Policy(
        name=name,
        where=root.where,
        model_types=model_types,
        transformers=transformers,
        ranges=ranges,
        config={key: plain(node) for key, node in config.items()},
        classes=classes,
        library=library,
        towers=tuple(towers),
        head=_parse_rules(top["head"], units) if "head" in top else {},
        head_attributes=_parse_attributes(top["head_attributes"], units) if "head_attributes" in top else {},
        models={_text(entry, "models"): entry.where for entry in models.value},
        loss=_parse_loss(top["loss"]) if "loss" in top else {},
        without_kernels=_parse_names(top, "without_kernels"),
    )


def _parse_tower(name: str, where: Where, keys: Mapping[str, Node], units: Mapping[str, UnitSpec]) -> Tower:
    sections = {key: parse(keys[key], units) for key, parse in _SECTIONS.items() if key in keys}
    if "blocks" in keys:
        given = keys["blocks"].value
        first, *more_lists = given if isinstance(given, list) and given else [keys["blocks"]]
        sections["then"] = tuple(_parse_tower(name, entry.where, {"blocks": entry}, units) for entry in more_lists)
        blocks = _mapping(first, _BLOCKS, "'blocks'")
        for required in ("path", "modules"):
            if required not in blocks:
                raise PolicyError(f"'blocks' has no '{required}'", first.where)
        sections |= {
            "blocks_path": _text(blocks["path"], "path"),
            "blocks_where": first.where,
            "blocks": _parse_rules(blocks["modules"], units),
        }
        more = [key for key in ("attributes", "inputs") if key in blocks]
        sections |= {f"block_{key}": _SECTIONS[key](blocks[key], units) for key in more}
    return Tower(name, where, units, _text(keys["config"], "config") if "config" in keys else "", **sections)


def _parse_versions(match: Mapping[str, Node], names: tuple[str, ...], library: str) -> tuple[str, dict[str, str]]:
    """Return the range of versions of transformers, and the ranges of individual model types or classes."""
    node = match.get(library or "transformers")
    if node is None or (library and not isinstance(node.value, dict)):
        return SUPPORTED, {}
    if not isinstance(node.value, dict):
        return _text(node, "transformers"), {}
    for kind, entry in node.value.items():
        if kind not in names:
            hint = nearest(kind, names)
            raise PolicyError(f"'transformers' names '{kind}', which 'model_type' does not list.{hint}", entry.where)
    return SUPPORTED, {kind: _text(entry, library or "transformers") for kind, entry in node.value.items()}


def _parse_names(match: Mapping[str, Node], key: str) -> tuple[str, ...]:
    if key not in match:
        return ()
    node = match[key]
    nodes = node.value if isinstance(node.value, list) else [node]
    if not nodes:
        raise PolicyError(f"'{key}' must not be empty", node.where)
    if isinstance(node.value, dict) and key in registry.LIBRARIES:  # with the versions of each
        return tuple(node.value)
    return tuple(_text(n, key) for n in nodes)


def _parse_units(
    node: Node, outer: Mapping[str, UnitSpec] | None = None, *, literal: bool = False
) -> dict[str, UnitSpec]:
    """Read units. With ``literal`` a count may be a number; a policy for a model type must fit models of all sizes."""
    units: dict[str, UnitSpec] = {}
    for name, entry in _mapping(node, None, "'units'").items():
        if isinstance(entry.value, dict):
            spec = _mapping(entry, tuple(_UNIT), f"unit '{name}'")
            if "count" not in spec:
                raise PolicyError(f"unit '{name}' has no 'count'", entry.where)
            facts: dict[str, Any] = {key: reader(spec[key], key) for key, reader in _UNIT.items() if key in spec}
            if facts.get("align", 1) < 1:
                raise PolicyError(f"'align' must be at least 1, not {facts['align']}", spec["align"].where)
            units[name] = UnitSpec(name, where=entry.where, **facts)
        else:
            counted = literal and type(entry.value) is int
            units[name] = UnitSpec(name, str(entry.value) if counted else _text(entry, name), entry.where)
    known = {**(outer or {}), **units}
    for unit in units.values():
        if unit.name == HIDDEN:
            raise PolicyError(f"'{HIDDEN}' cannot be defined: it is the predefined unit of single features", unit.where)
        if unit.follows is not None and unit.follows not in known:
            raise PolicyError(_undefined(unit.follows, known), unit.where)
        leader, chain = unit.follows, [unit.name]
        while leader is not None:
            if leader in chain:
                raise PolicyError(f"'{unit.name}' follows itself: {' -> '.join([*chain, leader])}", unit.where)
            chain.append(leader)
            leader = known[leader].follows if leader in known else None
    return units


def _parse_rules(node: Node, units: Mapping[str, UnitSpec]) -> dict[str, Rule]:
    return {path: _parse_rule(path, entry, units) for path, entry in _mapping(node, None, "modules").items()}


def _parse_rule(path: str, node: Node, units: Mapping[str, UnitSpec]) -> Rule:
    if isinstance(node.value, str):
        if node.value != "replicated":
            hint = f" Write {{{node.value}: UNIT}}." if node.value in KINDS else nearest(node.value, KINDS)
            raise PolicyError(f"unknown rule '{node.value}' for {path}.{hint}", node.where)
        return Rule("replicated", node.where)
    own = registry.extensions()
    name = next((name for name in own if isinstance(node.value, dict) and name in node.value), None)
    if name is not None:
        extended, numbers = own[name], own[name].numbers
        missing = [key for key in numbers if key not in node.value]
        if missing:
            raise PolicyError(f"'{name}' of {path} needs {', '.join(missing)}", node.where)
        given = tuple((key, float(_typed((int, float), "a number", node.value[key], key))) for key in numbers)
        left = {key: entry for key, entry in node.value.items() if key not in (name, *numbers)}
        rule = _parse_rule(path, Node({extended.rule: node.value[name], **left}, node.where), units)
        return replace(rule, extension=(name, given))
    content = _mapping(node, tuple(dict.fromkeys((*KINDS, *_OF_KINDS))), f"the rule of {path}")
    kinds = [kind for kind in KINDS if kind in content]
    if kinds == ["row", "enter_output"]:  # a flag of row, otherwise a rule
        kinds = ["row"]
    if not kinds and set(content) == {BY_EXPERT}:
        unit = _parse_unit(content[BY_EXPERT], BY_EXPERT, units)
        return Rule(BY_EXPERT, node.where, (UnitRun(unit),), by_expert=unit)
    if len(kinds) != 1:
        raise PolicyError(f"the rule of {path} must name exactly one of {', '.join(KINDS)}", node.where)
    kind = kinds[0]
    parts = _parse_parts(content[kind], kind, units)
    if kind not in LISTED and len(parts) != 1:
        raise PolicyError(f"'{kind}' of {path} takes one unit, not {len(parts)}", node.where)
    facts: dict[str, Any] = {}
    for key, (owners, reader) in _OF_KINDS.items():
        if key in content and key != kind:
            if kind not in owners:
                belongs = " and ".join(f"'{owner}'" for owner in owners)
                raise PolicyError(f"'{key}' belongs to {belongs}, not to '{kind}' ({path})", content[key].where)
            facts[key] = reader(content[key], key) if reader else _parse_unit(content[key], key, units)
    if facts.get("sorted") and BY_EXPERT not in content:
        raise PolicyError(f"'sorted' needs 'by_expert': it describes the rows of experts ({path})", node.where)
    if len({"opens", "closes", *(() if facts.get("sorted") else [BY_EXPERT])} & set(content)) > 1:
        raise PolicyError(f"a region must have only one of 'opens', 'closes' and 'by_expert' ({path})", node.where)
    return Rule(kind, node.where, parts, **facts)


def _parse_parts(node: Node, what: str, units: Mapping[str, UnitSpec]) -> tuple[UnitRun, ...]:
    parts = []
    for entry in node.value if isinstance(node.value, list) else [node]:
        unit, star, width = (piece.strip() for piece in _text(entry, what).partition("*"))
        if unit not in units and unit != HIDDEN:
            raise PolicyError(_undefined(unit, units), entry.where)
        if star and not width:
            raise PolicyError(f"'{entry.value}' has no width after '*'", entry.where)
        parts.append(UnitRun(unit, width or None))
    if not parts:
        raise PolicyError(f"'{what}' must list a unit", node.where)
    return tuple(parts)


def _parse_unit(node: Node, what: str, units: Mapping[str, UnitSpec]) -> str:
    parts = _parse_parts(node, what, units)
    if len(parts) != 1 or parts[0].width is not None:
        raise PolicyError(f"'{what}' takes the name of one unit, not {plain(node)!r}", node.where)
    return parts[0].unit


def _parse_attributes(node: Node, units: Mapping[str, UnitSpec]) -> dict[str, Ratio]:
    attributes: dict[str, Ratio] = {}
    for path, entry in _mapping(node, None, "attributes").items():
        per: str | None = None
        if isinstance(entry.value, str) and "/" in entry.value:
            names = [part.strip() for part in entry.value.split("/")]
            if len(names) > 2:
                raise PolicyError(f"{path} must be a unit or the quotient of two, not '{entry.value}'", entry.where)
            top, per = names
            if per not in units:
                raise PolicyError(_undefined(per, units), entry.where)
            parts = _parse_parts(Node(top, entry.where), path, units)
        else:
            parts = _parse_parts(entry, path, units)
        attributes[path] = Ratio(parts, per, entry.where)
    return attributes


def _parse_inputs(node: Node, units: Mapping[str, UnitSpec]) -> dict[str, Input]:
    inputs: dict[str, Input] = {}
    for path, entry in _mapping(node, None, "inputs").items():
        content = _mapping(entry, ("sharded", "dim"), f"the input {path}")
        if set(content) != {"sharded", "dim"}:
            raise PolicyError(f"the input {path} needs 'sharded' and 'dim'", entry.where)
        node, dim = content["sharded"], _number(content["dim"], "dim")
        run, *more = _parse_parts(node, "sharded", units)
        inputs[path] = Input(_parse_unit(node, "sharded", units) if more else run.unit, dim, entry.where, run.width)
    return inputs


_SECTIONS: dict[str, Any] = {
    **dict.fromkeys(("prefix", "every_stage", "suffix"), _parse_rules),
    "attributes": _parse_attributes,
    "inputs": _parse_inputs,
}


def _parse_loss(node: Node) -> dict[str, str]:
    kinds = {name: _text(entry, name) for name, entry in _mapping(node, None, "'loss'").items()}
    for name, kind in kinds.items():
        if kind not in LOSSES:
            raise PolicyError(
                f"the loss of {name} is one of {', '.join(LOSSES)}, not '{kind}'.{nearest(kind, LOSSES)}",
                node.value[name].where,
            )
    return kinds


def _undefined(unit: str, units: Mapping[str, UnitSpec]) -> str:
    return f"unit '{unit}' is not defined under 'units'.{nearest(unit, units)} Defined: {', '.join(units)}"


def _mapping(node: Node, known: tuple[str, ...] | None, what: str) -> dict[str, Node]:
    if not isinstance(node.value, dict):
        raise PolicyError(f"{what} must hold keys, not {plain(node)!r}", node.where)
    for key, entry in node.value.items():
        if known is not None and key not in known:
            raise PolicyError(
                f"unknown key '{key}' in {what}.{nearest(key, known)} Known: {', '.join(known)}", entry.where
            )
    return node.value


@functools.cache
def own_policies() -> Mapping[str, Policy]:
    """Read all policies of autopar: name of the file or variant -> policy."""
    found = {policy.name: policy for path in policy_files() for policy in load_policies(path)}
    return dict(sorted(found.items()))


def load_policies(path: Path) -> tuple[Policy, ...]:
    """Read the policies of a file, one per variant; a file of autopar is read once per process."""
    return _load_own(path) if comes_with_autopar(path) else _load(path)


def load_policy(path: Path) -> Policy:
    """Read the policy of a file; for a file with variants, the variant with the name of the file."""
    found = load_policies(path)
    if len(found) == 1:
        return found[0]
    names = [policy.name for policy in found]
    if path.stem in names:
        return found[names.index(path.stem)]
    raise PolicyError(
        f"{found[0].where.file} holds {len(found)} policies, expected one\n  Write a policy that extends one of them: "
        f"{{extends: {names[0]}}}, or one of {', '.join(names[1:])}."
    )


def _load(path: Path) -> tuple[Policy, ...]:
    names = [PolicyName(path, name) for name in variants_of(policy_tree(path))] or [PolicyName(path)]
    done: dict[PolicyName, Node] = {}
    return tuple(parse_policy(name.variant or path.stem, extended(name, done)) for name in names)


_load_own = functools.cache(_load)


def read_user_policy(source: str | Path | Mapping[str, Any] | Policy, *, place: str = "policy dict") -> Policy:
    """Read a policy from a path, a dict or YAML text; return a :class:`Policy` as it is.

    ``extends`` finds files next to the given file first, then autopar's.

    Args:
        place: The name of a dict in errors.
    """
    if isinstance(source, Policy):
        return source
    text = "" if isinstance(source, Mapping) else str(source)
    if isinstance(source, Path) or (text and "\n" not in text):
        path = Path(text)
        if not path.is_file():
            known = own_policies().keys() | {kind for policy in own_policies().values() for kind in policy.model_types}
            own = (
                f".\n  autopar has a policy {text}, which it finds by the model's type: leave policy= out."
                f"\n  A custom policy can extend it: policy={{'extends': '{text}', ...}}"
            )
            more = own if text in known else ""
            raise PolicyError(f"policy file '{path}' does not exist; a policy is a path, a dict or YAML text{more}")
        return load_policy(path.resolve())
    if isinstance(source, Mapping):
        root = plain_tree(source, place, fail_in(place))
    else:
        root = compose(text, "policy text")
    return parse_policy("user", user_tree(root))
