"""A policy as data.

See ``policies/README.md`` for the form. A policy states facts about one architecture: which dim of which parameter is
made of what. It holds no code and no run-time options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autopar.policy.yaml_reader import Where

BY_EXPERT = "by_expert"
"""Kind of a rule for a list of experts, each with rules for its modules."""
DERIVED = "derived"
"""Name of a policy that was derived because none lists the model type."""
INFERRED = "inferred"
HIDDEN = "hidden"
SUPPORTED = ">=5.20,<5.25"
"""Versions of transformers for a policy without a range."""
LISTED = ("column", "row", "sharded", "norm_over")
"""Kinds of rules that take a list of parts."""
LOSSES = ("loss_function", "mean", "shifted_mean", "attended_mean", "shifted_attended_mean", "other")
"""Kinds of a model's own loss: what ``self.loss_function`` of transformers is; a mean over the labels that are not
-100; that without the first label of each sequence; both without the labels that ``attention_mask`` masks; no mean over
labels."""
KINDS = (*LISTED, "embedding", "replicated", "gathered", "region", "enter_output", "once")


@dataclass(frozen=True)
class UnitSpec:
    """Units that tp shards, never splitting one in two.

    Attributes:
        count: Config attribute, or a product or quotient of some; ``block.PATH`` for an attribute of a module in the
            block; ``inferred`` for single elements, counted on the parameter.
        follows: Unit whose rank holds this one too (query heads follow their KV head).
        replicate: Several ranks may hold a unit, if there are fewer units than ranks.
        or_whole: All ranks hold all units, if there are fewer units than ranks.
        align: Divisor of the units of a rank, if there are enough of them (kernels want aligned widths).
    """

    name: str
    count: str
    where: Where
    follows: str | None = None
    replicate: bool = False
    or_whole: bool = False
    align: int = 1


class UnitRun(NamedTuple):
    """One run of units along a dim: the unit, and its width (None: an equal share of the remaining elements)."""

    unit: str
    width: str | None = None

    def __str__(self) -> str:
        return self.unit if self.width is None else f"{self.unit} * {self.width}"


@dataclass(frozen=True)
class Rule:
    """The sharding of one module, bare parameter or buffer.

    ``kind`` is one of :data:`KINDS`. ``parts`` are the runs of units; kinds that shard nothing name the unit of the
    region in which they work. ``extension``: name of the rule of a feature that extends this one, and its numbers.
    """

    kind: str
    where: Where
    parts: tuple[UnitRun, ...] = ()
    dim: int | None = None
    gather_output: bool = False
    split_input: bool = False
    enter_output: bool = False
    inside: bool = False
    opens: bool = False
    closes: bool = False
    by_expert: str | None = None
    sorted: bool = False
    within: str | None = None
    repeat: str | None = None
    extension: tuple[str, tuple[tuple[str, float], ...]] | None = None

    @property
    def units(self) -> tuple[str, ...]:
        """The units of the parts, in order."""
        return tuple(part.unit for part in self.parts)


class Ratio(NamedTuple):
    """The value of a scaled attribute: the features of ``parts`` that the rank holds, or a quotient of two units."""

    parts: tuple[UnitRun, ...]
    per: str | None
    where: Where


class Input(NamedTuple):
    """An argument of a module's forward that is sharded by a unit along ``dim``."""

    unit: str
    dim: int
    where: Where


@dataclass(frozen=True)
class Tower:
    """One run of blocks and what surrounds it. A policy has one, or several by name.

    Module paths are as written, with ``?`` after optional segments and ``*`` for every member of a list. ``blocks`` are
    relative to each block, everything else to the base model.
    """

    name: str
    where: Where
    units: Mapping[str, UnitSpec]
    config: str = ""
    blocks_path: str = ""
    blocks_where: Where | None = None
    blocks: Mapping[str, Rule] = field(default_factory=dict)
    block_attributes: Mapping[str, Ratio] = field(default_factory=dict)
    block_inputs: Mapping[str, Input] = field(default_factory=dict)
    prefix: Mapping[str, Rule] = field(default_factory=dict)
    every_stage: Mapping[str, Rule] = field(default_factory=dict)
    suffix: Mapping[str, Rule] = field(default_factory=dict)
    attributes: Mapping[str, Ratio] = field(default_factory=dict)
    inputs: Mapping[str, Input] = field(default_factory=dict)


@dataclass(frozen=True)
class Policy:
    """One parsed policy: its towers, the rules of task heads (relative to the task model), and the models inside.

    ``model_types`` is empty for a policy that is given by hand, without ``match``. ``models``: path (relative to the
    base model) -> place. Each is a Hugging Face model whose own policy, found by its own ``model_type``, holds below
    it. ``without_kernels``: functions of the modeling file that must be transformers' own (see
    :mod:`autopar.plan.matching`). ``loss``: class of a model -> one of :data:`LOSSES`, if its name does not tell.
    """

    name: str
    where: Where
    model_types: tuple[str, ...]
    transformers: str
    config: Mapping[str, Any]
    classes: tuple[str, ...]
    towers: tuple[Tower, ...]
    head: Mapping[str, Rule] = field(default_factory=dict)
    head_attributes: Mapping[str, Ratio] = field(default_factory=dict)
    models: Mapping[str, Where] = field(default_factory=dict)
    without_kernels: tuple[str, ...] = ()
    ranges: Mapping[str, str] = field(default_factory=dict)
    loss: Mapping[str, str] = field(default_factory=dict)

    def range_of(self, model_type: str) -> str:
        """Return the versions of transformers in which models of this type have the structure."""
        return self.ranges.get(model_type, self.transformers)

    @property
    def units(self) -> Mapping[str, UnitSpec]:
        """The units of the first tower, which hold in heads too."""
        return self.towers[0].units
