"""Keep results of a recomputed block's forward: its recomputation reads them, and computes and sends less.

[Note: why not torch's selective checkpointing] It keeps what operators return, and a collective returns nothing: it
writes into a tensor. So the tape stands where all collectives of activations pass
(:func:`autopar.distributed.collectives.run`). And it keeps results, not copies: a block that writes into one
through another tensor of the same memory (``y += x`` behind a linear layer) would get a changed value back, in silence.
The tape keeps copies, of operators too. Both runs of a block make the same calls in the same order; the recomputation
may end earlier.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from autopar.compat.tensors import no_dispatch_modes, schema_of, tree_map_only
from autopar.distributed.collectives import running
from autopar.errors import ConsistencyError
from autopar.tensor_tracking import TensorTracking


class _Kept(NamedTuple):
    name: str
    result: Any  # a tensor, or what an operator returns


class Tape:
    """Results of one block in one forward.

    Args:
        collectives: whether to keep those of collectives; ``operators``: of which operators of torch.
    """

    def __init__(self, *, collectives: bool = True, operators: Collection[Any] = ()) -> None:
        self._collectives, self._operators = collectives, operators
        self._kept: list[_Kept] = []
        self._next = -1  # of the recomputation; -1 in the forward

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep what collectives and operators give."""
        with self._running_from(-1):
            yield

    @contextmanager
    def played(self) -> Iterator[None]:
        """Give what was kept; any number of times, once for each backward."""
        with self._running_from(0):
            yield

    @contextmanager
    def _running_from(self, start: int) -> Iterator[None]:
        outer, self._next = running.tape, start
        with ExitStack() as stack:
            if self._operators:
                stack.enter_context(KeptOperators(self, self._operators))
            running.tape = self if self._collectives else outer
            try:
                yield
            finally:
                running.tape = outer

    def note(self, name: str, result: Any) -> None:
        """Keep what the call ``name`` has given, or on the meta device would; in a recomputation nothing."""
        if not self.is_playing:
            self._kept.append(_Kept(name, _copied(result)))

    @property
    def results(self) -> list[Any]:
        """The values that are kept, in the order of the forward."""
        return [kept.result for kept in self._kept]

    def plays(self, name: str, result: torch.Tensor) -> bool:
        """Write what a collective gave in the forward; whether this is a recomputation. Raises as :meth:`next`."""
        if not self.is_playing:
            return False
        kept = self.next(name, result.shape)
        with no_dispatch_modes():
            result.copy_(kept)
        return True

    @property
    def is_playing(self) -> bool:
        """Whether this is a recomputation."""
        return self._next >= 0

    def next(self, name: str, shape: torch.Size | None = None) -> Any:
        """Return what the call ``name`` gave in the forward.

        Raises:
            ConsistencyError: the recomputation is not the forward again.
        """
        kept = self._kept[self._next] if self._next < len(self._kept) else None
        if kept is None or kept.name != name or (shape is not None and kept.result.shape != shape):
            of = "" if shape is None else f" of {tuple(shape)}"
            was = "none" if kept is None else kept.name
            was += f" of {tuple(kept.result.shape)}" if kept is not None and shape is not None else ""
            raise ConsistencyError(
                f"activation_checkpointing.save: result {self._next + 1} of a block is {name}{of} when it is\n"
                f"  recomputed, and was {was} in its forward. The block must do the same both times; or leave save out."
            )
        self._next += 1
        return kept.result


class KeptOperators(TensorTracking):
    """Lets a tape keep or give the results of some operators. An operator that draws runs both times."""

    supports_higher_order_operators = True

    def __init__(self, tape: Tape, operators: Collection[Any]) -> None:
        super().__init__()
        self._tape, self._operators = tape, operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self._operators or _drops(func, args, kwargs):
            return func(*args, **kwargs)
        if self._tape.is_playing:
            return _copied(self._tape.next(str(func)))
        result = func(*args, **kwargs)
        self._tape.note(str(func), result)
        return result


def _copied(value: Any) -> Any:
    with no_dispatch_modes():
        return tree_map_only(torch.Tensor, lambda x: x.detach().clone(), value)


def _drops(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator draws a mask: left out, those behind it would draw other ones."""
    for place, argument in enumerate(schema_of(func).arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
            return bool(given)
    return False
