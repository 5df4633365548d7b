"""Rules of mixtures whose experts are distributed over ranks: stacked in parameters, or modules in a list.

Stacked experts are units along dim 0 of their parameters. An expert that is a module is on one rank with all its
parameters: each parameter is one unit along dim 0. The other ranks keep the module with empty parameters, so that
names, checkpoints and optimizers are identical on all ranks.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from autopar.compat.tensors import BatchNorm, own_parameters
from autopar.errors import ConfigError
from autopar.layout import Block, Layout
from autopar.plan.matching import RuleMatch, join
from autopar.plan.plan import AttributePlan, ModulePlan
from autopar.plan.rules import TensorRule
from autopar.plan.units import UnitTable
from autopar.policy.schema import BY_EXPERT, HIDDEN, Rule, UnitRun
from autopar.stored import StandIn

# Rules for modules that contain experts, are an expert, or call experts.
MIXTURES = frozenset(("experts", "expert_modules", "calls_experts", "one_expert"))
_NO_EXPERT = "no expert"  # kind of a module for indices after the last expert
_ARGUMENTS = 3  # hidden states, indices of the chosen experts, their weights


def expert_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the children that are experts, in order, such as ``0, 1, ...`` or ``expert_0, ...``."""
    found: dict[str, list[tuple[int, str]]] = {}
    for name, child in module.named_children():
        numbered = re.fullmatch(r"(.*?)(\d+)", name)
        if numbered and any(True for _ in child.parameters()):
            found.setdefault(numbered[1], []).append((int(numbered[2]), name))
    if len(found) != 1:
        return ()
    ((_, listed),) = found.items()
    return tuple(name for _, name in sorted(listed))


def shard_by_expert(
    matches: Sequence[RuleMatch], root: nn.Module, ranks: int
) -> tuple[list[RuleMatch], list[AttributePlan], frozenset[str]]:
    """Return the matches with each ``by_expert`` mixture distributed by expert, and the attributes that change.

    Args:
        root: The model, to find the module that calls a list of experts.
        ranks: Number of ranks over which experts are distributed.

    Raises:
        ConfigError: The model has no such mixture, or the forward of a mixture does not get the chosen experts.
    """
    mixtures = {match.path: match for match in matches if match.rule.by_expert is not None}
    if not mixtures:
        raise ConfigError("expert_parallel_size: this model has no experts that can be sharded by expert")
    listed = {path for path, match in mixtures.items() if isinstance(match.module, nn.Module)
              and expert_names(match.module)}  # fmt: skip
    result: list[RuleMatch] = []
    attributes: list[AttributePlan] = []
    tables: dict[int, UnitTable] = {}
    for found in matches:
        match = found
        if any(match.path.startswith(f"{path}.") for path in listed):
            continue  # an expert on one rank needs no rules inside
        holder = next((path for path in mixtures if match.path.startswith(f"{path}.")), "")
        if match.path in mixtures or holder:
            table = tables.setdefault(id(match.scope.table), match.scope.table.of_experts(ranks))
            match = replace(match, scope=replace(match.scope, table=table))
        if match.path in mixtures:
            if match.path not in listed:
                attributes.append(_check(match))
            experts = replace(match.rule, kind="experts", parts=(UnitRun(str(match.rule.by_expert)),))
            rules = partial(_rules_of, root=root) if isinstance(match.module, nn.Module) else None
            result.append(replace(match, rule=replace(experts, opens=False, closes=False), rules=rules))
        elif holder and match.rule.kind == "once" and isinstance(match.module, nn.Module):
            result.append(replace(match, rule=Rule(_NO_EXPERT, match.rule.where), rules=_no_expert))
        elif holder and isinstance(match.module, torch.Tensor):
            unit = str(mixtures[holder].rule.by_expert)
            count, rows = match.count(unit), match.module.shape[0]
            beyond = match.rule.repeat is None and count is not None and rows > count  # rows that no expert reads
            parts = (UnitRun(unit, "1"), UnitRun(HIDDEN)) if beyond else (UnitRun(unit),)
            result.append(replace(match, rule=Rule("sharded", match.rule.where, parts, dim=0)))
        else:
            result.append(match)
    return result, attributes, MIXTURES


