"""What a policy is, as data, and the reading of it from a YAML tree that knows its lines.

See ``policies/README.md`` for the form. A policy states facts about one architecture: which dim of which parameter is
made of what. It holds no code and no run-time options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autopar.errors import PolicyError, nearest

__all__ = ["HIDDEN", "INFERRED", "Node", "Policy", "Ratio", "Rule", "UnitSpec", "Where", "parse_policy"]

INFERRED = "inferred"
HIDDEN = "hidden"


class Where(NamedTuple):
    """Place of an entry: file (or ``policy dict``) and line (or key path)."""

    file: str
    line: int | str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Node:
    """One YAML value with its place: a scalar, a list of nodes, or a dict of nodes."""

    value: Any
    where: Where


@dataclass(frozen=True)
class UnitSpec:
    """What tp may share out but never cut in two.

    Attributes:
        count: a config attribute, or ``inferred`` (single elements, counted on the parameter).
        follows: the unit whose holder must hold this one too (query heads follow their KV head).
        replicate: with fewer units than ranks, several ranks may hold the same one.
    """

    name: str
    count: str
    where: Where
    follows: str | None = None
    replicate: bool = False


@dataclass(frozen=True)
class Rule:
    """What becomes of one module. ``kind`` is ``replicated``, ``column``, ``row`` or ``embedding``."""

    kind: str
    where: Where
    units: tuple[str, ...] = ()
    gather_output: bool = False
    split_input: bool = False


class Ratio(NamedTuple):
    """The value of a scaled attribute: units of the rank, or the quotient of two kinds of units."""

    unit: str
    per: str | None
    where: Where


@dataclass(frozen=True)
class Policy:
    """One parsed policy. Module paths are as written, with ``?`` after optional segments.

    ``prefix``, ``every_stage``, ``suffix`` and ``blocks_path`` are relative to the base model, ``blocks`` to each
    block, ``head`` to the task model.
    """

    name: str
    where: Where
    model_types: tuple[str, ...]
    transformers: str
    config: Mapping[str, Any]
    units: Mapping[str, UnitSpec]
    blocks_path: str
    blocks: Mapping[str, Rule]
    blocks_where: Where
    prefix: Mapping[str, Rule] = field(default_factory=dict)
    every_stage: Mapping[str, Rule] = field(default_factory=dict)
    suffix: Mapping[str, Rule] = field(default_factory=dict)
    head: Mapping[str, Rule] = field(default_factory=dict)
    block_attributes: Mapping[str, Ratio] = field(default_factory=dict)


_TOP = ("match", "units", "prefix", "every_stage", "blocks", "suffix", "head")
_MATCH = ("model_type", "transformers", "config")
_BLOCKS = ("path", "modules", "attributes")
_UNIT = ("count", "follows", "replicate")
_KINDS = ("column", "row", "embedding", "replicated")
_FLAGS = {"gather_output": "column", "split_input": "row"}


def parse_policy(name: str, root: Node) -> Policy:
    """Read a policy from its merged tree (``extends`` already resolved).

    Raises:
        PolicyError: with file and line, for unknown keys and rules, wrong types, undefined units.
    """
    top = _mapping(root, _TOP, f"policy '{name}'")
    for required in ("match", "units", "blocks"):
        if required not in top:
            raise PolicyError(f"policy '{name}' has no section '{required}'", root.where)
    match = _mapping(top["match"], _MATCH, "'match'")
    units = _parse_units(top["units"])
    blocks = _mapping(top["blocks"], _BLOCKS, "'blocks'")
    for required in ("path", "modules"):
        if required not in blocks:
            raise PolicyError(f"'blocks' has no '{required}'", top["blocks"].where)
    model_types = _parse_model_types(match, top["match"].where)
    return Policy(
        name=name,
        where=root.where,
        model_types=model_types,
        transformers=_text(match["transformers"], "transformers") if "transformers" in match else "",
        config={key: _plain(node) for key, node in _mapping(match["config"], None, "'config'").items()}
        if "config" in match
        else {},
        units=units,
        blocks_path=_text(blocks["path"], "path"),
        blocks=_parse_rules(blocks["modules"], units),
        blocks_where=top["blocks"].where,
        block_attributes=_parse_attributes(blocks["attributes"], units) if "attributes" in blocks else {},
        **{
            section: _parse_rules(top[section], units)
            for section in ("prefix", "every_stage", "suffix", "head")
            if section in top
        },
    )


def _parse_model_types(match: Mapping[str, Node], where: Where) -> tuple[str, ...]:
    if "model_type" not in match:
        raise PolicyError("'match' has no 'model_type'", where)
    node = match["model_type"]
    nodes = node.value if isinstance(node.value, list) else [node]
    if not nodes:
        raise PolicyError("'model_type' lists none", node.where)
    return tuple(_text(n, "model_type") for n in nodes)


def _parse_units(node: Node) -> dict[str, UnitSpec]:
    units: dict[str, UnitSpec] = {}
    for name, entry in _mapping(node, None, "'units'").items():
        if isinstance(entry.value, dict):
            spec = _mapping(entry, _UNIT, f"unit '{name}'")
            if "count" not in spec:
                raise PolicyError(f"unit '{name}' has no 'count'", entry.where)
            units[name] = UnitSpec(
                name,
                _text(spec["count"], "count"),
                entry.where,
                follows=_text(spec["follows"], "follows") if "follows" in spec else None,
                replicate=_flag(spec["replicate"], "replicate") if "replicate" in spec else False,
            )
        else:
            units[name] = UnitSpec(name, _text(entry, name), entry.where)
    for unit in units.values():
        if unit.name == HIDDEN:
            raise PolicyError(f"'{HIDDEN}' cannot be defined: it stands for single features", unit.where)
        if unit.follows is not None and unit.follows not in units:
            raise PolicyError(_undefined(unit.follows, units), unit.where)
        leader, chain = unit.follows, [unit.name]
        while leader is not None:
            if leader in chain:
                raise PolicyError(f"'{unit.name}' follows itself: {' -> '.join([*chain, leader])}", unit.where)
            chain.append(leader)
            leader = units[leader].follows if leader in units else None
    return units


def _parse_rules(node: Node, units: Mapping[str, UnitSpec]) -> dict[str, Rule]:
    return {path: _parse_rule(path, entry, units) for path, entry in _mapping(node, None, "modules").items()}


def _parse_rule(path: str, node: Node, units: Mapping[str, UnitSpec]) -> Rule:
    if isinstance(node.value, str):
        if node.value != "replicated":
            hint = f" Write {{{node.value}: UNIT}}." if node.value in _KINDS else nearest(node.value, _KINDS)
            raise PolicyError(f"unknown rule '{node.value}' for {path}.{hint}", node.where)
        return Rule("replicated", node.where)
    content = _mapping(node, (*_KINDS, *_FLAGS), f"the rule of {path}")
    kinds = [kind for kind in _KINDS if kind in content]
    if len(kinds) != 1:
        raise PolicyError(f"the rule of {path} must name exactly one of {', '.join(_KINDS)}", node.where)
    kind = kinds[0]
    listed = content[kind].value if isinstance(content[kind].value, list) else [content[kind]]
    names = tuple(_text(entry, kind) for entry in listed)
    if kind in ("embedding", "replicated") and len(names) != 1:
        raise PolicyError(f"'{kind}' of {path} takes one unit, not {len(names)}", node.where)
    for entry, unit in zip(listed, names, strict=True):
        if unit not in units and unit != HIDDEN:
            raise PolicyError(_undefined(unit, units), entry.where)
    flags = {flag: _flag(content[flag], flag) for flag in _FLAGS if flag in content}
    for flag in flags:
        if _FLAGS[flag] != kind:
            raise PolicyError(f"'{flag}' belongs to '{_FLAGS[flag]}', not to '{kind}' ({path})", content[flag].where)
    return Rule(kind, node.where, names, **flags)


def _parse_attributes(node: Node, units: Mapping[str, UnitSpec]) -> dict[str, Ratio]:
    attributes: dict[str, Ratio] = {}
    for path, entry in _mapping(node, None, "attributes").items():
        names = [part.strip() for part in _text(entry, path).split("/")]
        if len(names) > 2:
            raise PolicyError(f"{path} must be a unit or the quotient of two, not '{entry.value}'", entry.where)
        for unit in names:
            if unit not in units:
                raise PolicyError(_undefined(unit, units), entry.where)
        attributes[path] = Ratio(names[0], names[1] if len(names) == 2 else None, entry.where)
    return attributes


def _undefined(unit: str, units: Mapping[str, UnitSpec]) -> str:
    return f"unit '{unit}' is not defined under 'units'.{nearest(unit, units)} Defined: {', '.join(units)}"


def _mapping(node: Node, known: tuple[str, ...] | None, what: str) -> dict[str, Node]:
    if not isinstance(node.value, dict):
        raise PolicyError(f"{what} must hold keys, not {_plain(node)!r}", node.where)
    for key, entry in node.value.items():
        if known is not None and key not in known:
            raise PolicyError(
                f"unknown key '{key}' in {what}.{nearest(key, known)} Known: {', '.join(known)}", entry.where
            )
    return node.value


def _text(node: Node, what: str) -> str:
    if not isinstance(node.value, str):
        raise PolicyError(f"'{what}' must be text, not {_plain(node)!r}", node.where)
    return node.value


def _flag(node: Node, what: str) -> bool:
    if not isinstance(node.value, bool):
        raise PolicyError(f"'{what}' must be true or false, not {_plain(node)!r}", node.where)
    return node.value


def _plain(node: Node) -> Any:
    if isinstance(node.value, dict):
        return {key: _plain(entry) for key, entry in node.value.items()}
    if isinstance(node.value, list):
        return [_plain(entry) for entry in node.value]
    return node.value
