"""Compare over tp and cp, at the start of a forward, the values that must be identical on ranks with the same batch.

One small all-reduce carries six digests. Four must be identical: of the call (mode, shapes, number of optimizer steps),
of the contents of the inputs, of the random generators that the model uses, and of a sample of the replicated weights.
Two must differ over tp: of the gradient and of the optimizer state of a sharded weight in the last step. In the first
forward of a mode, the shards of all weights must differ too. Every rank gets the maximum and the minimum of each
digest, and so the same result. Ranks exchange the values only for an error message.

The check runs before the first collective of the forward, so a batch of another length raises instead of aborting the
process.
"""

from __future__ import annotations

import copy
import math
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from autopar.compat.tensors import PLAIN, local_part, no_overrides, own_parameters
from autopar.config import ParallelConfig
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import extremes_over, gathered
from autopar.distributed.digest import hexdigest, leaves, of_tensor, of_text, of_values, sums_of_bits
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.distributed.rng import Generators, begun_stream
from autopar.errors import ConsistencyError
from autopar.features.rank_checks.messages import different, explanation, same_gradient, same_shard
from autopar.guards.step import StepCheck, group_call
from autopar.stored import without_memory
from autopar.swap import replaced

_WATCHED = 4  # number of first forwards of a mode that detect the generators of the model
_WATCHED_AGAIN = 16  # interval of later forwards that detect them
_ELEMENTS = 16384  # elements per sample
_TENSORS = 8  # largest number of replicated weights per sample
_FEW = 256  # smallest shard that is compared, in elements, of parameters that are not named ``weight``
_OF_SHARD = 2048  # elements of the gradient and the state of a sharded weight
_FIRST = (1024, 64, 16)  # elements of one sharded weight, depending on its size
_IS_TRAINED = operator.attrgetter("requires_grad")


