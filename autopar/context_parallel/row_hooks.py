"""Hooks of the user's where the ranks of the context-parallel axis share sequences: they get all rows, in their order.

Three kinds of places are in a forward over rows:

* Tensors hold this rank's rows: in blocks, and behind them up to the head. They are gathered for a hook, and what it
  returns is cut. The gradient in front of and behind it is that of own rows, as large as an average over the ranks
  needs it (:mod:`~autopar.context_parallel.rows`): inside of the hook it is the whole one, on every rank.
* Tensors are whole, and each rank has a part of their gradient: in front of the blocks, between an encoder and a
  decoder, in a module that needs all rows. The gradient of what a hook returns is averaged over the ranks behind it.
* The forward is not cut: hooks are called as they are.

:mod:`~autopar.context_parallel.seen_rows` tells the first two apart, and does what they need.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from autopar.context_parallel.seen_rows import WORKS, GradientsOfRows, Place, SeenRows
from autopar.context_parallel.state import RowState
from autopar.plan.blocks import lies_in
from autopar.tensor_parallel.seen_values import Seen
from autopar.tensor_parallel.sequence_parallel import argument_names
from autopar.tensor_parallel.whole_hooks import described


class RowHooks:
    """Says for each module of a model over rows what its hooks are to see.

    Args:
        model: whose forward may be the outermost one; ``prefix``: its path in the names of the plan.
    """

    def __init__(self, state: RowState, model: nn.Module, prefix: str) -> None:
        self.state, self.model, self.prefix = state, model, prefix
        self._in_experts: dict[str, str] = {}  # path of a module -> that of the experts around it

    def places(self) -> Iterator[tuple[str, nn.Module, Callable[[Any, bool, bool], Seen | None]]]:
        """Yield all modules but the model itself, whose inputs and outputs are whole."""
        plan = self.state.plan
        experts = [below for below, module in self.model.named_modules() if is_experts(module)]
        for below, module in self.model.named_modules():
            path = self._path(below)
            lists = enumerate(plan.lists)
            number = next((n for n, blocks in lists if any(lies_in(path, block) for block in blocks)), None)
            whole = next((each for each in plan.whole if lies_in(path, each)), "")
            around = next((each for each in experts if below != each and lies_in(below, each)), None)
            if around is not None and number is not None and not whole:
                self._in_experts[below] = around
            if below:
                yield below, module, functools.partial(self._seen, Place(path, number, whole))

    def begin(self, hooked: list[tuple[str, str, Any]]) -> None:
        """Let modules run with all rows, or all heads, where hooks need that: their kind, path, and themselves.

        A module that hands on states, around a hook: one rank computes what is in front of another's rows while that
        one waits for it, and cannot gather there. Modules that share heads: all of them have all, since one may make a
        table that others read. Embeddings: rows of them do not go through autograd functions, as a backward hook is.
        Nothing can be done inside of experts, each of which is given other tokens on each rank, or none: a forward over
        rows is refused.
        """
        state, plan = self.state, self.state.plan
        state.hooked, state.refused = frozenset(), ""
        if not hooked:
            return
        inside = next(((hook, path) for _, path, hook in hooked if path in self._in_experts), None)
        if inside is not None:
            state.refused = _in_experts(*inside, self._in_experts[inside[1]], state.axis.size)
        paths = {(kind, self._path(path)) for kind, path, _ in hooked}
        outer = [*plan.whole, *plan.own]
        around = {each for each in outer for _, path in paths if path != each and lies_in(path, each)}
        if any(each in plan.whole and plan.whole[each].heads is not None for each in around):
            around |= {each for each, where in plan.whole.items() if where.heads is not None}
        blocks = [block for blocks in plan.lists for block in blocks]
        backward = [path for kind, path in paths if kind.startswith("backward")]
        if plan.own and not all(any(lies_in(path, block) for block in blocks) for path in backward):
            around |= set(plan.own)
        state.hooked = frozenset(around)

    def _path(self, below: str) -> str:
        return f"{self.prefix}.{below}".strip(".")

    def _seen(self, place: Place, hook: Any, gradients: bool, made: bool) -> Seen | None:
        state = self.state
        if gradients:
            return GradientsOfRows(state, place, hook, made=made) if state.lengths() else None
        if not state.cutting:
            return SeenRows(state, place, hook, None) if state.needs_all_rows else None
        number = place.number
        if number is None:
            at_head = state.keeping and place.path == state.plan.head
            number = len(state.plan.lists) - 1 if at_head else max(state.inside, default=None)
        layout = None if number is None else state.layout(number)
        if place.number is not None and layout is None:
            return None  # too few rows to be cut
        if place.number is not None and place.is_beside(state.plan, made=made):
            layout = None
        return SeenRows(state, place, hook, layout)


def is_experts(module: nn.Module) -> bool:
    """Return whether a module takes each token to the experts that were chosen for it."""
    names = argument_names(module) if not isinstance(module, nn.ModuleList | nn.ModuleDict) else ()
    return names[:1] == ("hidden_states",) and {"top_k_index", "top_k_weights"} <= set(names)


def _in_experts(hook: Any, path: str, experts: str, ranks: int) -> str:
    return (
        f"context_parallel_size={ranks}: the hook {described(hook)} on {path} is inside of {experts}, where each rank "
        "has the tokens\n  of its own rows that were sent to one expert, which differ in number, and not all rows of "
        f"the sequence. {WORKS}"
    )
