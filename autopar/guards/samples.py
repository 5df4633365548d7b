"""Samples of a model's weights, gradients and optimizer states, which are compared between ranks.

:class:`WeightSamples` are for a forward of a tensor-parallel model: of replicated weights, and of sharded ones whose
shards differ. :func:`digest_step` and :func:`sample_shard` are for an optimizer's step. :class:`FreeWeights` are those
that no torch optimizer steps: a loop of the user's own (``p.data -= lr * p.grad``, an optimizer that is not torch's)
calls no hook, so some elements of these weights are looked at when a training forward begins.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from autopar.distributed.axis import Axis
from autopar.distributed.collectives import extremes_over
from autopar.distributed.digest import of_tensor, sum_of_bits
from autopar.distributed.shard_reads import PLAIN
from autopar.foreign.modules import own_parameters
from autopar.foreign.tensors import no_overrides, writes_into
from autopar.quantized.layers import without_memory

OVERFLOW = -1  # the digest of a gradient that is not finite
_ELEMENTS = 16384  # of one sample
_TENSORS = 8  # replicated weights in one sample, at most
_FEW = 256  # elements of what is no ``weight``, from which on shards are compared
_FIRST = (1024, 64, 16)  # of one sharded weight, if it has as many
_OF_STEP = (4, 4096)  # weights of one step's sample, and elements of each: replicas may hold shards of other sizes
_OF_SHARD = 2048  # elements of the gradient and state of a sharded weight
_FREE = (4, 256)  # weights that no torch optimizer steps: how many are looked at, and elements of each
_AGAIN = 64  # forwards until it is looked up again which weights these are: some may have been frozen

Digests = dict[str, tuple[int, int]]
"""Name -> digests of (part of) a gradient and a weight."""


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
        parts = [first_elements(weight) for weight in weights]
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
        return first_elements(self._sharded[self._next_sharded % len(self._sharded)]) if self._sharded else None

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
        with no_overrides():  # they need not be asked whether they see functions
            places = [weight.data_ptr() for weight in self._sharded]
            firsts = _first_of_each(self._sharded)
            return writes_into(self._sharded), places, torch.cat(firsts) if firsts else torch.empty(0)

    def equal_shards(self, model: nn.Module, axis: Axis) -> list[str]:
        """Return the names of the sharded weights whose shards are all equal now. A collective of the axis."""
        self._collect(model)
        parts = [first_elements(weight) for weight in self._sharded]
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


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a tensor that FSDP may have sharded over the replicas."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _current(owner: nn.Module, leaf: str, known: nn.Parameter) -> torch.Tensor:
    """Return what a forward that begins now uses as this weight."""
    found = own_parameters(owner).get(leaf)
    return local_part(known) if found is None or isinstance(known, DTensor) else found.detach()


def _replicated(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that are replicated over tp and have memory, which torchao's have not."""
    sharded = without_memory(model)
    for module in model.modules():
        axis: Axis | None = vars(module).get("tp")
        for name, layout in vars(module).get("autopar_layouts", {}).items():
            if axis is not None and any(layout.ranges(rank) != layout.ranges(0) for rank in range(axis.size)):
                sharded.add(id(own_parameters(module).get(name)))
    for name, parameter in model.named_parameters():
        if id(parameter) not in sharded and not parameter.is_meta and local_part(parameter).numel():
            yield name, parameter


