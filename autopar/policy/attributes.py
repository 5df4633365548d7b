"""Attributes that ``forward`` reads: from the whole model's value to each rank's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from transformers import PreTrainedModel

from autopar.errors import ConfigError, PolicyError, nearest
from autopar.policy.plan import AttributePlan, ModulePlan
from autopar.policy.schema import Policy, Ratio
from autopar.policy.units import UnitTable
from autopar.policy.uses import blocks_of, join, walk

__all__ = ["scaled_attributes"]


def scaled_attributes(
    policy: Policy,
    prefix: str,
    model: PreTrainedModel,
    modules: Mapping[str, ModulePlan],
    table: UnitTable,
    tp: int,
) -> Iterator[AttributePlan]:
    for block_path, block in blocks_of(policy, prefix, model):
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
            found = walk(block, parent, ratio.where) if parent else ("", block)
            if found is None:
                continue
            path, module = found
            optional, name = name.endswith("?"), name.removesuffix("?")
            holder = getattr(module, "config", None) if of_config else module
            value = getattr(holder, name.removeprefix("config."), None)
            shown = join(path, name)
            if type(value) is not int:
                if optional and value is None:
                    continue
                hint = nearest(name, [key for key, v in vars(module).items() if type(v) is int])
                raise PolicyError(f"{type(block).__name__} has no integer attribute '{shown}'.{hint}", ratio.where)
            yield AttributePlan(
                join(block_path, path), name, str(ratio.where), value, _scaled(value, ratio, counts, table, tp, shown)
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