def _check(match: RuleMatch) -> AttributePlan:
    module, table = match.module, match.scope.table
    assert isinstance(module, nn.Module)
    kind, unit = type(module).__name__, str(match.rule.by_expert)
    taken = [p for p in inspect.signature(type(module).forward).parameters if p != "self"]
    counted = table.specs[unit].count.rpartition(".")[2] if table.specs[unit].count.startswith("block.") else ""
    name = counted if hasattr(module, counted) else "num_experts"
    experts = getattr(module, name, None)
    if match.rule.kind == BY_EXPERT:
        raise ConfigError(
            f"expert_parallel_size: {match.path} ({kind}) must have numbered children for 'by_expert' alone "
            f"({match.rule.where}).\n  For experts that are stacked in parameters write "
            f"{{region: UNIT, by_expert: {match.rule.by_expert}}}."
        )
    if len(taken) not in ((1, 2) if match.rule.sorted else (_ARGUMENTS,)) or type(experts) is not int:
        raise ConfigError(
            f"expert_parallel_size is not supported with {match.path} ({kind}), which chooses its experts inside\n"
            "  Remove it: then each expert is sharded."
        )
    layout = match.layout((UnitRun(unit),), 0, experts)
    values = tuple(layout.local_size(rank) for rank in range(table.size))
    return AttributePlan(match.path, name, str(match.rule.where), experts, values)


def _no_expert(match: RuleMatch) -> Iterator[TensorRule]:
    holder, _, name = match.path.rpartition(".")
    yield TensorRule(ModulePlan(holder, "", str(match.rule.where), once=frozenset([name])))


def _rules_of(match: RuleMatch, root: nn.Module) -> Iterator[TensorRule]:
    """Yield the rules of a mixture; raise ConfigError if its experts cannot be distributed."""
    module = match.module
    assert isinstance(module, nn.Module)
    where, names = str(match.rule.where), expert_names(module)
    unit = str(match.rule.by_expert)
    count = match.count(unit)
    layout = match.layout((UnitRun(unit),), 0, len(names) or count or 0)
    if not names:
        yield TensorRule(ModulePlan(match.path, "experts", where, layout))
        return
    if others := [name for name, _ in module.named_parameters() if name.split(".")[0] not in names]:
        raise ConfigError(
            f"expert_parallel_size is not supported with {match.path} ({type(module).__name__}): it has the parameter "
            f"{others[0]} next to {len(names)} experts\n  Remove it: then each expert is sharded."
        )
    yield TensorRule(ModulePlan(match.path, "expert_modules", where, layout))
    if type(module).forward is nn.Module.forward:
        above = match.path.rpartition(".")[0]
        caller = type(root.get_submodule(above))
        if caller.forward is nn.Module.forward:
            raise ConfigError(
                f"expert_parallel_size: {match.path}, or the {caller.__name__} around it, must have a forward that "
                f"calls the experts ({where}).\n  Remove expert_parallel_size: then each expert is sharded."
            )
        yield TensorRule(ModulePlan(above, "calls_experts", where))
    for number, name in enumerate(names):
        yield from _one_expert(match, join(match.path, name), module.get_submodule(name), number, len(names))


def _one_expert(match: RuleMatch, path: str, expert: nn.Module, number: int, of: int) -> Iterator[TensorRule]:
    """Yield the rules that put each parameter of an expert on one rank."""
    unit, size = str(match.rule.by_expert), match.scope.table.size
    for inside, holder in expert.named_modules():
        shown = join(path, inside)
        if isinstance(holder, BatchNorm):
            raise ConfigError(
                f"expert_parallel_size={size} is not supported with {shown}, which normalizes over the tokens of an "
                "expert\n  Remove it: then each expert is sharded."
            )
        own = {name: each for name, each in own_parameters(holder).items() if each is not None}
        for name, parameter in own.items():
            if isinstance(parameter, StandIn) or not parameter.ndim or not parameter.is_floating_point():
                form = "a quantized weight" if parameter.ndim else "a single number"
                raise ConfigError(
                    f"expert_parallel_size={size}: {join(shown, name)} must be a floating-point weight of at least one "
                    f"dim, got {form}\n  Use tensor_parallel_size, which shards each expert."
                )
        layouts = {name: Layout.of(0, [Block.alone(unit, number, of, p.shape[0], size)]) for name, p in own.items()}
        if layouts:
            first = next(iter(layouts.values()))
            yield TensorRule(
                ModulePlan(shown, "one_expert", str(match.rule.where), first, layouts),
                [(name, parameter, layouts[name]) for name, parameter in own.items()],
            )
