"""The user's own data (``extra=``): one value that all ranks have, and in it dictionaries of this rank's shards.

A dictionary whose keys are names of the model's tensors, and whose tensors have the shapes that this rank has of them
(an EMA of the weights), is saved like the state of an optimizer: ``{name}::extra.ema`` in the layout of the tensor. So
it comes back on any mesh. Everything else is saved from rank 0, and all ranks must have the same.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.checkpoint.format import SHARDED_EXTRA, Manifest
from autopar.checkpoint.optimizer_state import alike
from autopar.checkpoint.shards import Shards
from autopar.checkpoint.state import State
from autopar.distributed.digest import sum_of_bits
from autopar.distributed.shard_reads import PLAIN
from autopar.errors import CheckpointError, clip, listed
from autopar.foreign.tensors import local_part
from autopar.plan.plan import Plan, TensorPlan
from autopar.storage.files import checksum
from autopar.storage.json_values import Json, encode, inside
from autopar.storage.safetensors_io import dtype_name, dtype_of

_DEEPEST = 8  # dictionaries in dictionaries that are searched for shards


@dataclass(frozen=True)
class Extra:
    """One rank's data.

    Attributes:
        value: as JSON, with dictionaries of shards left empty.
        loose: the tensors in it, by their place.
        shards: place of a dictionary -> its keys on the way there, its tensors by the names that the user gave them.
    """

    value: Json
    loose: Mapping[str, torch.Tensor]
    shards: Mapping[str, tuple[tuple[str, ...], Mapping[str, torch.Tensor]]]

    @classmethod
    def of(cls, extra: Mapping[str, Any], plan: Plan, local: Mapping[str, torch.Tensor]) -> Extra:
        """Find the dictionaries of shards. Raises CheckpointError for what a checkpoint cannot hold.

        Args:
            local: this rank's tensors of the model, by canonical names.
        """
        if not isinstance(extra, Mapping):
            raise CheckpointError(f"extra={extra!r} must be a dict")
        canonical = plan.names
        found: dict[str, tuple[tuple[str, ...], Mapping[str, torch.Tensor]]] = {}

        def emptied(value: Any, path: tuple[str, ...], where: str) -> Any:
            if type(value) not in (dict, OrderedDict) or not all(isinstance(key, str) for key in value):
                return value
            shards = value and all(_is_shard(one, local.get(canonical.get(key, ""))) for key, one in value.items())
            if shards and _ties_hold(value, canonical):
                found[where] = path, value
                return type(value)()
            if len(path) == _DEEPEST:
                return value
            return type(value)((key, emptied(one, (*path, key), inside(where, key))) for key, one in value.items())

        json_value, loose = encode(emptied(dict(extra), (), "extra"), "extra")
        return cls(json_value, loose, found)

    def tensors(self, plan: Plan) -> Iterator[tuple[str, torch.Tensor, TensorPlan]]:
        """Yield canonical name, tensor and saved plan of each shard, in the plan's order."""
        canonical = plan.names
        for where, (_, given) in self.shards.items():
            by_name: dict[str, torch.Tensor] = {}
            for name, tensor in given.items():
                by_name.setdefault(canonical[name], tensor)
            for name, due in plan.tensors.items():
                if name in by_name:
                    tensor = by_name[name].detach().resolve_conj().resolve_neg()
                    saved = TensorPlan(f"{name}::{where}", due.shape, dtype_name(tensor.dtype), due.layout)
                    yield name, tensor, saved

    def names(self, plan: Plan) -> list[dict[str, Any]]:
        """Return for the manifest which dictionaries there are, and the tensors that their keys name."""
        canonical = plan.names
        return [
            {"path": list(path), "where": where, "names": {name: canonical[name] for name in given}}
            for where, (path, given) in self.shards.items()
        ]

    @torch.no_grad()
    def digests(self, plan: Plan, values: bool) -> dict[str, Any]:
        """Digest it for :func:`check_extra`; without ``values`` only which shards there are."""
        shards: dict[str, dict[str, tuple[str, int]]] = {}
        for name, tensor, saved in self.tensors(plan):
            digest = int(sum_of_bits(local_part(tensor))) if values else 0
            shards.setdefault(saved.name.partition("::")[2], {})[name] = saved.dtype, digest
        rest = {place: (clip(text, 40), checksum(text.encode())) for place, text in _leaves(self.value, "extra")}
        for place, tensor in self.loose.items():
            kind = f"a tensor {list(tensor.shape)} of {dtype_name(tensor.dtype)}"
            rest[place] = kind, f"{kind} {int(sum_of_bits(tensor)) if values else 0}"
        return {"rest": rest if values else {}, "shards": shards}


