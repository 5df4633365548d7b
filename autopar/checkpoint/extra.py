"""The user's data (``extra=``) of a checkpoint: one value for all ranks, which may contain :class:`ShardedDict`.

A tensor in a :class:`ShardedDict` (an EMA of the weights) is saved as ``{name}::extra.ema`` in the layout of the
model's tensor, and loads on any mesh. The other values are saved by rank 0 and must be identical on all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.checkpoint.format import Manifest
from autopar.checkpoint.optimizer_state import sharded_alike
from autopar.checkpoint.shards import ShardReader
from autopar.checkpoint.state import State
from autopar.compat.tensors import PLAIN, local_part
from autopar.distributed.digest import sum_of_bits
from autopar.errors import CheckpointError, clip, listed, nearest
from autopar.plan.plan import Plan, TensorPlan
from autopar.storage.files import checksum
from autopar.storage.json_values import Json, encode, inside
from autopar.storage.safetensors_io import dtype_name, dtype_of


class ShardedDict(dict[str, torch.Tensor]):
    """A dict for ``extra=`` that maps names of the model's tensors to this rank's shards, such as an EMA.

    It must be a value of ``extra`` itself, not nested deeper. On loading each rank gets its shards back, on the CPU::

        ema = autopar.checkpoint.ShardedDict({n: p.detach().clone() for n, p in model.named_parameters()})
        model.save_parallelized("step-100", extra={"ema": ema})
    """


@dataclass(frozen=True)
class Extra:
    """One rank's ``extra=``, encoded.

    Attributes:
        value: The JSON, in which each ShardedDict is empty.
        loose: Place in ``value`` -> tensor.
        shards: Place of a ShardedDict -> its tensors by canonical name.
    """

    value: Json
    loose: Mapping[str, torch.Tensor]
    shards: Mapping[str, Mapping[str, torch.Tensor]]

    @classmethod
    def of(cls, extra: Mapping[str, Any], plan: Plan, local: Mapping[str, torch.Tensor]) -> Extra:
        """Encode ``extra``. Raises CheckpointError for a value that a checkpoint cannot hold.

        ``local``: this rank's tensors of the model, by canonical name.
        """
        if not isinstance(extra, Mapping):
            raise CheckpointError(f"extra={extra!r} must be a dict")
        rest, shards = dict(extra), {}
        for key, value in extra.items():
            if isinstance(value, ShardedDict):
                where, rest[key] = inside("extra", key), {}
                shards[where] = _canonical(value, where, plan, local)
            elif isinstance(value, Mapping) and any(isinstance(each, DTensor) for each in value.values()):
                raise CheckpointError(
                    f"{inside('extra', key)} is a {type(value).__name__} with shards (DTensors)\n"
                    f"  Use extra={{{key!r}: autopar.checkpoint.ShardedDict(...)}}."
                )
        return cls(*encode(rest, "extra"), shards)

    def tensors(self, plan: Plan) -> Iterator[tuple[str, torch.Tensor, TensorPlan]]:
        """Yield canonical name, tensor and saved plan of each shard, in the plan's order."""
        for where, given in self.shards.items():
            for name, due in plan.tensors.items():
                if name in given:
                    tensor = given[name].detach().resolve_conj().resolve_neg()
                    saved = TensorPlan(f"{name}::{where}", due.shape, dtype_name(tensor.dtype), due.layout)
                    yield name, tensor, saved

    @torch.no_grad()
    def digests(self, plan: Plan, values: bool) -> dict[str, Any]:
        """Return digests for :func:`check_extra`; without ``values``, only the names of shards."""
        shards: dict[str, dict[str, tuple[str, int]]] = {}
        for name, tensor, saved in self.tensors(plan):
            digest = int(sum_of_bits(local_part(tensor))) if values else 0
            shards.setdefault(saved.name.partition("::")[2], {})[name] = saved.dtype, digest
        rest = {place: text if len(text) < 60 else f"{clip(text, 40)} ({checksum(text.encode())})"
                for place, text in _leaves(self.value, "extra")} if values else {}  # fmt: skip
        for place, tensor in self.loose.items() if values else ():
            kind = f"a tensor {list(tensor.shape)} of {dtype_name(tensor.dtype)}"
            rest[place] = f"{kind} with the sum {int(sum_of_bits(tensor))} of its bits"
        return {"rest": rest, "shards": shards}


