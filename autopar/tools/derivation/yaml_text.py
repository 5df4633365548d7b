"""A derived policy as YAML that people review: fragments where they fit, and one line a rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml
from transformers import PreTrainedModel

from autopar.errors import AutoparError
from autopar.plan.make_plan import make_plan
from autopar.plan.plan import Plan
from autopar.policy.files import PolicyName, extended, policy_folder
from autopar.policy.load import read_user_policy
from autopar.policy.yaml_reader import plain

_SECTIONS = ("prefix", "every_stage", "suffix", "head")
_NESTED = ("match", "units", "towers", "blocks", "modules", "attributes", *_SECTIONS)
_TP = 2


def yaml_text(tree: dict[str, Any], comments: list[str]) -> str:
    """Return a policy as text, with lines of comment before it."""
    lines = [f"# {line}" for line in comments]
    return "\n".join([*lines, *_lines(tree, 0)]) + "\n"


def _lines(tree: dict[str, Any], depth: int) -> Iterator[str]:
    for name, value in tree.items():
        key = yaml.safe_dump(str(name), default_flow_style=True, width=1000).split("\n")[0]
        tower = isinstance(value, dict) and ("blocks" in value or "units" in value)
        if isinstance(value, dict) and (name in _NESTED or tower):
            yield " " * depth + f"{key}:"
            yield from _lines(value, depth + 2)
        else:
            shown = yaml.safe_dump(value, default_flow_style=True, width=1000, sort_keys=False).split("\n")[0]
            yield " " * depth + f"{key}: {shown}"


def composed(model: PreTrainedModel, tree: dict[str, Any]) -> dict[str, Any]:
    """Return the same policy with fragments in the place of what they say; plans of ``model`` must not differ."""
    if "towers" in tree or "blocks" not in tree:
        return tree
    wanted = _facts(make_plan(model, read_user_policy(tree), _TP))
    current, chosen = tree, list[str]()
    for name in _fragments(tree):
        extended = {"extends": [*chosen, name], **{k: v for k, v in current.items() if k != "extends"}}
        less = _without_repeats(model, extended, wanted)
        if less is not None and _size(less) < _size(current):
            current, chosen = less, [*chosen, name]
    return current


def _fragments(tree: dict[str, Any]) -> list[str]:
    """Fragments that have rules for paths of the policy, those with most first."""
    own = _paths(tree)
    scored = []
    for path in sorted((policy_folder() / "fragments").glob("*.yaml")):
        if path.stem.startswith("module_") or path.stem == "composite":
            continue
        keys = _paths(plain(extended(PolicyName(path), {})))
        common = len(keys & own)
        if common:
            scored.append((len(keys) - common, -common, f"fragments/{path.stem}"))
    return [name for _, _, name in sorted(scored)]


def _paths(tree: dict[str, Any]) -> set[str]:
    """The paths for which a policy, or a fragment with all that it extends, has rules; without their marks."""
    sections = [tree.get(section) or {} for section in _SECTIONS]
    sections.append((tree.get("blocks") or {}).get("modules") or {})
    return {path.replace("?", "") for rules in sections for path in rules}


def _without_repeats(model: PreTrainedModel, tree: dict[str, Any], wanted: Any) -> dict[str, Any] | None:
    """Leave out what a fragment says too; None if the policy is another then."""

    def same(candidate: dict[str, Any]) -> bool:
        try:
            return bool(_facts(make_plan(model, read_user_policy(candidate), _TP)) == wanted)
        except AutoparError:
            return False

    if not same(tree):
        return None
    places = [("units", name) for name in tree.get("units", {})]
    places += [(section, name) for section in _SECTIONS for name in tree.get(section, {})]
    places += [
        (f"blocks.{part}", name) for part in ("modules", "attributes") for name in tree.get("blocks", {}).get(part, {})
    ]
    places += [("blocks", "path")] if "path" in tree.get("blocks", {}) else []
    for section, name in places:
        less = _less(tree, section, name)
        if same(less):
            tree = less
    return tree


def _less(tree: dict[str, Any], section: str, name: str) -> dict[str, Any]:
    outer, _, inner = section.partition(".")
    part = dict(tree[outer])
    if inner:
        part[inner] = {key: value for key, value in part[inner].items() if key != name}
        if not part[inner]:
            del part[inner]
    else:
        part.pop(name)
    return {key: (part if key == outer else value) for key, value in tree.items() if key != outer or part}


def _size(tree: dict[str, Any]) -> int:
    return sum(_size(value) if isinstance(value, dict) else 1 for value in tree.values())


def _facts(plan: Plan) -> Any:
    """Return the effect of a plan, without names of units and places of rules."""
    tensors = {name: _layout(tensor.layout) for name, tensor in plan.tensors.items()}
    modules = {
        path: (m.rule, m.gather_output, m.split_input, m.enter_output, m.inside, m.summed, m.once, m.opens, m.closes)
        for path, m in plan.modules.items()
        if m.rule != "replicated" or m.summed
    }
    attributes = {(a.path, a.name, a.values) for a in plan.attributes if set(a.values) != {a.whole}}
    return tensors, modules, attributes


def _layout(layout: Any) -> Any:
    return None if layout is None else (layout.dim, [layout.ranges(rank) for rank in range(layout.axis_size)])
