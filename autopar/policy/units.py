"""Counting units and sharing them out: from names in a policy to numbers of one model and one axis size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.errors import ConfigError, PolicyError, nearest
from autopar.layout import Block, Layout, Shares, follow, share_out, share_out_replicated
from autopar.policy.schema import HIDDEN, INFERRED, UnitSpec, Where

__all__ = ["UnitTable"]


class UnitTable:
    """The units of one policy, counted in one config.

    Args:
        specs: units by name, as the policy states them.
        config: the Hugging Face config that holds the counts.
        model: class name of the model, for messages.
        may_be_empty: units of which a rank may hold none (the vocabulary).
    """

    def __init__(self, specs: Mapping[str, UnitSpec], config: Any, model: str, may_be_empty: frozenset[str]) -> None:
        self.specs = {HIDDEN: UnitSpec(HIDDEN, INFERRED, Where("policies/README.md", "hidden")), **specs}
        self.config = config
        self.model = model
        self.may_be_empty = may_be_empty | {HIDDEN}
        self._shares: dict[tuple[str, int, int], Shares] = {}
        self.used: dict[tuple[str, int], tuple[str, Where]] = {}  # (unit, count) -> where it was first cut

    def count(self, unit: str) -> int | None:
        """How many units the config says there are; None if the policy leaves it to the parameter."""
        spec = self.specs[unit]
        if spec.count == INFERRED:
            return None
        value = getattr(self.config, spec.count, None)
        if type(value) is not int or value < 1:
            if hasattr(self.config, spec.count):
                raise PolicyError(f"'{unit}' is {spec.count}={value!r} in the config, which is no count", spec.where)
            hint = nearest(spec.count, vars(self.config))
            raise PolicyError(f"'{unit}' is {spec.count}, which {type(self.config).__name__} lacks.{hint}", spec.where)
        return value

    def family(self, unit: str) -> str:
        """The unit at the end of the chain of ``follows``: query heads and KV heads are one family."""
        leader = self.specs[unit].follows
        return unit if leader is None else self.family(leader)

    def shares(self, unit: str, count: int, size: int) -> Shares:
        """Who holds which of ``count`` units over ``size`` ranks. Raises ``ValueError`` if a rank would hold none."""
        key = (unit, count, size)
        if key not in self._shares:
            self._shares[key] = self._share_out(unit, count, size)
        return self._shares[key]

    def _share_out(self, unit: str, count: int, size: int) -> Shares:
        spec = self.specs[unit]
        if spec.follows is not None:
            leaders = self.count(spec.follows)
            if leaders is None:
                raise PolicyError(f"'{unit}' follows '{spec.follows}', whose count is inferred", spec.where)
            shares = follow(count, leaders, self.shares(spec.follows, leaders, size))
        elif spec.replicate:
            shares = share_out_replicated(count, size)
        else:
            shares = share_out(count, size)
        if unit not in self.may_be_empty and any(start == stop for start, stop in shares):
            raise ValueError(f"{count} {unit} cannot be shared out over {size} ranks")
        return shares

    def layout(self, units: Sequence[str], dim: int, elements: int, size: int, what: str, where: Where) -> Layout:
        """The layout of ``units`` side by side along a dim of ``elements``; the width of a unit is inferred.

        Raises:
            PolicyError: the units do not add up to the dim.
            ConfigError: a rank would hold none of them; says the largest size that fits.
        """
        counts = [self.count(unit) for unit in units]
        listed = f"[{', '.join(units)}]"
        if None in counts:
            if len(set(units)) != 1:
                raise PolicyError(f"{listed} of {what} mixes an inferred unit with others", where)
            total, counts = len(units), [elements // len(units)] * len(units)
            width = 1
        else:
            total = sum(count for count in counts if count is not None)
            width = elements // total
        if elements % total:
            raise PolicyError(
                f"{what} has {elements} features, {listed} describes {total} equal parts: "
                f"{elements} / {total} is not whole",
                where,
            )
        blocks = []
        for unit, count in zip(units, counts, strict=True):
            assert count is not None
            self.used.setdefault((unit, count), (what, where))
            try:
                blocks.append(Block(unit, count, width, self.shares(unit, count, size)))
            except ValueError as error:
                raise self._does_not_fit(unit, count, size, what, where, error) from None
        return Layout.of(dim, blocks)

    def _does_not_fit(
        self, unit: str, count: int, size: int, what: str, where: Where, error: ValueError
    ) -> ConfigError:
        spec = self.specs[unit]
        counted = "counted on the parameter" if spec.count == INFERRED else f"{spec.count}={count}"
        fits = next((n for n in range(size - 1, 0, -1) if self._fits(unit, count, n)), 1)
        return ConfigError(
            f"tensor_parallel_size={size} does not fit {self.model}: {error}.\n"
            f"  '{unit}' is {counted} ({spec.where}), cut by {what} ({where}).\n"
            f"  Largest size that fits this model: {fits}."
        )

    def _fits(self, unit: str, count: int, size: int) -> bool:
        try:
            self.shares(unit, count, size)
            for (other, other_count), _ in self.used.items():
                self.shares(other, other_count, size)
        except ValueError:
            return False
        return True
