"""Yield or upload the full weights of a parallelized model under the names that ``save_pretrained`` writes."""

from __future__ import annotations

import functools
import math
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.utils.hub import PushToHubMixin

from autopar.checkpoint.arguments import HUB_OPTIONS, check_same_call
from autopar.checkpoint.format import parse_size
from autopar.checkpoint.staging import link
from autopar.checkpoint.state import STATE, State, local_tensors, state_of
from autopar.distributed.agree import all_ranks, rank_zero, same_on_every_rank
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import all_gather, gathered
from autopar.distributed.gloo_collectives import all_reduce
from autopar.distributed.mesh import MPU
from autopar.errors import CheckpointError, ConsistencyError
from autopar.layout import Layout
from autopar.plan.plan import Plan, TensorPlan
from autopar.storage.lazy_tensor import InMemory, open_piece


def hf_weights(model: nn.Module, *, bucket_size: int | str = "512MB") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, tensor)`` of the full model on every rank, for a serving engine or a custom file.

    Names, shapes and values are equal to the reference model's ``save_pretrained``, in the dtype of the model. Custom
    modules around the Hugging Face model are left out. Every rank must iterate over all of it. One bucket is in memory
    at a time. Tensors are copies, on the device of the model::

        for name, tensor in autopar.hf_weights(model):
            if model.mpu.is_master:
                engine.load(name, tensor)

    If a rank leaves the loop early (``break``, an error), the other ranks raise. To leave an iterator that is kept in a
    variable, call ``close()``.

    Args:
        model: The result of ``autopar.initialize``, or a wrapper around it.
        bucket_size: The number of bytes after which the ranks check that all of them continue.

    Raises:
        CheckpointError: The model is not parallelized, or has changed since.
        ConsistencyError: Another rank left early, or was called with other arguments.
    """
    root = next((module for module in model.modules() if STATE in vars(module)), model)
    state = state_of(root)
    state.check_whole("hf_weights")
    local, buckets = same_on_every_rank(
        lambda: (local_tensors(root, fsdp=True), _buckets(state, parse_size(bucket_size))),
        lambda _: {"hf_weights": str(bucket_size), "tensors": len(state.plan.tensors)},
    )
    return FullWeights(state, local).run(buckets)


def _buckets(state: State, limit: int) -> list[list[TensorPlan]]:
    """Return the tensors that ``save_pretrained`` writes, in groups of about ``limit`` bytes."""
    buckets: list[list[TensorPlan]] = []
    room = 0
    for tensor in state.plan.tensors.values():
        if not tensor.saved_names():
            continue
        sources = {name for piece in tensor.pieces for name in piece.sources()} | {tensor.name}
        size = sum(math.prod(state.plan.tensors[name].shape) for name in sources) * 4
        if not buckets or size > room:
            buckets.append([])
            room = limit
        buckets[-1].append(tensor)
        room -= size
    return buckets


class FullWeights:
    """Gather the full weights of a model on every rank, one tensor at a time; ``local`` is by canonical name."""

    def __init__(self, state: State, local: dict[str, torch.Tensor]) -> None:
        self.state, self.mpu, self.local = state, state.mpu, local
        self.dtypes = {name: tensor.dtype for name, tensor in local.items()}
        if self.mpu.pp.size > 1:
            everyone = gathered(self.dtypes, self.mpu.pp.group)
            self.dtypes = {name: dtype for held in everyone for name, dtype in held.items()}

    def run(self, buckets: list[list[TensorPlan]]) -> Iterator[tuple[str, torch.Tensor]]:
        given, total = 0, sum(len(tensor.saved_names()) for bucket in buckets for tensor in bucket)
        try:
            for bucket in buckets:
                if (stopped := self._ask(stop=False)) is not None:
                    raise ConsistencyError(
                        f"hf_weights: rank {stopped} left the loop early; this rank has {given} of {total} tensors.\n"
                        "  Iterate over all tensors on every rank, or leave the loop at the same tensor."
                    )
                for name, full in [pair for tensor in bucket for pair in self._written(tensor)]:
                    given += 1
                    yield name, full
        except GeneratorExit:
            self._ask(stop=True)
            raise
        self._ask(stop=False)  # a rank may leave in the last bucket

    def _ask(self, *, stop: bool) -> int | None:
        """Return a rank that stops, None if all continue; a collective of the world."""
        flag = torch.tensor(self.mpu.rank + 1 if stop else 0, device=self.mpu.device)
        if self.mpu.world_size > 1:
            all_reduce(flag, op=dist.ReduceOp.MAX)
        return int(flag) - 1 if flag else None

    @torch.no_grad()
    def _written(self, tensor: TensorPlan) -> Iterator[tuple[str, torch.Tensor]]:
        if tensor.saved_as is not None:
            yield tensor.saved_as, self.gather(tensor.name)
            return
        stored = functools.cache(lambda name: InMemory(self.gather(name)))
        for piece in tensor.pieces:
            yield piece.name, open_piece(piece, tensor.name, stored).read().to(self.mpu.device)

    @torch.no_grad()
    def gather(self, name: str) -> torch.Tensor:
        """Gather a tensor; a collective of the replica, and of the replicas where FSDP2 shards over them."""
        held, holders = self.local.get(name), self.state.holders.get(name, range(self.mpu.pp.size))
        shard = self.state.gather_rows(name, held) if isinstance(held, DTensor) else held
        return gather_full(shard, self.state.plan.tensors[name], self.state.plan, self.mpu, holders, self.dtypes[name])


def sharding(due: TensorPlan, plan: Plan, mpu: MPU) -> tuple[Axis, Layout | None]:
    """Return the axis over which a tensor is sharded, and its layout on this axis."""
    axis = mpu.shards if due.name in plan.experts else mpu.tp
    return axis, None if due.layout is None else due.layout.of_first(axis.size)


@torch.no_grad()
def gather_full(
    shard: torch.Tensor | None, due: TensorPlan, plan: Plan, mpu: MPU, holders: Collection[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return the full tensor of a shard, which other stages receive in ``dtype`` from the first of its ``holders``."""
    if shard is None or mpu.pp.rank not in holders:
        shard = torch.empty(due.local_shape(mpu.shards.rank), dtype=dtype, device=mpu.device)
    else:
        shard = shard.clone(memory_format=torch.contiguous_format)
    if len(holders) < mpu.pp.size:
        dist.broadcast(shard.view(-1).view(torch.uint8), src=mpu.pp.ranks[min(holders)], group=mpu.pp.group)
    axis, layout = sharding(due, plan, mpu)
    return shard if layout is None or axis.size == 1 else all_gather(shard, axis, layout)


