"""What a forward keeps for its backward, counted on the meta device: block by block, with operations and collectives.

One rank's shard runs its own ``forward`` at the real batch and sequence, and nothing is estimated: what autograd saves
is counted by ``saved_tensors_hooks``, each storage once, weights not. Of equal blocks one computes
(:mod:`autopar.dry_run.block_replay`), so the size of a model makes no difference to the time. Each block is also run
backward, to see how much memory that needs beside what is saved.

Everything that differs by block is in its :class:`Unit`. A rank that holds only a part of each sequence would be a
third argument beside batch and sequence: of the units, nothing here looks at either.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from autopar.distributed.rng import kept
from autopar.dry_run.block_replay import BlockReplay, Form, form_of, tensor_of
from autopar.dry_run.equal_blocks import EqualBlocks
from autopar.planner.collective_calls import Collective, collectives_of
from autopar.planner.fused_kernels import FusedKernels
from autopar.planner.storages import Storages
from autopar.planner.units import ForwardCount, Unit
from autopar.tensor_tracking import storage_key, tensors_in

__all__ = ["count_forward"]


def count_forward(
    shard: nn.Module, inputs: dict[str, Any], elements: Sequence[str], equal: Sequence[EqualBlocks]
) -> ForwardCount:
    """Run a shard's forward on the meta device, and count.

    Args:
        shard: on the meta device, sharded, in training mode, in the precision of the run; its region has begun.
        inputs: on the meta device, with labels.
        elements: paths of its blocks in forward order.
        equal: blocks that are.

    Raises:
        Exception: whatever the forward raises where it does not run on the meta device.
    """
    storages = Storages()
    count = _Count(shard, elements, equal, storages)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for context in (kept(), torch.enable_grad(), storages, FusedKernels(storages), count):
            stack.enter_context(context)
        return count.run(inputs)


class _Count(BlockReplay):
    """Counts a forward: computed blocks are measured, equal ones are like them."""

    def __init__(
        self, shard: nn.Module, elements: Sequence[str], equal: Sequence[EqualBlocks], storages: Storages
    ) -> None:
        super().__init__(shard, equal)
        self._shard, self._storages = shard, storages
        self._places: dict[int, list[int]] = {}
        for place, path in enumerate(elements):
            self._places.setdefault(id(shard.get_submodule(path)), []).append(place)
        inside = [f"{path}." for path in elements]
        for number, path in enumerate(elements):
            block = shard.get_submodule(path)
            around = any(other.startswith(f"{path}.") for other in inside if other != f"{path}.")
            if "forward" not in vars(block) and not around:  # not the encoder around its blocks
                self._attach(block, -1 - number, ())
        self._weights = {storage_key(tensor) for tensor in (*shard.parameters(), *shard.buffers())}
        self._found: dict[int, Unit] = {}
        self._saved: dict[int, int] = {}  # of what runs now
        self._entered: dict[int, int] = {}  # a copy of an argument -> the argument
        self._unit: Unit | None = None
        self._last: list[torch.Tensor] = []  # what the last block returned
        self._inside_a_block = False
        self._before: Unit | None = None
        self._before_collectives: Sequence[Collective] = ()
        self._start = self._base = 0  # bytes that lived when the forward began, and behind the last block

    def run(self, inputs: dict[str, Any]) -> ForwardCount:
        storages = self._storages
        storages.start_operations()
        self._start = storages.reset_peak()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            out = self._shard(**inputs)
        loss = getattr(out, "loss", None) if not isinstance(out, dict) else out.get("loss")
        has_loss = isinstance(loss, torch.Tensor) and loss.requires_grad
        roots = [loss] if has_loss else [x for x in tensors_in(_values(out)) if x.requires_grad]
        del out  # execute_pipeline keeps no outputs
        if self._before is None:  # no block was called
            self._end_before()
        after = self._after(roots, storages)
        assert self._before is not None
        return ForwardCount(self._found, self._before, after, has_loss)

    def _after(self, roots: list[Any], storages: Storages) -> Unit:
        saved = self._saved
        kept_bytes, forward_peak = sum(saved.values()), storages.peak
        operations, storages.operations = storages.operations or [], None
        calls = collectives_of(roots, self._last)
        base = self._base
        backward_peak = forward_peak
        if roots and self._last:
            storages.reset_peak()
            ends = [x for x in self._last if x.requires_grad]
            try:
                torch.autograd.grad(roots, ends, [torch.empty_like(x) for x in roots], allow_unused=True)
                backward_peak = storages.peak
            except (RuntimeError, NotImplementedError):  # an operation whose backward has no shapes
                backward_peak = forward_peak + kept_bytes
        return Unit(
            saved,
            forward_peak=max(forward_peak - base - kept_bytes, 0),
            backward_peak=max(backward_peak - base - kept_bytes, 0),
            operations=operations,
            collectives=calls,
        )

    # -- what is saved ---------------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if storage_key(tensor) not in self._weights and tensor.is_meta:
            number = self._storages.number(tensor)
            self._saved[self._entered.get(number, number)] = self._storages.bytes(tensor)
        return tensor

    def _end_before(self) -> None:
        """Close what ran before the first block."""
        storages = self._storages
        saved, self._saved = self._saved, {}
        self._before = Unit(
            saved,
            forward_peak=max(storages.peak - self._start - sum(saved.values()), 0),
            operations=storages.operations or [],
            collectives=self._before_collectives,
        )
        storages.start_operations()

    # -- blocks ----------------------------------------------------------------------------------------------------

    def _call(self, block: nn.Module, group: int, differing: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        if self._inside_a_block:
            return forward(*args, **kwargs)
        given = [x for x in tensors_in((args, kwargs)) if x.is_meta]
        if self._before is None and id(block) in self._places:
            self._before_collectives = collectives_of([x for x in given if x.requires_grad])
            self._end_before()

        def measured(*args: Any, **kwargs: Any) -> Any:
            return self._measure(block, forward, args, kwargs)

        self._unit = None
        out = super()._call(block, group, differing, measured, args, kwargs)
        unit: Unit | None = self._unit
        if unit is not None:
            places = self._places.get(id(block))
            if places:
                self._found[places.pop(0) if len(places) > 1 else places[0]] = unit
            else:  # of a tower before the blocks
                self._saved.update(unit.saved)
                if self._storages.operations is not None:
                    self._storages.operations += unit.operations
        self._last = [x for x in tensors_in(_values(out)) if x.requires_grad]
        self._base = self._storages.reset_peak()
        return out

    def _measure(self, block: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run a block forward and backward by itself."""
        storages = self._storages
        outside, self._saved = self._saved, {}
        operations_outside = storages.operations
        entered: list[torch.Tensor] = []
        copies: dict[int, torch.Tensor] = {}

        def enter(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad or not tensor.is_meta:
                return tensor
            if id(tensor) not in copies:
                leaf = tensor.detach().requires_grad_()
                inside = leaf.clone()  # which the block may write into
                self._entered[storages.number(inside)] = storages.number(tensor)
                entered.append(leaf)
                copies[id(tensor)] = inside
            return copies[id(tensor)]

        storages.operations = None
        args, kwargs = tree_map_only(torch.Tensor, enter, (args, kwargs))
        given = list({id(x): x for x in tensors_in((args, kwargs)) if x.is_meta}.values())
        operations = storages.start_operations()
        start = storages.reset_peak()
        self._inside_a_block = True
        try:
            out = forward(*args, **kwargs)
        finally:
            self._inside_a_block = False
        storages.operations = None
        saved, self._saved = self._saved, {}
        held = sum(saved.values()) - sum(saved.get(self._original(x), 0) for x in given)
        forward_peak = storages.peak - start - held
        made = [x for x in tensors_in(_values(out)) if x.requires_grad]
        calls = collectives_of(made, copies.values())
        output = sum({self._original(x): storages.bytes(x) for x in made}.values())
        backward_peak = self._backward(made, entered, start + held + output, saved)
        self._unit = Unit(
            saved,
            {self._original(x): storages.bytes(x) for x in given if storage_key(x) not in self._weights},
            output,
            max(forward_peak, 0),
            max(backward_peak, 0),
            operations,
            calls,
            isinstance(block, GradientCheckpointingLayer) or not isinstance(self._shard, PreTrainedModel),
        )
        self._saved, storages.operations = outside, operations_outside
        return tree_map_only(torch.Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), out)

    def _original(self, tensor: torch.Tensor) -> int:
        number = self._storages.number(tensor)
        return self._entered.get(number, number)

    def _backward(self, made: list[Any], entered: list[Any], base: int, saved: dict[int, int]) -> int:
        """Run a block backward; return the most memory that takes beside what it has saved."""
        storages = self._storages
        if not made or not entered:
            return 0
        storages.reset_peak()
        try:
            torch.autograd.grad(made, entered, [torch.empty_like(x) for x in made], allow_unused=True)
        except (RuntimeError, NotImplementedError):  # an operation whose backward has no shapes
            return sum(saved.values())
        return storages.peak - base

    # -- replay ----------------------------------------------------------------------------------------------------

    def describe(self, tensor: torch.Tensor) -> Any:
        return (tensor.requires_grad,)

    def keep(self, output: torch.Tensor, block: nn.Module, arguments: list[torch.Tensor]) -> Any:
        unit = self._unit
        assert unit is not None
        return form_of(output), output.requires_grad, unit, [self._storages.number(x) for x in arguments]

    def make(self, kept: tuple[Form, bool, Unit, list[int]], block: nn.Module, arguments: list[torch.Tensor]) -> Any:
        form, requires_grad, unit, before = kept
        if self._unit is None:
            now = [self._storages.number(x) for x in arguments]
            known = dict(zip(before, now, strict=True))
            fresh = -len(self._found) * 1_000_000  # what the block makes by itself is made again
            renumbered = {
                known.get(number, number if number in before or number in self._shared else fresh - number): size
                for number, size in unit.saved.items()
            }
            given = {known.get(number, number): size for number, size in unit.arguments.items()}
            self._unit = replace(unit, saved=renumbered, arguments=given)
        return tensor_of(form).requires_grad_(requires_grad)

    @property
    def _shared(self) -> dict[int, int]:
        return self._before.saved if self._before is not None else {}


def _values(out: Any) -> Any:
    """The values of an output, also of a dataclass."""
    return dict(out) if hasattr(out, "keys") else vars(out) if hasattr(out, "__dataclass_fields__") else out
