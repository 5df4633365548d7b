"""One block by itself on the meta device, forward and backward: what it saves, and what it needs beside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.foreign.autograd import sequence_number
from autopar.foreign.tensors import tree_map_only
from autopar.pipeline_parallel.backward import backward_halves
from autopar.tensor_tracking import tensors_in
from autopar.tools.planner.collective_calls import collectives_of
from autopar.tools.planner.storages import SavedStorages, Storages, alive
from autopar.tools.planner.units import Unit

__all__ = ["measure_block", "values_of"]


def measure_block(
    forward: Callable[..., Any], args: Any, kwargs: Any, storages: Storages, saved_storages: SavedStorages
) -> tuple[Unit, Any]:
    """Run a block forward and backward.

    Args:
        forward: of the block; on the meta device, inside of ``storages``.
        saved_storages: of the hooks that are on; it has no entries.

    Returns:
        The unit, and what the block returned, of which no graph is left.
    """
    operations_outside, storages.operations = storages.operations, None
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # argument -> leaf, and what the block is given

    def enter(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad or not tensor.is_meta:
            return tensor
        if id(tensor) not in copies:
            leaf = tensor.detach().requires_grad_()
            inside = leaf.clone()  # which the block may write into
            saved_storages.enter(inside, tensor)
            copies[id(tensor)] = leaf, inside
        return copies[id(tensor)][1]

    args, kwargs = tree_map_only(torch.Tensor, enter, (args, kwargs))
    given = saved_storages.numbered(tensors_in((args, kwargs)))
    operations = storages.start_operations()
    start = storages.reset_peak()
    out = forward(*args, **kwargs)
    storages.operations = None
    entries = saved_storages.take()
    saved = alive(entries)
    held = sum(size for number, size in saved.items() if number not in given)
    forward_peak = storages.peak - start - held
    leaves = [leaf for leaf, _ in copies.values()]
    made = [x for x in tensors_in(values_of(out)) if x.requires_grad]
    outputs = saved_storages.numbered(made)
    halves = backward_halves(made, leaves)
    late = alive(entries, {sequence_number(node) for node in halves.freed}) if halves.rest else None
    calls = collectives_of(made, [inside for _, inside in copies.values()])
    backward_peak = 0
    if made and leaves:
        storages.reset_peak()
        try:
            torch.autograd.grad(made, leaves, [torch.empty_like(x) for x in made], allow_unused=True)
            backward_peak = storages.peak - (start + held + sum(outputs.values()))
        except (RuntimeError, NotImplementedError):  # an operation whose backward has no shapes
            backward_peak = sum(saved.values())
    storages.operations = operations_outside
    peaks = max(forward_peak, 0), max(backward_peak, 0)
    unit = Unit(saved, late, halves.apart, halves.gradients, given, outputs, *peaks, operations, calls)
    return unit, tree_map_only(torch.Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), out)


def values_of(out: Any) -> Any:
    """Return the values of an output, also of a dataclass."""
    return dict(out) if hasattr(out, "keys") else vars(out) if hasattr(out, "__dataclass_fields__") else out
