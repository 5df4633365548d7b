"""Numbers of DTensors under ZeRO's stages 2 and 3: those that a user's code reads, and those that it draws.

A norm or a sum of a DTensor is one with a sum over the ranks still to come. torch takes it when another operation needs
the result, but gives ``.item()`` and its kin what this rank has: another number on each. Here they get the whole of
parameters that FSDP2 shards for a parallelized model, and of what is made of them; other DTensors stay torch's.

Random numbers for such a parameter are drawn for all of it, and a rank keeps those of its rows: under one seed they are
those of one process. (On the CPU torch would draw the same numbers for the rows of each rank.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.call_site import place_of_user
from autopar.checks.process_hooks import listeners
from autopar.data_parallel.fully_sharded import FullySharded
from autopar.distributed.agree import meet
from autopar.foreign.patches import patch_entry
from autopar.foreign.tensors import ITEM, RANDOM, name_of_operator, operators_of_dtensors
from autopar.layout import replica_rows

__all__ = ["install"]

_ADVICE = (
    "A norm or a sum of a parameter under zero.stage 2 and 3 is that of all replicas' shards, and takes all of them:\n"
    "  read it on all (if rank == 0: around the print, not around .item()), or read parameter.to_local(), the shard."
)


def install() -> None:
    """Let DTensors answer with whole numbers."""
    table, kind = operators_of_dtensors(), "torch.distributed.tensor.DTensor"
    patch_entry(table, f"{kind}.item", ITEM, _read)
    for operator in RANDOM:
        patch_entry(table, f"{kind}.{name_of_operator(operator)}", operator, _draw)


@torch.no_grad()
def _read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the number in ``args[0]``."""
    tensor: DTensor = args[0]
    if all(placement.is_replicate() for placement in tensor.placements):
        return func(tensor.to_local())
    model, axis = _model_of(tensor)
    if model is None:
        return func(tensor.to_local())
    place = place_of_user()
    if place not in model.read:
        what = f"a number of a tensor that replicas share (line {place[1]})"
        meet(axis, what, axis.read_timeout, _ADVICE)
        model.read.add(place)
    with model.failures.blame("reading a number of a tensor that replicas share (FSDP2)", axis.ranks):
        return func(tensor.full_tensor())


@torch.no_grad()
def _draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return ``args[0]``, or one like it, with numbers that are drawn for the whole."""
    tensor: DTensor = args[0]
    local, mesh, last = tensor.to_local(), tensor.device_mesh, tensor.device_mesh.ndim - 1
    in_place = name_of_operator(func).endswith("_")
    if _model_of(tensor)[0] is None or not tensor.placements[last].is_shard(0):
        return _by_torch(func, args, kwargs)
    whole = func(torch.empty(tensor.shape, dtype=local.dtype, device=local.device), *args[1:], **kwargs)
    start, stop = replica_rows(tensor.shape[0], mesh.get_local_rank(last), mesh.size(last))
    rows = whole[start:stop].clone()
    if in_place:
        local.copy_(rows)
        return tensor
    like: Any = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(rows, mesh, tensor.placements, **like)


def _by_torch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    table = operators_of_dtensors()
    ours = table.pop(func)
    try:
        return func(*args, **kwargs)
    finally:
        table[func] = ours


def _model_of(tensor: DTensor) -> tuple[FullySharded | None, Any]:
    """Return the model whose parameters lie on the tensor's mesh, and the axis of its ranks."""
    for model in listeners(FullySharded):
        axis = model.axis_of(tensor.device_mesh)
        if axis is not None:
            return model, axis
    return None, None
