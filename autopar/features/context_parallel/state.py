"""State of a forward over rows: whether it is cut, and which rows of each list of blocks lie here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.call_site import described, hooks_below, user_hooks
from autopar.compat.tensors import HOOKS, hooks_of, hooks_of_all, in_backward
from autopar.distributed.axis import Axis
from autopar.errors import ConfigError
from autopar.features.context_parallel.recurrent.state_passing import HandedStates, Links
from autopar.layout import Layout, rows_layout
from autopar.tensor_parallel.regions import Region


def refused_hook(path: str, hook: Any, ranks: int) -> str:
    """Return the error of a user hook where ``ranks`` context-parallel ranks share each sequence."""
    return (
        f"context_parallel_size={ranks}: the hook {described(hook)} on {path} would get this rank's part of each "
        "sequence.\n  Call autopar.local_hooks(module) if it is written for that. Otherwise remove it, or use "
        "tensor_parallel_size,\n  with which hooks get full tensors."
    )


@dataclass
class WholeModule:
    """A module that runs with all rows on every rank: where its arguments and outputs hold rows.

    Attributes:
        inputs: path in ``(args, kwargs)`` -> dim of rows; ``folded``: how many times they lay in it in the rehearsal.
        outputs: path in what it returns -> dim of rows; ``shapes``: what it had in the rehearsal.
        states: how it runs over own rows instead, and hands on its states; None: it does not.
    """

    inputs: dict[str, int] = field(default_factory=dict)
    folded: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    states: HandedStates | None = None


@dataclass
class RowPlan:
    """How a model runs over rows, as a rehearsal found it out (:mod:`autopar.features.context_parallel.plan`).

    Attributes:
        lists: paths of the blocks of each list that is cut.
        arguments: argument of a block, and path in it -> dim of rows.
        numbers: argument of a block -> whole numbers that it was given.
        whole: path of a module -> how it is run with all rows.
        own: paths of embeddings in front of the blocks that look up own rows.
        crosses: path of a module that calls attention -> whether its keys are those of another sequence.
        head: path of the head that makes logits of rows; None without one.
        between: whether something between the blocks needs all rows: then each block is cut and joined by itself.
        through: whether rows stay on their ranks from the last block up to the head; else they are joined between.
    """

    lists: tuple[tuple[str, ...], ...]
    arguments: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, set[int]] = field(default_factory=dict)
    whole: dict[str, WholeModule] = field(default_factory=dict)
    own: tuple[str, ...] = ()
    crosses: dict[str, bool] = field(default_factory=dict)
    head: str | None = None
    through: bool = True
    between: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @property
    def in_runs(self) -> bool:
        """Whether each rank's rows are one run, since states are handed on from one rank to the next."""
        return any(where.states is not None for where in self.whole.values())


class Snapshot(NamedTuple):
    """Settings that differ between forwards."""

    cutting: bool
    keeping: bool
    batches: dict[int, int]
    layouts: dict[int, Layout]
    narrowed: dict[int, tuple[torch.Tensor, torch.Tensor]]


