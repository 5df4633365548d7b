"""The plan of the shards of every rank: plain data, computed from names, shapes and sizes, without a process group.

:func:`~autopar.plan.make_plan.make_plan` checks everything from data that every rank has, before a plan exists. So
every rank raises the same error, and the model does not change.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from autopar.errors import ConfigError
from autopar.layout import Layout
from autopar.policy.schema import DERIVED, Policy
from autopar.stored import stored_weights
from autopar.swap import NotCopied


@dataclass(frozen=True)
class Joined:
    """A concatenation of views along ``dim``, as by ``torch.cat``; for one view, its contiguous copy."""

    dim: int
    parts: tuple[Piece, ...]

    def shape(self) -> tuple[int, ...]:
        """Return the shape of the joined tensor. Raises ``ValueError`` if the parts do not fit together."""
        first = self.parts[0].shape
        if not 0 <= self.dim < len(first):
            raise ValueError(f"parts of shape {list(first)} are joined along dim {self.dim}")
        around = {(part.shape[: self.dim], part.shape[self.dim + 1 :]) for part in self.parts}
        if len(around) != 1:
            raise ValueError(f"parts with other sizes are joined along dim {self.dim}")
        return (*first[: self.dim], sum(part.shape[self.dim] for part in self.parts), *first[self.dim + 1 :])


@dataclass(frozen=True)
class Piece:
    """A tensor that ``save_pretrained`` writes: a view of a stored tensor, or of several joined ones.

    Attributes:
        name: The name in the file; for a part of a :class:`Joined`, the name of the stored tensor. "" for zeros.
        shape, stride, offset: The view, in elements of the contiguous tensor.
        joined: The joined tensors of which it is a view; None for a view of one stored tensor.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    joined: Joined | None = None

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the piece as a view of the full tensor. Raises ``RuntimeError`` if it is not inside."""
        last = self.offset + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        if not 0 <= self.offset <= last < whole.numel():
            raise RuntimeError(f"{self.name} is not inside a tensor of {whole.numel()} elements")
        return whole.contiguous().as_strided(self.shape, self.stride, self.offset)

    def sources(self) -> Iterator[str]:
        """Yield the names of the stored tensors that it joins; none for a view of one tensor."""
        for part in self.joined.parts if self.joined else ():
            if part.joined is not None:
                yield from part.sources()
            elif part.name:
                yield part.name

    def zeros(self) -> int:
        """Count the zeros that come from no stored tensor."""
        parts = self.joined.parts if self.joined else ()
        return sum(part.zeros() if part.joined or part.name else math.prod(part.shape) for part in parts)

    def renamed(self, rename: Callable[[str], str]) -> Piece:
        """Return the piece with renamed stored tensors."""
        if self.joined is None:
            return self
        parts = [
            part.renamed(rename) if part.joined else replace(part, name=part.name and rename(part.name))
            for part in self.joined.parts
        ]
        return replace(self, joined=replace(self.joined, parts=tuple(parts)))

    def to_json(self) -> list[Any]:
        """Return plain data."""
        view = [self.name, list(self.shape), list(self.stride), self.offset]
        return view if self.joined is None else [*view, [self.joined.dim, [p.to_json() for p in self.joined.parts]]]

    @classmethod
    def from_json(cls, data: list[Any]) -> Piece:
        """Read what :meth:`to_json` returned. Raises ``TypeError`` or ``ValueError`` on malformed data."""
        saved, sizes, steps, offset, *rest = data
        joined = None
        if rest:
            [[dim, parts]] = rest
            joined = Joined(int(dim), tuple(map(cls.from_json, parts)))
            if not joined.parts:
                raise ValueError(f"the piece {saved} is joined from nothing")
            joined.shape()
        piece = cls(str(saved), tuple(map(int, sizes)), tuple(map(int, steps)), int(offset), joined)
        if len(piece.shape) != len(piece.stride) or min((*piece.shape, *piece.stride, piece.offset), default=0) < 0:
            raise ValueError(f"the piece {piece.name} has an invalid shape")
        return piece


@dataclass(frozen=True)
class TensorPlan:
    """One entry of the reference model's state dict.

    Attributes:
        name: The canonical name in the state dict (for tied entries, the name that ``save_pretrained`` keeps).
        shape: The shape of the full tensor.
        dtype: The name of the dtype, such as ``float32``.
        layout: The layout over :attr:`Plan.shards` ranks; None if it is replicated.
        aliases: The other state-dict names of the same tensor.
        saved_as: The name that ``save_pretrained`` of the reference model writes; None if it writes pieces or nothing.
        outside: True if it belongs to the user's modules around the Hugging Face model.
        pieces: The tensors that are written instead: slices of this tensor, or joined tensors, of which this is the
            first.
        where: The ``file:line`` of its rule; "" for none. Neither compared nor saved.
        quantized: The quantized form of a weight that is not stored as a tensor of this shape; None otherwise.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout | None = None
    aliases: tuple[str, ...] = ()
    saved_as: str | None = None
    outside: bool = False
    pieces: tuple[Piece, ...] = ()
    where: str = field(default="", compare=False)
    quantized: str = ""

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the shard of ``rank``."""
        return self.shape if self.layout is None else self.layout.local_shape(self.shape, rank)

    def saved_names(self) -> tuple[str, ...]:
        """Return all names under which ``save_pretrained`` writes the tensor or its pieces."""
        return tuple(p.name for p in self.pieces) if self.saved_as is None else (self.saved_as,)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "layout": self.layout.to_json() if self.layout else None,
            "aliases": list(self.aliases),
            "saved_as": self.saved_as,
            "outside": self.outside,
            "pieces": [piece.to_json() for piece in self.pieces],
        }

    @classmethod
    def from_json(cls, name: str, data: Mapping[str, Any]) -> TensorPlan:
        """Read what :meth:`to_json` made. Raises ``KeyError``, ``TypeError`` or ``ValueError`` on malformed data."""
        shape = tuple(int(size) for size in data["shape"])
        layout = Layout.from_json(data["layout"]) if data["layout"] is not None else None
        if layout is not None and (not 0 <= layout.dim < len(shape) or shape[layout.dim] != layout.size):
            raise ValueError(f"the layout of {name} does not describe its shape {list(shape)}")
        aliases = tuple(str(alias) for alias in data["aliases"])
        saved_as = None if data["saved_as"] is None else str(data["saved_as"])
        pieces = tuple(Piece.from_json(piece) for piece in data.get("pieces", ()))
        return cls(name, shape, str(data["dtype"]), layout, aliases, saved_as, bool(data.get("outside", False)), pieces)


@dataclass(frozen=True)
class InputPlan:
    """An argument of a module's forward that is sliced by ``layout``, along ``layout.dim``.

    If the argument is a multiple of the layout's size (batch * heads), each repetition is sliced.
    """

    name: str
    layout: Layout
    where: str = ""


@dataclass(frozen=True)
class ModulePlan:
    """The plan of one module: its rule, layouts and collectives.

    Attributes:
        path: The dotted path from the root module.
        rule: The kind of rule; ``one_expert``: each tensor is on one rank (:meth:`autopar.layout.Block.alone`); "" if
            the plan has only bare parameters or arguments of the module.
        where: The ``file:line`` of the rule.
        layout: The layout of the sharded features (for a layer ``dim`` is a dim of the stored weight).
        layouts: Parameter or buffer name -> layout.
        summed: The full parameters whose incoming gradient is summed over tp, because they work on sharded activations.
        once: The parameters that only the first rank adds (the bias after a partial sum); for experts, the modules that
            indices after the last expert select.
        gather_output, split_input, enter_output, inside: The keys of the policy.
        aside: True if no other layer reads the input of a column (of an adapter).
        opens, closes: Flags of a region that only enters, or only sums.
        by_hidden: True if an embedding is sharded along its columns instead of its rows.
        inputs: The arguments of forward that are sliced.
        groups: The units of a norm that normalizes each unit separately.
        extension: The name of a feature's rule that extends this one, and its numbers by name.
    """

    path: str
    rule: str
    where: str
    layout: Layout | None = None
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    summed: frozenset[str] = frozenset()
    once: frozenset[str] = frozenset()
    gather_output: bool = False
    split_input: bool = False
    enter_output: bool = False
    inside: bool = False
    aside: bool = False
    opens: bool = False
    closes: bool = False
    by_hidden: bool = False
    inputs: tuple[InputPlan, ...] = ()
    groups: Layout | None = None
    extension: tuple[str, tuple[tuple[str, float], ...]] | None = None

    def facts(self) -> list[Any]:
        """Return plain data that ranks compare."""
        return [
            *(self.path, self.rule, self.gather_output, self.split_input, self.enter_output, self.inside),
            *(self.opens, self.closes, self.by_hidden, sorted(self.summed), sorted(self.once)),
            [[name, layout.to_json()] for name, layout in self.layouts.items()],
            [[sliced.name, sliced.layout.to_json()] for sliced in self.inputs],
            *([self.extension] if self.extension else []),
        ]


@dataclass(frozen=True)
class AttributePlan:
    """An attribute that ``forward`` reads and that differs between ranks: ``values[rank]``.

    For a name ``config.x`` the module gets a copy of the config. For experts, ranks count as in :attr:`Plan.shards`.
    """

    path: str
    name: str
    where: str
    whole: int
    values: tuple[int, ...]


@dataclass(frozen=True)
class Plan(NotCopied):
    """The shards of one model on every rank of a tensor-parallel group.

    Attributes:
        tp: The size of the tensor-parallel axis.
        model_type: The type of the Hugging Face model inside.
        policy: The name of the policy file.
        tensors: Canonical state-dict name -> :class:`TensorPlan`, in state-dict order.
        modules: Path -> :class:`ModulePlan`, for modules that change.
        attributes: The attributes that differ between ranks.
        shards: The number of ranks of the layouts: tp, or more if experts are sharded over replicas too. Rank ``r`` of
            them holds the shard of tp rank ``r % tp`` for all other tensors.
        experts: The names of the tensors that are sharded over replicas too.
    """

    tp: int
    model_type: str
    policy: str
    tensors: Mapping[str, TensorPlan]
    modules: Mapping[str, ModulePlan]
    attributes: tuple[AttributePlan, ...] = ()
    shards: int = 0
    experts: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards", self.shards or self.tp)
        object.__setattr__(self, "tensors", MappingProxyType(dict(self.tensors)))
        object.__setattr__(self, "modules", MappingProxyType(dict(self.modules)))

    def fingerprint(self, model: nn.Module) -> dict[str, Any]:
        """Return the facts of the plan and the model that must be identical on all ranks, as plain data."""
        return {
            "model type": self.model_type,
            "tensors": self._facts,
            "quantized": self.quantized(),
            "modules": {module.path: module.facts() for module in self.modules.values()},
            "attributes": {f"{a.path}.{a.name}": a.values for a in self.attributes},
            "parameters": {
                n: {"meta": p.is_meta, "requires_grad": p.requires_grad} for n, p in model.named_parameters()
            },
        }

    @cached_property
    def _facts(self) -> dict[str, Any]:
        return {tensor.name: tensor.to_json() for tensor in self.tensors.values()}

    def saved(self) -> Plan:
        """Return the plan without quantized weights."""
        return replace(self, tensors={name: one for name, one in self.tensors.items() if not one.quantized})

    def quantized(self) -> dict[str, str]:
        """Return the forms of quantized weights, by name."""
        return {name: one.quantized for name, one in self.tensors.items() if one.quantized}

    def check_zero(self, stage: int) -> None:
        """Raise ConfigError for a stage of ZeRO that would shard quantized weights."""
        if stage >= 2 and (quantized := self.quantized()):
            name, form = next(iter(quantized.items()))
            raise ConfigError(
                f"zero.stage={stage} is not supported with quantized weights, such as {name} ({form}): torch's FSDP2 "
                "would separate bytes and scales.\n  Use zero.stage 1 for the optimizer's state, and "
                "tensor_parallel_size to shard the quantized weights."
            )

    @cached_property
    def names(self) -> Mapping[str, str]:
        """Name of a tensor, aliases included -> canonical name."""
        return {name: tensor.name for tensor in self.tensors.values() for name in (tensor.name, *tensor.aliases)}

    def canonical(self, name: str) -> str:
        """Return the canonical name of a state-dict entry that may be an alias.

        Raises:
            ConfigError: The plan does not contain the name (a parameter added after ``initialize``).
        """
        if name in self.names:
            return self.names[name]
        raise ConfigError(
            f"{name} was added after autopar.initialize and is not in its plan\n"
            "  Add modules (adapters) before autopar.initialize."
        )


def rows(entries: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Merge entries that differ only in the numbers of blocks: ``layers.0-3.experts.0-7.up.weight``."""
    found = []
    for entry in entries:
        rest = json.dumps({key: value for key, value in entry.items() if key not in ("name", "tied")})
        found.append((tuple(entry["name"].split(".")), rest, entry))
    for place in range(max((len(name) for name, _, _ in found), default=0) - 1, 0, -1):  # the innermost number first
        groups: dict[Any, list[tuple[int, Any]]] = {}
        for name, rest, entry in found:
            number = name[place] if place < len(name) - 1 else ""
            key = (*name[:place], "*", *name[place + 1 :]) if number.isdigit() else name
            groups.setdefault((key, rest), []).append((int(number) if number.isdigit() else -1, entry))
        found = [
            (tuple(",".join(ranges([n for n, _ in group])) if s == "*" else s for s in key), rest, group[0][1])
            for (key, rest), group in groups.items()
        ]
    return [(".".join(name), entry) for name, _, entry in found]


