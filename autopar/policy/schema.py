"""The data classes of policies.

``policies/README.md`` describes the form. A policy states facts about an architecture: the units along the dims of its
parameters. It contains no code and no run-time options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autopar.policy.yaml_reader import Where

BY_EXPERT = "by_expert"
"""The kind of a rule for a list of experts, each with rules for its modules."""
DERIVED = "derived"
"""The name of a policy that was derived because no policy lists the model type."""
INFERRED = "inferred"
HIDDEN = "hidden"
SUPPORTED = ">=5.20,<5.25"
"""The versions of transformers for a policy without a range."""
LISTED = ("column", "row", "sharded", "norm_over")
"""The kinds of rules with a list of parts."""
LOSSES = ("loss_function", "mean", "shifted_mean", "attended_mean", "shifted_attended_mean", "other")
"""The kinds of the loss that a model computes: the loss of transformers' ``self.loss_function``; a mean over the labels
that are not -100; the same without the first label of each sequence; both without labels that ``attention_mask`` masks;
another loss."""
KINDS = (*LISTED, "embedding", "replicated", "gathered", "region", "enter_output", "once")


@dataclass(frozen=True)
class UnitSpec:
    """A kind of units, which tp shards without dividing a unit.

    Attributes:
        count: A config attribute, or a product or quotient of some; ``block.PATH`` for an attribute of a module in the
            block; ``inferred`` for single elements, counted on the parameter.
        follows: The unit that must be on the same rank (query heads follow their KV head).
        replicate: True if several ranks may hold a unit when there are fewer units than ranks.
        or_whole: True if all ranks hold all units when there are fewer units than ranks.
        align: The divisor of the number of units of a rank, if there are enough units (for aligned kernels).
    """

    name: str
    count: str
    where: Where
    follows: str | None = None
    replicate: bool = False
    or_whole: bool = False
    align: int = 1


class UnitRun(NamedTuple):
    """A run of units along a dim: the unit, and its width (None: an equal fraction of the remaining elements)."""

    unit: str
    width: str | None = None

    def __str__(self) -> str:
        return self.unit if self.width is None else f"{self.unit} * {self.width}"


@dataclass(frozen=True)
class Rule:
    """The sharding of one module, bare parameter or buffer.

    ``kind`` is one of :data:`KINDS`. ``parts`` are the runs of units; kinds without sharding name the unit of the
    region in which they work. ``extension``: the name of a feature's rule that extends this rule, and its numbers.
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
        """Units of the parts, in order."""
        return tuple(part.unit for part in self.parts)


class Ratio(NamedTuple):
    """The value of a scaled attribute: the features of ``parts`` that the rank holds, or a quotient of two units."""

    parts: tuple[UnitRun, ...]
    per: str | None
    where: Where


class Input(NamedTuple):
    """An argument of a module's forward, or each tensor in it, that is sharded by a unit along ``dim``."""

    unit: str
    dim: int
    where: Where
    width: str | None = None


@dataclass(frozen=True)
class Tower:
    """A list of blocks and the modules around it. A policy has one tower, or several by name.

    Module paths have ``?`` after optional segments and ``*`` for every member of a list. Paths in ``blocks`` are
    relative to each block, other paths to the base model. ``then``: the lists of blocks after the first one, with the
    units of the tower.
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
    then: tuple[Tower, ...] = ()

    @property
    def lists(self) -> tuple[Tower, ...]:
        """The lists of blocks in forward order, each as a tower."""
        return (self, *self.then)


@dataclass(frozen=True)
class Policy:
    """A parsed policy: its towers, the rules of task heads (relative to the task model), and the models inside.

    ``model_types`` is empty for a user's policy without ``match``, and for the ``classes`` of a ``library``.
    ``models``: path (relative to the base model) -> place in the policy, for Hugging Face models inside, which have the
    policy of their ``model_type``.
    ``without_kernels``: functions of the modeling file that must be transformers' torch code (see
    :mod:`autopar.plan.matching`). ``loss``: class of a model -> one of :data:`LOSSES`, if its name does not show it.
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
    library: str = ""

    def range_of(self, model_type: str) -> str:
        """Return the versions of the library for which the policy describes models of this type or class."""
        return self.ranges.get(model_type, self.transformers)

    @property
    def names(self) -> tuple[str, ...]:
        """The model types, or the classes of a library, for which the policy is."""
        return self.classes if self.library else self.model_types

    @property
    def units(self) -> Mapping[str, UnitSpec]:
        """The units of the first tower, which heads use too."""
        return self.towers[0].units
