"""Make a :class:`Plan` from a policy, a model and a tensor-parallel size. All checks are made here."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from autopar import registry
from autopar.compat.tensors import own_parameters
from autopar.errors import ConfigError, PolicyError, listed, nearest
from autopar.layout import Block, Layout
from autopar.plan.matching import RuleMatch, Scope, all_scopes, check_overlap, check_regions, join, matches_of, walk
from autopar.plan.plan import AttributePlan, InputPlan, ModulePlan, Plan
from autopar.plan.rules import TensorRule, tensor_rules_of
from autopar.plan.tensors import plan_tensors
from autopar.policy.match import Described, model_type_of
from autopar.policy.schema import BY_EXPERT, Policy, Ratio


def scaled_attributes(scope: Scope, modules: Mapping[str, ModulePlan]) -> Iterator[AttributePlan]:
    """Yield each attribute of a scope with its value on every rank."""
    start = scope.path + "." if scope.path else ""
    counts = {
        unit.unit: unit.count
        for path, plan in modules.items()
        if path.startswith(start)
        for layout in (*plan.layouts.values(), *([plan.layout] if plan.layout is not None else []))
        for unit in layout.blocks
    }
    for pattern, ratio in scope.attributes.items():
        units = [part.unit for part in ratio.parts] + ([ratio.per] if ratio.per else [])
        parent, _, name = pattern.rpartition(".")
        of_config = parent.removesuffix("?").split(".")[-1] == "config"
        if of_config:
            parent = parent.removesuffix("?").removesuffix("config").removesuffix(".")
        for path, module in walk(scope.root, parent, ratio.where) if parent else [("", scope.root)]:
            optional, own = name.endswith("?"), name.removesuffix("?")
            holder = getattr(module, "config", None) if of_config else module
            value = getattr(holder, own, None) if isinstance(module, nn.Module) else None
            shown = join(path, "config" if of_config else "", own)
            if type(value) is not int:
                if optional and not isinstance(value, int):
                    continue
                hint = nearest(own, [key for key, v in vars(module).items() if type(v) is int])
                raise PolicyError(f"{type(scope.root).__name__} has no integer attribute '{shown}'.{hint}", ratio.where)
            if optional and scope.block is not None and units[0] not in counts:
                continue  # an attribute of the same name in another mixer
            if any(scope.table.stays_whole(unit, scope.block) for unit in units):
                continue
            yield AttributePlan(
                join(scope.path, path),
                f"config.{own}" if of_config else own,
                str(ratio.where),
                value,
                _scaled(value, ratio, counts, scope, shown),
            )


def _scaled(value: int, ratio: Ratio, counts: Mapping[str, int], scope: Scope, shown: str) -> tuple[int, ...]:
    """Return the value of each rank for the model's ``value``."""
    table, tp = scope.table, scope.table.size
    if len(ratio.parts) > 1 or (ratio.parts[0].width is not None and ratio.per is None):
        layout = table.layout(ratio.parts, 0, value, shown, ratio.where, scope.block)
        return tuple(layout.local_size(rank) for rank in range(tp))
    top_part, per = ratio.parts[0], ratio.per
    width = 1 if top_part.width is None else table.number(top_part.width, scope.block, shown, ratio.where)
    numbers = []
    for unit in (top_part.unit, per):
        if unit is not None:
            count = table.count(unit, scope.block) or counts.get(unit)
            if count is None:
                raise PolicyError(
                    f"{shown} needs a sharded unit; '{unit}' is inferred and not sharded in this block", ratio.where
                )
            ranges = table.ranges(unit, count, tp, scope.block)
            numbers.append([count, *(stop - start for start, stop in ranges)])
    top, bottom = [width * number for number in numbers[0]], numbers[1] if len(numbers) == 2 else [1] * (tp + 1)
    if per is not None and value * bottom[0] != top[0]:
        raise PolicyError(f"{shown}={value} must be {top_part} / {per} = {top[0]} / {bottom[0]}", ratio.where)
    if value * bottom[0] % top[0]:
        raise PolicyError(f"{shown}={value} is not a multiple of {top[0]} {top_part}", ratio.where)
    values = []
    for rank in range(1, tp + 1):
        scaled, rest = divmod(value * bottom[0] * top[rank], top[0] * bottom[rank])
        if rest:
            raise ConfigError(
                f"tensor_parallel_size={tp} does not fit {table.model}: {shown} would be {top[rank]} / {bottom[rank]} "
                f"({top_part} / {per}) on rank {rank - 1}, which is not an integer ({ratio.where})."
            )
        values.append(scaled)
    return tuple(values)


