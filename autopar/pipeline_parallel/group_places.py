"""Groups of an optimizer that were cut by place in ``model.parameters()``, which lists the weights of one stage.

``params[:10]`` are other weights on each stage than in the plain model. Such groups are runs of that list on several
stages, with the same settings, and part weights that blocks have alike: groups by name do not, and rates that decay
from layer to layer are other ones on each stage. The first group goes on with a later stage, although the second one
has begun on the earlier one, and a block is parted: groups of the first and the last layers, or of every other, do not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from autopar.call_site import warn_user
from autopar.checks.step_digests import plain_settings

__all__ = ["check_places", "cut_by_place"]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # of a block, in the path of a weight


def cut_by_place(optimizer: Any, model: nn.Module, released: Collection[int]) -> str:
    """Describe the groups of an optimizer if they may have been cut by place on this stage; else return "".

    Args:
        model: with the weights of this stage.
        released: ``id`` of those of other stages: an optimizer that holds some was made of the whole list.
    """
    if len(optimizer.param_groups) == 1:
        return ""
    group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    held = [(name, group_of[id(p)]) for name, p in model.named_parameters() if id(p) in group_of]
    order = [number for _, number in held]
    groups_of: dict[str, set[int]] = {}
    for name, number in held:
        groups_of.setdefault(_NUMBER.sub("*", name), set()).add(number)
    parts_alike = any(len(groups) > 1 for groups in groups_of.values())
    if not parts_alike or order not in (sorted(order), sorted(order, reverse=True)) or group_of.keys() & set(released):
        return ""
    settings = [repr(sorted(plain_settings(group).items())) for group in optimizer.param_groups]
    if len(set(settings)) == 1:
        return ""
    place = next(place for place, number in enumerate(order) if number != order[0])
    return json.dumps([[settings[n] for n in dict.fromkeys(order)], held[place - 1][0], held[place][0]])


def check_places(said: Mapping[int, str]) -> None:
    """Warn if groups of an optimizer seem to be cut by place on both of two stages; ``said``: by rank."""
    found = {rank: json.loads(text) for rank, text in said.items() if text}
    if len(found) == 2 and _is_by_place(*found.values()):
        where = ", ".join(f"on rank {rank} at {begins}" for rank, (_, _, begins) in sorted(found.items()))
        warn_user(
            f"groups of the optimizer seem to be cut by place in model.parameters(): one ends {where}. Each stage "
            "lists its own weights, so a place is another weight than in the plain model. Make groups by name, or "
            "make the optimizer before autopar.initialize and give it (optimizer=)."
        )


def _is_by_place(one: tuple[list[str], str, str], other: tuple[list[str], str, str]) -> bool:
    """Whether the second group begins on one stage before the first one ends on the other, and a block is parted."""
    (settings, _, begins), (same, ends, _) = sorted((one, other), key=lambda each: _numbers(each[1]))
    parted = any(_numbers(last) == _numbers(first) for _, last, first in (one, other))
    return settings == same and parted and _numbers(begins) < _numbers(ends)


def _numbers(name: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(name)]