class RowState:
    """Rows of the forward that runs. One per model.

    Args:
        axis: the cp axis.
        method: ``ulysses``, ``gather`` or ``auto``.

    Attributes:
        cutting: whether blocks get rows; False in a forward with a cache, and inside a module that needs all rows.
        keeping: whether rows stay on their ranks behind the last block, up to the logits.
        refused: Why a forward over local sequences raises: user hooks are registered. Empty without them.
        gathers_logits: whether logits are gathered in every forward.
        resuming: whether a block is recomputed that knows its rows.
        watch: of a rehearsal: answers instead of attention.
        tracking: of a rehearsal: marks rows.
        opened, spoiled: embeddings whose rows came to a boundary, and those that were read in full in front of it.
        region: random draws that differ over the axis.
        links: the ranks beside this one, to which states are handed on.
        entered: lists of blocks that were run over rows; ``inside``: whose rows are not joined yet.
        batches: number of sequences that each list of blocks was given.
    """

    def __init__(self, axis: Axis, method: str, plan: RowPlan) -> None:
        self.axis, self.method, self.plan = axis, method, plan
        self.cutting = self.keeping = self.was_cut = self.resuming = False
        self.gathers_logits, self.refused = False, ""
        self.running = self.forwards = 0
        self.watch: Callable[..., torch.Tensor] | None = None
        self.tracking: Any = None
        self.region, self.links = Region(axis), Links(axis)
        self.opened: set[str] = set()
        self.spoiled: set[str] = set()
        self.entered: set[int] = set()
        self.inside: set[int] = set()
        self.batches: dict[int, int] = {}
        self._layouts: dict[int, Layout] = {}
        self._known: dict[int, Layout | None] = {}
        self._narrowed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._dicts: dict[nn.Module, list[dict[int, Any]]] = {}  # torch's dicts of hooks, of each model

    def __deepcopy__(self, memo: dict[int, Any]) -> RowState:
        copied = RowState(self.axis, self.method, self.plan)
        memo[id(self)] = copied
        copied.region, copied.gathers_logits = deepcopy(self.region, memo), self.gathers_logits
        return copied

    def start(self, *, cutting: bool, keeping: bool) -> None:
        """Begin the forward of the outermost model."""
        self.release()
        if cutting and self.plan.in_runs and self.axis.group is not None:
            self.links.begin()
        self.region.start()
        self.forwards += 1
        self.cutting, self.keeping = cutting, cutting and keeping
        self.was_cut = cutting

    def finish(self, *, failed: bool = False) -> None:
        """End it, also one that failed."""
        if failed:
            self.links.failed = True
        else:
            self.links.neighbours.wait_sent()
        self.cutting = self.keeping = False
        self.region.finish()
        self.release()

    def find_hooks(self, model: nn.Module) -> dict[str, str]:
        """Refuse a forward of ``model`` over local sequences while user hooks below it are registered that are not
        local; return where they are, for ranks to compare.
        """
        if model not in self._dicts:
            self._dicts[model] = [hooks_of(m, kind) for path, m in model.named_modules() if path for kind in HOOKS]
        found = [*hooks_below(model)] if any(self._dicts[model]) else []
        found += [("all modules", hook) for kind in HOOKS for hook in user_hooks(hooks_of_all(kind)[0])]
        self.refused = refused_hook(*found[0], self.axis.size) if found else ""
        return {"user hooks": ", ".join(f"over local sequences on {path}" for path, _ in found)} if found else {}

    def release(self) -> None:
        """Release the references to activations."""
        self._layouts.clear()
        self.inside.clear()
        self._narrowed.clear()

    @contextmanager
    def resumed(self, forward: Snapshot) -> Iterator[None]:
        """Go on inside as in another forward: a block is recomputed."""
        now, before = self.snapshot()._replace(narrowed=self._narrowed), self.resuming
        self._resume(forward._replace(narrowed={**self._narrowed, **forward.narrowed}))
        self.resuming = True
        try:
            yield
        finally:
            self._resume(now)
            self.resuming = before

    def snapshot(self) -> Snapshot:
        """Return what tells this forward from others."""
        positions = {key: pair for key, pair in self._narrowed.items() if not pair[0].is_floating_point()}
        return Snapshot(self.cutting, self.keeping, dict(self.batches), dict(self._layouts), positions)

    def _resume(self, forward: Snapshot) -> None:
        self.cutting, self.keeping, self.batches, layouts, self._narrowed = forward
        self._layouts = dict(layouts)

    def check_recomputed(self) -> None:
        """Raise ConfigError if a block is recomputed by what does not know its rows."""
        if self.was_cut and not self.running and not self.resuming and in_backward():
            raise ConfigError(
                f"context_parallel_size={self.axis.size}: a block is recomputed in the backward pass, and nobody knows "
                "which rows it had.\n  Use activation_checkpointing: {enable: true}, or "
                "model.gradient_checkpointing_enable(), instead of torch's checkpoint around it."
            )

    def enter(self, number: int, length: int, batch: int = 0) -> Layout | None:
        """Begin a list of blocks with ``batch`` sequences of ``length`` rows; None if there are too few to be cut."""
        self.batches[number] = batch
        if self.tracking is not None and length != self.tracking.prime * self.axis.size:
            return None  # no words: sound, or an image
        self.entered.add(number)
        layout = self.rows_of(length)
        if layout is None:
            self._layouts.pop(number, None)
            return None
        self._layouts[number] = layout
        self.inside.add(number)
        return layout

    def rows_of(self, length: int) -> Layout | None:
        """Return which rows of a sequence each rank has; None if they are too few to be cut."""
        if length not in self._known:
            zigzag = self.method != "ulysses" and not self.plan.in_runs
            self._known[length] = rows_layout(length, self.axis.size, zigzag=zigzag)
        return self._known[length]

    def layout(self, number: int) -> Layout | None:
        """Return the rows of a list of blocks that runs; None if it is not cut."""
        return self._layouts.get(number)

    def picks_ulysses(self, heads: int, kv_heads: int) -> bool:
        """Return whether heads are exchanged for rows: with ``auto`` where each rank gets as many keys."""
        if heads % kv_heads:
            return False
        return self.method == "ulysses" or (self.method == "auto" and kv_heads % self.axis.size == 0)

    def narrow(self, x: torch.Tensor, layout: Layout, dim: int) -> torch.Tensor:
        """Keep this rank's rows of ``x``; of what has no gradient, as rotary angles, once for all blocks."""
        if x.requires_grad and torch.is_grad_enabled():
            return self.mark(layout.shard(x, self.axis.rank, dim))
        known = self._narrowed.get(id(x))
        if known is None or known[0] is not x:
            known = self._narrowed[id(x)] = (x, self.mark(layout.shard(x, self.axis.rank, dim)))
            self._narrowed[id(known[1])] = (known[1], x)
        return known[1]

    def whole_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return what ``x`` is this rank's rows of; ``x`` itself if that is not known."""
        known = self._narrowed.get(id(x))
        if known is None or known[0] is not x or known[1].numel() <= x.numel():
            return x
        return known[1]

    def mark(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, which holds rows from here on."""
        if self.tracking is not None:
            self.tracking.mark_rows(x)
        return x

    def unmark(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, whole from here on; in a rehearsal another tensor."""
        return x if self.tracking is None else self.tracking.whole(x)
