"""make_plan: one policy, one model, one axis size -> a :class:`Plan`. Every check is here; the model is only read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from autopar.errors import ConfigError, PolicyError
from autopar.layout import Layout
from autopar.policy.attributes import scaled_attributes
from autopar.policy.plan import ModulePlan, Plan
from autopar.policy.schema import HIDDEN, Policy, Rule
from autopar.policy.tensors import plan_tensors
from autopar.policy.units import UnitTable
from autopar.policy.uses import Use, all_uses, check_overlap, hugging_face_model, join

__all__ = ["make_plan"]


def make_plan(root: nn.Module, policy: Policy, tp: int) -> Plan:
    """What each of ``tp`` ranks will hold of ``root``. Works on the meta device and in one process.

    Raises:
        PolicyError: the policy does not describe this model (file and line).
        ConfigError: the size does not fit (both numbers, and what would).
    """
    prefix, model = hugging_face_model(root)
    uses = list(all_uses(policy, prefix, model))
    check_overlap(uses)
    rows = frozenset(unit for use in uses if use.rule.kind == "embedding" for unit in use.rule.units)
    table = UnitTable(policy.units, model.config, type(model).__name__, rows)
    modules: dict[str, ModulePlan] = {}
    layouts: dict[int, tuple[Layout | None, Use, str]] = {}
    for use in uses:
        if isinstance(use.module, nn.Module):
            _resolve_use(use, table, tp, modules, layouts)
    for use in uses:
        if isinstance(use.module, nn.Parameter):
            _resolve_bare(use, layouts)
    _check_regions(uses, modules, table)
    attributes = tuple(scaled_attributes(policy, prefix, model, modules, table, tp))
    _check_coverage(model, prefix, layouts, policy)
    by_id = {key: layout for key, (layout, _, _) in layouts.items()}
    return Plan(
        tp=tp,
        model_type=model.config.model_type,
        policy=policy.name,
        tensors=plan_tensors(root, prefix, model, by_id),
        modules=modules,
        attributes=attributes,
    )


# -- one rule on one module ---------------------------------------------------------------------------------------


def _resolve_use(
    use: Use, table: UnitTable, tp: int, modules: dict[str, ModulePlan], layouts: dict[int, tuple[Any, Use, str]]
) -> None:
    rule, module = use.rule, use.module
    assert isinstance(module, nn.Module)
    if rule.kind == "replicated":
        for name, parameter in module.named_parameters():
            _note(layouts, parameter, None, use, name)
        for inside, holder in module.named_modules() if rule.units else ():
            if holder._parameters:
                path = join(use.path, inside)
                modules[path] = ModulePlan(path, "replicated", str(rule.where), sum_gradients=True)
        return
    weight, dim = _weight_and_dim(use)
    layout = table.layout(rule.units, dim, weight.shape[dim], tp, use.shown, rule.where)
    if (rule.gather_output or rule.split_input) and layout.replicated:
        raise ConfigError(
            f"tensor_parallel_size={tp} does not fit {use.shown}: gather_output and split_input need at least "
            f"one unit of each kind a rank ({rule.where})."
        )
    _note(layouts, weight, layout, use, "weight")
    bias = getattr(module, "bias", None)
    if bias is not None:
        whole = rule.kind == "row"
        _note(layouts, bias, None if whole else Layout.of(0, layout.blocks), use, "bias")
    modules[use.path] = ModulePlan(
        use.path,
        rule.kind,
        str(rule.where),
        layout,
        gather_output=rule.gather_output,
        split_input=rule.split_input,
        by_hidden=rule.kind == "embedding" and rule.units == (HIDDEN,),
    )


def _resolve_bare(use: Use, layouts: dict[int, tuple[Any, Use, str]]) -> None:
    """A parameter beside the layers. If it is tied to one that a layer's rule cuts (BERT's bias), that rule holds."""
    if use.rule != Rule("replicated", use.rule.where):
        raise PolicyError(f"{use.shown} is a bare parameter, which can only be 'replicated'", use.rule.where)
    layouts.setdefault(id(use.module), (None, use, ""))


def _weight_and_dim(use: Use) -> tuple[nn.Parameter, int]:
    """The weight that the rule cuts and the dim of its units. ``nn.Linear`` stores [out, in], ``Conv1D`` [in, out]."""
    module, rule = use.module, use.rule
    kind = type(module).__name__
    if rule.kind == "embedding":
        if not isinstance(module, nn.Embedding):
            raise PolicyError(f"'embedding' needs an nn.Embedding, {use.shown} is a {kind}", rule.where)
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            uses = "max_norm, sparse or scale_grad_by_freq"
            raise PolicyError(f"{use.shown} uses {uses}, which look at the whole table; it cannot be cut", rule.where)
        dim = 1 if rule.units == (HIDDEN,) else 0
    elif isinstance(module, nn.Linear):
        dim = 0 if rule.kind == "column" else 1
    elif isinstance(module, Conv1D):
        dim = 1 if rule.kind == "column" else 0
    else:
        raise PolicyError(f"'{rule.kind}' needs an nn.Linear or Conv1D, {use.shown} is a {kind}", rule.where)
    weight = module.weight
    if type(weight) is not nn.Parameter or not weight.is_floating_point():
        raise PolicyError(
            f"{use.shown}.weight is a {type(weight).__name__} of {weight.dtype}; only plain floating-point "
            "parameters can be cut",
            rule.where,
        )
    return weight, dim


def _note(
    layouts: dict[int, tuple[Any, Use, str]], parameter: nn.Parameter, layout: Layout | None, use: Use, name: str
) -> None:
    """Record the layout of a parameter; modules that share one (tied weights) must agree."""
    known = layouts.get(id(parameter))
    if known is None:
        layouts[id(parameter)] = (layout, use, name)
    elif known[0] != layout:
        other = known[1]
        raise PolicyError(
            f"{use.path}.{name} is the same tensor as {other.path}.{known[2]}, but {_words(layout)} here and "
            f"{_words(known[0])} by {other.rule.where}",
            use.rule.where,
        )


def _words(layout: Layout | None) -> str:
    return "whole" if layout is None else f"cut along dim {layout.dim} by {', '.join(b.unit for b in layout.blocks)}"


# -- checks of the whole ------------------------------------------------------------------------------------------


def _check_regions(uses: list[Use], modules: Mapping[str, ModulePlan], table: UnitTable) -> None:
    """Inside one block (or section) what a column opens a row must close, and widths of a unit must agree."""
    scopes: dict[str, list[Use]] = {}
    for use in uses:
        scopes.setdefault(use.scope, []).append(use)
    for inside in scopes.values():
        opened = {table.family(u): use for use in inside for u in use.rule.units if _opens(use.rule)}
        closed = {table.family(u): use for use in inside for u in use.rule.units if _closes(use.rule)}
        for family, use in opened.items():
            if family not in closed:
                raise PolicyError(
                    f"{use.shown} opens a region shared out by '{use.rule.units[0]}' that no row closes; "
                    "add a row rule, or gather_output: true",
                    use.rule.where,
                )
        for family, use in closed.items():
            if family not in opened:
                raise PolicyError(
                    f"{use.shown} closes a region shared out by '{use.rule.units[0]}' that no column opens; "
                    "add a column rule, or split_input: true",
                    use.rule.where,
                )
        widths: dict[str, tuple[tuple[int, int], Use]] = {}
        for use in inside:
            plan = modules.get(use.path)
            if use.rule.kind == "replicated" and use.rule.units and table.family(use.rule.units[0]) not in opened:
                raise PolicyError(
                    f"{use.shown} works on activations shared out by '{use.rule.units[0]}', but no column opens them",
                    use.rule.where,
                )
            for block in plan.layout.blocks if plan is not None and plan.layout is not None else ():
                numbers, first = widths.setdefault(block.unit, ((block.width, block.count), use))
                if numbers != (block.width, block.count):
                    raise PolicyError(
                        f"{block.count} '{block.unit}' are {block.width} wide in {use.shown}, "
                        f"but {numbers[1]} are {numbers[0]} wide in {first.shown} ({first.rule.where})",
                        use.rule.where,
                    )


def _opens(rule: Rule) -> bool:
    return rule.kind == "column" and not rule.gather_output


def _closes(rule: Rule) -> bool:
    return rule.kind == "row" and not rule.split_input


def _check_coverage(model: PreTrainedModel, prefix: str, layouts: Mapping[int, object], policy: Policy) -> None:
    missing = [join(prefix, name) for name, parameter in model.named_parameters() if id(parameter) not in layouts]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise PolicyError(
            f"no rule covers {len(missing)} parameters of {type(model).__name__}: {', '.join(missing[:5])}{more}. "
            "Every parameter needs a rule; 'replicated' keeps one whole.",
            policy.where,
        )
