"""The ``tp_plan`` that transformers ships with a model, as a policy: for model types that no policy lists.

A plan says of patterns of module names in which *style* they are sharded, and nothing of what their features are made
of. Heads are counted on the attention module and in its config; everything else is single features. What a plan leaves
whole stays whole. A style that no rule of a policy says is refused (:mod:`autopar.policy.plan_styles`). Whether the
result is right, the rehearsal decides (:mod:`autopar.dry_run.imported_plan`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from autopar.foreign.modules import own_parameters
from autopar.foreign.transformers import tensor_plan
from autopar.policy.described_model import base_of
from autopar.policy.plan_styles import StyleRules, generic
from autopar.policy.schema import SUPPORTED, Part, Policy, Ratio, Rule, Tower
from autopar.policy.yaml_reader import Where

__all__ = ["import_tp_plan", "is_imported", "shipped_plan"]

_NAME = "tp_plan of "


def is_imported(where: object) -> bool:
    """Whether ``where``, the place of a policy or of a rule, is in a ``tp_plan``."""
    return str(where).startswith(_NAME)


def shipped_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the plan that comes with a model and the models in it: pattern of a path from ``model`` -> style."""
    plan: dict[str, str] = tensor_plan(model)
    name, base = base_of(model)
    start = f"{name}." if name else ""
    for pattern, style in (getattr(getattr(base, "config", None), "base_model_tp_plan", None) or {}).items():
        plan.setdefault(f"{start}{pattern}", style)
    return {str(pattern): str(style) for pattern, style in plan.items()}


def import_tp_plan(model: PreTrainedModel) -> Policy | None:
    """Return the model's ``tp_plan`` as a policy for this very model; None if it has none for its base model.

    Raises:
        UnsupportedModelError: a style, or what it is said of, that no rule of a policy says.
    """
    plan = shipped_plan(model)
    name, _ = base_of(model)
    start = f"{name}." if name else ""
    own = {generic(path) for path, _ in (*model.named_modules(), *model.named_parameters())}
    if not any(pattern.startswith(start) and pattern in own for pattern in plan):
        return None
    return _Import(model, plan, start).policy()


@dataclass
class _Section:
    """Entries in the blocks of one list: path in a block -> the style in each block that has it."""

    rules: dict[str, list[Rule]] = field(default_factory=dict)
    attributes: dict[str, list[Ratio]] = field(default_factory=dict)


