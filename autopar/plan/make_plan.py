"""make_plan: one policy, one model, one axis size -> a :class:`Plan`. Every check is here; the model is only read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import nn

from autopar.errors import ConfigError, PolicyError
from autopar.layout import Layout
from autopar.plan.attributes import cut_inputs, scaled_attributes
from autopar.plan.experts import share_experts
from autopar.plan.matching import Use, all_scopes, check_overlap, join, uses_of
from autopar.plan.plan import AttributePlan, ModulePlan, Plan
from autopar.plan.regions import check_regions
from autopar.plan.rules import Cut, cuts_of
from autopar.plan.tensors import plan_tensors
from autopar.policy.described_model import model_inside, model_type_of
from autopar.policy.schema import Policy

__all__ = ["make_plan"]


def make_plan(root: nn.Module, policy: Policy, tp: int, *, by_expert: bool = False) -> Plan:
    """What each of ``tp`` ranks will hold of ``root``. Works on the meta device and in one process.

    Args:
        by_expert: share mixtures of experts out by expert instead of cutting each.

    Raises:
        PolicyError: the policy does not describe this model (file and line).
        ConfigError: the size does not fit (both numbers, and what would).
    """
    prefix, model = model_inside(root, policy)
    scopes = list(all_scopes(policy, prefix, model, tp))
    names = _Names(root)
    uses = names.each_once([use for scope in scopes for met in uses_of(scope) for use in _whole_if_too_few(met)])
    check_overlap(uses)
    modules: dict[str, ModulePlan] = {}
    layouts = _Layouts()
    expert_attributes: list[AttributePlan] = []
    if by_expert:
        uses, expert_attributes = share_experts(uses)
    for bare in (False, True):  # a bare parameter that is tied to one which a layer's rule cuts follows that rule
        for use in uses:
            if isinstance(use.module, nn.Module) is not bare:
                for cut in cuts_of(use):
                    _add(cut, use, modules, layouts, bare)
    check_regions(uses, modules)
    attributes = [replace(a, path=names[a.path]) for scope in scopes for a in scaled_attributes(scope, modules)]
    for scope in scopes:
        for path, cut_input, where in cut_inputs(scope):
            known = modules.get(names[path]) or ModulePlan(names[path], "", where)
            if any(other.name == cut_input.name for other in known.inputs):
                continue  # a module that several blocks share
            modules[known.path] = replace(known, inputs=(*known.inputs, cut_input))
    _refuse_replicas_in_regions(modules)
    _watch_parents(modules)
    _check_ties(root, layouts, modules, {use.path for use in uses if not isinstance(use.module, nn.Module)})
    _check_coverage(model, prefix, layouts, policy)
    experts = {attribute.path for attribute in expert_attributes}
    attributes = [attribute for attribute in attributes if attribute.path not in experts]
    return Plan(
        tp=tp,
        model_type=model_type_of(model),
        policy=policy.name,
        tensors=plan_tensors(root, prefix, model, layouts.by_id()),
        modules=modules,
        attributes=tuple(_once_each([*attributes, *expert_attributes])),
    )


def _whole_if_too_few(use: Use) -> list[Use]:
    """``use``, as ``replicated`` where ``or_whole`` says so; a buffer needs no rule for that."""
    units = use.rule.units
    if not any(use.scope.table.stays_whole(unit, use.scope.block) for unit in units):
        return [use]
    if isinstance(use.module, torch.Tensor) and not isinstance(use.module, nn.Parameter):
        return []
    return [replace(use, rule=replace(use.rule, kind="replicated", parts=(), gather_output=False, split_input=False,
                                      enter_output=False, inside=False, dim=None, by_expert=None))]  # fmt: skip


class _Names:
    """Paths of modules; one that several blocks share (Zamba's, ALBERT's) goes by its first path."""

    def __init__(self, root: nn.Module) -> None:
        first = {id(module): path for path, module in root.named_modules()}
        self._path = {path: first[id(module)] for path, module in root.named_modules(remove_duplicate=False)}

    def __getitem__(self, path: str) -> str:
        return self._path[path]

    def each_once(self, uses: list[Use]) -> list[Use]:
        """``uses`` without those of further paths to the same module."""
        found: dict[int, Use] = {}
        result = []
        for use in uses:
            if isinstance(use.module, nn.Module):
                path = self[use.path]
            else:
                holder, _, name = use.path.rpartition(".")
                path = join(self[holder], name)
            if path != use.path:
                known = found.get(id(use.module))
                if known is not None and replace(known.rule, where=use.rule.where) == use.rule:
                    continue
            first = replace(use, path=path)
            found[id(use.module)] = first
            result.append(first)
        return result


class _Layouts:
    """Parameter or buffer -> its layout and who said so; modules that share one (tied weights) must agree."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Layout | None, Use, str]] = {}

    def note(self, tensor: torch.Tensor, layout: Layout | None, use: Use, name: str, *, yields: bool) -> Layout | None:
        """The layout that holds; a bare parameter's ``replicated`` yields to a layer's rule."""
        known = self._known.setdefault(id(tensor), (layout, use, name))
        if known[0] != layout and not (yields and layout is None):
            other = known[1]
            raise PolicyError(
                f"{join(use.path, name)} is the same tensor as {join(other.path, known[2])}, but {_words(layout)} here "
                f"and {_words(known[0])} by {other.rule.where}",
                use.rule.where,
            )
        return known[0]

    def by_id(self) -> Mapping[int, Layout | None]:
        return {key: layout for key, (layout, _, _) in self._known.items()}

    def use(self, tensor: torch.Tensor) -> Use:
        """Whose rule came first."""
        return self._known[id(tensor)][1]

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._known


