"""make_plan: one policy, one model, one axis size -> a :class:`Plan`. Every check is here; the model is only read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from autopar.errors import ConfigError, PolicyError, UnsupportedModelError, nearest
from autopar.layout import Layout
from autopar.policy.plan import AttributePlan, ModulePlan, Plan
from autopar.policy.schema import HIDDEN, Policy, Ratio, Rule, Where
from autopar.policy.tensors import plan_tensors
from autopar.policy.units import UnitTable

__all__ = ["hugging_face_model", "make_plan"]


def hugging_face_model(root: nn.Module) -> tuple[str, PreTrainedModel]:
    """The Hugging Face model inside ``root`` (often ``root`` itself) and its path.

    Raises:
        UnsupportedModelError: there is none, or more than one.
    """
    found: list[tuple[str, PreTrainedModel]] = []
    for path, module in root.named_modules():
        inside = any(path.startswith(outer + ".") or not outer for outer, _ in found)
        if isinstance(module, PreTrainedModel) and not inside:
            found.append((path, module))
    if len(found) == 1:
        return found[0]
    if not found:
        raise UnsupportedModelError(f"{type(root).__name__} is no Hugging Face model and holds none")
    listed = ", ".join(f"{path} ({type(module).__name__})" for path, module in found)
    raise UnsupportedModelError(
        f"{type(root).__name__} holds {len(found)} Hugging Face models: {listed}; one is supported"
    )


@dataclass(frozen=True)
class _Use:
    """One rule met one module, or one bare parameter.

    ``scope`` is the block or section inside which regions must open and close.
    """

    path: str
    module: nn.Module | nn.Parameter
    rule: Rule
    scope: str
    shown: str


def make_plan(root: nn.Module, policy: Policy, tp: int) -> Plan:
    """What each of ``tp`` ranks will hold of ``root``. Works on the meta device and in one process.

    Raises:
        PolicyError: the policy does not describe this model (file and line).
        ConfigError: the size does not fit (both numbers, and what would).
    """
    prefix, model = hugging_face_model(root)
    uses = list(_all_uses(policy, prefix, model))
    _check_overlap(uses)
    rows = frozenset(unit for use in uses if use.rule.kind == "embedding" for unit in use.rule.units)
    table = UnitTable(policy.units, model.config, type(model).__name__, rows)
    modules: dict[str, ModulePlan] = {}
    layouts: dict[int, tuple[Layout | None, _Use, str]] = {}
    for use in uses:
        if isinstance(use.module, nn.Module):
            _resolve_use(use, table, tp, modules, layouts)
    for use in uses:
        if isinstance(use.module, nn.Parameter):
            _resolve_bare(use, layouts)
    _check_regions(uses, modules, table)
    attributes = tuple(_attributes(policy, prefix, model, modules, table, tp))
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


# -- which rule meets which module --------------------------------------------------------------------------------


def _base(model: PreTrainedModel) -> tuple[str, nn.Module]:
    name = model.base_model_prefix
    base = getattr(model, name, None) if name else None
    return (name, base) if isinstance(base, nn.Module) else ("", model)


def _blocks(policy: Policy, prefix: str, model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    name, base = _base(model)
    found = _walk(base, policy.blocks_path, policy.blocks_where)
    if not isinstance(found, tuple) or not isinstance(found[1], nn.ModuleList):
        raise PolicyError(
            f"blocks.path '{policy.blocks_path}' is no ModuleList of {type(base).__name__}", policy.blocks_where
        )
    for index, block in enumerate(found[1]):
        yield _join(prefix, name, found[0], str(index)), block


def _all_uses(policy: Policy, prefix: str, model: PreTrainedModel) -> Iterator[_Use]:
    name, base = _base(model)
    for section in ("prefix", "every_stage", "suffix"):
        yield from _uses(getattr(policy, section), _join(prefix, name), base, section)
    for path, block in _blocks(policy, prefix, model):
        yield from _uses(policy.blocks, path, block, path)
    yield from _uses(policy.head, prefix, model, "head")


def _uses(rules: Mapping[str, Rule], root_path: str, root: nn.Module, scope: str) -> Iterator[_Use]:
    for pattern, rule in rules.items():
        found = _walk(root, pattern, rule.where)
        if found is not None:
            path, module = found
            yield _Use(_join(root_path, path), module, rule, scope, path)


def _walk(root: nn.Module, pattern: str, where: Where) -> tuple[str, nn.Module | nn.Parameter] | None:
    """The module, or bare parameter, at ``pattern``; None if a segment marked ``?`` is missing (or None)."""
    module: Any = root
    path = ""
    for segment in pattern.split("."):
        name = segment.removesuffix("?")
        known_here = isinstance(module, nn.Module) and (name in module._modules or name in module._parameters)
        child = getattr(module, name) if known_here else None
        if child is None:
            if segment.endswith("?"):
                return None
            known = [known for known, _ in root.named_modules() if known]
            wanted = pattern.replace("?", "")
            raise PolicyError(f"{type(root).__name__} has no module '{wanted}'.{nearest(wanted, known)}", where)
        module, path = child, _join(path, name)
    return path, module


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _check_overlap(uses: list[_Use]) -> None:
    by_path: dict[str, _Use] = {}
    for use in uses:
        if use.path in by_path:
            raise PolicyError(f"{use.path} is covered here and by {by_path[use.path].rule.where}", use.rule.where)
        by_path[use.path] = use
    for path, use in by_path.items():
        parts = path.split(".")
        for end in range(1, len(parts)):
            outer = by_path.get(".".join(parts[:end]))
            if outer is not None:
                raise PolicyError(
                    f"{path} is covered here and, with {outer.path}, by {outer.rule.where}", use.rule.where
                )


# -- one rule on one module ---------------------------------------------------------------------------------------


def _resolve_use(
    use: _Use, table: UnitTable, tp: int, modules: dict[str, ModulePlan], layouts: dict[int, tuple[Any, _Use, str]]
) -> None:
    rule, module = use.rule, use.module
    assert isinstance(module, nn.Module)
    if rule.kind == "replicated":
        for name, parameter in module.named_parameters():
            _note(layouts, parameter, None, use, name)
        for inside, holder in module.named_modules() if rule.units else ():
            if holder._parameters:
                path = _join(use.path, inside)
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


def _resolve_bare(use: _Use, layouts: dict[int, tuple[Any, _Use, str]]) -> None:
    """A parameter beside the layers. If it is tied to one that a layer's rule cuts (BERT's bias), that rule holds."""
    if use.rule != Rule("replicated", use.rule.where):
        raise PolicyError(f"{use.shown} is a bare parameter, which can only be 'replicated'", use.rule.where)
    layouts.setdefault(id(use.module), (None, use, ""))


def _weight_and_dim(use: _Use) -> tuple[nn.Parameter, int]:
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
    layouts: dict[int, tuple[Any, _Use, str]], parameter: nn.Parameter, layout: Layout | None, use: _Use, name: str
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


def _check_regions(uses: list[_Use], modules: Mapping[str, ModulePlan], table: UnitTable) -> None:
    """Inside one block (or section) what a column opens a row must close, and widths of a unit must agree."""
    scopes: dict[str, list[_Use]] = {}
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
        widths: dict[str, tuple[tuple[int, int], _Use]] = {}
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
    missing = [_join(prefix, name) for name, parameter in model.named_parameters() if id(parameter) not in layouts]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise PolicyError(
            f"no rule covers {len(missing)} parameters of {type(model).__name__}: {', '.join(missing[:5])}{more}. "
            "Every parameter needs a rule; 'replicated' keeps one whole.",
            policy.where,
        )


# -- attributes ---------------------------------------------------------------------------------------------------


def _attributes(
    policy: Policy,
    prefix: str,
    model: PreTrainedModel,
    modules: Mapping[str, ModulePlan],
    table: UnitTable,
    tp: int,
) -> Iterator[AttributePlan]:
    for block_path, block in _blocks(policy, prefix, model):
        counts = {
            unit.unit: unit.count
            for path, plan in modules.items()
            if path.startswith(block_path + ".") and plan.layout is not None
            for unit in plan.layout.blocks
        }
        for pattern, ratio in policy.block_attributes.items():
            parent, _, name = pattern.rpartition(".")
            of_config = parent.removesuffix("?").split(".")[-1] == "config"
            if of_config:
                parent, name = parent.removesuffix("config").removesuffix("."), f"config.{name}"
            found = _walk(block, parent, ratio.where) if parent else ("", block)
            if found is None:
                continue
            path, module = found
            optional, name = name.endswith("?"), name.removesuffix("?")
            holder = getattr(module, "config", None) if of_config else module
            value = getattr(holder, name.removeprefix("config."), None)
            shown = _join(path, name)
            if type(value) is not int:
                if optional and value is None:
                    continue
                hint = nearest(name, [key for key, v in vars(module).items() if type(v) is int])
                raise PolicyError(f"{type(block).__name__} has no integer attribute '{shown}'.{hint}", ratio.where)
            yield AttributePlan(
                _join(block_path, path), name, str(ratio.where), value, _scaled(value, ratio, counts, table, tp, shown)
            )


def _scaled(
    value: int, ratio: Ratio, counts: Mapping[str, int], table: UnitTable, tp: int, shown: str
) -> tuple[int, ...]:
    """``value`` of the whole model -> the value of each rank."""
    numbers = []
    for unit in (ratio.unit, ratio.per):
        if unit is not None:
            count = counts.get(unit) or table.count(unit)
            if count is None:
                raise PolicyError(f"'{unit}' is inferred and cut nowhere in this block, {shown} needs it", ratio.where)
            numbers.append([count, *(stop - start for start, stop in table.shares(unit, count, tp))])
    top, bottom = numbers[0], numbers[1] if len(numbers) == 2 else [1] * (tp + 1)
    if ratio.per is not None and value * bottom[0] != top[0]:
        raise PolicyError(f"{shown}={value} is not {ratio.unit} / {ratio.per} = {top[0]} / {bottom[0]}", ratio.where)
    if value * bottom[0] % top[0]:
        raise PolicyError(f"{shown}={value} is not a multiple of {top[0]} {ratio.unit}", ratio.where)
    values = []
    for rank in range(1, tp + 1):
        scaled, rest = divmod(value * bottom[0] * top[rank], top[0] * bottom[rank])
        if rest:
            raise ConfigError(
                f"tensor_parallel_size={tp} does not fit {table.model}: {shown} would be {top[rank]} / {bottom[rank]} "
                f"({ratio.unit} / {ratio.per}) on rank {rank - 1}, which is not whole ({ratio.where})."
            )
        values.append(scaled)
    return tuple(values)
