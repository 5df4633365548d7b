"""Count a forward on the meta device, block by block: saved activations, operations and collectives.

One rank's shard runs its real ``forward`` at the real batch and sequence sizes. ``saved_tensors_hooks`` count each
storage that autograd saves once, except weights. Each block also runs a backward, to measure its temporary memory. A
:class:`Unit` has the result of one block.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from autopar.compat.tensors import input_metadata, sequence_number, tree_map_only
from autopar.compat.transformers import recomputed_layers
from autopar.distributed.rng import kept
from autopar.dry_run.operators import autocast_on_meta
from autopar.pipeline_parallel.backward import nodes, runs_once, way
from autopar.tensor_tracking import tensors_in
from autopar.tools.planner.stage_costs import ForwardCount, Unit, collectives_of
from autopar.tools.planner.storages import FusedKernels, Operation, SavedStorages, SavedTensor, Storages, alive


@contextmanager
def remembered(storages: Storages, saved: SavedStorages, save: tuple[str, ...]) -> Iterator[dict[int, int]]:
    """Yield number -> bytes of the storages that ``activation_checkpointing.save`` keeps from a block's forward."""
    sizes: dict[int, int] = {}
    if not save:
        yield sizes
        return
    from autopar.features.activation_checkpointing.setup import Tape, saved_operators

    tape, operators = Tape(), saved_operators(save)
    if "attention" in save:
        operators |= {F.scaled_dot_product_attention}

    def keep(operator: Any, made: Sequence[torch.Tensor]) -> None:
        if operator in operators:
            sizes.update(saved.numbered(made))

    storages.keep = keep if operators else None
    try:
        with tape.kept() if "collectives" in save else nullcontext():
            yield sizes
    finally:
        storages.keep = None
    sizes.update(saved.numbered(tape.results))


_AFTER = -1  # the place of the code after the last element


class _Segment(NamedTuple):
    """Code between blocks. Its saved storages are known only at the end of the forward.

    Attributes:
        unit, entries: The unit, and the tensors saved so far, which the unit does not include.
        freed: The sequence numbers of nodes that the first half of a split backward frees.
    """

    unit: Unit
    entries: list[SavedTensor]
    freed: frozenset[int]