def _add(cut: Cut, use: Use, modules: dict[str, ModulePlan], layouts: _Layouts, bare: bool) -> None:
    for name, tensor, layout in cut.tensors:
        layouts.note(tensor, layout, use, name, yields=bare)
    if cut.plan is None:
        return
    known = modules.get(cut.plan.path)
    if known is None:
        modules[cut.plan.path] = cut.plan
        return
    if known.rule and cut.plan.rule:
        raise PolicyError(f"{use.path} is covered here and by {known.where}", use.rule.where)
    modules[cut.plan.path] = replace(
        known if known.rule else cut.plan,
        layouts={**known.layouts, **cut.plan.layouts},
        summed=known.summed | cut.plan.summed,
        once=known.once | cut.plan.once,
    )


def _refuse_replicas_in_regions(modules: Mapping[str, ModulePlan]) -> None:
    """The outputs of a region are summed: what two ranks hold would count twice."""
    regions = [path for path, plan in modules.items() if plan.rule == "region"]
    for path, plan in modules.items():
        if any(path == region or path.startswith(region + ".") for region in regions):
            for name, layout in plan.layouts.items():
                if layout.replicated:
                    raise ConfigError(
                        f"tensor_parallel_size={layout.axis_size} does not fit {join(path, name)}: a region needs at "
                        f"least one unit of each kind a rank ({plan.where})."
                    )


def _watch_parents(modules: dict[str, ModulePlan]) -> None:
    """A mixer that reads the weight of its convolution itself must be known to run, for the sum of its gradient."""
    for plan in list(modules.values()):
        special = plan.summed or any(layout.replicated for layout in plan.layouts.values())
        parent = plan.path.rpartition(".")[0]
        if special and plan.rule in ("cut", "replicated", "norm_over") and parent and parent not in modules:
            modules[parent] = ModulePlan(parent, "", plan.where)


def _words(layout: Layout | None) -> str:
    return "whole" if layout is None else f"cut along dim {layout.dim} by {', '.join(b.unit for b in layout.blocks)}"


def _once_each(attributes: list[AttributePlan]) -> list[AttributePlan]:
    """Modules that stand in several blocks (shared ones) are scaled once; two rules for one attribute must agree."""
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
    """Each module that holds a cut parameter knows it: a tied one without a rule would go on as if it were whole."""
    by_id = layouts.by_id()
    for path, module in root.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or by_id.get(id(parameter)) is None or join(path, name) in bare:
                continue
            plan = modules.get(path)
            if plan is None or name not in plan.layouts:
                other = layouts.use(parameter)
                raise PolicyError(
                    f"{join(path, name)} is the same tensor as {join(other.path, name)}, which this rule cuts, "
                    "but has no rule that cuts it",
                    other.rule.where,
                )


def _check_coverage(model: nn.Module, prefix: str, layouts: _Layouts, policy: Policy) -> None:
    missing = [join(prefix, name) for name, parameter in model.named_parameters() if parameter not in layouts]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise PolicyError(
            f"no rule covers {len(missing)} parameters of {type(model).__name__}: {', '.join(missing[:5])}{more}. "
            "Every parameter needs a rule; 'replicated' keeps one whole.",
            policy.where,
        )
