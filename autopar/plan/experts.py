"""Mixtures of experts sharded by expert: the same matches, with whole experts as units."""

from __future__ import annotations

import inspect
from dataclasses import replace

import torch
from torch import nn

from autopar.errors import ConfigError
from autopar.plan.matching import RuleMatch
from autopar.plan.plan import AttributePlan
from autopar.policy.schema import Part, Rule

__all__ = ["shard_by_expert"]

_ARGUMENTS = 3  # hidden states, indices of the chosen experts, their weights


def shard_by_expert(matches: list[RuleMatch]) -> tuple[list[RuleMatch], list[AttributePlan]]:
    """Return the matches with each region that names ``by_expert`` sharded so, and the attributes that change.

    Raises:
        ConfigError: the model has no such region, or one whose forward does not take the choice of experts.
    """
    regions = {match.path: match for match in matches if match.rule.by_expert is not None}
    if not regions:
        raise ConfigError("expert_parallel_size: this model has no experts that can be sharded by expert")
    result: list[RuleMatch] = []
    attributes: list[AttributePlan] = []
    for match in matches:
        holder = match.path.rpartition(".")[0]
        if match.path in regions:
            attributes.append(_check(match))
            rule = replace(match.rule, kind="experts", parts=(Part(str(match.rule.by_expert)),))
            result.append(replace(match, rule=rule))
        elif holder in regions and isinstance(match.module, torch.Tensor):
            unit = str(regions[holder].rule.by_expert)
            result.append(replace(match, rule=Rule("sharded", match.rule.where, (Part(unit),), dim=0)))
        else:
            result.append(match)
    return result, attributes


def _check(match: RuleMatch) -> AttributePlan:
    module, table = match.module, match.scope.table
    assert isinstance(module, nn.Module)
    kind = type(module).__name__
    taken = [p for p in inspect.signature(type(module).forward).parameters if p != "self"]
    experts = getattr(module, "num_experts", None)
    if len(taken) != _ARGUMENTS or type(experts) is not int:
        raise ConfigError(
            f"expert_parallel_size: {match.path} ({kind}) chooses its experts inside, it cannot be sharded by expert. "
            "Leave it out: each expert is sharded instead."
        )
    unit = str(match.rule.by_expert)
    layout = match.layout((Part(unit),), 0, experts)
    values = tuple(layout.local_size(rank) for rank in range(table.size))
    return AttributePlan(match.path, "num_experts", str(match.rule.where), experts, values)