def _rows(tensor: torch.Tensor, turn: int, most: int = _ELEMENTS) -> torch.Tensor:
    """At most some rows of a tensor, others each turn."""
    if tensor.numel() <= most or tensor.ndim == 0:
        return tensor
    rows = max(1, most * len(tensor) // tensor.numel())
    return tensor.narrow(0, turn * rows % (len(tensor) - rows + 1), rows)


def first_elements(weight: torch.Tensor) -> torch.Tensor | None:
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
            plain = type(weight) in PLAIN
            if weight is None or not plain or layout.replicated or weight.is_meta:
                continue
            beside = math.prod(size for dim, size in enumerate(weight.shape) if dim != layout.dim)
            least = beside * min(layout.local_size(rank) for rank in range(layout.axis_size))  # alike on all ranks
            if name == "weight" or (weight.ndim > 1 and least >= _FEW):
                yield weight


# -- at a step --------------------------------------------------------------------------------------------------------


class ShardSample(NamedTuple):
    """Some rows of the gradient of a sharded weight, and of its optimizer state; None where they tell nothing."""

    name: str
    gradient: torch.Tensor | None
    state: torch.Tensor | None

    def digests(self, apart: int) -> list[int]:
        """Digest both; ``apart`` stands for what tells nothing."""
        return [_digest_of(self.gradient, apart), _digest_of(self.state, apart)]


@torch.no_grad()
def sample_shard(sharded: list[tuple[str, nn.Parameter]], turn: int, optimizer: Optimizer) -> ShardSample | None:
    """Copy some rows of the gradient and of the state of one weight, of another one each turn; None without any."""
    if not sharded:
        return None
    name, parameter = sharded[turn % len(sharded)]
    state = optimizer.state.get(parameter, {})
    moments = next((x for x in state.values() if isinstance(x, torch.Tensor) and x.shape == parameter.shape), None)
    return ShardSample(name, _some_rows(parameter.grad), _some_rows(moments))


def _some_rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or tensor.is_sparse or isinstance(tensor, DTensor) or tensor.numel() < 2:
        return None
    return tensor[: max(1, _OF_SHARD * len(tensor) // tensor.numel())].detach().clone()


def _digest_of(part: torch.Tensor | None, apart: int) -> int:
    """Digest it; ``apart`` if it is all the same number, or no numbers."""
    if part is None:
        return apart
    part = part.cpu()
    known = (part != part.flatten()[0]).any() & torch.isfinite(part).all()
    return of_tensor(part) if known else apart


@torch.no_grad()
def digest_step(held: list[tuple[str, nn.Parameter]], turn: int | None, closure: bool, scaled: bool) -> Digests:
    """Digest all gradients and weights, or with ``turn`` a sample that moves on with it.

    Args:
        scaled: of a loss with a scale: gradients that are not finite make the step one to skip, and cannot be compared.
    """
    names, sums, (count, most) = [], list[torch.Tensor](), _OF_STEP
    chosen = range(min(count, len(held))) if turn is not None else ()
    for name, parameter in held if turn is None else [held[(count * turn + n) % len(held)] for n in chosen]:
        gradient, part = None if closure else parameter.grad, parameter.detach()
        if turn is not None:
            part = _rows(part, turn, most)
        if gradient is None or isinstance(gradient, DTensor):
            found = torch.zeros((), dtype=torch.int64, device=part.device)
        elif turn is None or gradient.is_sparse:
            found = sum_of_bits(gradient)
        else:
            found = sum_of_bits(_rows(gradient, turn, most))
        if scaled and gradient is not None:
            found = torch.where(torch.isfinite(gradient).all(), found, OVERFLOW)
        names.append(name)
        sums += [found, sum_of_bits(part)]
    numbers = torch.stack(sums).tolist() if sums else []
    return {name: (numbers[2 * i], numbers[2 * i + 1]) for i, name in enumerate(names)}


def plain_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is plain data in a param group."""
    plain = (bool, int, float, str, tuple, type(None))
    return {name: value for name, value in group.items() if name != "params" and isinstance(value, plain)}


# -- of updates that no torch optimizer makes -------------------------------------------------------------------------


class FreeWeights:
    """The trained weights of a model that no torch optimizer has stepped.

    Attributes:
        named: these weights by name; without those that FSDP shards, and those that have no memory.
    """

    def __init__(self) -> None:
        self.named: list[tuple[str, nn.Parameter]] = []
        self._known = -1  # stepped parameters when ``named`` was looked up
        self._forwards = 0
        self._seen: dict[int, int] = {}  # id of a weight -> sum of its elements when it was looked at last

    def have_changed(self, model: nn.Module, stepped: Iterable[nn.Parameter]) -> bool:
        """Return whether something has changed these weights since the last call.

        Args:
            stepped: the parameters that torch optimizers step.
        """
        held = {id(parameter) for parameter in stepped}
        if len(held) != self._known or self._forwards % _AGAIN == 0:
            named = [(name, p) for name, p in model.named_parameters() if id(p) not in held and _is_trained(p)]
            free = {id(p) for _, p in named}
            self.named, self._seen = named, {key: seen for key, seen in self._seen.items() if key in free}
            self._known = len(held)
        turn, self._forwards = self._forwards, self._forwards + 1
        if not self.named:
            return False
        now = _sums_of_some(self.named, turn)
        changed = any(self._seen.get(key, seen) != seen for key, seen in now.items())
        self._seen |= now
        return changed


def _is_trained(parameter: nn.Parameter) -> bool:
    here = not isinstance(parameter, DTensor) and not parameter.is_meta and parameter.numel() > 0
    return here and parameter.requires_grad


@torch.no_grad()
def _sums_of_some(named: list[tuple[str, nn.Parameter]], turn: int) -> dict[int, int]:
    """Sum the bits of some elements of the smallest weight, of some others, and of some that change with the turn."""
    smallest = min(named, key=lambda entry: entry[1].numel())
    stride = max(1, len(named) // (_FREE[0] - 1))
    looked_at = [parameter for _, parameter in [smallest, *named[::stride], *named[turn % stride :: stride]]]
    parts = [parameter.flatten() for parameter in looked_at]
    sums = torch.stack([sum_of_bits(part[:: max(1, len(part) // _FREE[1])].contiguous()) for part in parts]).tolist()
    return {id(parameter): found for parameter, found in zip(looked_at, sums, strict=True)}
