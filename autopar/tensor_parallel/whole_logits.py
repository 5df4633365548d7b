"""Logits of which a rank has a part, in autograd's graph: views of each other are read together, or none is.

What a loss does to logits on the way, and ``F.cross_entropy`` itself, are done to the parts; any other operation
gathers them and goes on with a plain tensor, in the same graph. A view shares memory with what it was taken from, so
as soon as one of a family is read, all are whole, and a change in place of one is seen by all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from autopar.call_site import is_of_library
from autopar.distributed.whole_on_read import WholeOnRead, without_overrides
from autopar.foreign.tensors import tree_leaves
from autopar.tensor_parallel.logits_shards import Change

__all__ = ["COMMUTE", "REPEATED", "WholeLogits", "placed"]

Logits = TypeVar("Logits", bound="WholeLogits")

# What may share its memory with what it is made of: done again to the whole logits, if those are ever read.
REPEATED = frozenset(("view", "reshape", "contiguous", "__getitem__", "detach"))
COMMUTE = frozenset(("mul", "__mul__", "add", "__add__"))
_OF_GRADIENTS = ("retain_grad", "register_hook", "grad")


class _Origin:
    """The head's output, and everything made of it."""

    lost = False  # a loss was taken from the parts: no gradient of whole logits will exist


class _Family:
    """Logits and what may share memory with them: as soon as one is read, all are whole."""

    def __init__(self) -> None:
        self.members: list[weakref.ref[WholeLogits]] = []  # in the order in which they were made
        self.is_whole = False

    def read(self) -> None:
        """Make plain tensors of all of them. A collective of the axis."""
        living = [member for ref in self.members if (member := ref()) is not None]
        with torch.inference_mode(False):
            for member in living:
                member.materialize()
        self.is_whole = True


class WholeLogits(WholeOnRead):
    """The whole logits, of which this rank has a part; made by :func:`placed`.

    Raises:
        ConsistencyError: on reading, if other ranks of the axis do not read the same in time.
    """

    _origin: _Origin
    _family: _Family
    _source: Callable[[], WholeLogits | None]  # what it was made of, if they may share memory and that still lives
    _step: Change | None
    _node: Any  # its place in the graph, as it was made
    _whole: torch.Tensor | None

    def gathered(self) -> torch.Tensor:
        """Return a plain tensor with the same place in the graph. A collective of the axis."""
        raise NotImplementedError

    def after(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what an operation makes of this rank's part, ``args`` being those after the logits; else None."""
        raise NotImplementedError

    @property
    def is_whole(self) -> bool:
        """Whether somebody has read it."""
        return self._family.is_whole

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def whole(self) -> torch.Tensor:
        """Return the logits as a plain tensor, gathered. A collective of the axis the first time."""
        if self._whole is None:
            self._family.read()
        assert self._whole is not None
        return self._whole

    def materialize(self) -> None:
        """Make the plain tensor of these logits, from that of their source or by gathering."""
        source = self._source()
        if self._whole is not None:
            return
        if source is not None:
            source.materialize()
            assert source._whole is not None and self._step is not None
            with torch.set_grad_enabled(self.requires_grad):
                self._whole = self._step(source._whole)
        else:
            with torch.set_grad_enabled(self.requires_grad):
                self._whole = self.gathered()

    def has_parts(self) -> bool:
        """Return whether the part still says what the logits are; not of what a function of C++ returned."""
        return not self._family.is_whole and self.grad_fn is self._node

    def lose(self) -> None:
        """Note that a loss was taken from the parts."""
        self._origin.lost = True

    @classmethod
    def from_parts(cls, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do to the part what can be done to it; raise if gradients are asked for that will not exist."""
        logits = args[0] if args else kwargs.get("input") if name == "cross_entropy" else None
        if name in COMMUTE and len(args) == 2 and not isinstance(logits, cls):
            logits, args = args[1], (args[1], args[0])
        listed = [x for x in tree_leaves((args, kwargs)) if isinstance(x, WholeLogits)]
        if isinstance(logits, cls) and len(listed) == 1 and logits.has_parts():
            rest, named = (args[1:], kwargs) if args else ((), {k: v for k, v in kwargs.items() if k != "input"})
            if name == "register_hook" and is_of_library(rest[0] if rest else named.get("hook")):
                hooked = logits.hook_for_a_library(func, *rest)
                if hooked is not None:
                    return hooked
            result = logits.after(func, name, rest, named)
            if result is not None:
                return result
        if name in _OF_GRADIENTS and any(x._origin.lost for x in listed):
            raise RuntimeError(
                f"{name} of logits: the loss was taken from a part of them on each rank, so the whole ones get no "
                "gradient.\n  Gather them in every forward: loss: {gather_logits: always}"
            )
        return None

    def hook_for_a_library(self, func: Any, hook: Any) -> Any:
        """Register a hook for torch's own wrappers (FSDP), which ask every output when a gradient comes; or None."""
        return without_overrides(func, (self, hook), {}) if self._origin.lost else None


def placed(made: Logits, source: WholeLogits | None = None, step: Change | None = None) -> Logits:
    """Return ``made`` with its place among what shares memory with it.

    Args:
        source: logits that they were made of, if not by the head.
        step: what made them, if they may share memory with ``source``.
    """
    made._origin = _Origin() if source is None else source._origin
    made._family, made._source, made._step, made._whole = _Family(), lambda: None, step, None
    made._node = without_overrides(lambda: made.grad_fn, (), {})
    if source is not None and step is not None:
        keeps = source.grad_fn is None or made._node is not None  # one without a graph must not keep that of another
        made._family, made._source = source._family, (lambda: source) if keeps else weakref.ref(source)
    made._family.members.append(weakref.ref(made))
    return made
