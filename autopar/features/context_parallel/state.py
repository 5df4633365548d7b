"""The state of a forward over sharded sequences, and the local rows of each list of blocks.

After rows are gathered, every rank computes the same, including the loss. In the backward pass the gradients of all
ranks are summed at the gather. Before it, each rank has the gradients of its local rows only; the average over ranks
adds them up. So values that are not sums over rows, such as a gradient penalty, are not supported.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from autopar.call_site import described, hooks_below, user_hooks
from autopar.compat.tensors import HOOKS, PLAIN, hooks_of, hooks_of_all, in_backward, tree_map
from autopar.config import ParallelConfig
from autopar.distributed.autograd_functions import refuse_again
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import as_view, gather_sum, itself, linear, reduce
from autopar.errors import ConfigError
from autopar.features.context_parallel.recurrent.state_passing import HandedStates, Neighbours
from autopar.layout import Layout, rows_layout
from autopar.swap import replaced
from autopar.tensor_parallel.regions import Region


def refused_hook(path: str, hook: Any, ranks: int) -> str:
    """Return the error message for a user hook that would see sequences sharded over ``ranks`` ranks."""
    return (
        f"context_parallel_size={ranks}: the hook {described(hook)} on {path} would get this rank's part of each "
        "sequence.\n  Call autopar.local_hooks(module) if the hook supports that. Otherwise remove it, or use "
        "tensor_parallel_size,\n  with which hooks get full tensors."
    )


@dataclass
class GatheredModule:
    """A module that runs on full sequences on every rank, with the dims of rows in its arguments and outputs.

    Attributes:
        inputs: Path in ``(args, kwargs)`` -> dim of rows.
        folded: Path in ``(args, kwargs)`` -> number of times that the rows are repeated in this dim.
        outputs: Path in the result -> dim of rows.
        states: States that it passes between ranks to run on local rows instead; None if it needs full sequences.
    """

    inputs: dict[str, int] = field(default_factory=dict)
    folded: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    states: HandedStates | None = None


@dataclass
class RowPlan:
    """The plan of a model over sharded sequences, found by a dry run (:mod:`autopar.features.context_parallel.plan`).

    Attributes:
        lists: Paths of the blocks of each list that runs on sharded sequences.
        arguments: Name of a block argument, and path in it -> dim of rows.
        numbers: Name of a block argument -> integers that it had.
        whole: Path of a module -> description of its run on full sequences.
        own: Paths of embeddings before the blocks that look up local rows only.
        crosses: Path of a module that calls attention -> whether its keys belong to another sequence.
        head: Path of the head that makes logits of local rows; None without one.
        between: True if code between blocks needs full sequences, so that each block shards and gathers them.
        through: True if sequences stay sharded from the last block to the head.
    """

    lists: tuple[tuple[str, ...], ...]
    arguments: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, set[int]] = field(default_factory=dict)
    whole: dict[str, GatheredModule] = field(default_factory=dict)
    own: tuple[str, ...] = ()
    crosses: dict[str, bool] = field(default_factory=dict)
    head: str | None = None
    through: bool = True
    between: bool = False

    def check(self, model: nn.Module, config: ParallelConfig) -> None:
        """Raise ConfigError if the model of another library does not fit a configuration."""

    def undo(self, model: nn.Module) -> None:
        """Undo changes to the model of another library."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @property
    def in_runs(self) -> bool:
        """True if the local rows must be contiguous, because states pass from rank to rank."""
        return any(where.states is not None for where in self.whole.values())