def _leaves(value: Json, where: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the JSON text of each value that is not a non-empty dict."""
    if isinstance(value, dict) and value and "$" not in value:
        for key, one in value.items():
            yield from _leaves(one, inside(where, key))
    else:
        yield where, json.dumps(value, sort_keys=True)


def _canonical(
    given: ShardedDict, where: str, plan: Plan, local: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the shards by canonical name. Raises CheckpointError if one differs in shape from this rank's tensor."""
    found: dict[str, torch.Tensor] = {}
    for key, value in given.items():
        name = plan.names.get(key, "")
        due = local.get(name)
        if due is None:
            hint = nearest(str(key), list(plan.names))
            raise CheckpointError(f"{where} is a ShardedDict with {key!r}; this rank's model has no such tensor.{hint}")
        if not isinstance(value, DTensor) and type(value) not in PLAIN:
            raise CheckpointError(f"{key} in {where} must be a tensor; got {type(value).__name__}")
        if value.shape != due.shape or value.layout != torch.strided or value.is_meta or not sharded_alike(value, due):
            raise CheckpointError(
                f"{key} in {where} must be a dense shard of shape {list(due.shape)}; got {list(value.shape)}\n"
                "  A ShardedDict holds tensors that are sharded like the model's. Put other tensors into extra= itself."
            )
        one = found.setdefault(name, value)
        if one is not value and not (one.dtype == value.dtype and torch.equal(one, value)):
            raise CheckpointError(f"{where} holds two different tensors for {name}, which is tied in the model")
    return found


# -- over ranks --------------------------------------------------------------------------------------------------------


def check_replicas(
    digests: Sequence[Mapping[str, tuple[str, int]]],
    plan: Plan,
    places: Sequence[tuple[int, int, int]],
    rows: int | None,
    where: str = "",
) -> None:
    """Check that ranks with the same shards have the same digests. Dtypes are compared elsewhere.

    Args:
        digests: The digests of each rank of the world: name -> dtype and digest.
        places: The place of each rank (:meth:`MPU.places`).
        rows: The number of neighboring replicas that hold different rows (FSDP2); None if all hold the same.
        where: The place of the tensors in ``extra``; empty for the model's tensors.

    Raises:
        CheckpointError: Two ranks differ. The error names them and the tensors.
    """
    first: dict[Any, tuple[int, int]] = {}
    different: dict[str, tuple[int, int]] = {}
    for rank, theirs in enumerate(digests):
        shard_rank, _, copy = places[rank]
        for name, (dtype, digest) in theirs.items():
            layout = plan.tensors[name].layout
            replica = copy % (rows or 1), 0 if name in plan.experts else shard_rank // plan.tp
            shard = (name, dtype, None if layout is None else layout.ranges(shard_rank), replica if rows else None)
            other, expected = first.setdefault(shard, (rank, digest))
            if digest != expected:
                different.setdefault(name, (other, rank))
    if different:
        name, (one, other) = next(iter(different.items()))
        raise CheckpointError(
            f"{name}{where and f' in {where}'} must be identical on rank {one} and rank {other}, but differs "
            f"({len(different)} tensors: {listed(list(different), 3)})\n"
            "  One of the ranks skipped an optimizer step, or stepped with different gradients or random numbers.\n"
            "  Nothing was written. Continue from the last checkpoint. consistency_check: {enable: false} skips this\n"
            "  check and saves a mix of the ranks' values."
        )


def check_extra(ranks: Sequence[Mapping[str, Any]], state: State, rows: int | None) -> None:
    """Raise CheckpointError unless all ranks have the same :meth:`Extra.digests`, and shards of the same tensors."""
    places = dict.fromkeys(place for rank in ranks for place in rank["rest"])
    different = {}
    for place in places:
        values = [rank["rest"].get(place, "missing") for rank in ranks]
        other = next((number for number, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            different[place] = f"{place} is {values[0]} on rank 0 and {values[other]} on rank {other}"
    if different:
        raise CheckpointError(
            f"extra= differs between ranks in {len(different)} of {len(places)} places: "
            f"{next(iter(different.values()))}\n  All places: {listed(list(different))}.\n"
            "  Pass the same value on all ranks (an average, a list of all ranks' values), and shards (of an EMA)\n"
            "  as an autopar.checkpoint.ShardedDict {name: tensor}.\n"
            "  consistency_check: {enable: false} skips this check and saves rank 0's value."
        )
    stages = [stage for _, stage, _ in state.mpu.places()]
    for where in dict.fromkeys(where for rank in ranks for where in rank["shards"]):
        theirs: list[dict[str, tuple[str, int]]] = [rank["shards"].get(where, {}) for rank in ranks]
        for name in dict.fromkeys(name for rank in theirs for name in rank):
            holders = state.holders.get(name, range(state.mpu.pp.size))
            due = [rank for rank in range(len(ranks)) if stages[rank] in holders]
            have = next(rank for rank in due if name in theirs[rank])
            lacks = [rank for rank in due if theirs[rank].get(name, ("", 0))[0] != theirs[have][name][0]]
            if lacks:
                what = "as another dtype" if name in theirs[lacks[0]] else "not"
                raise CheckpointError(
                    f"{where} holds {name} on rank {have} and {what} on rank {lacks[0]}, which also has this weight\n"
                    "  Pass the same weights on all ranks that hold them."
                )
        check_replicas(theirs, state.plan, state.mpu.places(), rows, where)


# -- loading -----------------------------------------------------------------------------------------------------------


def saved_shards(manifest: Manifest, plan: Plan) -> dict[str, str]:
    """Return the tensors of each ShardedDict in a checkpoint: saved name -> canonical name."""
    extra = manifest.parts.get("extra")
    names = {} if extra is None else {saved: saved.partition("::")[0] for saved in extra.tensors}
    return {saved: name for saved, name in names.items() if name in plan.tensors}


def fill_shards(
    value: Any, shards: ShardReader, model: nn.Module, state: State, local: Mapping[str, torch.Tensor]
) -> None:
    """Read this rank's shards into the empty dicts of ``value`` that stand for a ShardedDict."""
    names: dict[str, str] = {}  # a tied weight has the name of named_parameters()
    for name in model.state_dict(keep_vars=True):
        names.setdefault(state.plan.names.get(name, name), name)
    saved = saved_shards(shards.manifest, state.plan)
    for key in value if isinstance(value, dict) else ():
        theirs = {tensor: name for tensor, name in saved.items() if tensor == f"{name}::{inside('extra', key)}"}
        if theirs:
            value[key] = ShardedDict()
        for tensor, name in theirs.items():
            if name not in names:
                continue
            dtype, like = dtype_of(shards.manifest.parts["extra"].tensors[tensor].dtype), local[name].detach()
            device = like.device if isinstance(like, DTensor) else torch.device("cpu")
            out = torch.empty_like(like, dtype=dtype, device=device)
            shards.read_shard(tensor, "extra", state.plan.tensors[name].layout, state.mpu, out)
            value[key][names[name]] = out