# -- upload: all ranks merge into a folder, which rank 0 uploads with transformers' code -------------------------------


class MergedModel(PushToHubMixin):
    """A folder in Hugging Face's form, as transformers uploads models."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def save_pretrained(self, target: str, **_: Any) -> None:
        """Link the files of the folder, without its sub-folders, into ``target``."""
        for path in Path(self.folder).iterdir():
            if path.is_file():
                link(str(path), os.path.join(target, path.name))


def push_merged(model: Any, repo_id: object, max_shard_size: int | str, options: Mapping[str, Any]) -> str:
    """Merge into a temporary folder of rank 0 (``TMPDIR``, which all nodes must share), and upload it. Collective.

    Returns the URL of the commit. Raises CheckpointError, identical on all ranks.
    """
    mpu = state_of(model).mpu
    call = {"repo_id": repo_id, **{name: repr(value) for name, value in options.items() if name != "token"}}

    def check() -> dict[str, Any]:
        if not isinstance(repo_id, str) or not repo_id:
            raise CheckpointError(f"push_to_hub: repo_id={repo_id!r} must be a name such as 'user/model'")
        if unknown := [name for name in options if name not in HUB_OPTIONS]:
            raise CheckpointError(f"push_to_hub has no argument {unknown[0]!r}: {', '.join(HUB_OPTIONS)}")
        return call

    all_ranks(mpu, check, check=check_same_call)
    with ExitStack() as stack:
        made = functools.partial(tempfile.TemporaryDirectory, prefix="autopar-hub-", ignore_cleanup_errors=True)
        folder = os.path.join(rank_zero(mpu, lambda: stack.enter_context(made())), "merged")
        model.save_parallelized(folder, merge_checkpoints=True, max_shard_size=max_shard_size)
        tags = options.get("tags") or []
        tags = [*(getattr(model, "model_tags", None) or []), *([tags] if isinstance(tags, str) else tags)]
        given: dict[str, Any] = {**options, "tags": list(dict.fromkeys(tags)) or None}
        return rank_zero(mpu, lambda: str(MergedModel(folder).push_to_hub(str(repo_id), **given)))