class RowState:
    """The rows of the current forward; one object per model.

    Args:
        axis: The cp axis.
        method: ``ulysses``, ``gather`` or ``auto``.

    Attributes:
        cutting: True while blocks get local rows; False in a forward with a cache, and in a module on full sequences.
        keeping: True if sequences stay sharded after the last block, up to the logits.
        refused: Error for a forward over sharded sequences with user hooks; "" without hooks.
        gathers_logits: True if logits are gathered in every forward.
        resuming: True while a block with known rows is recomputed.
        watch: Replacement for attention in a dry run, or None.
        tracking: :class:`~autopar.dry_run.row_tracking.RowTracking` of a dry run, or None.
        opened: Paths of embeddings whose local rows reached a boundary.
        spoiled: Paths of embeddings that were read in full before a boundary.
        region: Region for random draws that differ over the axis.
        links: Links to the neighboring ranks, for states.
        entered: Numbers of the lists of blocks that ran on sharded sequences.
        inside: Numbers of the lists whose rows are not gathered yet.
        batches: Number of a list of blocks -> number of its sequences.
        layouts: Number of a list of blocks -> layout of its rows, if it is sharded.
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
        self._dicts: dict[nn.Module, list[dict[int, Any]]] = {}  # model -> torch's dicts of hooks

    def __deepcopy__(self, memo: dict[int, Any]) -> RowState:
        copied = memo[id(self)] = RowState(self.axis, self.method, self.plan)
        copied.region, copied.gathers_logits = deepcopy(self.region, memo), self.gathers_logits
        return copied

    def start(self, *, cutting: bool, keeping: bool) -> None:
        """Start the forward of the outermost model."""
        self.release()
        if cutting and self.plan.in_runs and self.axis.group is not None:
            self.links.begin()
        self.region.start()
        self.forwards += 1
        self.cutting, self.keeping, self.was_cut = cutting, cutting and keeping, cutting

    def finish(self, *, failed: bool = False) -> None:
        """End the forward of the outermost model, including a failed one."""
        if failed:
            self.links.failed = True
        else:
            self.links.wait_sent()
        self.cutting = self.keeping = False
        self.region.finish()
        self.release()

    def find_hooks(self, model: nn.Module) -> dict[str, str]:
        """Refuse sharded sequences if ``model`` has user hooks; return the places of the hooks, for rank checks."""
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
        """Return the attributes that differ between forwards, to recompute a block."""
        positions = {key: pair for key, pair in self._narrowed.items() if not pair[0].is_floating_point()}
        settings = {"cutting": self.cutting, "keeping": self.keeping, "batches": dict(self.batches)}
        return {**settings, "layouts": dict(self.layouts), "_narrowed": positions, "resuming": True}

    def resumed(self, forward: dict[str, Any]) -> AbstractContextManager[None]:
        """Restore the snapshot of a forward inside, to recompute a block."""
        narrowed = {**self._narrowed, **forward["_narrowed"]}
        return replaced(vars(self), {**forward, "layouts": dict(forward["layouts"]), "_narrowed": narrowed})

    def check_recomputed(self) -> None:
        """Raise ConfigError if code that does not restore the rows recomputes a block."""
        if self.was_cut and not self.running and not self.resuming and in_backward():
            raise ConfigError(
                f"context_parallel_size={self.axis.size} is not supported with torch's checkpoint around a block\n"
                "  Use activation_checkpointing: {enable: true}, or model.gradient_checkpointing_enable()."
            )

    def enter(self, number: int, length: int, batch: int) -> None:
        """Start a list of blocks with ``batch`` sequences of ``length`` rows; short sequences are not sharded."""
        self.batches[number] = batch
        if self.tracking is not None and length != self.tracking.prime * self.axis.size:
            return  # audio or an image, not text
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
        """Return the local rows of ``x``; cached for all blocks if ``x`` has no gradient, such as rotary angles."""
        if x.requires_grad and torch.is_grad_enabled():
            return self.mark(layout.shard(x, self.axis.rank, dim))
        known = self._narrowed.get(id(x))
        if known is None or known[0] is not x:
            known = self._narrowed[id(x)] = (x, self.mark(layout.shard(x, self.axis.rank, dim)))
            self._narrowed[id(known[1])] = (known[1], x)
        return known[1]

    def full_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the full tensor whose local rows are ``x``, or ``x`` if it is unknown."""
        known = self._narrowed.get(id(x))
        return x if known is None or known[0] is not x or known[1].numel() <= x.numel() else known[1]

    def mark(self, x: torch.Tensor) -> torch.Tensor:
        """Mark ``x`` as local rows in a dry run; return it."""
        if self.tracking is not None:
            self.tracking.mark_rows(x)
        return x

    def unmark(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` as a full tensor; in a dry run a new tensor."""
        return x if self.tracking is None else self.tracking.unmarked(x)


# -- gather rows ---------------------------------------------------------------------------------------------------


def join(x: torch.Tensor, axis: Axis, dim: int, rows: Layout) -> torch.Tensor:
    """Gather rows along ``dim``, ``[..., rows/cp, ...] -> [..., rows, ...]``.

    Raises:
        ConfigError: In a backward pass with ``create_graph=True``.
    """
    if x.requires_grad and torch.is_grad_enabled():
        x = _Parts.apply(x, axis)
    return gather_sum(x, axis, dim, rows)


_Parts = linear("_Parts", as_view, itself, refuse_again)
"""The identity; gradients are full after it and partial before it."""


def entered(values: Any, axis: Axis) -> Any:
    """Return the arguments of a model so that they get full gradients on every rank."""

    def full(x: Any) -> Any:
        wants = type(x) in PLAIN and x.requires_grad and torch.is_grad_enabled()
        return _Entered.apply(x, axis) if wants else x

    return tree_map(full, values)


def _averaged(grad: torch.Tensor, axis: Axis) -> torch.Tensor:
    return reduce(grad, axis) / axis.size


_Entered = linear("_Entered", as_view, _averaged, refuse_again, "", "all-reduce: gradient of the model's inputs")
"""The identity; gradients are full before it, and partial and scaled for an average after it."""