class ForwardCounter:
    """Counter of a shard's forward on the meta device.

    Args:
        shard: A sharded model on the meta device, in training mode, in the run's precision, with a started region.
        elements: The paths of its blocks in forward order, including the ``encoder``.
        save: The operations whose results recomputed blocks keep (``activation_checkpointing.save``).
    """

    def __init__(
        self,
        shard: nn.Module,
        elements: Sequence[str],
        encoder: int | None,
        quantized: Sequence[torch.Tensor],
        save: tuple[str, ...],
    ) -> None:
        layers = recomputed_layers(shard) or [shard.get_submodule(path) for path in elements]
        self._recomputed = {id(layer): number for number, layer in enumerate(layers)}
        self._save = save
        self._shard, self._encoder = shard, encoder
        self._storages = storages = Storages([p for p in shard.parameters() if not p.requires_grad], quantized)
        self._places: dict[nn.Module, list[int]] = {}  # a module may be called as several elements
        for place, path in enumerate(elements):
            self._places.setdefault(shard.get_submodule(path), []).append(place)
        self._blocks: list[nn.Module] = []
        for block in self._places:
            around = any(module in self._places for module in block.modules() if module is not block)
            if "forward" not in vars(block) and not around:  # not an encoder that contains blocks
                block.forward = wraps(block.forward)(partial(self._call, block, block.forward))
                self._blocks.append(block)
        self._around = None if encoder is None else shard.get_submodule(elements[encoder])
        self._saved = SavedStorages(storages, (*shard.parameters(), *shard.buffers()))
        self._found: dict[int, Unit] = {}
        self._segments: dict[int, _Segment] = {}  # by the element that follows, in forward order
        self._last: list[torch.Tensor] = []  # outputs of the last block
        self._given: list[Any] = []  # nodes before blocks, which keep the graph between blocks alive
        self._inside_a_block = False
        self._start = self._base = 0  # live bytes when the forward began, and after the last block

    def count(self, inputs: dict[str, Any]) -> ForwardCount:
        """Run the forward on the meta device, and return its count. Raises the errors of the forward."""
        kernels = FusedKernels(self._storages)
        try:
            with warnings.catch_warnings(), kept(), torch.enable_grad(), autocast_on_meta(), self._storages, kernels:
                warnings.simplefilter("ignore")
                return self._run(inputs)
        finally:
            for block in self._blocks:  # restore the original forward
                vars(block).pop("forward", None)

    def _run(self, inputs: dict[str, Any]) -> ForwardCount:
        storages = self._storages
        storages.operations = []
        self._start = storages.reset_peak()
        leaving = None if self._around is None else self._around.register_forward_hook(self._leave_encoder)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._saved.pack, self._saved.unpack):
                out = self._shard(**inputs)
        finally:
            if leaving is not None:
                leaving.remove()
        loss = getattr(out, "loss", None) if not isinstance(out, dict) else out.get("loss")
        has_loss = isinstance(loss, torch.Tensor) and loss.requires_grad
        roots: list[Any] = [loss] if has_loss else _trained(out)
        del out  # execute_pipeline does not keep outputs
        if not self._segments:  # no block was called
            self._end_segment(0, roots)
        self._end_segment(_AFTER, roots)
        first, *fronts = self._segments
        units = {}
        for place, (unit, entries, freed) in self._segments.items():
            late = None if unit.late is None else {**unit.late, **alive(entries, freed)}
            units[place] = replace(unit, saved={**unit.saved, **alive(entries)}, late=late)
        found = {**self._found, **({self._encoder: units[self._encoder]} if self._encoder in fronts else {})}
        inner = {place: units[place] for place in fronts if place not in (self._encoder, _AFTER)}
        between = {place: unit for place, unit in inner.items() if unit.saved or unit.operations}
        after = units[_AFTER]
        saved, peak = sum(after.saved.values()), after.forward_peak
        if roots and self._last:
            peak = _backward_peak(storages, roots, self._last, self._base + saved, peak + saved)
        return ForwardCount(found, units[first], replace(after, backward_peak=peak), between, self._encoder)

    # -- outside of blocks -----------------------------------------------------------------------------------------

    def _end_segment(self, place: int, made: Sequence[torch.Tensor]) -> None:
        """End the segment before the element ``place``, whose inputs are ``made``."""
        storages, entries, self._saved.entries = self._storages, self._saved.entries, []
        made = [x for x in made if x.requires_grad]
        first, last = not self._segments, place == _AFTER
        held = sum(alive(entries).values())
        halves = backward_halves(made, [] if first else self._last)
        unit = Unit(
            late={} if halves.rest else None,
            halves=halves.apart,
            gradients=halves.gradients,
            outputs=self._saved.numbered(made),
            forward_peak=max(storages.peak - (self._start if first else self._base) - held, 0),
            operations=Counter(storages.operations),
            collectives=collectives_of(made, self._last if last else (), () if last else self._given),
        )
        known = self._segments.get(place)
        if known is not None:  # the element is called several times
            unit, entries = known.unit.followed_by(unit), [*known.entries, *entries]
        self._segments[place] = _Segment(unit, entries, frozenset(map(sequence_number, halves.freed)))
        storages.operations = []

    def _leave_encoder(self, encoder: nn.Module, args: Any, output: Any) -> None:
        """Count the encoder's code after its blocks as the unit of the encoder."""
        assert self._encoder is not None
        made = list(tensors_in(_values_of(output)))
        self._end_segment(self._encoder, made)
        self._give(made)
        self._leave(output)

    def _leave(self, output: Any) -> None:
        self._last = _trained(output)
        self._base = self._storages.reset_peak()

    def _give(self, tensors: Sequence[torch.Tensor]) -> None:
        self._given += [x.grad_fn for x in tensors if x.grad_fn is not None]

    # -- blocks ----------------------------------------------------------------------------------------------------

    def _call(self, block: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self._inside_a_block:
            return forward(*args, **kwargs)
        given = [x for x in tensors_in((args, kwargs)) if x.is_meta]
        places = self._places[block]
        place = places.pop(0) if len(places) > 1 else places[0]
        self._end_segment(place, given)
        self._give(given)
        out, unit = self._measure(forward, *args, **kwargs)
        unit = replace(unit, number=self._recomputed.get(id(block)))
        known = self._found.get(place)  # of an earlier call
        self._found[place] = unit if known is None else known.followed_by(unit)
        self._leave(out)
        return out

    def _measure(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Unit]:
        """Run a block's forward and backward. Return its output without a graph, and its unit."""
        storages, saved_storages = self._storages, self._saved
        storages.operations = None
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # argument -> leaf, and its clone for the block

        def enter(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad or not tensor.is_meta:
                return tensor
            if id(tensor) not in copies:
                leaf = tensor.detach().requires_grad_()
                inside = leaf.clone()  # the block may write in place
                saved_storages.enter(inside, tensor)
                copies[id(tensor)] = leaf, inside
            return copies[id(tensor)][1]

        args, kwargs = tree_map_only(torch.Tensor, enter, (args, kwargs))
        given = saved_storages.numbered(tensors_in((args, kwargs)))
        operations: list[Operation] = []
        storages.operations, start = operations, storages.reset_peak()
        self._inside_a_block = True
        try:
            with remembered(storages, saved_storages, self._save) as kept_sizes:
                out = forward(*args, **kwargs)
        finally:
            self._inside_a_block = False
        storages.operations, (last, before_last) = None, saved_storages.last
        entries, saved_storages.entries = saved_storages.entries, []
        saved = alive(entries)
        held = sum(size for number, size in saved.items() if number not in given)
        forward_peak = storages.peak - start - held
        leaves = [leaf for leaf, _ in copies.values()]
        made = _trained(out)
        outputs = saved_storages.numbered(made)
        halves = backward_halves(made, leaves)
        late = alive(entries, {sequence_number(node) for node in halves.freed}) if halves.rest else None
        calls = collectives_of(made, [inside for _, inside in copies.values()], last=last)
        held += start + sum(outputs.values())
        backward_peak = _backward_peak(storages, made, leaves, held, sum(saved.values())) if made and leaves else 0
        storages.operations = []

        def is_kept(operation: Operation) -> bool:
            return ("attention" if operation.attention else "matmuls" if operation.flops else "") in self._save

        extra = {number: size for number, size in kept_sizes.items() if number not in given}
        again = Counter(operation for operation in operations[:before_last] if not is_kept(operation))
        unit = Unit(
            *(saved, late, halves.apart, halves.gradients, given, extra, outputs, max(forward_peak, 0), backward_peak),
            *(Counter(operations), again, calls),
            sends_again="collectives" not in self._save,
        )
        return tree_map_only(torch.Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), out), unit


def _backward_peak(
    storages: Storages, made: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], held: int, unknown: int
) -> int:
    """Return the peak bytes above ``held`` in a backward; ``unknown`` if it does not run on the meta device."""
    storages.reset_peak()
    try:
        torch.autograd.grad(made, leaves, [torch.empty_like(x) for x in made], allow_unused=True)
    except (RuntimeError, NotImplementedError):
        return unknown
    return max(storages.peak - held, 0)


