"""Mixtures of experts shared out by expert: the same uses, with whole experts as units."""

from __future__ import annotations

import inspect
from dataclasses import replace

import torch
from torch import nn

from autopar.errors import ConfigError
from autopar.plan.matching import Use
from autopar.plan.plan import AttributePlan
from autopar.policy.schema import Part, Rule

__all__ = ["share_experts"]

_ARGUMENTS = 3  # hidden states, indices of the chosen experts, their weights


def share_experts(uses: list[Use]) -> tuple[list[Use], list[AttributePlan]]:
    """Uses in which each region that names ``by_expert`` is cut by expert, and the attributes that change with it.

    Raises:
        ConfigError: the model has no such region, or one whose forward does not take the choice of experts.
    """
    regions = {use.path: use for use in uses if use.rule.by_expert is not None}
    if not regions:
        raise ConfigError("expert_parallel_size: this model has no experts that can be shared out by expert")
    result: list[Use] = []
    attributes: list[AttributePlan] = []
    for use in uses:
        holder = use.path.rpartition(".")[0]
        if use.path in regions:
            attributes.append(_check(use))
            rule = replace(use.rule, kind="experts", parts=(Part(str(use.rule.by_expert)),))
            result.append(replace(use, rule=rule))
        elif holder in regions and isinstance(use.module, torch.Tensor):
            unit = str(regions[holder].rule.by_expert)
            result.append(replace(use, rule=Rule("cut", use.rule.where, (Part(unit),), dim=0)))
        else:
            result.append(use)
    return result, attributes


def _check(use: Use) -> AttributePlan:
    module, table = use.module, use.scope.table
    assert isinstance(module, nn.Module)
    kind = type(module).__name__
    taken = [p for p in inspect.signature(type(module).forward).parameters if p != "self"]
    experts = getattr(module, "num_experts", None)
    if len(taken) != _ARGUMENTS or type(experts) is not int:
        raise ConfigError(
            f"expert_parallel_size: {use.path} ({kind}) chooses its experts inside, it cannot be shared out by expert. "
            "Leave it out: each expert is cut instead."
        )
    unit = str(use.rule.by_expert)
    layout = table.layout((Part(unit),), 0, experts, use.shown, use.rule.where, use.scope.block)
    values = tuple(layout.local_size(rank) for rank in range(table.size))
    return AttributePlan(use.path, "num_experts", str(use.rule.where), experts, values)
