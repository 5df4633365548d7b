"""Compare outputs and tensors with the reference model's, and exchange values between ranks.

Differences are relative to the largest expected element. So gradients of 1e-6 are compared as closely as logits of 20.
``floor`` is for tensors that are zero except for rounding, for example the gradient of a key's bias.

The plan has the shard of a parameter. The shard of an activation is searched: a dim may be sharded by units of the plan
(heads, features, vocabulary), by the sequence, or evenly.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from autopar.distributed.digest import leaves
from autopar.distributed.mesh import MPU
from autopar.errors import UnsupportedModelError
from autopar.layout import Layout, even_shards, rows_layout
from autopar.pipeline_parallel.outputs import complete, unavailable
from autopar.plan.plan import ModulePlan, Plan

_MOST = 64  # combinations of layouts to try


def named(output: Any) -> Any:
    """Return a model's outputs by name. In a tuple of tensors the scalar is the loss."""
    if hasattr(output, "items"):
        return output
    listed = output if isinstance(output, tuple) else (output,)
    return {
        "loss" if isinstance(value, torch.Tensor) and value.ndim == 0 else str(number): value
        for number, value in enumerate(listed)
    }


def floats_of(output: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the floating-point tensors of an output, by name."""
    for name, value in leaves(dict(named(output).items())):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            yield name, value


def same_floats(expected: Any, actual: Any) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """Yield the name, the expected tensor and the actual tensor of each output. Skip outputs of other stages."""
    actual = named(actual)
    for key, value in dict(named(expected).items()).items():
        if key in unavailable(actual):
            continue
        try:
            found = dict(leaves(actual[key], key)) if key in dict.keys(actual) else {}
        except UnsupportedModelError:
            continue
        for name, tensor in leaves(value, key):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                yield name, tensor, found.get(name)


def total_loss(output: Any, lacking: Collection[str] = ()) -> torch.Tensor:
    """Return the sum of all losses in an output. Without a loss, return a weighted sum of the elements of all outputs.

    Each element of a sample has a different weight, and samples are averaged. ``lacking`` outputs do not count.
    """
    losses, entries = _losses(output, lacking)
    return torch.stack(losses or list(_weighed(entries))).sum()


@torch.no_grad()
def size_of_loss(output: Any, lacking: Collection[str] = ()) -> float:
    """Return the sum of absolute terms of :func:`total_loss` without a loss, where terms may cancel; else 0."""
    losses, entries = _losses(output, lacking)
    return 0.0 if losses else sum(each.item() for each in _weighed(entries, of=torch.abs))


def _losses(output: Any, lacking: Collection[str]) -> tuple[list[torch.Tensor], list[Any]]:
    """Return the losses of an output, and all its values."""
    present = {name: value for name, value in named(complete(output)).items() if name not in lacking}
    losses = [value for key, value in present.items() if str(key).endswith("loss") and value is not None]
    return losses, list(present.values())


def _weighed(
    values: list[Any], of: Callable[[torch.Tensor], torch.Tensor] = lambda terms: terms
) -> Iterator[torch.Tensor]:
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
    rows = [tensor.reshape(len(tensor), -1) if tensor.ndim > 1 else tensor.reshape(-1, 1) for tensor in tensors]
    most = max(max((row.shape[1] for row in rows), default=0) / 350, 1)  # keeps gradients small for many elements
    for row in rows:
        weights = torch.linspace(-1, 1, row.shape[1] + 1, device=row.device, dtype=row.dtype)[1:]
        yield of(row * weights).sum(1).mean() / (5 * most)


def reseed(seed: int) -> None:
    """Seed every generator that a model may draw from. transformers' function of this kind imports peft."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


TOLERANCES: dict[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 8e-2,
}
"""Dtype -> maximum difference of outputs from a different order of summation, relative to the largest element."""
OF_GRADIENTS = 10
"""Factor for the tolerance of gradients, which pass through every layer twice."""


class Distance(NamedTuple):
    """Largest difference, relative to the largest expected element; ``problem``: the reason for a missing number."""

    relative: float
    problem: str = ""


def tolerance_of(*dtypes: torch.dtype) -> float:
    """Return the largest tolerance of these dtypes."""
    return max(TOLERANCES.get(dtype, 0.0) for dtype in dtypes)


@torch.no_grad()
def measure(actual: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> Distance:
    """Compare two tensors of any dtype, relative to the largest element of ``expected``, or to ``floor``."""
    if actual.shape != expected.shape:
        return Distance(math.inf, f"expected shape {list(expected.shape)}, got {list(actual.shape)}")
    actual = actual.detach().to(expected.device)
    expected = expected.detach()
    if actual.dtype == expected.dtype and torch.equal(actual, expected):
        return Distance(0.0)
    if not (actual.is_floating_point() and expected.is_floating_point()):
        count = int((actual != expected).sum())
        return Distance(math.inf, f"{count} of {actual.numel()} elements differ")
    wide = torch.float64 if torch.float64 in (actual.dtype, expected.dtype) else torch.float32
    mine, theirs = actual.to(wide), expected.to(wide)
    odd = ~(torch.isfinite(mine) & torch.isfinite(theirs))
    if odd.any():
        if not torch.equal(mine[odd], theirs[odd]):  # equal masks of -inf are allowed
            return Distance(math.inf, f"{int(odd.sum())} of {odd.numel()} elements are not finite")
        mine, theirs = mine.masked_fill(odd, 0), theirs.masked_fill(odd, 0)
    largest = (mine - theirs).abs().max().item()
    scale = max(theirs.abs().max().item(), floor)
    return Distance(largest / scale if scale else (math.inf if largest else 0.0))


def of_first(mine: Any) -> Any:
    """Return the value of rank 0."""
    listed = [mine]
    dist.broadcast_object_list(listed)
    return listed[0]


def local(tensor: Any) -> torch.Tensor:
    """Return the tensor. Gather it if FSDP2 shards it over replicas."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local_part(plan: Plan, name: str, full: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the shard of parameter (or gradient) ``name`` on ``rank`` of :attr:`Plan.shards`."""
    layout = plan.tensors[plan.canonical(name)].layout
    return full if layout is None else layout.shard(full, rank)


class Slices:
    """The possible shards of activations of a parallelized model on this rank."""

    def __init__(self, plan: Plan, mpu: MPU) -> None:
        self.plan, self.mpu = plan, mpu
        found: dict[Any, Layout] = {}
        layouts = [tensor.layout for tensor in plan.tensors.values()]
        layouts += [module.layout for module in plan.modules.values()]
        for blocks in (layout.blocks for layout in layouts if layout is not None):
            for part in (blocks, *((block,) for block in blocks)):
                found.setdefault(tuple((b.count, b.width, b.ranges) for b in part), Layout.of(0, part))
        self._layouts = list(found.values())
        self._cuts_of = functools.cache(self._find_cuts)

    def compare(
        self, actual: torch.Tensor, expected: torch.Tensor, planned: ModulePlan | None, floor: float
    ) -> Distance | None:
        """Return the distance between this rank's tensor and a shard of ``expected``; None if no shard has its shape.

        The layout of a column-parallel layer (``planned``) is used without a search.
        """
        if actual.shape == expected.shape:
            return measure(actual, expected, floor)
        if actual.ndim != expected.ndim:
            return None
        dims = [dim for dim in range(actual.ndim) if actual.shape[dim] != expected.shape[dim]]
        cuts = [self._cuts_of(expected.shape[dim], actual.shape[dim]) for dim in dims]
        if len(dims) > 2 or not all(cuts):
            return None
        own = planned.layout if planned is not None and planned.rule == "column" and len(dims) == 1 else None
        if own is not None and expected.shape[dims[0]] == own.size:
            return measure(actual, own.shard(expected, self.mpu.tp.rank, dims[0]), floor)
        best: Distance | None = None
        for chosen in itertools.islice(itertools.product(*cuts), _MOST):
            part = expected
            for dim, cut in zip(dims, chosen, strict=True):
                part = part.index_select(dim, cut.to(part.device))
            distance = measure(actual, part, floor)
            if best is None or distance.relative < best.relative:
                best = distance
        return best

    def _find_cuts(self, size: int, local: int) -> list[torch.Tensor]:
        """Return the index tensors of possible shards of a dim: ``local`` of ``size`` indices."""
        found = (tuple(n for start, stop in ranges for n in range(start, stop)) for ranges in self._candidates(size))
        fitting = dict.fromkeys(indices for indices in found if len(indices) == local)
        return [torch.tensor(indices, dtype=torch.long) for indices in fitting]

    def _candidates(self, size: int) -> Iterator[list[tuple[int, int]]]:
        tp, cp, shards = self.mpu.tp, self.mpu.cp, self.mpu.shards
        for layout in self._layouts if shards.size > 1 else ():
            rank = tp.rank if layout.axis_size == tp.size else shards.rank
            yield from _spread(layout.ranges(rank), layout.size, size)
        both, inner, outer = tp.size * cp.size, tp.rank * cp.size + cp.rank, cp.rank * tp.size + tp.rank
        for count, rank in ((tp.size, tp.rank), (cp.size, cp.rank), (both, inner), (both, outer)):
            if count > 1:
                yield [even_shards(size, count)[rank]]
        if cp.size > 1:
            for zigzag in (False, True):
                rows = rows_layout(size, cp.size, zigzag=zigzag)
                yield from [list(rows.ranges(cp.rank))] if rows is not None else []


def _spread(ranges: Sequence[tuple[int, int]], of: int, size: int) -> Iterator[list[tuple[int, int]]]:
    """Yield ranges in a dim of ``size``, from ranges in a dim of ``of``, with scaled or repeated units."""
    if not of:
        return
    if size % of == 0:
        times = size // of
        yield [(start * times, stop * times) for start, stop in ranges]
        if times > 1:  # [batch * heads]
            yield [(start + turn * of, stop + turn * of) for turn in range(times) for start, stop in ranges]
    elif of % size == 0:
        width = of // size
        if all(edge % width == 0 for pair in ranges for edge in pair):
            yield [(start // width, stop // width) for start, stop in ranges]