def _values_of(out: Any) -> Any:
    """Return the values of an output, which may be a dataclass."""
    return dict(out) if hasattr(out, "keys") else vars(out) if hasattr(out, "__dataclass_fields__") else out


def _trained(out: Any) -> list[torch.Tensor]:
    return [x for x in tensors_in(_values_of(out)) if x.requires_grad]


class Halves(NamedTuple):
    """The state that the first half of a split backward leaves for the second half.

    Attributes:
        apart: A flag, set if the backward can be split; else the first half is the full backward.
        rest: A flag, set if the second half has work.
        freed: The nodes that the first half frees.
        gradients: An upper bound of the bytes of waiting gradients, some of which may be views.
    """

    apart: bool
    rest: bool
    freed: frozenset[Node]
    gradients: int


def backward_halves(roots: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> Halves:
    """Return the state that ``stage_backward_input`` leaves, without running it."""
    graph, _, starts = way([get_gradient_edge(root) for root in roots], leaves)
    apart = not any(runs_once(node) for node in starts)
    below = nodes(starts) if apart else {}
    arriving = [each for node in starts for each in input_metadata(node)] if apart else []
    gradients = sum(prod(each.shape) * each.dtype.itemsize for each in arriving)
    return Halves(apart, bool(below), frozenset(graph.keys() - below.keys()), gradients)