def _is_shard(value: Any, local: torch.Tensor | None) -> bool:
    """Tell whether a value has the form of what this rank holds of a tensor of the model."""
    known = isinstance(value, DTensor) or type(value) in PLAIN
    if local is None or not known or value.shape != local.shape:
        return False
    if value.layout != torch.strided or value.is_meta or not alike(value, local):
        return False
    try:
        return dtype_of(dtype_name(value.dtype)) is not None
    except ValueError:
        return False


def _ties_hold(given: Mapping[str, torch.Tensor], canonical: Mapping[str, str]) -> bool:
    first: dict[str, torch.Tensor] = {}
    pairs = ((first.setdefault(canonical[name], tensor), tensor) for name, tensor in given.items())
    return all(one is other or (one.dtype == other.dtype and torch.equal(one, other)) for one, other in pairs)


def _leaves(value: Json, where: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of everything that is not a dictionary with content."""
    if isinstance(value, dict) and value and "$" not in value:
        for key, one in value.items():
            yield from _leaves(one, inside(where, key))
    else:
        yield where, json.dumps(value, sort_keys=True)


# -- over ranks --------------------------------------------------------------------------------------------------------


def unlike(
    digests: Sequence[Mapping[str, tuple[str, int]]], plan: Plan, places: Sequence[tuple[int, int, int]], fsdp: bool
) -> dict[str, tuple[int, int]]:
    """Return the tensors whose digests differ on ranks that hold the same shard, with two such ranks.

    Args:
        digests: name -> dtype and digest, of each rank of the world in order.
        places: of each of these ranks (:meth:`MPU.places`).
        fsdp: the replicas hold different rows.
    """
    first: dict[Any, tuple[int, int]] = {}
    different: dict[str, tuple[int, int]] = {}
    for rank, theirs in enumerate(digests):
        shard_rank, _, copy = places[rank]
        for name, (dtype, digest) in theirs.items():
            layout = plan.tensors[name].layout
            replica = copy, 0 if name in plan.experts else shard_rank // plan.tp
            shard = (name, dtype, None if layout is None else layout.ranges(shard_rank), replica if fsdp else None)
            other, expected = first.setdefault(shard, (rank, digest))
            if digest != expected:
                different.setdefault(name, (other, rank))
    return different


def check_extra(ranks: Sequence[Mapping[str, Any]], state: State, fsdp: bool) -> None:
    """Check that all ranks have the same data, and their shards of the same tensors.

    Args:
        ranks: what :meth:`Extra.digests` gave on each rank of the world, in order.
        fsdp: the replicas hold different rows.

    Raises:
        CheckpointError: names what differs, and two ranks.
    """
    places = dict.fromkeys(place for rank in ranks for place in rank["rest"])
    different = {}
    for place in places:
        values = [rank["rest"].get(place, ("missing", "")) for rank in ranks]
        other = next((number for number, value in enumerate(values) if value[1] != values[0][1]), None)
        if other is not None:
            shown = values[0][0], values[other][0]
            different[place] = f"{place} is {shown[0]} on rank 0 and {'another' if len(set(shown)) < 2 else shown[1]}"
            different[place] += f" on rank {other}"
    if different:
        raise CheckpointError(
            f"extra= differs between ranks in {len(different)} of {len(places)} places: "
            f"{next(iter(different.values()))}\n  They differ in {listed(list(different))}.\n"
            "  One value is saved for all ranks: pass the same everywhere (an average, a list of all ranks' values).\n"
            "  Shards come back on any mesh as a dict {name of a parameter: tensor of this rank's shape}.\n"
            "  With consistency_check: {enable: false} rank 0's is saved."
        )
    for where in dict.fromkeys(where for rank in ranks for where in rank["shards"]):
        theirs = [rank["shards"].get(where, {}) for rank in ranks]
        _check_complete(where, theirs, state)
        drifted = unlike(theirs, state.plan, state.mpu.places(), fsdp)
        if drifted:
            name, (one, other) = next(iter(drifted.items()))
            raise CheckpointError(
                f"{name} in {where} differs between rank {one} and rank {other}, which must hold the same "
                f"({len(drifted)} tensors: {listed(list(drifted), 3)})\n  Update it alike on all ranks that hold the "
                "same weights. Nothing was written."
            )


def _check_complete(where: str, ranks: Sequence[Mapping[str, tuple[str, int]]], state: State) -> None:
    stages = [stage for _, stage, _ in state.mpu.places()]
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        holders = state.holders.get(name, range(state.mpu.pp.size))
        due = [rank for rank in range(len(ranks)) if stages[rank] in holders]
        kinds = {ranks[rank].get(name, ("", 0))[0] for rank in due}
        if len(kinds) > 1:
            have = next(rank for rank in due if name in ranks[rank])
            lacks = next(rank for rank in due if ranks[rank].get(name, ("", 0))[0] != ranks[have][name][0])
            what = "as another dtype" if name in ranks[lacks] else "not"
            raise CheckpointError(
                f"{where} holds {name} on rank {have} and {what} on rank {lacks}, which has this weight, too\n"
                "  Give the same weights on all ranks that have them."
            )


def merged_names(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Merge what :meth:`Extra.names` gave on each rank: stages hold other weights."""
    merged: dict[str, dict[str, Any]] = {}
    for entry in (entry for rank in ranks for entry in rank):
        known = merged.setdefault(entry["where"], {**entry, "names": {}})
        known["names"].update(entry["names"])
    return list(merged.values())


# -- loading -----------------------------------------------------------------------------------------------------------


class SavedShards:
    """The dictionaries of shards in a checkpoint, for the mesh that loads it. Making it checks them, and reads nothing.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """

    def __init__(self, manifest: Manifest, model: nn.Module, state: State, local: Mapping[str, torch.Tensor]) -> None:
        self._state, self._local = state, local
        self.entries: list[tuple[list[str], str, dict[str, str]]] = []
        tensors = manifest.parts["extra"].tensors if "extra" in manifest.parts else {}
        self.saved: dict[str, TensorPlan] = {}
        try:
            for entry in manifest.training.get(SHARDED_EXTRA, ()):
                path, where = [str(key) for key in entry["path"]], str(entry["where"])
                names = {str(key): str(name) for key, name in entry["names"].items()}
                for name in names.values():
                    plan = self.saved[f"{name}::{where}"] = tensors[f"{name}::{where}"]
                    if plan.shape != state.plan.tensors[name].shape:
                        raise ValueError(f"{plan.name} has shape {list(plan.shape)}")
                self.entries.append((path, where, names))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"extra is damaged in the checkpoint: {error!r}") from error
        canonical = state.plan.names
        self._names: dict[str, list[str]] = {}
        for name in model.state_dict(keep_vars=True) if self.entries else ():
            self._names.setdefault(canonical.get(name, name), []).append(name)

    def fill(self, value: dict[str, Any], shards: Shards) -> None:
        """Read this rank's shards into the dictionaries of ``value`` that were left empty for them."""
        for path, where, names in self.entries:
            target: Any = value
            for key in path:
                target = target.get(key) if isinstance(target, dict) else None
            if not isinstance(target, dict):
                raise CheckpointError(f"{where} is damaged in the checkpoint: it is no dict")
            for key, name in self._chosen(names).items():
                target[key] = self._read(f"{name}::{where}", name, shards)

    def _chosen(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return key -> tensor on this rank; a tied weight is called here as in the checkpoint, if it can be."""
        chosen = {}
        for key, name in names.items():
            here = self._names.get(name, [])
            if key in here:
                chosen[key] = name
            elif here and not any(other in names for other in here):
                chosen[here[0]] = name
        return chosen

    def _read(self, saved: str, name: str, shards: Shards) -> torch.Tensor:
        local, dtype = self._local[name].detach(), dtype_of(self.saved[saved].dtype)
        if isinstance(local, DTensor):
            out: torch.Tensor = torch.empty_like(local, dtype=dtype)
        else:
            out = torch.empty(local.shape, dtype=dtype, device="cpu")
        shards.read_shard(saved, "extra", self._state.plan.tensors[name].layout, self._state.mpu, out)
        return out
