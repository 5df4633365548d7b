"""States that a module hands on from row to row, handed on from rank to rank: recurrences, and convolutions' last rows.

A module that takes a cache keeps in it what the rows behind need to know of those in front: the state of a recurrence,
and the last rows that a convolution saw. So each rank runs the module over its own rows with a cache of which the
states are those of the rank before, and gives that of its own last row to the rank behind. Whether a module goes on
from a state as if its rows were whole is found out by running it (:mod:`autopar.dry_run.handed_states`).
:mod:`~autopar.context_parallel.rank_states` carries states from rank to rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from autopar.foreign.tensors import SequenceKey, keystr, tree_map_with_path
from autopar.layout import Layout
from autopar.tensor_parallel.sequence_parallel import argument_names

Key = tuple[str, int]
"""Which kind of state, ``conv`` or ``recurrent``, and its number in the module."""


@dataclass(frozen=True)
class HandedStates:
    """How a module's states are handed on.

    Attributes:
        argument: of its forward, which is a cache.
        spare: rows in front of a convolution's state that nothing reads.
        apart: whether rows of a convolution are put in front of others where these are added, and are read nowhere
            else: then they are exchanged there, and no rank waits for the one in front to have had its own.
        others: arguments without rows that the rehearsal gave it.
    """

    argument: str
    spare: int = 0
    apart: bool = False
    others: tuple[str, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> HandedStates:
        return self


class States:
    """Takes the place of a cache in one forward of a module over some rows.

    Args:
        first: whether no rows are in front of these.
    """

    def __init__(self, how: HandedStates, *, first: bool) -> None:
        self.how, self.first = how, first
        self._before: dict[Key, torch.Tensor] = {}

    def before(self, key: Key) -> torch.Tensor:
        """Return the state behind the row in front of these, however often it is asked for."""
        if key not in self._before:
            self._before[key] = self.take(key)
        return self._before[key]

    def take(self, key: Key) -> torch.Tensor:
        """Return the state behind the row in front of these; once."""
        raise NotImplementedError

    def give(self, key: Key, state: torch.Tensor, through: torch.Tensor | None = None) -> torch.Tensor | None:
        """Hand on the state behind the last of these rows; ``through``, of any shape, is returned and must be used."""
        raise NotImplementedError

    # -- what modules call, as transformers' Cache has it --------------------------------------------------------------

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """Return the rows before these, ``[batch, channels, kernel]``; None if there are none."""
        if self.first:
            return None
        return _Untouched() if self.how.apart else self.before(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the state behind the row before these; None if there is none."""
        return None if self.first else self.before(("recurrent", state_idx))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether rows are in front."""
        return not self.first

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return whether states can be taken back: they cannot."""
        return False

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        """Return ``conv_states``, ``[batch, channels, rows]``, with the rows before in front."""
        key, x = ("conv", state_idx), conv_states
        kept = x.shape[-1] if conv_kernel_size is None else conv_kernel_size - self.how.spare
        if kept <= 0:
            return x
        enough = x.shape[-1] >= kept
        if enough and self.how.apart:  # nobody waits for the rank in front
            x = _some(self.give(key, x[..., -kept:], x), x)
        full = x if self.first else torch.cat([self.before(key), x], -1)
        if enough and self.how.apart:
            return full
        last = full[..., -kept:] if full.shape[-1] >= kept else pad(full, (kept - full.shape[-1], 0))
        return _some(self.give(key, last, full if self.how.apart else None), full)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0) -> Any:
        """Hand on the state behind the last row, of any shape; returned as it is."""
        self.give(("recurrent", state_idx), recurrent_states)
        return recurrent_states


class _Untouched:
    """The rows in front, for code that asks whether there are any."""


def _some(tied: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return x if tied is None else tied


def own_arguments(
    module: Any, values: Any, how: HandedStates, inputs: Mapping[str, int], layout: Layout, rank: int
) -> Any:
    """Return ``(args, kwargs)`` of a module that runs over own rows, without its cache; None if it has to have all.

    Args:
        inputs: path of an argument -> its dim of rows, own ones.
    """
    names, missing = argument_names(module), []

    def own(path: Any, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        place, dim = place_of(path, x), inputs.get(place_of(path, x))
        if dim is not None and x.shape[dim] == layout.local_size(rank):
            return x
        if dim is not None and x.shape[dim] == layout.size:
            return layout.shard(x, rank, dim)
        if x.ndim == 2 and x.shape[1] == layout.size and "mask" in argument_of(path, names):  # of padding
            return layout.shard(x, rank, 1)
        if place not in how.others:
            missing.append(place)  # documents: kernels cut states between them
        return x

    made = tree_map_with_path(own, values)
    return None if missing else made


def with_states(module: Any, values: Any, how: HandedStates, states: States) -> Any:
    """Return ``(args, kwargs)`` with ``states`` in the place of a cache."""
    (args, kwargs), names = values, argument_names(module)
    place = names.index(how.argument)
    if place < len(args):
        return (*args[:place], states, *args[place + 1 :]), kwargs
    return args, {**kwargs, how.argument: states}


def place_of(path: Any, x: torch.Tensor) -> str:
    """Return the name of a tensor in ``(args, kwargs)``, by its path."""
    return f"{keystr(path)} of {x.ndim} dims"


def argument_of(path: Any, names: Sequence[str]) -> str:
    """Return the name of the argument that a path in ``(args, kwargs)`` begins with."""
    key = path[1]
    if isinstance(key, SequenceKey):
        return names[key.idx] if key.idx < len(names) else ""
    return str(key.key)
