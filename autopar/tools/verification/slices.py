"""Slices: which part of a tensor of the plain model a rank may hold. From the layouts of the plan; no communication.

A parameter's part is known. An activation's is found: a dim that is shorter than the plain model's is cut by units of
the plan (heads, features, rows of the vocabulary), by rows of the sequence, or evenly. Any cut that fits is tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from autopar.context_parallel.rows import rows_layout
from autopar.distributed.mesh import MPU
from autopar.layout import Layout, even_shards
from autopar.plan.plan import ModulePlan, Plan
from autopar.tools.verification.outputs import Distance, measure

__all__ = ["Slices", "local_part"]

_MOST = 64  # combinations of cuts that are tried


def local_part(plan: Plan, name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """Return what tp rank ``rank`` holds of the plain model's parameter (or gradient) ``name``."""
    layout = plan.tensors[plan.canonical(name)].layout
    return whole if layout is None else layout.shard(whole, rank)


class Slices:
    """The cuts that activations of one parallelized model may have on this rank.

    Args:
        plan: of the model; ``mpu``: this rank's place.
    """

    def __init__(self, plan: Plan, mpu: MPU) -> None:
        self.plan, self.mpu = plan, mpu
        found: dict[str, Layout] = {}
        for layout in self._planned():
            for part in (layout, *(Layout.of(0, [block]) for block in layout.blocks)):
                found.setdefault(repr([(b.count, b.width, b.ranges) for b in part.blocks]), part)
        self._layouts = list(found.values())
        self._cuts: dict[tuple[int, int], list[torch.Tensor]] = {}

    def _planned(self) -> Iterator[Layout]:
        yield from (tensor.layout for tensor in self.plan.tensors.values() if tensor.layout is not None)
        yield from (module.layout for module in self.plan.modules.values() if module.layout is not None)

    def compare(
        self, actual: torch.Tensor, expected: torch.Tensor, planned: ModulePlan | None, floor: float
    ) -> Distance | None:
        """Return the distance of this rank's tensor to its part of the plain model's; None if no cut has its shape.

        Args:
            planned: the plan of the module, whose own layout is tried first.
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

    def _cuts_of(self, size: int, local: int) -> list[torch.Tensor]:
        """The indices along a dim of ``size`` that make ``local``, without doubles."""
        key = (size, local)
        if key not in self._cuts:
            found: dict[tuple[int, ...], None] = {}
            for ranges in self._candidates(size):
                indices = tuple(number for start, stop in ranges for number in range(start, stop))
                if len(indices) == local:
                    found.setdefault(indices)
            self._cuts[key] = [torch.tensor(indices, dtype=torch.long) for indices in found]
        return self._cuts[key]

    def _candidates(self, size: int) -> Iterator[list[tuple[int, int]]]:
        tp, cp = self.mpu.tp, self.mpu.cp
        for layout in self._layouts if tp.size > 1 else ():
            yield from _spread(layout.ranges(tp.rank), layout.size, size)
        for axis in (tp, cp):
            if axis.size > 1:
                yield [even_shards(size, axis.size)[axis.rank]]
        if cp.size > 1:
            for zigzag in (False, True):
                yield list(rows_layout(size, cp.size, zigzag=zigzag).ranges(cp.rank))
        if tp.size > 1 and cp.size > 1:
            yield [even_shards(size, tp.size * cp.size)[tp.rank * cp.size + cp.rank]]
            yield [even_shards(size, tp.size * cp.size)[cp.rank * tp.size + tp.rank]]


def _spread(ranges: Sequence[tuple[int, int]], of: int, size: int) -> Iterator[list[tuple[int, int]]]:
    """Ranges of a dim of ``of`` elements on one of ``size``: with wider or narrower units, or repeated."""
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
