"""Match the rules of a policy with the modules of a model, and check that the rules of a region agree.

Code that would replace sharded layers, or read their weights, raises. A ``forward`` set on a module object would run
instead of the class's method. transformers uses a fused kernel of an installed package (mamba-ssm) if there is one. A
kernel multiplies by weights itself and would skip the all-reduce; policies list such functions as ``without_kernels``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autopar.compat.peft import seen_through
from autopar.compat.tensors import own_buffers, own_modules, own_parameters
from autopar.compat.transformers import ACCELERATE_HOOK
from autopar.errors import ConfigError, PolicyError, UnsupportedModelError, nearest
from autopar.layout import Layout
from autopar.plan.plan import ModulePlan, Plan
from autopar.plan.units import UnitTable
from autopar.policy.match import base_of, config_of, find_policy
from autopar.policy.schema import BY_EXPERT, Input, Policy, Ratio, Rule, UnitRun, UnitSpec
from autopar.policy.yaml_reader import Where
from autopar.stored import block_of


@dataclass(frozen=True)
class Scope:
    """A block, a section of a tower, or the head: the root of paths in rules, and the boundary of regions.

    Attributes:
        path: The dotted path of ``root``.
        name: The name in messages and comparisons.
        table: The units of this scope.
        block: The module ``root`` if it is a block, otherwise None.
    """

    path: str
    root: nn.Module
    name: str
    table: UnitTable
    rules: Mapping[str, Rule]
    attributes: Mapping[str, Ratio]
    inputs: Mapping[str, Input]
    where: Where
    block: nn.Module | None = None


@dataclass(frozen=True)
class RuleMatch:
    """A rule and a module, bare parameter or buffer that it matches.

    Attributes:
        rules: A feature's function that makes the layouts; None: :func:`autopar.plan.rules.tensor_rules_of`.
    """

    path: str
    module: nn.Module | torch.Tensor
    rule: Rule
    scope: Scope
    shown: str
    rules: Callable[[RuleMatch], Iterator[Any]] | None = None

    def error(self, text: str) -> PolicyError:
        """Return an error at the line of the rule."""
        return PolicyError(text, self.rule.where)

    def count(self, unit: str) -> int | None:
        """Return the number of units in this scope; None if it is inferred from the parameter."""
        return self.scope.table.count(unit, self.scope.block)

    def number(self, expression: str) -> int:
        """Return the value of an expression of the rule."""
        return self.scope.table.number(expression, self.scope.block, self.shown, self.rule.where)

    def layout(self, parts: Sequence[UnitRun], dim: int, elements: int, shown: str = "") -> Layout:
        """Return the layout of ``parts`` along a dim of ``elements``; ``shown``: the name in errors."""
        try:
            return self.scope.table.layout(parts, dim, elements, shown or self.shown, self.rule.where, self.scope.block)
        except PolicyError as error:
            key = next((key for key, rule in self.scope.rules.items() if rule == self.rule), self.shown)
            line = f"{{{key}: replicated}}"
            section = self.scope.name.rpartition("/")[2]
            rule = f"{section}: {line}" if self.scope.block is None else f"blocks: {{modules: {line}}}"
            error.args = (f"{error}\n  If this module has another size, use a policy that replicates it: {rule}",)
            raise


def all_scopes(
    policy: Policy, prefix: str, model: nn.Module, tp: int, policy_of: Callable[[PreTrainedModel], Policy] = find_policy
) -> Iterator[Scope]:
    """Yield every scope of a policy on a model, and the scopes of models inside it by their policies."""
    if tp > 1:
        check_kernels(policy, model)
    name, base = base_of(model)
    base_path = join(prefix, name)
    rows, together = rows_of(policy), block_of(model)
    for tower in policy.towers:
        config = config_of(model)
        for step in tower.config.split(".") if tower.config else ():
            if not hasattr(config, step):
                lacks = f"which {type(config).__name__} lacks.{nearest(step, vars(config))}"
                raise PolicyError(f"tower '{tower.name}' reads config.{tower.config}, {lacks}", tower.where)
            config = getattr(config, step)
        table = UnitTable(_aligned(tower.units, together), config, type(model).__name__, tp, rows, model)
        for section in ("prefix", "every_stage", "suffix"):
            rules = getattr(tower, section)
            yield Scope(base_path, base, f"{base_path}/{tower.name}/{section}", table, rules, {}, {}, tower.where)
        everywhere = f"{base_path}/{tower.name}"
        yield Scope(base_path, base, everywhere, table, {}, tower.attributes, tower.inputs, tower.where)
        walked = ((each, walk(base, each.blocks_path, each.blocks_where)) for each in tower.lists if each.blocks_where)
        for part, (list_path, blocks) in ((part, found) for part, lists in walked for found in lists):
            if not isinstance(blocks, nn.ModuleList | nn.Sequential | nn.ModuleDict):
                words = f"blocks.path '{part.blocks_path}' must be a ModuleList of {type(base).__name__}"
                raise PolicyError(words, part.blocks_where)
            for name, block in blocks.named_children():
                path, own = join(base_path, list_path, name), (part.block_attributes, part.block_inputs)
                yield Scope(path, block, path, table, part.blocks, *own, part.where, block)
    table = UnitTable(_aligned(policy.units, together), config_of(model), type(model).__name__, tp, rows, model)
    yield Scope(prefix, model, f"{prefix}/head", table, policy.head, policy.head_attributes, {}, policy.where)
    for pattern, where in policy.models.items():
        for path, inside in walk(base, pattern, where):
            if not isinstance(inside, PreTrainedModel):
                raise PolicyError(f"{path} is a {type(inside).__name__}, for which there is no policy", where)
            yield from all_scopes(policy_of(inside), join(base_path, path), inside, tp, policy_of)


def _aligned(units: Mapping[str, UnitSpec], together: int) -> Mapping[str, UnitSpec]:
    """Return units of which ranks hold multiples of ``together`` if there are enough, for quantized weights."""
    if together == 1:
        return units
    return {name: replace(spec, align=math.lcm(spec.align, together)) for name, spec in units.items()}


def rows_of(policy: Policy) -> frozenset[str]:
    """Return the units that are rows of an embedding, of which a rank may hold none."""
    sections = [policy.head]
    for tower in policy.towers:
        sections += [tower.prefix, tower.every_stage, tower.suffix, *(part.blocks for part in tower.lists)]
    return frozenset(
        unit for section in sections for rule in section.values() if rule.kind == "embedding" for unit in rule.units
    )


def matches_of(scope: Scope) -> Iterator[RuleMatch]:
    """Yield every rule of a scope with its matches."""
    for pattern, rule in scope.rules.items():
        for path, module in walk(scope.root, pattern, rule.where):
            yield RuleMatch(join(scope.path, path), module, rule, scope, path)


def walk(root: nn.Module, pattern: str, where: Where) -> Iterator[tuple[str, nn.Module | torch.Tensor]]:
    """Yield each module, bare parameter or buffer at ``pattern``; nothing if a segment marked ``?`` is missing or None.

    ``*`` matches every member of a list of modules. Adapters are skipped (:mod:`autopar.compat.peft`).
    """
    found: list[tuple[str, Any]] = [("", root)]
    for segment in pattern.split("."):
        name, optional = segment.removesuffix("?"), segment.endswith("?")
        below: list[tuple[str, Any]] = []
        for path, module in found:
            if name == "*":
                children = list(module.named_children())
            else:
                tables = (own_modules, own_parameters, own_buffers) if isinstance(module, nn.Module) else ()
                child = getattr(module, name) if any(name in table(module) for table in tables) else None
                children = [] if child is None else [(name, child)]
            if not children and not optional and not (name == "*" and isinstance(module, nn.ModuleList)):
                known = [known for known, _ in root.named_modules() if known]
                known += [known for known, _ in (*root.named_parameters(), *root.named_buffers())]
                wanted = pattern.replace("?", "")
                raise PolicyError(f"{type(root).__name__} has no module '{wanted}'.{nearest(wanted, known)}", where)
            below += [
                (join(path, child_name, further), inside)
                for child_name, child in children
                for further, inside in seen_through(child)
            ]
        found = below
    yield from found


def around(path: str) -> Iterator[str]:
    """Yield the paths of the modules around a module, from its parent to the model, ``""``."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def join(*parts: str) -> str:
    """Join the parts of a dotted path that are not empty."""
    return ".".join(part for part in parts if part)