def sliced_inputs(scope: Scope) -> Iterator[tuple[str, InputPlan]]:
    """Yield each argument of a scope that is sliced: path of the module, and its plan."""
    for pattern, entry in scope.inputs.items():
        if scope.table.stays_whole(entry.unit, scope.block):
            continue
        parent, _, name = pattern.rpartition(".")
        for path, module in walk(scope.root, parent, entry.where) if parent else [("", scope.root)]:
            if not isinstance(module, nn.Module):
                raise PolicyError(f"{path} must be a module whose forward has the argument '{name}'", entry.where)
            known = list(inspect.signature(module.forward).parameters)
            if name not in known:
                raise PolicyError(
                    f"forward of {path} ({type(module).__name__}) has no argument '{name}'.{nearest(name, known)}",
                    entry.where,
                )
            count = scope.table.count(entry.unit, scope.block)
            if count is None:
                raise PolicyError(f"'{entry.unit}' is inferred: the input {name} needs a count", entry.where)
            ranges = scope.table.ranges(entry.unit, count, scope.table.size, scope.block)
            width = scope.table.number(entry.width or "1", scope.block, name, entry.where)
            layout = Layout.of(entry.dim, [Block(entry.unit, count, width, ranges)])
            yield join(scope.path, path), InputPlan(name, layout, str(entry.where))


