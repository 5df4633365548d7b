"""One rule on one module, bare parameter or buffer: which tensors it cuts how, and what becomes of the module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from autopar.errors import ConfigError, PolicyError
from autopar.layout import Layout
from autopar.plan.matching import Use, join
from autopar.plan.plan import ModulePlan
from autopar.policy.schema import HIDDEN, Part

__all__ = ["Cut", "cuts_of"]


@dataclass(frozen=True)
class Cut:
    """Part of a plan: a module, and each tensor that a rule has a word on with its layout (None: whole)."""

    plan: ModulePlan | None
    tensors: list[tuple[str, torch.Tensor, Layout | None]] = field(default_factory=list)


def cuts_of(use: Use) -> Iterator[Cut]:
    """What a rule makes of what it met.

    Raises:
        PolicyError: the rule does not fit what stands there.
        ConfigError: the size does not fit.
    """
    if not isinstance(use.module, nn.Module):
        yield _bare(use)
    elif use.rule.kind in ("column", "row", "embedding"):
        yield _layer(use)
    elif use.rule.kind == "region":
        where, opens, closes = str(use.rule.where), use.rule.opens, use.rule.closes
        yield Cut(ModulePlan(use.path, "region", where, opens=opens, closes=closes))
    elif use.rule.kind == "experts":
        table, count = use.scope.table, use.scope.table.count(use.rule.units[0], use.scope.block)
        assert count is not None
        layout = table.layout(use.rule.parts, 0, count, use.shown, use.rule.where, use.scope.block)
        yield Cut(ModulePlan(use.path, "experts", str(use.rule.where), layout))
    elif use.rule.kind in ("cut", "norm_over"):
        yield from _own_parameters(use)
    else:
        yield from _whole(use)


def _whole(use: Use) -> Iterator[Cut]:
    """Kinds that keep every parameter whole: ``replicated``, ``enter_output``, ``gathered``, ``once``."""
    module, rule = use.module, use.rule
    assert isinstance(module, nn.Module)
    whole: list[tuple[str, torch.Tensor, Layout | None]] = [(n, p, None) for n, p in module.named_parameters()]
    where = str(rule.where)
    if rule.kind in ("replicated", "once"):
        yield Cut(None, whole)
        for inside, holder in module.named_modules() if rule.units else ():
            names = frozenset(name for name, parameter in holder._parameters.items() if parameter is not None)
            kind = "replicated" if inside else rule.kind
            if names or kind == "once":
                yield Cut(ModulePlan(join(use.path, inside), kind, where, summed=names))
    elif rule.kind == "enter_output":
        yield Cut(ModulePlan(use.path, "enter_output", where, enter_output=True), whole)
    elif rule.kind == "gathered":
        table, unit = use.scope.table, rule.units[0]
        count = table.count(unit, use.scope.block)
        if count is None:
            raise PolicyError(f"'gathered' of {use.shown} needs a unit with a count, '{unit}' is inferred", rule.where)
        dim = -1 if rule.dim is None else rule.dim
        layout = table.layout(rule.parts, dim, count, use.shown, rule.where, use.scope.block)
        yield Cut(ModulePlan(use.path, "gathered", where, layout), whole)


def _layer(use: Use) -> Cut:
    rule, module = use.rule, use.module
    weight, dim = _weight_and_dim(use)
    table = use.scope.table
    layout = table.layout(rule.parts, dim, weight.shape[dim], use.shown, rule.where, use.scope.block)
    if rule.kind in ("row", "embedding") and layout.replicated:  # two ranks would add the same
        raise ConfigError(
            f"tensor_parallel_size={layout.axis_size} does not fit {use.shown}: '{rule.kind}' needs at least "
            f"one unit of each kind a rank ({rule.where})."
        )
    tensors: list[tuple[str, torch.Tensor, Layout | None]] = [("weight", weight, layout)]
    layouts = {"weight": layout}
    bias = getattr(module, "bias", None)
    if bias is not None:
        if rule.kind == "column":
            layouts["bias"] = Layout.of(0, layout.blocks)
        tensors.append(("bias", bias, layouts.get("bias")))
    plan = ModulePlan(
        use.path,
        rule.kind,
        str(rule.where),
        layout,
        layouts,
        gather_output=rule.gather_output,
        split_input=rule.split_input,
        enter_output=rule.enter_output,
        inside=rule.inside,
        by_hidden=rule.kind == "embedding" and rule.units == (HIDDEN,),
    )
    return Cut(plan, tensors)


def _own_parameters(use: Use) -> Iterator[Cut]:
    """``cut`` and ``norm_over``: each parameter of the module along one dim."""
    module, rule, table = use.module, use.rule, use.scope.table
    assert isinstance(module, nn.Module)
    groups = None
    if rule.within is not None:
        groups = _features((Part(rule.within),), use)
    for inside, holder in module.named_modules():
        if rule.kind == "cut" and isinstance(holder, nn.LayerNorm | nn.RMSNorm):
            raise PolicyError(
                f"{join(use.shown, inside)} takes a mean over what would be cut: write {{norm_over: ...}}", rule.where
            )
        own: list[tuple[str, torch.Tensor]] = [(n, p) for n, p in holder._parameters.items() if p is not None]
        if isinstance(holder, nn.modules.batchnorm._BatchNorm):  # statistics of each channel
            own += [(name, buffer) for name, buffer in holder._buffers.items() if buffer is not None and buffer.ndim]
        layouts: dict[str, Layout] = {}
        for name, parameter in own:
            shown = join(use.shown, inside, name)
            dim = 0 if parameter.ndim == 1 else _dim(parameter, shown, use)
            _check_plain(shown, parameter, use)
            parts = _repeated_parts(use)
            layouts[name] = table.layout(parts, dim, parameter.shape[dim], shown, rule.where, use.scope.block)
        if own or (rule.kind == "norm_over" and not inside):
            first = next(iter(layouts.values()), None)
            if first is None:
                first = _features(rule.parts, use)
            yield Cut(
                ModulePlan(join(use.path, inside), rule.kind, str(rule.where), first, layouts, groups=groups),
                [(name, parameter, layouts[name]) for name, parameter in own],
            )


def _features(parts: tuple[Part, ...], use: Use) -> Layout:
    """The layout of parts that no parameter shows: their widths are 1 or stated."""
    table, elements = use.scope.table, 0
    for part in parts:
        count = table.count(part.unit, use.scope.block)
        if count is None:
            raise PolicyError(f"{use.shown} has no weight to count '{part.unit}' on", use.rule.where)
        width = "1" if part.width is None else part.width
        elements += count * table.number(width, use.scope.block, use.shown, use.rule.where)
    return table.layout(parts, 0, elements, use.shown, use.rule.where, use.scope.block)


def _bare(use: Use) -> Cut:
    """A parameter or buffer beside the layers."""
    rule, tensor = use.rule, use.module
    assert isinstance(tensor, torch.Tensor)
    holder, _, name = use.path.rpartition(".")
    where = str(rule.where)
    if rule.kind == "cut":
        dim = _dim(tensor, use.shown, use)
        _check_plain(use.shown, tensor, use)
        parts = _repeated_parts(use)
        layout = use.scope.table.layout(parts, dim, tensor.shape[dim], use.shown, rule.where, use.scope.block)
        return Cut(ModulePlan(holder, "", where, layouts={name: layout}), [("", tensor, layout)])
    if not isinstance(tensor, nn.Parameter):
        raise PolicyError(f"{use.shown} is a buffer, which can only be 'cut'", rule.where)
    if rule.kind == "once" or (rule.kind == "replicated" and rule.units):
        once = frozenset([name] if rule.kind == "once" else [])
        return Cut(ModulePlan(holder, "", where, summed=frozenset([name]), once=once), [("", tensor, None)])
    if rule.kind != "replicated":
        raise PolicyError(
            f"{use.shown} is a bare parameter, which can only be 'replicated', 'cut' or 'once'", rule.where
        )
    return Cut(None, [("", tensor, None)])


def _repeated_parts(use: Use) -> tuple[Part, ...]:
    rule = use.rule
    if rule.repeat is None:
        return rule.parts
    times = use.scope.table.number(rule.repeat, use.scope.block, use.shown, rule.where)
    if times < 1:
        raise PolicyError(f"'repeat' of {use.shown} is {rule.repeat}={times}, which is no count", rule.where)
    return rule.parts * times


def _dim(tensor: torch.Tensor, shown: str, use: Use) -> int:
    """The dim that the rule cuts, counted from the front."""
    dim = 0 if use.rule.dim is None else use.rule.dim
    if not -tensor.ndim <= dim < tensor.ndim:
        raise PolicyError(f"{shown} has {tensor.ndim} dims, the rule cuts dim {dim}", use.rule.where)
    return dim % tensor.ndim


def _check_plain(shown: str, tensor: torch.Tensor, use: Use) -> None:
    if isinstance(tensor, nn.Parameter) and (type(tensor) is not nn.Parameter or not tensor.is_floating_point()):
        raise PolicyError(
            f"{shown} is a {type(tensor).__name__} of {tensor.dtype}; only plain floating-point parameters can be cut",
            use.rule.where,
        )


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
    elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        if module.groups != 1 or rule.gather_output or rule.split_input:
            raise PolicyError(
                f"'{rule.kind}' of {use.shown}: a convolution takes it without groups (it has {module.groups}), "
                "gather_output and split_input",
                rule.where,
            )
        dim = 0 if rule.kind == "column" else 1
    else:
        hint = ""
        if type(module).__module__.startswith("peft."):
            hint = (
                " of PEFT: adapters cannot be sharded yet.\n"
                "  Merge them first (model.merge_and_unload()), or train them without tensor parallelism."
            )
        raise PolicyError(
            f"'{rule.kind}' needs an nn.Linear, Conv1D or convolution, {use.shown} is a {kind}{hint}",
            rule.where,
        )
    weight = module.weight
    _check_plain(f"{use.shown}.weight", weight, use)
    if type(weight) is not nn.Parameter:
        raise PolicyError(f"{use.shown}.weight is a {type(weight).__name__}, no parameter", rule.where)
    return weight, dim