_OWN_PARAMETERS = ("region", "column", "row", "embedding", BY_EXPERT)  # rules that do not cover submodules


def check_overlap(matches: list[RuleMatch]) -> None:
    """Raise PolicyError if two rules match a module."""
    by_path: dict[str, RuleMatch] = {}
    for match in matches:
        if match.path in by_path:
            raise match.error(f"{match.path} is matched by two rules, here and in {by_path[match.path].rule.where}")
        by_path[match.path] = match
    for path, match in by_path.items():
        for outer in (by_path[each] for each in around(path) if each and each in by_path):
            if outer.rule.kind not in _OWN_PARAMETERS:
                raise match.error(f"{path} is matched by two rules, here and, with {outer.path}, in {outer.rule.where}")


def check_regions(matches: list[RuleMatch], modules: Mapping[str, ModulePlan]) -> None:
    """Check that in each scope a row closes each region of a column, and that the columns and rows have equal units.

    Raises:
        PolicyError: A rule has no counterpart.
    """
    scopes: dict[str, list[RuleMatch]] = {}
    for match in matches:
        scopes.setdefault(match.scope.name, []).append(match)
    of_towers = {(id(u.scope.table), u.scope.table.family(x)) for u in matches if _opens(u.rule) for x in u.rule.units}
    for name, inside in scopes.items():
        table = inside[0].scope.table
        families = [(table.family(unit), match) for match in inside for unit in match.rule.units]
        opened = {family: match for family, match in families if _opens(match.rule)}
        closed = {family: match for family, match in families if _closes(match.rule)}
        entered = {family for family, m in families if m.rule.kind in _ENTERS and not m.rule.closes} | {*opened}
        alone = [
            (m, "opens", next(unit for unit in m.rule.units if table.family(unit) == family), _NO_ROW)
            for family, m in opened.items()
            if family not in closed
        ]
        alone += [(m, "closes", m.rule.units[0], _NO_COLUMN) for family, m in closed.items() if family not in entered]
        for match, does, unit, advice in alone:
            raise match.error(f"{match.shown} {does} a region sharded by '{unit}' {advice}")
        for match in inside:
            if match.rule.kind in ("replicated", "once") and match.rule.units:
                unit = match.rule.units[0]
                for_blocks = name.endswith("/every_stage") and (id(table), table.family(unit)) in of_towers
                if table.family(unit) not in entered and not for_blocks:
                    raise match.error(
                        f"{match.shown} works on activations sharded by '{unit}', but no column opens them"
                    )
        _check_counts(inside, modules)