class _Import:
    def __init__(self, model: PreTrainedModel, plan: Mapping[str, str], start: str) -> None:
        self.model, self.start = model, start
        self.file = f"{_NAME}{type(model).__name__}"
        self.made = StyleRules(model, plan, self.file, start)
        self.modules, self.rules = self.made.modules, self.made.rules
        self.style = {path: style for path in self._names() if (style := self.made.style_of(path)) is not None}
        self.lists = self._lists()

    def policy(self) -> Policy:
        """Return the policy."""
        for path, members in self._groups().items():
            block = self._block_of(path)
            inside = path[len(block) + 1 :] if block else ""
            tower = block.rpartition(".")[0] if len(self.lists) > 1 and inside else ""
            self.made.add(path, inside, tower, {member: self.style[member] for member in members})
        self._tied()
        self._whole()
        towers, head = self._sections()
        where = Where(self.file, "all")
        kind = str(self.model.config.model_type)
        return Policy("tp_plan", where, (kind,), SUPPORTED, {}, (), tuple(towers), head=head)

    def _names(self) -> Iterator[str]:
        for path, module in self.modules.items():
            if path:
                yield path
            yield from (f"{path}.{name}".lstrip(".") for name, p in own_parameters(module).items() if p is not None)

    def _lists(self) -> list[str]:
        """The outermost lists of blocks in the base model that the plan shards something in."""
        found: dict[str, None] = {}
        for path in self.style:
            names = path.split(".") if path.startswith(self.start) else []
            outer = (".".join(names[:length]) for length in range(1, len(names)))
            listed = next((each for each in outer if isinstance(self.modules.get(each), nn.ModuleList)), None)
            if listed is not None:
                found[listed] = None
        return list(found)

    def _block_of(self, path: str) -> str:
        """The block that a path lies in; empty outside."""
        listed = next((each for each in self.lists if path.startswith(f"{each}.")), None)
        return ".".join(path.split(".")[: listed.count(".") + 2]) if listed is not None else ""

    def _groups(self) -> dict[str, list[str]]:
        """Modules whose sharded features may meet: path of the module around them -> their paths."""
        groups: dict[str, list[str]] = {}
        parents = sorted({path.rpartition(".")[0] for path in self.style}, key=len)
        for path in self.style:
            parent, block = path.rpartition(".")[0], self._block_of(path)
            outer = [p for p in parents if p not in ("", block) and _inside(parent, p) and _inside(p, block)]
            groups.setdefault(outer[0] if outer and parent != block else parent, []).append(path)
        return groups

    def _tied(self) -> None:
        """An embedding and a head that share a weight are sharded both, or not at all."""
        tied = [path for path, module in self.modules.items() if self.made.ties(module)]
        sharded = next((self.rules[path] for path in tied if path in self.rules), None)
        if sharded is None or sharded.parts != (Part("vocab"),):
            return
        for path in tied:
            if path not in self.rules:
                embedding = isinstance(self.modules[path], nn.Embedding)
                self.rules[path] = Rule("embedding", sharded.where, sharded.parts)
                if not embedding:
                    self.rules[path] = replace(self.rules[path], kind="column", gather_output=True)

    def _whole(self) -> None:
        """Add rules for the modules that the plan does not name."""
        holders = {generic(path) for path, module in self.modules.items() if next(module.children(), None) is not None}
        for path, module in self.modules.items():
            names = [name for name, parameter in own_parameters(module).items() if parameter is not None]
            left = [name for name in names if f"{path}.{name}".lstrip(".") not in self.rules]
            if path in self.rules or not left:
                continue
            leaf = path and generic(path) not in holders and left == names
            for own in [path] if leaf else [f"{path}.{name}".lstrip(".") for name in left]:
                self.rules[own] = Rule("replicated", Where(self.file, "whole"))

    def _sections(self) -> tuple[list[Tower], dict[str, Rule]]:
        """Distribute the rules: to blocks, to what lies before and behind their lists, and to the head."""
        order = {path: place for place, path in enumerate(self.modules)}
        blocks = {each: _Section() for each in self.lists}
        around: dict[str, dict[str, dict[str, Rule]]] = {each: {"prefix": {}, "suffix": {}} for each in ["", *blocks]}
        head: dict[str, Rule] = {}
        for path, rule in self.rules.items():
            block = self._block_of(path)
            if not path.startswith(self.start):
                head[path] = rule
            elif block:
                blocks[block.rpartition(".")[0]].rules.setdefault(path[len(block) + 1 :], []).append(rule)
            else:
                near = max(blocks, key=lambda each: _common(each, path), default="")
                behind = near and order.get(path, order.get(path.rpartition(".")[0], 0)) > order[near]
                around[near]["suffix" if behind else "prefix"][path.removeprefix(self.start)] = rule
        for path, ratio in self.made.attributes.items():
            block = self._block_of(path)
            if block:
                blocks[block.rpartition(".")[0]].attributes.setdefault(path[len(block) + 1 :], []).append(ratio)
        towers = [self._tower(each, section, around[each]) for each, section in blocks.items()]
        return towers or [Tower("", Where(self.file, "all"), self.made.units, prefix=around[""]["prefix"])], head

    def _tower(self, path: str, section: _Section, around: Mapping[str, Mapping[str, Rule]]) -> Tower:
        many = sum(1 for _ in self.modules[path].children())
        for name, found in section.rules.items():
            if len({replace(rule, where=found[0].where) for rule in found}) > 1:
                raise self.made.refused(f"{generic(path)}.*.{name}", "colwise", "blocks differ in what it is made of")

        def entries(found: Mapping[str, list[Any]]) -> dict[str, Any]:
            return {_optional(name, len(each) < many): each[0] for name, each in found.items()}

        where = Where(self.file, path)
        return Tower(
            path if len(self.lists) > 1 else "",
            where,
            self.made.units,
            blocks_path=path.removeprefix(self.start),
            blocks_where=where,
            blocks=entries(section.rules),
            block_attributes=entries(section.attributes),
            prefix=around["prefix"],
            suffix=around["suffix"],
        )


def _inside(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _optional(path: str, missing: bool) -> str:
    return ".".join(f"{name}?" for name in path.split(".")) if missing else path


def _common(one: str, other: str) -> int:
    pairs = list(zip(one.split("."), other.split("."), strict=False))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))
