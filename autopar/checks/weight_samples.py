"""Samples of a tensor-parallel model's weights: of replicated ones, and of sharded ones whose shards differ."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.distributed.axis import Axis
from autopar.distributed.collectives import extremes_over
from autopar.distributed.digest import of_tensor
from autopar.foreign.modules import own_parameters
from autopar.foreign.tensors import writes_into

__all__ = ["WeightSamples", "local"]

_ELEMENTS = 16384  # of replicated weights in one sample
_TENSORS = 8  # and of how many weights
_FEW = 256  # elements of what is no ``weight``, from which on shards are compared
_FIRST = (1024, 64, 16)  # of one sharded weight, if it has as many


class WeightSamples:
    """Samples of the weights of one model, of other elements each time.

    Args:
        fsdp: also of replicated weights that FSDP has sharded: the ranks that compare have the same rows of them, as
            those of a tensor-parallel group do, and those of a context-parallel one do not.

    Attributes:
        apart: ``id(weight)`` -> the sharded weights whose shards differ.
    """

    _seen: tuple[int, list[int], torch.Tensor] | None = None  # writes into sharded weights, their places, elements

    def __init__(self, *, fsdp: bool = True) -> None:
        self._fsdp = fsdp
        self._replicated: list[tuple[str, nn.Module, str, nn.Parameter]] = []
        self.apart: dict[int, nn.Parameter] = {}
        self._sharded: list[nn.Parameter] = []
        self._all: list[nn.Parameter] = []
        self._model: weakref.ref[nn.Module] | None = None  # of these weights
        self._next = self._next_sharded = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightSamples:
        copied = memo[id(self)] = WeightSamples(fsdp=self._fsdp)
        apart = [copy.deepcopy(weight, memo) for weight in self.apart.values()]
        copied.apart = {id(weight): weight for weight in apart}
        return copied

    def find_sharded(self, model: nn.Module, axis: Axis) -> None:
        """Find the sharded weights whose shards differ: heads may be copies of each other. A collective of the axis."""
        weights = list(_sharded_weights(model))
        if not weights:
            return
        parts = [_first_elements(weight) for weight in weights]
        digests = [0 if part is None else of_tensor(part) for part in parts]
        largest, smallest = extremes_over(axis, [*digests, *(part is None for part in parts)])
        differ = [high != low for high, low in zip(largest, smallest, strict=True)]
        found = zip(weights, differ, largest[len(weights) :], strict=False)
        self.apart = {id(weight): weight for weight, apart, missing in found if apart and not missing}

    def reset(self) -> None:
        """Collect the weights anew at the next sample."""
        self._model = None

    def count_anew(self) -> None:
        """Begin with the first weights again."""
        self._next = self._next_sharded = 0

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Return the replicated weights by name; in ``torch.func.functional_call`` those that it was given."""
        return [(name, _current(owner, leaf, known)) for name, owner, leaf, known in self._replicated]

    def trained(self, model: nn.Module) -> bytes:
        """Return for each weight whether it is trained."""
        self._collect(model)
        return bytes(weight.requires_grad for weight in self._all)

    def replicated(self, model: nn.Module, *, whole: bool = False) -> list[torch.Tensor]:
        """Sample some replicated weights; with ``whole`` return all of them."""
        self._collect(model)
        if whole:
            return [weight for _, weight in self.named()]
        left, sample = _ELEMENTS, list[torch.Tensor]()
        for _ in range(min(_TENSORS, len(self._replicated))):
            turn, place = divmod(self._next, len(self._replicated))
            _, owner, leaf, known = self._replicated[place]
            part = _rows(_current(owner, leaf, known), turn)
            if sample and part.numel() > left:
                break
            left -= part.numel()
            sample.append(part)
            self._next += 1
        return sample

    def sharded(self, model: nn.Module) -> torch.Tensor | None:
        """Sample a sharded weight; None if there is none, or if its elements are all the same number."""
        self._collect(model)
        self._next_sharded += 1
        return _first_elements(self._sharded[self._next_sharded % len(self._sharded)]) if self._sharded else None

    def redrawn(self, model: nn.Module) -> bool:
        """Return whether sharded weights were written into since the last call, but by an optimizer's step."""
        self._collect(model)
        before, now = self._seen, self._written()
        self._seen = now
        return before is not None and (before[:2] != now[:2] or not torch.equal(before[2], now[2]))

    def note_written(self) -> None:
        """Take what was written into sharded weights until now for an optimizer's step."""
        self._seen = self._written()

    def _written(self) -> tuple[int, list[int], torch.Tensor]:
        """Return writes that torch counted (not those by ``.data``), places of the weights, and an element of each."""
        places = [weight.data_ptr() for weight in self._sharded]
        firsts = _first_of_each(self._sharded)
        return writes_into(self._sharded), places, torch.cat(firsts) if firsts else torch.empty(0)

    def equal_shards(self, model: nn.Module, axis: Axis) -> list[str]:
        """Return the names of the sharded weights whose shards are all equal now. A collective of the axis."""
        self._collect(model)
        parts = [_first_elements(weight) for weight in self._sharded]
        apart = -1 - axis.rank
        largest, smallest = extremes_over(axis, [apart if part is None else of_tensor(part) for part in parts])
        equal = {id(w) for w, high, low in zip(self._sharded, largest, smallest, strict=True) if high == low}
        return [name for name, weight in model.named_parameters() if id(weight) in equal]

    def _collect(self, model: nn.Module) -> None:
        if self._model is None or self._model() is not model:
            self._model = weakref.ref(model)
            kept = [(name, p) for name, p in _replicated(model) if self._fsdp or not isinstance(p, DTensor)]
            places = [(name, *name.rpartition(".")[::2], p) for name, p in kept]
            self._replicated = [(name, model.get_submodule(path), leaf, p) for name, path, leaf, p in places]
            self._all = list(model.parameters())
            self._sharded = [weight for weight in _sharded_weights(model) if id(weight) in self.apart]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a tensor that FSDP may have sharded over the replicas."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _current(owner: nn.Module, leaf: str, known: nn.Parameter) -> torch.Tensor:
    """Return what a forward that begins now uses as this weight."""
    found = own_parameters(owner).get(leaf)
    return local(known) if found is known or found is None or isinstance(known, DTensor) else found.detach()


