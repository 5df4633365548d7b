"""``model.load_state_dict`` of a parallelized model: of this rank's own state dict, or of a whole plain model's.

A load hook turns a whole state dict into this rank's part before torch looks at it: it shards each tensor by its
layout and leaves out what other stages hold. All checks come before anything is changed, and nothing is communicated.
Which of the two a dict is, its shapes say; where both shapes are the same, so are the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.checkpoint.local_shard import Share, share_of
from autopar.checkpoint.partial_state_dict import described, part_of
from autopar.checkpoint.state import listed
from autopar.errors import CheckpointError
from autopar.plan.plan import TensorPlan

__all__ = ["TakeShare"]


class TakeShare:
    """Pre-hook of ``load_state_dict`` on a root model and on the Hugging Face models inside it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> TakeShare:
        return self

    def __call__(self, model: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        share = share_of(model)
        if share is None:
            return
        entries = [(name, due, state[prefix + name]) for name, due in _planned(share, state, prefix)]
        if metadata.get("assign_to_params_buffers"):
            raise CheckpointError(
                f"load_state_dict(assign=True): the tensors of {share.name} are this rank's shards, and an optimizer "
                "and the other ranks rely on these very parameters.\n  Leave assign out: values are copied into them."
            )
        sharded = _check(model, share, entries, part_of(metadata))
        own = dict(_own_tensors(model))
        for name, due, value in entries:
            if name not in own:
                del state[prefix + name]  # another stage's
                continue
            whole = sharded and due.layout is not None and tuple(value.shape) == due.shape
            mine = due.layout.shard(value.detach(), share.mpu.tp.rank) if whole and due.layout else value
            state[prefix + name] = _over_replicas(mine, own[name])


def _planned(share: Share, state: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, TensorPlan]]:
    for key, value in state.items():
        due = share.planned(key[len(prefix) :]) if key.startswith(prefix) else None
        if due is not None and isinstance(value, torch.Tensor):
            yield key[len(prefix) :], due


def _own_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from ((name, buffer) for name, buffer in model.named_buffers(remove_duplicate=False) if buffer is not None)


def _check(
    model: nn.Module,
    share: Share,
    entries: list[tuple[str, TensorPlan, torch.Tensor]],
    part: Mapping[str, list[int]] | None,
) -> bool:
    """Whether the tensors are whole. Raises CheckpointError if they do not fit together, or are another rank's."""
    rank = share.mpu.tp.rank
    whole: list[str] = []
    local: list[str] = []
    neither: list[str] = []
    for name, due, value in entries:
        shape, mine = tuple(value.shape), due.local_shape(rank)
        if shape == mine == due.shape:
            continue
        kind = whole if shape == due.shape else local if shape == mine else neither
        kind.append(f"{name}: {list(shape)} given, {list(due.shape)} whole, {list(mine)} here")
    places = share.places(model)
    is_part = bool(local) or not whole  # without a mark, shapes alone tell
    if part is not None and is_part and dict(part) != places:
        raise CheckpointError(
            f"load_state_dict: the state dict is what {described(part)} had; this is {described(places)}.\n"
            "  Load this rank's own, or a whole model's on every rank; for another mesh use model.save_parallelized "
            "and\n  model.from_parallelized."
        )
    if neither or (whole and local):
        what = "have neither the whole nor this rank's shape" if neither else "are whole, others this rank's shards"
        found = neither or [whole[0], local[0]]
        raise CheckpointError(
            f"load_state_dict: {len(neither) or len(whole)} tensors {what} ({described(places)}):\n  "
            + "\n  ".join(found[:5])
            + ("\n  ..." if len(found) > 5 else "")
        )
    own = dict(_own_tensors(model))
    if entries and not any(name in own for name, _, _ in entries):
        raise CheckpointError(
            f"load_state_dict: the state dict holds nothing of this rank ({described(places)}), only what other "
            f"stages hold: {listed([name for name, _, _ in entries], 3)}"
        )
    return bool(whole)


def _over_replicas(value: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """``value`` cut as ``own`` is, if that is a DTensor (``zero.stage: 3``): rows in equal runs, the last one short."""
    if not isinstance(own, DTensor) or isinstance(value, DTensor) or value.shape != own.shape:
        return value
    mesh = own.device_mesh
    each = -(-value.shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * each, value.shape[0])
    rows = value.detach()[start : start + each].to(own.to_local().device)
    return DTensor.from_local(rows, mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride())
