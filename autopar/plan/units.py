"""Units: their counts in one model, and the ranks that hold them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from torch import nn

from autopar.errors import ConfigError, PolicyError, nearest
from autopar.layout import Block, Layout, UnitRanges, aligned_shards, even_shards, replicated_shards
from autopar.policy.schema import HIDDEN, INFERRED, UnitRun, UnitSpec
from autopar.policy.yaml_reader import Where


@dataclass(eq=False)
class UnitTable:
    """The units of one tower, counted in one config.

    Attributes:
        specs: Name -> unit of the policy.
        config: The Hugging Face config with the counts.
        model: The class name of the model, for messages.
        size: The number of ranks over which units are sharded.
        may_be_empty: The units of which a rank may hold none (the vocabulary).
        root: The model, for counts that are attributes of its modules (``blocks.0.attn.n_head``).
        tp: The tensor-parallel size if ranks hold full experts, whose ``size`` must be a multiple of it; otherwise 0.
        used: Sharded unit -> the place of its first use.
    """

    specs: Mapping[str, UnitSpec]
    config: Any
    model: str
    size: int
    may_be_empty: frozenset[str]
    root: nn.Module | None = None
    tp: int = 0
    used: dict[tuple[str, int, int | None], tuple[str, Where]] = field(init=False, default_factory=dict)
    _ranges: dict[tuple[str, int, int, int | None], UnitRanges] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.specs = {HIDDEN: UnitSpec(HIDDEN, INFERRED, Where("policies/README.md", "hidden")), **self.specs}
        self.may_be_empty |= {HIDDEN}

    def of_experts(self, size: int) -> UnitTable:
        """Return the same units over ``size`` ranks that hold unsplit experts."""
        return self if size == self.size else replace(self, size=size, tp=self.size)

    def count(self, unit: str, block: nn.Module | None = None) -> int | None:
        """Return the number of units; None if it is inferred from the parameter."""
        spec = self.specs[unit]
        if spec.count == INFERRED:
            return None
        value = self.number(spec.count, block, unit, spec.where)
        if value < 1:
            raise PolicyError(f"'{unit}' must be a positive integer; got {spec.count}={value!r}", spec.where)
        return value

    def number(self, expression: str, block: nn.Module | None, what: str, where: Where) -> int:
        """Evaluate names, integers, ``*`` and ``/`` (exact), from left to right."""
        tokens = re.findall(r"[\w.]+|[*/]", expression)
        if "".join(tokens) != expression.replace(" ", "") or len(tokens) % 2 == 0:
            raise PolicyError(f"'{what}' must be a product or quotient of names; got '{expression}'", where)
        value = self._name(tokens[0], block, what, where)
        for operator, name in zip(tokens[1::2], tokens[2::2], strict=True):
            other = self._name(name, block, what, where)
            if operator == "*":
                value *= other
            elif other == 0 or value % other:
                raise PolicyError(f"'{what}' is {expression}: {value} / {other} is not an integer", where)
            else:
                value //= other
        return value

    def _name(self, name: str, block: nn.Module | None, what: str, where: Where) -> int:
        if name.isdigit():
            return int(name)
        try:
            return self._attribute(name, block, what, where)
        except RuntimeError as error:  # from transformers' configs of layers that differ
            text = f"'{what}' is {name}, which may differ between layers. Use an attribute of the block: block. ..."
            raise PolicyError(text, where) from error

    def _attribute(self, name: str, block: nn.Module | None, what: str, where: Where) -> int:
        path = name.split(".")
        holder: Any = self.config
        if path[0] == "block":
            holder, path = block, path[1:]
        elif not hasattr(holder, path[0]) and hasattr(self.root, path[0]):
            holder = self.root
        for step in path:
            inside = holder if isinstance(holder, Mapping) else None
            if step not in inside if inside is not None else not hasattr(holder, step):
                own = self.root is not None and isinstance(holder, SimpleNamespace)  # of a model without config
                shown = self.model if own else type(holder).__name__
                known = holder if inside is not None else getattr(holder, "__dict__", {})
                if isinstance(holder, SimpleNamespace):
                    known = {**vars(self.root or holder), **known}
                raise PolicyError(f"'{what}' is {name}, which {shown} lacks.{nearest(step, known)}", where)
            holder = getattr(holder, step) if inside is None else inside[step]
        if type(holder) is not int:
            raise PolicyError(f"'{what}' must be a positive integer; got {name}={holder!r}", where)
        return holder

    def family(self, unit: str) -> str:
        """Return the unit at the end of the chain of ``follows``, for example the KV heads for query heads."""
        leader = self.specs[unit].follows
        return unit if leader is None else self.family(leader)

    def stays_whole(self, unit: str, block: nn.Module | None = None) -> bool:
        """Return whether tensors of ``unit`` are replicated, because of ``or_whole`` and fewer units than ranks."""
        spec, leader = self.specs[unit], self.specs[self.family(unit)]
        if not (spec.or_whole or leader.or_whole):
            return False
        try:
            for one in (spec, leader):
                count = self.count(one.name, block)
                if count is not None:
                    self.ranges(one.name, count, self.size, block)
        except ValueError:
            return True
        return False

    def ranges(self, unit: str, count: int, size: int, block: nn.Module | None = None) -> UnitRanges:
        """Return the units of each of ``size`` ranks. Raises ``ValueError`` if a rank would hold none."""
        spec = self.specs[unit]
        leaders = self.count(spec.follows, block) if spec.follows is not None else None
        key = (unit, count, size, leaders)
        if key in self._ranges:
            return self._ranges[key]
        if spec.follows is not None:
            if leaders is None:
                raise PolicyError(f"'{unit}' cannot follow '{spec.follows}', whose count is inferred", spec.where)
            ranges = aligned_shards(count, leaders, self.ranges(spec.follows, leaders, size, block))
        elif spec.replicate:
            ranges = replicated_shards(count, size)
        else:
            each = spec.align if count % spec.align == 0 and count // spec.align >= size else 1
            ranges = tuple((a * each, b * each) for a, b in even_shards(count // each, size))
        if unit not in self.may_be_empty and any(start == stop for start, stop in ranges):
            raise ValueError(f"{count} {unit} cannot be sharded over {size} ranks")
        self._ranges[key] = ranges
        return ranges

    def layout(
        self, parts: Sequence[UnitRun], dim: int, elements: int, what: str, where: Where, block: nn.Module | None = None
    ) -> Layout:
        """Return the layout of consecutive ``parts`` along a dim of ``elements``; missing widths are inferred.

        Raises:
            PolicyError: The parts do not add up to the dim.
            ConfigError: A rank would hold no unit. The error has the largest size that fits.
        """
        counts = [self.count(part.unit, block) for part in parts]
        widths = [None if part.width is None else self.number(part.width, block, what, where) for part in parts]
        listed = f"[{', '.join(map(str, parts))}]"
        left = elements - sum(c * w for c, w in zip(counts, widths, strict=True) if c is not None and w is not None)
        open_ = [part.unit for part, width in zip(parts, widths, strict=True) if width is None]
        if None in counts:
            if len(set(open_)) != 1 or any(c is None and w is not None for c, w in zip(counts, widths, strict=True)):
                raise PolicyError(f"{listed} of {what} must not mix an inferred unit with counted units", where)
            each, total, width = left // len(open_), len(open_), 1
        else:
            total = sum(c for c, w in zip(counts, widths, strict=True) if c is not None and w is None)
            each, width = 0, left // total if total else 0
        if left < 0 or (left % total if total else left):
            if self.size == 1:  # nothing is sharded
                return Layout.of(dim, [Block(parts[0].unit, elements, 1, ((0, elements),))])
            equal = f"{total} equal parts: {elements} / {total} is not an integer"
            described = equal if left == elements else elements - left
            raise PolicyError(f"{what} has {elements} features, {listed} describes {described}", where)
        blocks = []
        for part, count, given in zip(parts, counts, widths, strict=True):
            number = each if count is None else count
            leader = self.specs[part.unit].follows
            leaders = self.count(leader, block) if leader is not None else None
            self.used.setdefault((part.unit, number, leaders), (what, where))
            try:
                ranges = self.ranges(part.unit, number, self.size, block)
            except ValueError as error:
                raise self._does_not_fit(part.unit, number, what, where, error, block) from None
            blocks.append(Block(part.unit, number, width if given is None else given, ranges))
        return Layout.of(dim, blocks)

    def _does_not_fit(
        self, unit: str, count: int, what: str, where: Where, error: ValueError, block: nn.Module | None
    ) -> ConfigError:
        spec, size = self.specs[unit], self.size
        axis = "expert_parallel_size" if self.tp else "tensor_parallel_size"
        counted = "counted on the parameter" if spec.count == INFERRED else f"{spec.count}={count}"

        def fits(smaller: int) -> bool:
            try:
                return all(self.ranges(unit, count, smaller, block) for unit, count, _ in self.used)
            except (ValueError, PolicyError):
                return False

        largest = next((n for n in range(size - 1, 0, -1) if n % (self.tp or 1) == 0 and fits(n)), 1)
        return ConfigError(
            f"{axis}={size} does not fit {self.model}: {error}.\n"
            f"  '{unit}' is {counted} ({spec.where}), sharded by {what} ({where}).\n"
            f"  Largest size that fits this model: {largest}."
        )
