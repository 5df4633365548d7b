"""The plan: what every rank will hold. Plain data, computed from names, shapes and sizes; no process group.

:func:`~autopar.plan.make_plan.make_plan` checks everything before a plan exists, from data that every rank has: every
rank raises the same error, and the model is untouched.
"""

from __future__ import annotations

import hashlib
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
    """A contiguous tensor made of views side by side along ``dim``, as by ``torch.cat``; of one view, its copy."""

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
    """A tensor that ``save_pretrained`` writes and that is a view of a stored one, or of several that it joins.

    Attributes:
        name: Name in the file; of a part of a :class:`Joined`, the stored tensor that it is a view of. "": zeros.
        shape, stride, offset: The view, in elements of the contiguous tensor.
        joined: Joined tensors that it is a view of, instead of one stored tensor.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    joined: Joined | None = None

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the piece as a view of the full tensor. Raises ``RuntimeError`` if it does not lie inside."""
        last = self.offset + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        if not 0 <= self.offset <= last < whole.numel():
            raise RuntimeError(f"{self.name} does not lie inside a tensor of {whole.numel()} elements")
        return whole.contiguous().as_strided(self.shape, self.stride, self.offset)

    def sources(self) -> Iterator[str]:
        """Yield the stored tensors that it is joined from; none for a view of one."""
        for part in self.joined.parts if self.joined else ():
            if part.joined is not None:
                yield from part.sources()
            elif part.name:
                yield part.name

    def zeros(self) -> int:
        """Count the elements that no stored tensor has."""
        parts = self.joined.parts if self.joined else ()
        return sum(part.zeros() if part.joined or part.name else math.prod(part.shape) for part in parts)

    def renamed(self, rename: Callable[[str], str]) -> Piece:
        """Return the same with other names of stored tensors."""
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
            raise ValueError(f"the piece {piece.name} has an impossible shape")
        return piece


@dataclass(frozen=True)
class TensorPlan:
    """One entry of the reference model's state dict.

    Attributes:
        name: Canonical name in the state dict (of tied entries, the one that ``save_pretrained`` keeps).
        shape: Shape of the full tensor.
        dtype: Name of the dtype in safetensors and torch: ``float32``.
        layout: Layout over :attr:`Plan.shards` ranks; None if it is replicated.
        aliases: Other state-dict names of the same tensor.
        saved_as: Name under which ``save_pretrained`` of the reference model writes it; None if it does not.
        outside: True if it belongs to the user's modules around the Hugging Face model.
        pieces: Tensors written instead: parts of this tensor, or several tensors joined, of which this is the first.
        where: ``file:line`` of its rule; "" for none. Neither compared nor saved.
        quantized: Form in which the weight is stored, if that is not a tensor of this shape; such a one is not saved.
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
        """Return the shape on rank ``rank`` of those that hold the shards."""
        return self.shape if self.layout is None else self.layout.local_shape(self.shape, rank)

    def saved_names(self) -> tuple[str, ...]:
        """Return all names under which ``save_pretrained`` writes it or its parts."""
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

    def facts(self) -> dict[str, Any]:
        """Return plain data that two ranks can compare; a digest of pieces, of which experts have thousands."""
        data = self.to_json()
        if self.pieces:
            pieces = json.dumps(data["pieces"]).encode()
            data["pieces"] = f"{len(self.pieces)}, {hashlib.blake2b(pieces, digest_size=8).hexdigest()}"
        return data

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

    An argument several times as long as the layout (batch * heads) is sliced in each repetition.
    """

    name: str
    layout: Layout
    where: str = ""