def ranges(numbers: list[int]) -> list[str]:
    """Return ``0-3`` for each run of consecutive numbers."""
    runs = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        values = [number for _, number in run]
        runs.append(str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}")
    return runs


def held(model: nn.Module) -> tuple[int, int]:
    """Return the number of elements and bytes of this rank's parameters; a tied parameter counts once."""
    stored = {f"{path}.weight": weight for path, weight in stored_weights(model).items()}
    elements = size = 0
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        weight = stored.get(name)
        elements += local.numel() if weight is None else prod(weight.shape)
        size += local.nbytes if weight is None or weight.dtype is None else 0
        size += 0 if weight is None else sum(tensor.nbytes for tensor in weight.beside().values())
    return elements, size


def summarise(model: nn.Module, whole: int, sizes: tuple[int, ...], device: Any, policy: object) -> str:
    """Return the model, its policy, the mesh, and the size of this rank's shards, in one line.

    Args:
        whole: The number of elements of all parameters of the full model.
        sizes: The sizes ``(tp, pp, dp, cp)``.
        policy: The file of the policy, with or without a line.
    """
    tp, pp, dp, cp = sizes
    context = f" x cp {cp}" if cp > 1 else ""
    elements, size = held(model)
    place = Path(str(policy)).name.removesuffix(":top")
    return (
        f"{type(model).__name__} by {place}: tp {tp}{context} x pp {pp} x dp {dp} on {device}; "
        f"{whole:,} parameters, this rank holds {elements:,} ({size / 1e6:,.1f} MB)"
    )


def derived_notice(model: nn.Module, plan: Plan, policy: Policy) -> str | None:
    """Return one line about a policy that was derived automatically; None for others. ``model`` is not sharded yet."""
    if policy.name != DERIVED:
        return None
    line = (
        f"no policy lists model_type '{plan.model_type}', so its policy is derived from its tp_plan and forward "
        "('autopar policy new' verifies and saves it)"
    )
    names = {plan.canonical(name) for name, _ in model.named_parameters()}
    sizes = {name: prod(plan.tensors[name].shape) for name in names}
    full = sum(size for name, size in sizes.items() if plan.tensors[name].layout is None) / max(sum(sizes.values()), 1)
    return f"{line}; {full:.0%} of the parameters stay full on each of {plan.tp} ranks" if plan.tp > 1 else line