class ForwardCheck:
    """The rank check over tp and cp at the start of a model's forwards.

    Args:
        draws: Function ``(training) -> bool`` that returns whether the model draws random numbers.
        steps: Counts and digests of optimizer steps.
        every: Interval of forwards that compare contents, generators and weights, in addition to the first of each
            mode; 0 compares only the first of each mode, and later not even shapes.
        full_every: Interval of steps after which all replicated weights are compared instead of a sample; 0: never.

    Attributes:
        begun: Named values of each feature that must be identical on all ranks in this forward.
    """

    def __init__(
        self,
        mpu: MPU,
        failures: FailureLog,
        draws: Callable[[bool], bool],
        steps: StepCheck,
        every: int,
        full_every: int = 0,
    ) -> None:
        self.full_every, steps.sample = full_every, sample_shard
        self._full_after = 0  # number of steps at the last comparison of all replicated weights
        self.mpu, self.failures, self.draws, self.steps, self.every = mpu, failures, draws, steps, every
        self._left = -1  # remaining forwards to compare inside first_only; -1 outside
        self._watches = True
        self._samples = WeightSamples(fsdp=mpu.cp.size == 1)
        self._forwards = {True: 0, False: 0}  # number of forwards in training and in evaluation
        self._drawn: dict[bool, set[str]] = {True: set(), False: set()}  # generators that the model draws from
        self._before: dict[str, str] | None = None
        self.begun: Sequence[Mapping[str, str]] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardCheck:
        copied = memo[id(self)] = copy.copy(self)
        vars(copied).update(copy.deepcopy(vars(self), memo))
        copied._reset_counts()
        return copied

    def find_sharded(self, model: nn.Module) -> None:
        """Find the sharded weights whose shards differ; heads may be copies of each other. A collective of tp."""
        self._samples.find_sharded(model, self.mpu.tp)
        self.steps.watch(set(self._samples.apart))

    # -- around a forward ------------------------------------------------------------------------------------------

    def before_forward(
        self, model: nn.Module, arguments: Mapping[str, Any], *, compiled: bool = False, cached: bool = False
    ) -> None:
        """Compare the call, inputs, generators and weights. A collective of the tp and cp axes.

        Args:
            arguments: Arguments by name (:func:`named_arguments`).
            compiled: True in a compiled graph, which does not call :meth:`after_forward`.
            cached: True for a forward with a cache that an earlier forward filled. In evaluation it compares weights
                only in one of :data:`_WATCHED_AGAIN` forwards, since the earlier forward compared them.

        Raises:
            ConsistencyError: A value differs; on every rank of the axes, with both values.
        """
        if self._left == 0:
            return
        self._left = max(self._left - 1, -1)
        number = self._forwards[model.training]
        self._forwards[model.training] += 1
        made, every = self.steps.made, self.full_every
        all_weights = every > 0 and model.training and made // every > self._full_after // every
        self._full_after = made if all_weights else self._full_after  # the first training forward after such a step
        full = number == 0 or all_weights or (self.every > 0 and number % self.every == 0)
        if not full and not self.every:
            return
        self._samples.collect(model)
        seen = self._described(model, arguments, cached=cached)
        numbers = [of_text(repr(seen))]
        brief = cached and full and not model.training and 0 < self.every <= number % _WATCHED_AGAIN
        if full:
            watched = self._watches and not compiled and (number < _WATCHED or number % _WATCHED_AGAIN == 0)
            self._before = Generators.now().digests() if watched and not brief else None
            numbers += [of_values(arguments), of_text(repr(self._states(model)))]
            if not brief:
                numbers.append(of_text(repr(sums_of_bits(self._samples.replicated(all_weights)))))
                if (last := self.steps.last_shard) is not None:  # two digests, which must differ
                    numbers += last.digests(-1 - self.mpu.tp_cp.rank)
        else:
            self._before = None
        identical, step_repeats = self._compare(numbers)
        if self.steps.last_shard is not None and step_repeats:
            raise ConsistencyError(same_gradient(self.mpu.tp.ranks, self.steps.last_shard.name, group_call(self.mpu)))
        if not identical:
            self._raise(model, arguments, seen, full=full)
        if number == 0 and not brief:
            with self.failures.wait("comparing the shards of weights", self.mpu.tp.ranks):
                equal = self._samples.equal_shards(model, self.mpu.tp)
            if equal:
                raise ConsistencyError(same_shard(self.mpu.tp.ranks, group_call(self.mpu), equal))

    def after_forward(self, model: nn.Module) -> None:
        """Find the generators that the forward drew from, and compare the states of new ones.

        Later forwards compare them too. A collective of the axes if a generator is new, on all ranks.
        """
        before, self._before = self._before, None
        if before is None:
            return
        now, begun = Generators.now().digests(), begun_stream()
        new = {name for name, state in now.items() if state not in (before.get(name, state), begun.get(name))}
        new -= self._drawn[model.training]
        if new:
            self._drawn[model.training] |= new
            states = {name: before[name] for name in sorted(new)}
            if not self._compare([of_text(repr(states))])[0]:
                self._raise(model, {}, states, full=False)

    def check_call(self, call: str) -> None:
        """Check that all ranks make this ``call``, before its first collective. A collective of the tp and cp axes.

        Raises:
            ConsistencyError: Another rank makes a different call, such as a forward.
        """
        seen = {"call": call, "optimizer steps so far": str(self.steps.made)}
        if not self._compare([of_text(repr(seen))])[0]:
            self._raise(None, {}, seen, full=False)

    def report(self, call: str) -> None:
        """Join the collectives of :meth:`before_forward` on a rank that does not start the forward.

        The other ranks raise and quote ``call``.
        """
        if self._left != 0 and self.every and not self._compare([of_text("refused")])[0]:
            self._reset_counts()
            gathered({"call": call}, self.mpu.tp_cp.group)

    def first_only(self, compare: bool = True, watch: bool = True) -> AbstractContextManager[None]:
        """Compare only the first forward inside, since later forwards depend on its result.

        Args:
            compare: False to compare no forward.
            watch: True to detect the generators of the model; False if other threads may draw from them.
        """
        return replaced(vars(self), {"_left": int(compare) if self._left else 0, "_watches": watch})

    @property
    def is_silent(self) -> bool:
        """True if the next forward is not compared, because it is not the first inside :meth:`first_only`."""
        return self._left == 0

    def reset(self) -> None:
        """Collect the weights again after modules have changed."""
        self._samples.model = None

    def _reset_counts(self) -> None:
        """Reset the counts of forwards, which may differ between ranks after a disagreement."""
        self._forwards = dict.fromkeys(self._forwards, 0)
        self._samples.next = 0

    # -- compared values -------------------------------------------------------------------------------------------

    def _described(self, model: nn.Module, arguments: Mapping[str, Any], *, cached: bool) -> dict[str, str]:
        """Return the values that every forward compares, by name."""
        seen = {"call": f"forward of {type(model).__name__}", "training mode": str(model.training)}
        seen |= {"optimizer steps so far": str(self.steps.made), "optimizer settings": self.steps.settings}
        seen["weights that are trained"] = f"{of_text(self._samples.trained()):x}"[:8]
        for each in self.begun:
            seen |= each
        seen |= {"continues from a cache": "yes"} if cached else {}
        for name, value in leaves(arguments):
            if isinstance(value, torch.Tensor):
                wants = ", requires a gradient" if value.requires_grad else ""
                seen[name] = f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}{wants}"
            elif isinstance(value, bool | int | float | str):
                seen[name] = repr(value)
        return seen

    def _states(self, model: nn.Module) -> dict[str, str]:
        """Return the states of the generators that the model draws from."""
        drawn = set(self._drawn[model.training])
        if self.draws(model.training):
            on_gpu = self.mpu.device.type != "cpu"
            drawn |= {"random state of torch"} | ({"random state of torch (GPU)"} if on_gpu else set())
        known = (self._before or Generators.now().digests()) if drawn else {}
        return {name: known[name] for name in sorted(drawn) if name in known}

    def _compare(self, numbers: list[int]) -> tuple[bool, bool]:
        """Compare up to four digests that must be identical, and two that must differ; missing digests differ.

        The digests that must differ are compared over tp and cp together. cp ranks have identical shards, so all ranks
        are equal exactly if the tensor-parallel ranks are.

        Returns:
            True if the first four are identical; True if one of the last two is identical.
        """
        axis, first, missing = self.mpu.tp_cp, numbers[:4], [-1 - self.mpu.tp_cp.rank] * 2
        numbers = [*first, *[0] * (4 - len(first)), *(numbers[4:] or missing)]
        with self.failures.wait("comparing the inputs of the forward", axis.ranks):
            largest, smallest = extremes_over(axis, numbers)
        same = list(map(operator.eq, largest, smallest))
        return all(same[:4]), same[4] or same[5]

    def _raise(
        self, model: nn.Module | None, arguments: Mapping[str, Any], seen: dict[str, str], *, full: bool
    ) -> None:
        axis, mine = self.mpu.tp_cp, dict(seen)
        if model is not None and "weights that are trained" in mine:
            mine |= {f"requires_grad of {name}": str(p.requires_grad) for name, p in model.named_parameters()}
            del mine["weights that are trained"]
        if full and model is not None:
            for name, value in leaves(arguments):
                if isinstance(value, torch.Tensor) and not value.is_meta:
                    wants = ", requires a gradient" if value.requires_grad else ""
                    mine[name] = f"{list(value.shape)} {hexdigest(local_part(value))}{wants}"
            mine |= self._states(model)
            mine |= {f"weight {name}": hexdigest(weight) for name, weight in self._samples.named()}
        with self.failures.wait("comparing the inputs of the forward", axis.ranks):
            everyone = gathered(mine, axis.group)
        self._reset_counts()
        weights = (name.removeprefix("weight ") for name in different(everyone) if name.startswith("weight "))
        kinds = [name for name, its in (("tensor", self.mpu.tp), ("context", self.mpu.cp)) if its.size > 1]
        text = explanation(everyone, list(axis.ranks), f"{'- and '.join(kinds)}-parallel")
        raise ConsistencyError(text, next(weights, ""))