@dataclass(frozen=True)
class ModulePlan:
    """The plan of one module: its rule, its layouts, its collectives.

    Attributes:
        path: Dotted path from the root module.
        rule: Rule of the policy; ``one_expert``: each tensor is on one rank (:meth:`autopar.layout.Block.alone`); ""
            if only bare parameters or arguments of the module are concerned.
        where: ``file:line`` of the rule.
        layout: Layout of the sharded features (for a layer ``dim`` is a dim of the stored weight).
        layouts: Parameter or buffer name -> its layout.
        summed: Full parameters whose incoming gradient is summed over tp (they work on sharded activations).
        once: Those that only the first rank adds (the bias after a partial sum); of experts, the modules that indices
            after the last expert stand for.
        gather_output, split_input, enter_output, inside: Keys of the policy.
        aside: True if no other layer reads the input of a column (an adapter's).
        opens, closes: Flags of a region that only enters, or only sums.
        by_hidden: True if an embedding is sharded along its columns instead of its rows.
        inputs: Arguments of forward that are sliced.
        groups: Units of a norm whose features are normalised by themselves.
        extension: Name of a feature's rule that extends this one, and its numbers by name.
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
        """Return plain data that two ranks can compare."""
        return [
            *(self.path, self.rule, self.gather_output, self.split_input, self.enter_output, self.inside),
            *(self.opens, self.closes, self.by_hidden, sorted(self.summed), sorted(self.once)),
            [[name, layout.to_json()] for name, layout in self.layouts.items()],
            [[sliced.name, sliced.layout.to_json()] for sliced in self.inputs],
            *([self.extension] if self.extension else []),
        ]


@dataclass(frozen=True)
class AttributePlan:
    """An attribute that ``forward`` reads and that differs by rank: ``values[rank]``.

    ``name`` may be ``config.x``: then the module gets its own copy of the config. Experts have the ranks of
    :attr:`Plan.shards`.
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
        tp: Size of the tensor-parallel axis.
        model_type: Type of the Hugging Face model inside.
        policy: Name of the policy file.
        tensors: State-dict name -> :class:`TensorPlan`, in state-dict order, canonical names only.
        modules: Path -> :class:`ModulePlan`, only of modules that change.
        attributes: Attributes that differ by rank.
        shards: Number of ranks over which tensors are laid out: tp, or more where experts are sharded over replicas.
            Rank ``r`` of them holds of all other tensors the shard of tp rank ``r % tp``.
        experts: Names of the tensors that are sharded over replicas, too.
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
        """Return all of the plan and of the model that must be the same on every rank, as plain data."""
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
        return {tensor.name: tensor.facts() for tensor in self.tensors.values()}

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
                f"zero.stage={stage} does not go with quantized weights, such as {name} ({form}): torch's FSDP2 would "
                "part bytes and scales.\n  Use zero.stage 1, which shards the state of what is trained; "
                "tensor_parallel_size shards the quantized weights."
            )

    @cached_property
    def names(self) -> Mapping[str, str]:
        """Every name of the tensors -> the canonical one; tied tensors have several."""
        return {name: tensor.name for tensor in self.tensors.values() for name in (tensor.name, *tensor.aliases)}

    def canonical(self, name: str) -> str:
        """Return the canonical name of a state-dict entry that may be an alias.

        Raises:
            ConfigError: the plan does not know the name (a parameter added after ``initialize``).
        """
        if name in self.names:
            return self.names[name]
        raise ConfigError(
            f"{name} was added after autopar.initialize, which does not know whether it is sharded. "
            "Add modules (adapters) before."
        )


def rows(entries: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """One row for entries that differ in numbers of blocks alone: ``layers.0-3.experts.0-7.up.weight``."""
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
    """``0-3`` for each run of numbers that follow one another."""
    runs = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        values = [number for _, number in run]
        runs.append(str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}")
    return runs


def held(model: nn.Module) -> tuple[int, int]:
    """Return how many elements the parameters that are here have, and their bytes; a tied one counts once."""
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
        whole: Number of elements of all parameters of the full model.
        sizes: tp, pp, dp and cp.
        policy: File of the policy, with a line or without.
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
    """Return one line on a policy that was derived unasked; None for any other. ``model`` is not sharded yet."""
    if policy.name != DERIVED:
        return None
    line = (
        f"no policy lists model_type '{plan.model_type}', which comes with a tp_plan: one is derived from what forward "
        "computes ('autopar policy new' proves it and writes it down)"
    )
    names = {plan.canonical(name) for name, _ in model.named_parameters()}
    sizes = {name: prod(plan.tensors[name].shape) for name in names}
    full = sum(size for name, size in sizes.items() if plan.tensors[name].layout is None) / max(sum(sizes.values()), 1)
    return f"{line}; it leaves {full:.0%} of the parameters whole on each of {plan.tp} ranks" if plan.tp > 1 else line
