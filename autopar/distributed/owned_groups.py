"""Process groups that autopar makes. They are destroyed when all ranks have dropped the object that uses them.

torch keeps a group, its threads and its connections until the group is destroyed. Two meshes never share a group: their
models may run in different threads, and a collective that fails leaves messages behind.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from autopar.foreign.groups import default_group, destroy


class _Owned(NamedTuple):
    owner: weakref.ref[Any]
    groups: list[Any]


_worlds: weakref.WeakKeyDictionary[Any, dict[int, _Owned]] = weakref.WeakKeyDictionary()
"""Default process group -> number of an owner, the same on all ranks -> its groups."""

_MOST_OWNERS = 4
"""Owners that may be alive before garbage is collected: that takes a few tenths of a second next to large libraries."""


def owned_groups(owner: Any) -> list[Any]:
    """Return a list for the process groups of ``owner``. Every rank calls it, in the same order."""
    owners = _worlds.setdefault(default_group(), {})
    owners[max(owners, default=-1) + 1] = made = _Owned(weakref.ref(owner), [])
    return made.groups


def dropped() -> set[int]:
    """Return the numbers of the owners that this rank has dropped."""
    owners = _worlds.get(default_group(), {})
    if len(owners) > _MOST_OWNERS:
        gc.collect()  # a model refers to itself
    return {number for number, (owner, _) in owners.items() if owner() is None}


def destroy_dropped(numbers: Iterable[set[int]]) -> None:
    """Destroy the groups of owners that all ranks have dropped, in the same order on all ranks.

    Args:
        numbers: the result of :func:`dropped` on each rank.
    """
    owners = _worlds.get(default_group(), {})
    for number in sorted(set.intersection(*numbers)):
        destroy(owners.pop(number).groups)
