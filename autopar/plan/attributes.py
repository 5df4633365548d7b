"""Attributes and arguments that ``forward`` reads: the whole model's value -> each rank's."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

from torch import nn

from autopar.errors import ConfigError, PolicyError, nearest
from autopar.layout import Block, Layout
from autopar.plan.matching import Scope, join, walk
from autopar.plan.plan import AttributePlan, InputPlan, ModulePlan
from autopar.policy.schema import Ratio


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
                continue  # another mixer's attribute of the same name
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
    """``value`` of the whole model -> the value of each rank."""
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
                    f"'{unit}' is inferred and shards nothing in this block, as {shown} needs", ratio.where
                )
            ranges = table.ranges(unit, count, tp, scope.block)
            numbers.append([count, *(stop - start for start, stop in ranges)])
    top, bottom = [width * number for number in numbers[0]], numbers[1] if len(numbers) == 2 else [1] * (tp + 1)
    if per is not None and value * bottom[0] != top[0]:
        raise PolicyError(f"{shown}={value} is not {top_part} / {per} = {top[0]} / {bottom[0]}", ratio.where)
    if value * bottom[0] % top[0]:
        raise PolicyError(f"{shown}={value} is not a multiple of {top[0]} {top_part}", ratio.where)
    values = []
    for rank in range(1, tp + 1):
        scaled, rest = divmod(value * bottom[0] * top[rank], top[0] * bottom[rank])
        if rest:
            raise ConfigError(
                f"tensor_parallel_size={tp} does not fit {table.model}: {shown} would be {top[rank]} / {bottom[rank]} "
                f"({top_part} / {per}) on rank {rank - 1}, which is not whole ({ratio.where})."
            )
        values.append(scaled)
    return tuple(values)


def sliced_inputs(scope: Scope) -> Iterator[tuple[str, InputPlan, str]]:
    """Yield each argument of a scope that is sliced: path of the module, its plan, and the place of its entry."""
    for pattern, entry in scope.inputs.items():
        if scope.table.stays_whole(entry.unit, scope.block):
            continue
        parent, _, name = pattern.rpartition(".")
        for path, module in walk(scope.root, parent, entry.where) if parent else [("", scope.root)]:
            if not isinstance(module, nn.Module):
                raise PolicyError(f"{path} is no module, it has no forward that takes '{name}'", entry.where)
            known = list(inspect.signature(module.forward).parameters)
            if name not in known:
                raise PolicyError(
                    f"forward of {path} ({type(module).__name__}) takes no '{name}'.{nearest(name, known)}", entry.where
                )
            count = scope.table.count(entry.unit, scope.block)
            if count is None:
                raise PolicyError(f"'{entry.unit}' is inferred: the input {name} needs a count", entry.where)
            ranges = scope.table.ranges(entry.unit, count, scope.table.size, scope.block)
            layout = Layout.of(entry.dim, [Block(entry.unit, count, 1, ranges)])
            yield join(scope.path, path), InputPlan(name, layout, str(entry.where)), str(entry.where)