def _replicated(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that are replicated over tp."""
    sharded: set[int] = set()
    for module in model.modules():
        axis: Axis | None = vars(module).get("tp")
        for name, layout in vars(module).get("autopar_layouts", {}).items():
            if axis is not None and any(layout.ranges(rank) != layout.ranges(0) for rank in range(axis.size)):
                sharded.add(id(own_parameters(module).get(name)))
    for name, parameter in model.named_parameters():
        if id(parameter) not in sharded and not parameter.is_meta and local(parameter).numel():
            yield name, parameter


def _rows(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """At most some rows of a tensor, others each turn."""
    if tensor.numel() <= _ELEMENTS or tensor.ndim == 0:
        return tensor
    rows = max(1, _ELEMENTS * len(tensor) // tensor.numel())
    return tensor.narrow(0, turn * rows % (len(tensor) - rows + 1), rows)


def _first_elements(weight: torch.Tensor) -> torch.Tensor | None:
    """Return some elements of a shard; None if there are none, or all are the same number, or not numbers.

    Shards of unequal sizes that are drawn under one seed begin alike: so there are few kinds of lengths.
    """
    length = next((length for length in _FIRST if length <= weight.numel()), weight.numel())
    if not length or weight.ndim == 0:
        return None
    part = weight.detach()
    while part.ndim > 1 and part[0].numel() >= length:
        part = part[0]
    part = part[: -(-length * len(part) // part.numel())].flatten()[:length]
    numbers = torch.view_as_real(part) if part.is_complex() else part.float() if part.element_size() == 1 else part
    low, high = (end.item() for end in numbers.aminmax())
    return part if low < high and math.isfinite(low) and math.isfinite(high) else None


@torch.no_grad()
def _first_of_each(weights: list[nn.Parameter]) -> list[torch.Tensor]:
    """Return views of the first elements of weights that can be joined: on one device, of two bytes or more.

    They are not kept: a view would keep the memory of a weight that has moved elsewhere.
    """
    usual = [w for w in weights if w.numel() and w.element_size() > 1 and w.device == weights[0].device]
    return [weight.as_strided((1,), (1,)) for weight in usual]


def _sharded_weights(model: nn.Module) -> Iterator[nn.Parameter]:
    """Weights, tables of experts and the like of which each tp rank holds another part.

    Not what may well have the same few numbers on all ranks: biases, and others with few elements.
    """
    for module in model.modules():
        parameters = own_parameters(module)
        for name, layout in vars(module).get("autopar_layouts", {}).items():
            weight = parameters.get(name)
            if type(weight) is not nn.Parameter or layout.replicated or weight.is_meta:
                continue
            beside = math.prod(size for dim, size in enumerate(weight.shape) if dim != layout.dim)
            least = beside * min(layout.local_size(rank) for rank in range(layout.axis_size))  # alike on all ranks
            if name == "weight" or (weight.ndim > 1 and least >= _FEW):
                yield weight
