"""Apply a rule to a module, bare parameter or buffer: the layout of each tensor, and the plan of the module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from autopar.compat.tensors import BatchNorm, own_buffers, own_parameters
from autopar.errors import ConfigError
from autopar.layout import Layout
from autopar.plan.matching import RuleMatch, join
from autopar.plan.plan import AttributePlan, ModulePlan
from autopar.policy.schema import BY_EXPERT, HIDDEN, UnitRun
from autopar.stored import StandIn


@dataclass(frozen=True)
class TensorRule:
    """The plan of a module, and the tensors of a rule with their layouts (None: replicated).

    Attributes:
        attributes: The attributes of a feature's addition to the module, per rank.
    """

    plan: ModulePlan | None
    tensors: list[tuple[str, torch.Tensor, Layout | None]] = field(default_factory=list)
    attributes: tuple[AttributePlan, ...] = ()


def tensor_rules_of(match: RuleMatch) -> Iterator[TensorRule]:
    """Yield the plans of a rule for its module, bare parameter or buffer.

    Raises:
        PolicyError: The rule does not fit the module.
        ConfigError: The size does not fit.
    """
    if not isinstance(match.module, nn.Module):
        yield _bare(match)
    elif match.rule.kind in ("column", "row", "embedding"):
        yield _layer(match)
    elif match.rule.kind == "region":
        where, opens, closes = str(match.rule.where), match.rule.opens, match.rule.closes
        yield TensorRule(ModulePlan(match.path, "region", where, opens=opens, closes=closes))
    elif match.rule.kind == BY_EXPERT:
        return  # of experts that are sharded by expert
    elif match.rule.kind in ("sharded", "norm_over"):
        yield from _own_parameters(match)
    else:
        yield from _whole(match)


def _whole(match: RuleMatch) -> Iterator[TensorRule]:
    """Yield rules of kinds that replicate every parameter: ``replicated``, ``enter_output``, ``gathered``, ``once``."""
    module, rule = match.module, match.rule
    assert isinstance(module, nn.Module)
    whole: list[tuple[str, torch.Tensor, Layout | None]] = [(n, p, None) for n, p in module.named_parameters()]
    where = str(rule.where)
    if rule.kind in ("replicated", "once"):
        yield TensorRule(None, whole)
        for inside, holder in module.named_modules() if rule.units else ():
            names = frozenset(name for name, parameter in own_parameters(holder).items() if parameter is not None)
            kind = "replicated" if inside else rule.kind
            if names or kind == "once":
                yield TensorRule(ModulePlan(join(match.path, inside), kind, where, summed=names))
    elif rule.kind == "enter_output":
        yield TensorRule(ModulePlan(match.path, "enter_output", where, enter_output=True), whole)
    elif rule.kind == "gathered":
        count = match.count(rule.units[0])
        if count is None:
            raise match.error(f"'gathered' of {match.shown} needs a unit with a count, '{rule.units[0]}' is inferred")
        layout = match.layout(rule.parts, -1 if rule.dim is None else rule.dim, count)
        yield TensorRule(ModulePlan(match.path, "gathered", where, layout), whole)


def _layer(match: RuleMatch) -> TensorRule:
    rule, module = match.rule, match.module
    weight, dim = _weight_and_dim(match)
    layout = match.layout(rule.parts, dim, weight.shape[dim])
    if isinstance(weight, StandIn):
        weight.kind.check(match.shown, weight.shape, layout, match)
    if rule.kind in ("row", "embedding") and layout.replicated:  # two ranks would add the same units
        raise ConfigError(
            f"tensor_parallel_size={layout.axis_size} does not fit {match.shown}: '{rule.kind}' needs at least "
            f"one unit of each kind per rank ({rule.where})."
        )
    tensors: list[tuple[str, torch.Tensor, Layout | None]] = [("weight", weight, layout)]
    layouts = {"weight": layout}
    bias = getattr(module, "bias", None)
    if bias is not None:
        if rule.kind == "column":
            layouts["bias"] = Layout.of(0, layout.blocks)
        tensors.append(("bias", bias, layouts.get("bias")))
    keys = ("gather_output", "split_input", "enter_output", "inside", "extension")
    by_hidden = rule.kind == "embedding" and rule.units == (HIDDEN,)
    more: dict[str, Any] = {key: getattr(rule, key) for key in keys}
    plan = ModulePlan(match.path, rule.kind, str(rule.where), layout, layouts, by_hidden=by_hidden, **more)
    return TensorRule(plan, tensors)


def _own_parameters(match: RuleMatch) -> Iterator[TensorRule]:
    """Yield the rules ``sharded`` and ``norm_over``, which shard each parameter of the module along one dim."""
    module, rule = match.module, match.rule
    assert isinstance(module, nn.Module)
    groups = None if rule.within is None else _features((UnitRun(rule.within),), match)
    for inside, holder in module.named_modules():
        if rule.kind == "sharded" and isinstance(holder, nn.LayerNorm | nn.RMSNorm):
            shown = join(match.shown, inside)
            raise match.error(f"{shown} computes a mean over sharded features and needs {{norm_over: ...}}")
        own: list[tuple[str, torch.Tensor]] = [(n, p) for n, p in own_parameters(holder).items() if p is not None]
        if isinstance(holder, BatchNorm):  # statistics of each channel
            own += [(name, x) for name, x in own_buffers(holder).items() if x is not None and x.ndim]
        layouts: dict[str, Layout] = {}
        for name, parameter in own:
            shown = join(match.shown, inside, name)
            dim = 0 if parameter.ndim == 1 else _dim(parameter, shown, match)
            _check_plain(shown, parameter, match)
            layouts[name] = match.layout(_repeated_parts(match), dim, parameter.shape[dim], shown)
            if isinstance(parameter, StandIn):
                parameter.kind.check(shown, parameter.shape, layouts[name], match)
        if own or (rule.kind == "norm_over" and not inside):
            first = next(iter(layouts.values()), None) or _features(rule.parts, match)
            yield TensorRule(
                ModulePlan(join(match.path, inside), rule.kind, str(rule.where), first, layouts, groups=groups),
                [(name, parameter, layouts[name]) for name, parameter in own],
            )


def _features(parts: tuple[UnitRun, ...], match: RuleMatch) -> Layout:
    """Return the layout of parts without a parameter; their widths are 1 or given."""
    elements = 0
    for part in parts:
        count = match.count(part.unit)
        if count is None:
            raise match.error(f"{match.shown} has no weight to count '{part.unit}' on")
        elements += count * match.number("1" if part.width is None else part.width)
    return match.layout(parts, 0, elements)


def _bare(match: RuleMatch) -> TensorRule:
    """Return the rule of a parameter or buffer next to the layers."""
    rule, tensor = match.rule, match.module
    assert isinstance(tensor, torch.Tensor)
    holder, _, name = match.path.rpartition(".")
    where = str(rule.where)
    if rule.kind == "sharded":
        dim = _dim(tensor, match.shown, match)
        _check_plain(match.shown, tensor, match)
        layout = match.layout(_repeated_parts(match), dim, tensor.shape[dim])
        return TensorRule(ModulePlan(holder, "", where, layouts={name: layout}), [("", tensor, layout)])
    if not isinstance(tensor, nn.Parameter):
        raise match.error(f"{match.shown} is a buffer, which can only be 'sharded'")
    if rule.kind == "once" or (rule.kind == "replicated" and rule.units):
        once = frozenset([name] if rule.kind == "once" else [])
        return TensorRule(ModulePlan(holder, "", where, summed=frozenset([name]), once=once), [("", tensor, None)])
    if rule.kind != "replicated":
        raise match.error(f"{match.shown} is a bare parameter, which can only be 'replicated', 'sharded' or 'once'")
    return TensorRule(None, [("", tensor, None)])


def _repeated_parts(match: RuleMatch) -> tuple[UnitRun, ...]:
    rule = match.rule
    if rule.repeat is None:
        return rule.parts
    times = match.number(rule.repeat)
    if times < 1:
        raise match.error(f"'repeat' of {match.shown} must be a positive integer; got {rule.repeat}={times}")
    return rule.parts * times


def _dim(tensor: torch.Tensor, shown: str, match: RuleMatch) -> int:
    """Return the dim that the rule shards, counted from the front."""
    dim = 0 if match.rule.dim is None else match.rule.dim
    if not -tensor.ndim <= dim < tensor.ndim:
        raise match.error(f"{shown} has {tensor.ndim} dims, but the rule shards dim {dim}")
    return dim % tensor.ndim


def _check_plain(shown: str, tensor: torch.Tensor, match: RuleMatch) -> None:
    if isinstance(tensor, StandIn) or not isinstance(tensor, nn.Parameter):
        return
    if type(tensor) is not nn.Parameter or not tensor.is_floating_point():
        kind = f"{type(tensor).__name__} of {tensor.dtype}"
        raise match.error(f"{shown} is a {kind}; only plain floating-point parameters can be sharded")


def _weight_and_dim(match: RuleMatch) -> tuple[nn.Parameter, int]:
    """Return the weight that the rule shards, and the dim: ``nn.Linear`` stores [out, in], ``Conv1D`` [in, out]."""
    module, rule = match.module, match.rule
    kind = type(module).__name__
    if rule.kind == "embedding":
        if not isinstance(module, nn.Embedding):
            raise match.error(f"'embedding' needs an nn.Embedding, {match.shown} is a {kind}")
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            used = "max_norm, sparse or scale_grad_by_freq"
            raise match.error(f"{match.shown} uses {used}, which need the full table; it cannot be sharded")
        dim = 1 if rule.units == (HIDDEN,) else 0
    elif isinstance(module, nn.Linear):
        dim = 0 if rule.kind == "column" else 1
    elif isinstance(module, Conv1D):
        dim = 1 if rule.kind == "column" else 0
    elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        if module.groups != 1 or rule.gather_output or rule.split_input:
            takes = f"a convolution takes it without groups (it has {module.groups}), gather_output and split_input"
            raise match.error(f"'{rule.kind}' of {match.shown}: {takes}")
        dim = 0 if rule.kind == "column" else 1
    else:
        raise match.error(f"'{rule.kind}' needs an nn.Linear, Conv1D or convolution, {match.shown} is a {kind}")
    weight = module.weight
    _check_plain(f"{match.shown}.weight", weight, match)
    if not isinstance(weight, nn.Parameter):
        raise match.error(
            f"{match.shown}.weight must be a parameter; got a {type(weight).__name__}, as of pruning, weight_norm or "
            "spectral_norm.\n  Make it a parameter before initialize: torch.nn.utils.prune.remove(module, "
            "'weight'), or\n  torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')."
        )
    return weight, dim