def make(
    inner: nn.Module,
    mpu: MPU,
    config: ParallelConfig,
    failures: FailureLog,
    draws: Callable[[bool], bool],
    steps: StepCheck,
) -> ForwardCheck:
    """Make the rank check of a model's forwards. A collective of tp; all weights must have memory."""
    kind, _, number = config.consistency_inputs.partition(" ")
    every = {"auto": 1 if mpu.device.type == "cpu" else 10, "first": 0, "always": 1}.get(kind)
    every = int(number) if every is None else every
    check = ForwardCheck(mpu, failures, draws, steps, every, config.parameters_every)
    if not config.fully_sharded:
        check.find_sharded(inner)
    return check


# -- weights -----------------------------------------------------------------------------------------------------------


class WeightSamples:
    """Samples of the weights of one model, with different elements each time.

    Args:
        fsdp: True to also sample replicated weights that FSDP has sharded. Their rows are identical in a
            tensor-parallel group, but differ in a context-parallel group.

    Attributes:
        apart: ``id(weight)`` -> sharded weight, for weights whose shards differ.
    """

    def __init__(self, *, fsdp: bool = True) -> None:
        self._fsdp = fsdp
        self._replicated: list[tuple[str, Mapping[str, Any], str, nn.Parameter]] = []
        self.apart: dict[int, nn.Parameter] = {}
        self._sharded: list[nn.Parameter] = []
        self._all: list[nn.Parameter] = []
        self.model: weakref.ref[nn.Module] | None = None  # model of these weights; None: collect them again
        self.next = 0  # index of the next sample among the replicated weights

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightSamples:
        copied = memo[id(self)] = WeightSamples(fsdp=self._fsdp)
        apart = [copy.deepcopy(weight, memo) for weight in self.apart.values()]
        copied.apart = {id(weight): weight for weight in apart}
        return copied

    def find_sharded(self, model: nn.Module, axis: Axis) -> None:
        """Find the sharded weights whose shards differ; heads may be copies of each other. A collective of the axis."""
        weights = list(_sharded_weights(model))
        if not weights:
            return
        parts = [first_elements(weight) for weight in weights]
        digests = [0 if part is None else of_tensor(part) for part in parts]
        largest, smallest = extremes_over(axis, [*digests, *(part is None for part in parts)])
        differ = [high != low for high, low in zip(largest, smallest, strict=True)]
        found = zip(weights, differ, largest[len(weights) :], strict=False)
        self.apart = {id(weight): weight for weight, apart, missing in found if apart and not missing}

    def collect(self, model: nn.Module) -> None:
        """Collect the weights of ``model``, unless the last call collected them."""
        if self.model is None or self.model() is not model:
            self.model = weakref.ref(model)
            kept = [(name, p) for name, p in _replicated(model) if self._fsdp or not isinstance(p, DTensor)]
            places = [(name, *name.rpartition(".")[::2], p) for name, p in kept]
            owners = {path: own_parameters(model.get_submodule(path)) for _, path, _, _ in places}
            self._replicated = [(name, owners[path], leaf, p) for name, path, leaf, p in places]
            self._all = list(model.parameters())
            self._sharded = [weight for weight in _sharded_weights(model) if id(weight) in self.apart]

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Return the replicated weights by name; in ``torch.func.functional_call`` the weights passed to it."""
        return [(name, _current(held, leaf, known)) for name, held, leaf, known in self._replicated]

    def trained(self) -> bytes:
        """Return one byte per weight: 1 if it requires a gradient."""
        with no_overrides():
            return bytes(map(_IS_TRAINED, self._all))

    def replicated(self, all_weights: bool) -> list[torch.Tensor]:
        """Return a sample of the replicated weights, or all of them with ``all_weights``."""
        if all_weights:
            return [weight for _, weight in self.named()]
        left, sample = _ELEMENTS, list[torch.Tensor]()
        for _ in range(min(_TENSORS, len(self._replicated))):
            turn, place = divmod(self.next, len(self._replicated))
            part = _current(*self._replicated[place][1:])
            part = part if part.numel() <= _ELEMENTS else some_rows(part, turn, _ELEMENTS)
            if sample and part.numel() > left:
                break
            left -= part.numel()
            sample.append(part)
            self.next += 1
        return sample

    def equal_shards(self, model: nn.Module, axis: Axis) -> list[str]:
        """Return the names of the sharded weights whose shards are now equal on all ranks. A collective of the axis."""
        parts = [first_elements(weight) for weight in self._sharded]
        apart = -1 - axis.rank
        largest, smallest = extremes_over(axis, [apart if part is None else of_tensor(part) for part in parts])
        equal = {id(w) for w, high, low in zip(self._sharded, largest, smallest, strict=True) if high == low}
        return [name for name, weight in model.named_parameters() if id(weight) in equal]


def _current(held: Mapping[str, Any], leaf: str, known: nn.Parameter) -> torch.Tensor:
    """Return the tensor that a forward uses now for a weight: the current parameter of its module."""
    found: nn.Parameter | None = held.get(leaf)
    return local_part(known) if found is None or isinstance(known, DTensor) else found.detach()


def _replicated(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that are replicated over tp and have memory."""
    sharded = without_memory(model)
    for module in model.modules():
        axis: Axis | None = vars(module).get("tp")
        for name, layout in vars(module).get("autopar_layouts", {}).items():
            if axis is not None and any(layout.ranges(rank) != layout.ranges(0) for rank in range(axis.size)):
                sharded.add(id(own_parameters(module).get(name)))
    for name, parameter in model.named_parameters():
        if id(parameter) not in sharded and not parameter.is_meta and local_part(parameter).numel():
            yield name, parameter


