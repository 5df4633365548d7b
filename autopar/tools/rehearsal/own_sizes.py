"""Sizes of one rank's own call: what it gives fits what it has room for, as backends check it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.distributed.trace import Call


def check_sizes(call: Call, place: int, out: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    """Check a collective's tensors against the number of ranks.

    Args:
        place: of this rank in the group.

    Raises:
        ValueError: they do not fit; with both numbers.
    """
    members = len(call.group.ranks)
    if call.kind == "all_to_all":
        _check_splits(call, out, given)
    of_all = {"all_gather": out, "reduce_scatter": given, "gather": out, "scatter": given}.get(call.kind, ())
    own = given if of_all is out else out
    if not of_all or not own:
        return  # it sends nothing of all, or is not the root
    if len(of_all) == len(own) and call.kind in ("all_gather", "reduce_scatter"):  # all ranks' in one tensor
        for whole, part in zip(of_all, own, strict=True):
            if whole.numel() != members * part.numel():
                _refuse(call, f"has {whole.numel()} elements where {members} ranks have {part.numel()} each")
    elif len(of_all) != members * len(own):
        _refuse(call, f"has {len(of_all)} tensors, and the group has {members} ranks")
    elif of_all[place].numel() != own[0].numel():
        _refuse(call, f"has {of_all[place].numel()} elements for itself, and its own are {own[0].numel()}")


def _check_splits(call: Call, out: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    members = len(call.group.ranks)
    for name, rows, tensors in zip(("sends", "receives"), call.splits, (given, out), strict=False):
        if len(tensors) > 1 and len(tensors) != members:
            _refuse(call, f"{name} {len(tensors)} tensors, and the group has {members} ranks")
        if len(tensors) == 1 and tensors[0].ndim and sum(rows) != len(tensors[0]):
            _refuse(call, f"{name} {len(tensors[0])} rows, and they are split into {list(rows)}")


def _refuse(call: Call, wrong: str) -> None:
    raise ValueError(f"{call} {wrong}: {call.where}")
