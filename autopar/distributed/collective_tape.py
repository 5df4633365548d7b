"""Keep the results of a recomputed block's collectives: its recomputation reads them, and sends nothing.

[Note: why results are kept outside of autograd] torch's selective checkpointing keeps what an operator returns. A
collective returns nothing: it writes into a tensor. So the tape stands where all collectives of activations pass
(:func:`autopar.distributed.plain_collectives.run`): in the forward it keeps a copy of the tensor that was written,
which the block may go on writing into, and in the recomputation it copies that into the tensor that is to be written.
Both runs of a block make the same collectives in the same order; the recomputation may end earlier.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from autopar.errors import ConsistencyError
from autopar.foreign.tensors import no_dispatch_modes

__all__ = ["Tape", "current_tape", "note_on_meta"]

_running = threading.local()  # backward passes recompute in threads of autograd's


def current_tape() -> Tape | None:
    """Return the tape that keeps or gives collectives in this thread now; graphs of torch.compile have none."""
    if torch.compiler.is_compiling():
        return None
    tape: Tape | None = getattr(_running, "tape", None)
    return tape


def note_on_meta(name: str, x: torch.Tensor, shape: Sequence[int] | None = None) -> None:
    """Let a dry run's tape keep ``x``, or a tensor like it of another shape, as the collective would."""
    tape = current_tape()
    if tape is not None:
        tape.note(name, x if shape is None else x.new_empty(shape))


class _Kept(NamedTuple):
    name: str
    result: torch.Tensor


class Tape:
    """The results of one block's collectives in one forward."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._next = -1  # of the recomputation; -1 in the forward

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep what collectives give."""
        with self._running_from(-1):
            yield

    @contextmanager
    def played(self) -> Iterator[None]:
        """Give what was kept, instead of sending."""
        with self._running_from(0):
            yield

    @contextmanager
    def _running_from(self, start: int) -> Iterator[None]:
        outer, self._next, _running.tape = current_tape(), start, self
        try:
            yield
        finally:
            _running.tape = outer

    def note(self, name: str, result: torch.Tensor) -> None:
        """Keep what the collective ``name`` has written, or on the meta device would; in a recomputation nothing."""
        if self._next < 0:
            with no_dispatch_modes():  # selective checkpointing counts operators, and a recomputation has no such one
                self._kept.append(_Kept(name, result.detach().clone()))

    @property
    def results(self) -> list[torch.Tensor]:
        """The tensors that are kept, in the order of the forward."""
        return [kept.result for kept in self._kept]

    def plays(self, name: str, result: torch.Tensor) -> bool:
        """Write what the collective gave in the forward; whether this is a recomputation.

        Raises:
            ConsistencyError: the recomputation is not the forward again.
        """
        if self._next < 0:
            return False
        kept = self._kept[self._next] if self._next < len(self._kept) else None
        if kept is None or kept.name != name or kept.result.shape != result.shape or kept.result.dtype != result.dtype:
            was = "none" if kept is None else f"{kept.name} of {tuple(kept.result.shape)}"
            raise ConsistencyError(
                f"activation_checkpointing.save=[collectives]: collective {self._next + 1} of a block is {name} of "
                f"{tuple(result.shape)} when it is\n  recomputed, and was {was} in its forward. The block must do the "
                "same both times; or leave collectives out."
            )
        self._next += 1
        with no_dispatch_modes():
            result.copy_(kept.result)
        return True