def first_elements(weight: torch.Tensor) -> torch.Tensor | None:
    """Return some elements of a shard; None if it is empty, constant or not finite.

    Shards of different sizes drawn under one seed start with equal numbers, so only a few lengths are used.
    """
    with no_overrides():
        count = weight.numel()
        length = next(filter(count.__ge__, _FIRST), count)
        if not length or weight.ndim == 0:
            return None
        part = weight.detach()
        while part.ndim > 1 and part[0].numel() >= length:
            part = part[0]
        part = part[: -(-length * len(part) // part.numel())].flatten()[:length]
        numbers = torch.view_as_real(part) if part.is_complex() else part.float() if part.element_size() == 1 else part
        low, high = torch.stack(numbers.aminmax()).tolist()
    return part if low < high and math.isfinite(low) and math.isfinite(high) else None


def _sharded_weights(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the weights and other large parameters that are sharded over tp.

    Biases and parameters with few elements are skipped, because they may be equal on all ranks.
    """
    for module in model.modules():
        parameters = own_parameters(module)
        for name, layout in vars(module).get("autopar_layouts", {}).items():
            weight = parameters.get(name)
            if weight is None or type(weight) not in PLAIN or layout.replicated or weight.is_meta:
                continue
            rest = math.prod(size for dim, size in enumerate(weight.shape) if dim != layout.dim)
            least = rest * min(layout.local_size(rank) for rank in range(layout.axis_size))  # equal on all ranks
            if name == "weight" or (weight.ndim > 1 and least >= _FEW):
                yield weight


# -- the last step -----------------------------------------------------------------------------------------------------


class ShardSample(NamedTuple):
    """Rows of the gradient of a sharded weight and of its optimizer state; None if missing."""

    name: str
    gradient: torch.Tensor | None
    state: torch.Tensor | None

    def digests(self, apart: int) -> list[int]:
        """Return the digests of both; ``apart`` for a missing value."""
        return [_digest_of(self.gradient, apart), _digest_of(self.state, apart)]


@torch.no_grad()
def sample_shard(sharded: list[tuple[str, nn.Parameter]], turn: int, optimizer: Optimizer) -> ShardSample | None:
    """Copy rows of the gradient and the state of one weight, a different one each turn; None without weights."""
    if not sharded:
        return None
    name, parameter = sharded[turn % len(sharded)]
    shape, state = parameter.shape, optimizer.state.get(parameter, {}).values()
    moments = next((value for value in state if isinstance(value, torch.Tensor) and value.shape == shape), None)
    return ShardSample(name, _first_rows(parameter.grad), _first_rows(moments))


def _first_rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or tensor.is_sparse or isinstance(tensor, DTensor) or tensor.numel() < 2:
        return None
    return tensor[: max(1, _OF_SHARD * len(tensor) // tensor.numel())].detach().clone()


def _digest_of(part: torch.Tensor | None, apart: int) -> int:
    """Return a digest; ``apart`` if all elements are equal or some are not finite."""
    if part is None:
        return apart
    part = part.cpu()
    known = (part != part.flatten()[0]).any() & torch.isfinite(part).all()
    return of_tensor(part) if known else apart


def some_rows(tensor: torch.Tensor, turn: int, most: int) -> torch.Tensor:
    """Return rows of a tensor with about ``most`` elements in total, different rows each turn."""
    if tensor.numel() <= most or tensor.ndim == 0:
        return tensor
    rows = max(1, most * len(tensor) // tensor.numel())
    return tensor.narrow(0, turn * rows % (len(tensor) - rows + 1), rows)
