"""What the tensor-parallel ranks of a replica must have alike when a forward begins, compared over the group.

One small all-reduce at the start of the model's forward carries seven numbers: a digest of what the call looks like
(mode, shapes, optimizer steps made so far), of the inputs' contents, of the random generators that the model draws
from, of a sample of the replicated weights; and of a sample of a sharded weight, of the gradient and of the optimizer's
state that a sharded one had in the last step, which must *differ*. The largest and the smallest of each tell every rank
the same: alike, or not. Only then do ranks exchange what there is to name.

Before the first activation travels, so a batch of another length is an error here and not an aborted process.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.distributed.axis import Axis
from autopar.distributed.digest import hexdigest, of_tensor, of_text, of_values, sum_of_bits
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.distributed.rng import Generators
from autopar.errors import ConsistencyError
from autopar.layout import Layout
from autopar.tensor_parallel.consistency_errors import explanation, same_gradient, same_shard
from autopar.tensor_parallel.regions import Region

__all__ = ["ForwardCheck", "Steps"]

_SAMPLE = 16384  # elements of replicated weights that one comparison looks at
_TENSORS = 8  # and of how many weights
_WATCHED = 4  # first forwards of a mode in which it is seen which generators the model draws from
_WATCHED_AGAIN = 16  # and every so many later ones
_LOCAL = ("past_key_values", "past_key_value", "cache_params")  # arguments that hold this rank's heads


class Steps(Protocol):
    """What is known of the optimizer steps that this rank has made with the model's parameters.

    Attributes:
        made: how many.
        settings: of the optimizer in the last one, as text.
        last_shard: name of a sharded weight, and digests of part of its gradient and of its state in the last one.
    """

    made: int
    settings: str
    last_shard: tuple[str, int, int] | None

    def watch(self, apart: set[int]) -> None:
        """Take notice of these parameters (``id``) only: their shards differ."""


class _Verdict(NamedTuple):
    alike: bool
    same_shard: bool
    same_step: bool


class ForwardCheck:
    """Compare over tp, at the start of the model's forwards.

    Args:
        every: compare contents, generators and weights on every ``every``-th forward, and on the first of each mode;
            0 compares on the first of each mode and nothing, not even shapes, on the others.
    """

    def __init__(self, mpu: MPU, failures: FailureLog, region: Region, steps: Steps, every: int) -> None:
        self.mpu, self.failures, self.region, self.steps, self.every = mpu, failures, region, steps, every
        self._left = -1  # forwards that are still compared inside first_only; -1 outside
        self._replicated: list[tuple[str, nn.Parameter]] = []
        self._apart: dict[int, nn.Parameter] = {}
        self._sharded: list[nn.Parameter] = []
        self._of: weakref.ref[nn.Module] | None = None  # whose these are
        self._forwards = {True: 0, False: 0}  # so far, in training and in evaluation
        self._drawn: dict[bool, set[str]] = {True: set(), False: set()}  # generators that the model draws from then
        self._before: dict[str, str] | None = None
        self._cursor = 0

    def learn(self, model: nn.Module) -> None:
        """Find the sharded weights whose shards differ: heads may be copies of each other. A collective of tp."""
        listed = list(_sharded_weights(model))
        mine = [None if (part := _beginning(weight)) is None else of_tensor(part) for weight in listed]
        everyone = [mine] * self.mpu.tp.size
        dist.all_gather_object(everyone, mine, group=self.mpu.tp.group)
        apart = [
            weight
            for weight, seen in zip(listed, zip(*everyone, strict=True), strict=True)
            if None not in seen and len(set(seen)) > 1
        ]
        self._apart = {id(weight): weight for weight in apart}
        self.steps.watch(set(self._apart))

    # -- around a forward ------------------------------------------------------------------------------------------

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare what this forward begins with. A collective of the tp axis.

        Raises:
            ConsistencyError: on every rank of the axis; names what differs, and both values.
        """
        if self._left == 0:
            return
        self._left = max(self._left - 1, -1)
        number = self._forwards[model.training]
        self._forwards[model.training] += 1
        full = number == 0 or (self.every > 0 and number % self.every == 0)
        if not full and not self.every:
            return
        arguments = _named(model, args, kwargs)
        look = {"call": f"forward of {type(model).__name__}", "training mode": str(model.training)}
        look |= {"optimizer steps so far": str(self.steps.made), "optimizer settings": self.steps.settings}
        look["weights that are trained"] = f"{of_text(_trained(model)):x}"[:8]
        for name, value in arguments.items():
            _shapes(name, value, look)
        watched = number < _WATCHED or number % _WATCHED_AGAIN == 0
        self._before = Generators.now().digests() if full and watched else None
        numbers = self._digests(model, arguments) if full else []
        verdict = self._extremes([of_text(repr(look)), *numbers])
        if self.steps.last_shard is not None and verdict.same_step:
            raise ConsistencyError(same_gradient(self.mpu.tp.ranks, self.steps.last_shard[0]))
        if verdict.same_shard:
            raise ConsistencyError(same_shard(self.mpu.tp.ranks))
        if not verdict.alike:
            self._raise(model, arguments, look, full=full)

    def after(self, model: nn.Module) -> None:
        """See which generators the forward drew from: from then on their states are compared, and these at once.

        A collective of the tp axis where it drew from one for the first time, which it does on all ranks.
        """
        before, self._before = self._before, None
        if before is None:
            return
        now = Generators.now().digests()
        new = {name for name, state in now.items() if before.get(name, state) != state} - self._drawn[model.training]
        if new:
            self._drawn[model.training] |= new
            states = {name: before[name] for name in sorted(new)}
            if not self._extremes([of_text(repr(states))]).alike:
                self._raise(model, {}, states, full=False)

    def meet(self, call: str) -> None:
        """Compare that all ranks make this ``call``, before its first collective. A collective of the tp axis.

        Raises:
            ConsistencyError: another rank does something else, a forward for instance.
        """
        look = {"call": call, "optimizer steps so far": str(self.steps.made)}
        if not self._extremes([of_text(repr(look))]).alike:
            self._raise(None, {}, look, full=False)

    def tell(self, call: str) -> None:
        """Make the exchange that peers make when a forward begins, on a rank that does not begin it.

        Peers that begin one raise and quote ``call``. A collective of the tp axis, like :meth:`before`.
        """
        if self._left != 0 and self.every and not self._extremes([of_text("refused")]).alike:
            everyone = [{"call": call}] * self.mpu.tp.size
            dist.all_gather_object(everyone, {"call": call}, group=self.mpu.tp.group)

    # -- comparing -------------------------------------------------------------------------------------------------

    def _digests(self, model: nn.Module, arguments: Mapping[str, Any]) -> list[int]:
        states = self._states(model)
        weights = [int(sum_of_bits(part)) for part in self._sample(model)]
        shard = self._shard_sample()
        apart = -1 - self.mpu.tp.rank
        gradient, state = (apart, apart) if self.steps.last_shard is None else self.steps.last_shard[1:]
        return [
            of_values(arguments),
            of_text(repr(states)),
            of_text(repr(weights)),
            apart if shard is None else of_tensor(shard),
            gradient,
            state,
        ]

    def _states(self, model: nn.Module) -> dict[str, str]:
        """The generators' states that must be alike: those that the model draws from."""
        drawn = set(self._drawn[model.training])
        if self.region.draws(model.training):
            drawn |= {"random state of torch"} | ({"random state of torch (CUDA)"} if self._cuda else set())
        if not drawn:
            return {}
        known = self._before or Generators.now().digests()
        return {name: known[name] for name in sorted(drawn) if name in known}

    @property
    def _cuda(self) -> bool:
        return self.mpu.device.type == "cuda"

    def _extremes(self, numbers: list[int]) -> _Verdict:
        """Compare up to four digests that must be alike and three that must differ; those that are missing do."""
        axis, missing = self.mpu.tp, 7 - len(numbers)
        numbers = [*numbers, *[0] * max(0, missing - 3), *[-1 - axis.rank] * min(3, missing)]
        cpu = not self._cuda or "gloo" in str(dist.get_backend_config(axis.group))
        pair = torch.tensor([numbers, [-number for number in numbers]], device="cpu" if cpu else self.mpu.device)
        with self.failures.blame("comparing what the forward begins with", axis.ranks):
            dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=axis.group)
        largest, smallest = pair.tolist()
        same = [high == -low for high, low in zip(largest, smallest, strict=True)]
        return _Verdict(all(same[:4]), same[4], same[5] or same[6])

    def _sample(self, model: nn.Module) -> list[torch.Tensor]:
        """Part of the elements of some replicated weights, of others each time."""
        if self._of is None or self._of() is not model:
            self._of = weakref.ref(model)
            self._replicated = list(_replicated(model))
            self._sharded = [p for p in _sharded_weights(model) if id(p) in self._apart]
        left, sample = _SAMPLE, list[torch.Tensor]()
        for _ in range(min(_TENSORS, len(self._replicated))):
            turn, place = divmod(self._cursor, len(self._replicated))
            part = _part(_local(self._replicated[place][1]), turn)
            if sample and part.numel() > left:
                break
            left -= part.numel()
            sample.append(part)
            self._cursor += 1
        return sample

    def _shard_sample(self) -> torch.Tensor | None:
        """Some elements of a sharded weight, of another one each time; None if they are all the same number."""
        if not self._sharded:
            return None
        return _beginning(self._sharded[sum(self._forwards.values()) % len(self._sharded)])

    @contextlib.contextmanager
    def first_only(self) -> Iterator[None]:
        """Compare the first forward inside, and no other: what follows is made from its result on every rank alike."""
        before, self._left = self._left, 1 if self._left else 0
        try:
            yield
        finally:
            self._left = before

    def forget(self) -> None:
        """Look at the modules anew: they have changed."""
        self._of = None

    # -- naming ----------------------------------------------------------------------------------------------------

    def _raise(
        self, model: nn.Module | None, arguments: Mapping[str, Any], look: dict[str, str], *, full: bool
    ) -> None:
        axis = self.mpu.tp
        ranks = list(axis.ranks)
        mine = dict(look)
        if model is not None and "weights that are trained" in mine:
            mine |= {f"requires_grad of {name}": str(p.requires_grad) for name, p in model.named_parameters()}
            del mine["weights that are trained"]
        if full and model is not None:
            for name, value in arguments.items():
                _fingerprint(name, value, mine)
            mine |= self._states(model)
            mine |= {f"weight {name}": hexdigest(_local(parameter)) for name, parameter in self._replicated}
        everyone = [mine] * axis.size
        with self.failures.blame("comparing what the forward begins with", axis.ranks):
            dist.all_gather_object(everyone, mine, group=axis.group)
        raise ConsistencyError(explanation(everyone, ranks))


