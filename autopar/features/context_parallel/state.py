"""State of a forward over local sequences: whether it is sharded, and which rows of each list of blocks lie here.

Where rows are gathered, every rank computes the same from there on, the loss too; in the backward pass the gradients of
all ranks are summed for each row. Before that the gradient on each rank is that of its rows: a part, which the average
over ranks adds up. A value that is not a sum of parts (a penalty on gradients) cannot be computed from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from autopar.call_site import described, hooks_below, user_hooks
from autopar.compat.tensors import HOOKS, PLAIN, hooks_of, hooks_of_all, in_backward, tree_map
from autopar.distributed.autograd_functions import keep_none, named_collective, single_backward
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import gather_sum, reduce
from autopar.errors import ConfigError
from autopar.features.context_parallel.recurrent.state_passing import HandedStates, Neighbours
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
        inputs: Path in ``(args, kwargs)`` -> dim of rows; ``folded``: how many times they lay in it in the dry run.
        outputs: Path in the result -> dim of rows.
        states: States that it passes on, to run over own rows instead; None: it needs all rows.
    """

    inputs: dict[str, int] = field(default_factory=dict)
    folded: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    states: HandedStates | None = None


@dataclass
class RowPlan:
    """How a model runs over local sequences, as a dry run found it (:mod:`autopar.features.context_parallel.plan`).

    Attributes:
        lists: Paths of the blocks of each list that is sharded.
        arguments: Argument of a block, and path in it -> dim of rows.
        numbers: Argument of a block -> integers that it was given.
        whole: Path of a module -> how it runs with all rows.
        own: Paths of embeddings before the blocks that look up own rows.
        crosses: Path of a module that calls attention -> whether its keys belong to another sequence.
        head: Path of the head that makes logits of own rows; None without one.
        between: True if code between the blocks needs all rows: then each block is sharded and joined separately.
        through: True if rows stay on their ranks from the last block to the head; else they are joined between.
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


class RowState:
    """Rows of the forward that runs. One per model.

    Args:
        axis: The cp axis.
        method: ``ulysses``, ``gather`` or ``auto``.

    Attributes:
        cutting: True while blocks get own rows; False in a forward with a cache, and in a module that needs all rows.
        keeping: True if rows stay on their ranks after the last block, up to the logits.
        refused: Error of a forward over local sequences while user hooks are registered; "" without them.
        gathers_logits: True if logits are gathered in every forward.
        resuming: True while a block is recomputed that knows its rows.
        watch, tracking: Only in a dry run: the answer in place of attention, and the marks on rows.
        opened, spoiled: Embeddings whose rows reached a boundary, and those that were read in full before it.
        region: Random draws that differ over the axis.
        links: The ranks next to this one, to which states are passed.
        entered: Lists of blocks that ran over rows; ``inside``: those whose rows are not joined yet.
        batches, layouts: List of blocks -> number of its sequences, and their rows; none if it is not sharded.
    """

    def __init__(self, axis: Axis, method: str, plan: RowPlan) -> None:
        self.axis, self.method, self.plan = axis, method, plan
        self.cutting = self.keeping = self.was_cut = self.resuming = False
        self.gathers_logits, self.refused = False, ""
        self.running = self.forwards = 0
        self.watch: Callable[..., torch.Tensor] | None = None
        self.tracking: Any = None
        self.region, self.links = Region(axis), Neighbours(axis)
        self.opened: set[str] = set()
        self.spoiled: set[str] = set()
        self.entered: set[int] = set()
        self.inside: set[int] = set()
        self.batches: dict[int, int] = {}
        self.layouts: dict[int, Layout] = {}
        self._narrowed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._dicts: dict[nn.Module, list[dict[int, Any]]] = {}  # torch's dicts of hooks, of each model

    def __deepcopy__(self, memo: dict[int, Any]) -> RowState:
        copied = memo[id(self)] = RowState(self.axis, self.method, self.plan)
        copied.region, copied.gathers_logits = deepcopy(self.region, memo), self.gathers_logits
        return copied

    def start(self, *, cutting: bool, keeping: bool) -> None:
        """Begin the forward of the outermost model."""
        self.release()
        if cutting and self.plan.in_runs and self.axis.group is not None:
            self.links.begin()
        self.region.start()
        self.forwards += 1
        self.cutting, self.keeping, self.was_cut = cutting, cutting and keeping, cutting

    def finish(self, *, failed: bool = False) -> None:
        """End it, also one that failed."""
        if failed:
            self.links.failed = True
        else:
            self.links.wait_sent()
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
        self.layouts.clear()
        self.inside.clear()
        self._narrowed.clear()

    def snapshot(self) -> dict[str, Any]:
        """Return the attributes that differ between forwards, for the recomputation of a block."""
        positions = {key: pair for key, pair in self._narrowed.items() if not pair[0].is_floating_point()}
        settings = {"cutting": self.cutting, "keeping": self.keeping, "batches": dict(self.batches)}
        return {**settings, "layouts": dict(self.layouts), "_narrowed": positions, "resuming": True}

    @contextmanager
    def resumed(self, forward: dict[str, Any]) -> Iterator[None]:
        """Recompute a block inside, with the snapshot of its forward."""
        now = {name: getattr(self, name) for name in forward}
        narrowed = {**self._narrowed, **forward["_narrowed"]}
        vars(self).update({**forward, "layouts": dict(forward["layouts"]), "_narrowed": narrowed})
        try:
            yield
        finally:
            vars(self).update(now)

    def check_recomputed(self) -> None:
        """Raise ConfigError if a block is recomputed by code that does not know its rows."""
        if self.was_cut and not self.running and not self.resuming and in_backward():
            raise ConfigError(
                f"context_parallel_size={self.axis.size}: a block is recomputed in the backward pass, and nobody knows "
                "which rows it had.\n  Use activation_checkpointing: {enable: true}, or "
                "model.gradient_checkpointing_enable(), instead of torch's checkpoint around it."
            )

    def enter(self, number: int, length: int, batch: int) -> None:
        """Begin a list of blocks with ``batch`` sequences of ``length`` rows; too few are not sharded."""
        self.batches[number] = batch
        if self.tracking is not None and length != self.tracking.prime * self.axis.size:
            return  # no words: sound, or an image
        self.entered.add(number)
        self.layouts.pop(number, None)
        layout = self.rows_of(length)
        if layout is not None:
            self.layouts[number] = layout
            self.inside.add(number)

    def rows_of(self, length: int) -> Layout | None:
        """Return the layout of a sequence; None if it is too short to be sharded."""
        return rows_layout(length, self.axis.size, zigzag=self.method != "ulysses" and not self.plan.in_runs)

    def narrow(self, x: torch.Tensor, layout: Layout, dim: int) -> torch.Tensor:
        """Keep this rank's rows of ``x``; of a tensor without gradient, as rotary angles, once for all blocks."""
        if x.requires_grad and torch.is_grad_enabled():
            return self.mark(layout.shard(x, self.axis.rank, dim))
        known = self._narrowed.get(id(x))
        if known is None or known[0] is not x:
            known = self._narrowed[id(x)] = (x, self.mark(layout.shard(x, self.axis.rank, dim)))
            self._narrowed[id(known[1])] = (known[1], x)
        return known[1]

    def whole_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the full tensor of which ``x`` is this rank's rows; ``x`` itself if that is not known."""
        known = self._narrowed.get(id(x))
        return x if known is None or known[0] is not x or known[1].numel() <= x.numel() else known[1]

    def mark(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, which is own rows from here on."""
        if self.tracking is not None:
            self.tracking.mark_rows(x)
        return x

    def unmark(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, in full from here on; in a dry run another tensor."""
        return x if self.tracking is None else self.tracking.whole(x)


# -- rows joined ---------------------------------------------------------------------------------------------------


def join(x: torch.Tensor, axis: Axis, dim: int, rows: Layout) -> torch.Tensor:
    """Gather rows along ``dim``, ``[..., rows/cp, ...] -> [..., rows, ...]``.

    Raises:
        ConfigError: In a backward pass that is to be differentiated.
    """
    if x.requires_grad and torch.is_grad_enabled():
        x = _Parts.apply(x)
    return gather_sum(x, axis, dim, rows)


class _Parts(torch.autograd.Function):
    """The identity, after which gradients are full, and before which they are parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        keep_none(ctx)
        return x.view_as(x)

    @staticmethod
    @single_backward
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def entered(values: Any, axis: Axis) -> Any:
    """Return the arguments of a model, so that those with a gradient get the full one, on every rank."""

    def full(x: Any) -> Any:
        wants = type(x) in PLAIN and x.requires_grad and torch.is_grad_enabled()
        return _Entered.apply(x, axis) if wants else x

    return tree_map(full, values)


class _Entered(torch.autograd.Function):
    """The identity, before which gradients are full, and after which they are parts, scaled for an average."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        keep_none(ctx)
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @named_collective("all-reduce: gradient of what the model is given")
    @single_backward
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce(grad, ctx.axis) / ctx.axis.size, None