def make_plan(root: nn.Module, policy: Policy | Described, tp: int, *, experts: int = 1) -> Plan:
    """Return the shards of ``root`` on each of ``tp`` ranks. Works on the meta device and in one process.

    Args:
        experts: The number of ranks over which mixtures are sharded by expert, a multiple of ``tp``; 1 shards each
            expert.

    Raises:
        PolicyError: The policy does not describe this model (with file and line).
        ConfigError: The size does not fit (with a size that does).
    """
    described = Described.of(root, policy)
    policy, prefix, model = described.policy, described.prefix, described.model
    additions = [addition(root) for _, addition in registry.entries("additions")]
    for addition in additions:
        addition.check(tp, 1)
    scopes = list(all_scopes(policy, prefix, model, tp, described.policy_of))
    names = _names(root)
    found = [match for scope in scopes for met in matches_of(scope) for match in _replicated_if_too_few(met)]
    matches = _distinct_matches(found, names)
    check_overlap(matches)
    modules: dict[str, ModulePlan] = {}
    layouts = _Layouts()
    expert_attributes: list[AttributePlan] = []
    expert_rules: Collection[str] = ()
    if experts > 1:
        where = next((match.rule.where for match in matches if match.rule.by_expert is not None), policy.where)
        lay = registry.entry("matches", BY_EXPERT, f"the rule '{BY_EXPERT}' ({where})")
        matches, expert_attributes, expert_rules = lay(matches, root, experts)
    for bare in (False, True):  # a bare parameter that is tied to a layer's weight follows the layer's rule
        for match in matches:
            if isinstance(match.module, nn.Module) is not bare:
                for rule in (match.rules or tensor_rules_of)(match):
                    _add(rule, match, modules, layouts, bare)
    for match, rule in (found for addition in additions for found in addition.rules(matches, modules, tp)):
        _add(rule, match, modules, layouts, bare=False)
        expert_attributes.extend(rule.attributes)
    check_regions(matches, modules)
    attributes = [replace(a, path=names[a.path]) for scope in scopes for a in scaled_attributes(scope, modules)]
    for scope in scopes:
        for path, sliced in sliced_inputs(scope):
            known = modules.get(names[path]) or ModulePlan(names[path], "", sliced.where)
            if all(other.name != sliced.name for other in known.inputs):  # a shared module may have it already
                modules[known.path] = replace(known, inputs=(*known.inputs, sliced))
    _refuse_replicas_in_regions(modules)
    for plan in list(modules.values()):  # a mixer that reads its convolution's weight sums the gradient
        special = plan.summed or any(layout.replicated for layout in plan.layouts.values())
        parent = plan.path.rpartition(".")[0]
        if special and plan.rule in ("sharded", "replicated", "norm_over") and parent and parent not in modules:
            modules[parent] = ModulePlan(parent, "", plan.where)
    _check_ties(root, layouts, modules, {match.path for match in matches if not isinstance(match.module, nn.Module)})
    if missing := [join(prefix, name) for name, parameter in model.named_parameters() if id(parameter) not in layouts]:
        raise PolicyError(
            f"no rule covers {len(missing)} parameters of {type(model).__name__}: {listed(missing)}. "
            "Every parameter needs a rule; 'replicated' keeps it full on every rank.",
            policy.where,
        )
    mixtures = {path for path, plan in modules.items() if plan.rule in expert_rules}
    mixtures |= {attribute.path for attribute in expert_attributes}
    attributes = [attribute for attribute in attributes if attribute.path not in mixtures]
    if tp == 1 and experts > 1:  # all other modules stay as they are
        wide = {path for path, plan in modules.items() if any(x.axis_size == experts for x in plan.layouts.values())}
        wide |= {path for path, plan in modules.items() if plan.extension}
        modules, attributes = {path: plan for path, plan in modules.items() if path in mixtures | wide}, []
    by_id, over_replicas = layouts.over(tp, max(tp, experts))
    places = {key: str(match.rule.where) for key, (_, match, _) in layouts.items()}
    tensors = plan_tensors(root, prefix, model, by_id, places)
    return Plan(
        tp=tp,
        model_type=model_type_of(model),
        policy=policy.name,
        tensors=tensors,
        modules=modules,
        attributes=tuple(_distinct([*attributes, *expert_attributes])),
        shards=max(tp, experts),
        experts=frozenset(n for n, p in root.state_dict(keep_vars=True).items() if id(p) in over_replicas),
    )


def _replicated_if_too_few(match: RuleMatch) -> list[RuleMatch]:
    """Return the match, changed to ``replicated`` if ``or_whole`` applies; a buffer then needs no rule."""
    units = match.rule.units
    if not any(match.scope.table.stays_whole(unit, match.scope.block) for unit in units):
        return [match]
    if isinstance(match.module, torch.Tensor) and not isinstance(match.module, nn.Parameter):
        return []
    if match.rule.extension:
        raise match.error(
            f"'{match.rule.extension[0]}' of {match.shown} needs a sharded layer, but 'or_whole' keeps the layer "
            "replicated here."
        )
    return [replace(match, rule=replace(match.rule, kind="replicated", parts=(), gather_output=False, split_input=False,
                                      enter_output=False, inside=False, dim=None, by_expert=None))]  # fmt: skip


def _names(root: nn.Module) -> dict[str, str]:
    """Map each path to the first path of the same module, which several blocks may share (Zamba, ALBERT)."""
    first = {id(module): path for path, module in root.named_modules()}
    return {path: first[id(module)] for path, module in root.named_modules(remove_duplicate=False)}


def _distinct_matches(matches: list[RuleMatch], names: Mapping[str, str]) -> list[RuleMatch]:
    """Keep one match per module, for its first path."""
    found: dict[int, RuleMatch] = {}
    result = []
    for match in matches:
        holder, _, name = match.path.rpartition(".")
        path = names[match.path] if isinstance(match.module, nn.Module) else join(names[holder], name)
        known = found.get(id(match.module)) if path != match.path else None
        if known is None or replace(known.rule, where=match.rule.where) != match.rule:
            found[id(match.module)] = replace(match, path=path)
            result.append(found[id(match.module)])
    return result


