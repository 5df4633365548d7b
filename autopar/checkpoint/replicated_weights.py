"""Weights that several ranks hold are the same on all of them, or nothing is saved: one of them only is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.checkpoint.state import listed
from autopar.distributed.digest import sum_of_bits
from autopar.distributed.mesh import MeshSizes
from autopar.errors import CheckpointError
from autopar.plan.plan import Plan

__all__ = ["check_alike", "digests"]


@torch.no_grad()
def digests(model: nn.Module, plan: Plan) -> dict[str, tuple[str, int]]:
    """Digest the parameters of this rank: canonical name -> dtype and number. No communication."""
    canonical = {alias: tensor.name for tensor in plan.tensors.values() for alias in (tensor.name, *tensor.aliases)}
    found: dict[str, tuple[str, int]] = {}
    for name, parameter in model.named_parameters():
        if name in canonical and not parameter.is_meta:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            found[canonical[name]] = str(local.dtype), int(sum_of_bits(local))
    return found


def check_alike(
    everyone: Sequence[Mapping[str, tuple[str, int]]], plan: Plan, sizes: MeshSizes, in_shares: bool
) -> None:
    """Compare the digests of all ranks, by what each of them holds. Dtypes that differ are another error's.

    Args:
        everyone: what :func:`digests` gave on each rank of the world, in order.
        in_shares: the data-parallel replicas hold different parts (FSDP).

    Raises:
        CheckpointError: names the tensors, and two ranks that disagree.
    """
    first: dict[Any, tuple[int, int]] = {}
    different: dict[str, tuple[int, int]] = {}
    for rank, theirs in enumerate(everyone):
        tp, dp = rank % sizes.tp, rank // sizes.tp % sizes.dp
        for name, (dtype, digest) in theirs.items():
            layout = plan.tensors[name].layout
            held = (name, dtype, None if layout is None else layout.ranges(tp), dp if in_shares else None)
            other, expected = first.setdefault(held, (rank, digest))
            if digest != expected:
                different.setdefault(name, (other, rank))
    if different:
        name, (one, other) = next(iter(different.items()))
        raise CheckpointError(
            f"{name} differs between rank {one} and rank {other}, which must hold the same: the ranks have drifted "
            f"apart ({len(different)} of {len(plan.tensors)} tensors: {listed(list(different), 3)})\n"
            "  One of them skipped an optimizer step, stepped with gradients or random numbers of its own, or wrote\n"
            "  into its weights. Nothing was written. Go on from the last checkpoint; with\n"
            "  consistency_check: {enable: false} the weights of rank "
            f"{one} would be saved."
        )
