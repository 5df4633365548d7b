"""Collectives of numbers of the host: what each rank of a group gets of what all give.

Numbers that do not fit become ones: the comparison of calls names them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable

import torch

from autopar.distributed.trace import Call

Members = list[list[torch.Tensor]]
"""Tensors that each rank of a group gives."""

_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": lambda rows: rows.amax(0),
    "min": lambda rows: rows.amin(0),
    "product": lambda rows: rows.prod(0, dtype=rows.dtype),
    "avg": lambda rows: rows.mean(0),
    "band": lambda rows: functools.reduce(torch.bitwise_and, rows),
    "bor": lambda rows: functools.reduce(torch.bitwise_or, rows),
    "bxor": lambda rows: functools.reduce(torch.bitwise_xor, rows),
}


def fill(out: torch.Tensor, value: torch.Tensor) -> None:
    """Copy numbers; ones, where there are more or fewer of them."""
    if out.numel() == value.numel():
        out.copy_(value.reshape(out.shape))
    else:
        out.fill_(1)


def _reduced(call: Call, like: torch.Tensor, given: Iterable[torch.Tensor]) -> torch.Tensor:
    """Make one tensor of those of all ranks that have the size of this one's."""
    rows = torch.stack([each.reshape(-1) for each in given if each.numel() == like.numel()])
    reduce = _REDUCTIONS.get(call.reduction)
    return rows.sum(0, dtype=rows.dtype) if reduce is None else reduce(rows)


def _all_reduce(call: Call, place: int, out: list[torch.Tensor], members: Members) -> None:
    if call.kind == "reduce" and call.peer != place:
        return
    for number, x in enumerate(out):
        fill(x, _reduced(call, x, [given[number] for given in members if number < len(given)]))


def _reduce_scatter(call: Call, place: int, out: list[torch.Tensor], members: Members) -> None:
    for number, x in enumerate(out):
        parts = [_part(given[number:] if len(given) == len(out) else given, place, len(members)) for given in members]
        fill(x, _reduced(call, x, parts))


def _part(given: list[torch.Tensor], place: int, of: int) -> torch.Tensor:
    """Return the part of a rank: one of many tensors, or as many elements of the first as others get."""
    if len(given) >= of:
        return given[place]
    return given[0].reshape(-1).tensor_split(of)[place] if given else torch.empty(0)


def _all_gather(call: Call, place: int, out: list[torch.Tensor], members: Members) -> None:
    firsts = [given[0] for given in members if given]
    if len(out) == 1:
        fill(out[0], torch.cat([first.reshape(-1) for first in firsts]))
    else:
        for x, first in zip(out, firsts, strict=False):
            fill(x, first)


def _broadcast(call: Call, place: int, out: list[torch.Tensor], members: Members) -> None:
    for x, value in itertools.zip_longest(out, members[call.peer][: len(out)], fillvalue=torch.empty(0)):
        fill(x, value)


def _gather(call: Call, place: int, out: list[torch.Tensor], members: Members) -> None:
    for x, given in zip(out, members, strict=False):  # nothing, but on the root
        fill(x, given[0])


def _scatter(call: Call, place: int, out: list[torch.Tensor], members: Members) -> None:
    for x in out:
        fill(x, _part(members[call.peer], place, len(members)))  # nothing, if who stands for the root is not one


def _all_to_all(call: Call, place: int, out: list[torch.Tensor], members: Members) -> None:
    parts = [_part(given, place, len(members)) for given in members]
    if len(out) == 1:
        fill(out[0], torch.cat([part.reshape(-1) for part in parts]))
    else:
        for x, part in zip(out, parts, strict=False):
            fill(x, part)


CARRIED = {
    "all_reduce": _all_reduce,
    "reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
}