_NO_ROW = "that no row closes; add a row rule, or gather_output: true"
_NO_COLUMN = "that no column opens; add a column rule, or split_input: true"
_ENTERS = ("region", "enter_output", "sharded")


def _check_counts(inside: list[RuleMatch], modules: Mapping[str, ModulePlan]) -> None:
    """Check that the number of units that a row reads is the number that a column makes, for inferred counts."""
    opened: dict[str, dict[int, RuleMatch]] = {}
    for opening in (True, False):
        for match in inside:
            plan = modules.get(match.path)
            if plan is None or plan.layout is None or not (_opens(match.rule) if opening else _closes(match.rule)):
                continue
            for block in plan.layout.blocks:
                known = opened.setdefault(block.unit, {})
                if opening:
                    known.setdefault(block.count, match)
                elif known and block.count not in known:
                    count, first = next(iter(known.items()))
                    shown = f"{match.shown} reads {block.count} '{block.unit}', but {first.shown} makes {count}"
                    raise match.error(f"{shown} ({first.rule.where})")


def _opens(rule: Rule) -> bool:
    return rule.opens or (rule.kind == "column" and not rule.gather_output)


def _closes(rule: Rule) -> bool:
    return rule.closes or (rule.kind == "row" and not rule.split_input)


def check_kernels(policy: Policy, model: nn.Module) -> None:
    """Raise UnsupportedModelError if a function in ``without_kernels`` is not transformers' torch code."""
    for name in policy.without_kernels:
        function = getattr(sys.modules.get(type(model).__module__), name, None)
        variables = getattr(getattr(function, "__code__", None), "co_freevars", ())
        cells = getattr(function, "__closure__", None) or ()
        wrapped = dict(zip(variables, (cell.cell_contents for cell in cells), strict=True))  # by transformers
        if wrapped.get("is_new_implementation"):
            raise UnsupportedModelError(
                f"{type(model).__name__} is not supported with the kernel '{name}' of an installed package, which uses "
                "sharded weights without an all-reduce.\n"
                "  Uninstall that package (mamba-ssm, causal-conv1d) here, or leave tensor_parallel_size at 1 "
                f"({policy.where})."
            )


def check_forwards(model: nn.Module, plan: Plan) -> None:
    """Raise ConfigError if a layer that the plan shards has a ``forward`` set on the object.

    Python uses it instead of the method of the sharded class, so the sum over ranks would be left out.
    """
    if plan.tp == 1:
        return
    layers = [path for path, module in plan.modules.items() if module.rule in ("column", "row", "embedding")]
    found = [path for path in layers if _has_another(model.get_submodule(path))]
    if not found:
        return
    first, more = model.get_submodule(found[0]), f", and {len(found) - 1} more" if len(found) > 1 else ""
    if hasattr(first, ACCELERATE_HOOK):
        cause = (
            "  Remove accelerate's hooks (device_map=..., cpu_offload) before initialize:\n"
            "  accelerate.hooks.remove_hook_from_module(model, recurse=True)"
        )
    else:
        cause = "  Use register_forward_hook or register_forward_pre_hook, or replace the layer by a subclass."
    raise ConfigError(
        f"{found[0]}{more} ({plan.modules[found[0]].rule}, tensor_parallel_size={plan.tp}) must not have a forward set "
        f"on the object: it would replace the\n  sharded forward, and results would be wrong.\n{cause}"
    )


def _has_another(module: nn.Module) -> bool:
    """Return whether the object's ``forward`` differs from the class's, which removed hooks leave on the object."""
    own = vars(module).get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def drop_plain_forward(module: nn.Module) -> None:
    """Delete a ``forward`` of the object that is its class's method, because the class will be swapped."""
    if not _has_another(module):
        vars(module).pop("forward", None)
