"""Numbers that a user's code reads of DTensors, under ZeRO's stages 2 and 3: ``.item()``, ``float()``, ``bool()``.

A norm or a sum of a DTensor is one with a sum over the ranks still to come. torch takes it when another operation needs
the result, but gives ``.item()`` and its kin what this rank has: another number on each. Here they get the whole of
parameters that FSDP2 shards for a parallelized model, and of what is made of them; other DTensors stay torch's.
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
from autopar.foreign.tensors import ITEM, operators_of_dtensors

__all__ = ["install"]

_ADVICE = (
    "A norm or a sum of a parameter under zero.stage 2 and 3 is that of all replicas' shards, and takes all of them:\n"
    "  read it on all (if rank == 0: around the print, not around .item()), or read parameter.to_local(), the shard."
)


def install() -> None:
    """Let DTensors answer with whole numbers."""
    patch_entry(operators_of_dtensors(), "torch.distributed.tensor.DTensor.item", ITEM, _read)


@torch.no_grad()
def _read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the number in ``args[0]``."""
    tensor: DTensor = args[0]
    if all(placement.is_replicate() for placement in tensor.placements):
        return func(tensor.to_local())
    mesh = tensor.device_mesh
    for model in listeners(FullySharded):
        axis = model.axis_of(mesh)
        if axis is None:
            continue
        place = place_of_user()
        if place not in model.read:
            what = f"a number of a tensor that replicas share (line {place[1]})"
            meet(axis, what, axis.read_timeout, _ADVICE)
            model.read.add(place)
        with model.failures.blame("reading a number of a tensor that replicas share (FSDP2)", axis.ranks):
            return func(tensor.full_tensor())
    return func(tensor.to_local())