def _named(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, without those that hold this rank's part of something."""
    named = {**dict(zip(_parameters(_kind(model)), args, strict=False)), **kwargs}
    return {name: value for name, value in named.items() if name not in _LOCAL}


def _kind(module: nn.Module) -> Any:
    return type(module)


@functools.cache
def _parameters(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(kind.forward).parameters if name != "self")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What lies on this rank of a tensor that FSDP may have sharded over the replicas."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _replicated(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that every tp rank holds whole."""
    sharded: set[int] = set()
    for module in model.modules():
        axis: Axis | None = vars(module).get("tp")
        for name, layout in vars(module).get("autopar_layouts", {}).items():
            if axis is not None and any(layout.ranges(rank) != layout.ranges(0) for rank in range(axis.size)):
                sharded.add(id(module._parameters.get(name)))
    for name, parameter in model.named_parameters():
        if id(parameter) not in sharded and not parameter.is_meta and _local(parameter).numel():
            yield name, parameter


def _part(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """At most some rows of a tensor, others each turn."""
    if tensor.numel() <= _SAMPLE or tensor.ndim == 0:
        return tensor
    rows = max(1, _SAMPLE * len(tensor) // tensor.numel())
    return tensor.narrow(0, turn * rows % (len(tensor) - rows + 1), rows)


def _shapes(name: str, value: Any, into: dict[str, str]) -> None:
    if isinstance(value, torch.Tensor):
        into[name] = f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            _shapes(f"{name}.{key}", entry, into)
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            _shapes(f"{name}[{index}]", entry, into)
    elif isinstance(value, bool | int | float | str):
        into[name] = repr(value)


def _fingerprint(name: str, value: Any, into: dict[str, str]) -> None:
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            into[name] = f"{list(value.shape)} {hexdigest(_local(value))}"
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            _fingerprint(f"{name}.{key}", entry, into)
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            _fingerprint(f"{name}[{index}]", entry, into)


def _beginning(weight: torch.Tensor) -> torch.Tensor | None:
    """Some rows of a shard; None if there are none, or all are the same number, or not numbers."""
    if not weight.numel():
        return None
    part = weight.detach()[: max(1, 2048 * len(weight) // weight.numel())]
    return part if (part != part.flatten()[0]).any() and torch.isfinite(part).all() else None


def _trained(model: nn.Module) -> bytes:
    return bytes(parameter.requires_grad for parameter in model.parameters())


def _sharded_weights(model: nn.Module) -> Iterator[nn.Parameter]:
    """Weights of which each tp rank holds another part."""
    for module in model.modules():
        layout: Layout | None = vars(module).get("autopar_layouts", {}).get("weight")
        weight = module._parameters.get("weight")
        if weight is None or layout is None or layout.replicated or type(weight) is not nn.Parameter or weight.is_meta:
            continue
        yield weight