class _Layouts(dict[int, tuple[Layout | None, RuleMatch, str]]):
    """``id`` of a parameter or buffer -> layout, the match that determines it, and the name in the matched module."""

    def note(self, tensor: torch.Tensor, layout: Layout | None, match: RuleMatch, name: str, *, bare: bool) -> None:
        """Set the layout of a tensor. Tied tensors must agree, but a layer's rule overrides a bare parameter's."""
        known, other, other_name = self.setdefault(id(tensor), (layout, match, name))
        if known != layout and not (bare and layout is None):
            raise match.error(
                f"{join(match.path, name)} is the same tensor as {join(other.path, other_name)}, but {_words(layout)} "
                f"here and {_words(known)} by {other.rule.where}"
            )

    def over(self, tp: int, ranks: int) -> tuple[dict[int, Layout | None], set[int]]:
        """Return layouts over ``ranks``, and the tensors that are sharded over all of them instead of over ``tp``."""
        found = {key: layout for key, (layout, _, _) in self.items()}
        wide = {key for key, layout in found.items() if layout is not None and layout.axis_size > tp}
        if ranks > tp:
            found = {key: layout and layout.repeated(ranks // layout.axis_size) for key, layout in found.items()}
        return found, wide


def _add(rule: TensorRule, match: RuleMatch, modules: dict[str, ModulePlan], layouts: _Layouts, bare: bool) -> None:
    for name, tensor, layout in rule.tensors:
        layouts.note(tensor, layout, match, name, bare=bare)
    plan = rule.plan
    known = None if plan is None else modules.setdefault(plan.path, plan)
    if plan is None or known is None or known is plan:
        return
    if known.rule and plan.rule:
        raise match.error(f"{match.path} is matched by two rules, here and in {known.where}")
    modules[plan.path] = replace(
        known if known.rule else plan,
        layouts={**known.layouts, **plan.layouts},
        summed=known.summed | plan.summed,
        once=known.once | plan.once,
    )


def _refuse_replicas_in_regions(modules: Mapping[str, ModulePlan]) -> None:
    """Check that no parameter in a region is on two ranks, because the outputs of a region are summed."""
    regions = [path for path, plan in modules.items() if plan.rule == "region"]
    for path, plan in modules.items():
        if any(path == region or path.startswith(region + ".") for region in regions):
            for name, layout in plan.layouts.items():
                if layout.replicated:
                    raise ConfigError(
                        f"tensor_parallel_size={layout.axis_size} does not fit {join(path, name)}: a region needs at "
                        f"least one unit of each kind per rank ({plan.where})."
                    )


def _words(layout: Layout | None) -> str:
    if layout is None:
        return "replicated"
    return f"sharded along dim {layout.dim} by {', '.join(block.unit for block in layout.blocks)}"


def _distinct(attributes: list[AttributePlan]) -> list[AttributePlan]:
    """Drop duplicates of modules that several blocks share. Two rules for one attribute must agree."""
    found: dict[tuple[str, str], AttributePlan] = {}
    for attribute in attributes:
        known = found.setdefault((attribute.path, attribute.name), attribute)
        if known.values != attribute.values:
            raise ConfigError(
                f"{attribute.path}.{attribute.name} becomes {list(attribute.values)} by {attribute.where} and "
                f"{list(known.values)} by {known.where}"
            )
    return list(found.values())


def _check_ties(root: nn.Module, layouts: _Layouts, modules: Mapping[str, ModulePlan], bare: Collection[str]) -> None:
    """Check that each module with a sharded parameter has a rule; a tied module without one would use the shard."""
    for path, module in root.named_modules():
        for name, parameter in own_parameters(module).items():
            layout, other, _ = layouts.get(id(parameter), (None, None, ""))
            if layout is None or other is None or join(path, name) in bare:
                continue
            plan = modules.get(path)
            if plan is None or name not in plan.layouts:
                same = f"{join(path, name)} is the same tensor as {join(other.path, name)}"
                raise other.error(f"{same}, which this rule shards, and needs a rule that shards it too")
