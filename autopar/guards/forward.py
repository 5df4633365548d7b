"""Compare over tp and cp, when a forward begins, what ranks that get the same batch must have alike.

One small all-reduce at the start of the model's forward carries eight numbers: a digest of the call (mode, shapes,
optimizer steps made so far), of the inputs' contents, of the random generators that the model draws from, of a sample
of the replicated weights; and of a sample of a sharded weight, of the gradient and of the optimizer's state that a
sharded one had in the last step, which must *differ* over tp; and whether sharded weights were written into without an
optimizer's step: then, and in the first forwards, the shards of all of them must differ. Every rank gets the largest
and the smallest of each, and so the same result. Only where it is wrong do ranks exchange the values that the error
names.

It comes before the first collective of the forward, so a batch of another length is an error here, not an aborted
process.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from autopar.distributed.collectives import extremes_over
from autopar.distributed.digest import hexdigest, of_tensor, of_text, of_values, sum_of_bits
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.distributed.rng import Generators, begun_stream
from autopar.errors import ConsistencyError
from autopar.foreign.transformers import CACHES
from autopar.guards.messages import different, explanation, same_gradient, same_shard
from autopar.guards.process_hooks import listen
from autopar.guards.samples import WeightSamples, local_part
from autopar.guards.step import StepCheck
from autopar.guards.wrappers import group_call

_WATCHED = 4  # first forwards of a mode in which it is seen which generators the model draws from
_WATCHED_AGAIN = 16  # and every so many later ones


class _Verdict(NamedTuple):
    alike: bool
    same_shard: bool
    same_step: bool
    redrawn: bool


class ForwardCheck:
    """Compare over tp and cp, at the start of the model's forwards.

    Args:
        draws: whether the model draws random numbers, in training (True) or in evaluation.
        steps: counts and digests of optimizer steps.
        every: compare contents, generators and weights on every ``every``-th forward, and on the first of each mode;
            0 compares on the first of each mode and nothing, not even shapes, on the others.

    After every ``steps.whole_every``-th step all replicated weights are compared, not a sample.
    """

    def __init__(
        self, mpu: MPU, failures: FailureLog, draws: Callable[[bool], bool], steps: StepCheck, every: int
    ) -> None:
        self._whole_after = 0  # steps after which all replicated weights were compared last
        self.mpu, self.failures, self.draws, self.steps, self.every = mpu, failures, draws, steps, every
        self._left = -1  # forwards that are still compared inside first_only; -1 outside
        self._watches = True
        self._samples = WeightSamples(fsdp=mpu.cp.size == 1)
        self._forwards = {True: 0, False: 0}  # so far, in training and in evaluation
        self._drawn: dict[bool, set[str]] = {True: set(), False: set()}  # generators that the model draws from
        self._before: dict[str, str] | None = None
        self.hooks = ""  # of the user's, which gather: where they are
        self._redrawn = 0  # forwards before which sharded weights were written into without a step
        listen(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardCheck:
        copied = memo[id(self)] = copy.copy(self)
        vars(copied).update(copy.deepcopy(vars(self), memo))
        copied._count_anew()
        listen(copied)
        return copied

    def find_sharded(self, model: nn.Module) -> None:
        """Find the sharded weights whose shards differ: heads may be copies of each other. A collective of tp."""
        self._samples.find_sharded(model, self.mpu.tp)
        self.steps.watch(set(self._samples.apart))

    # -- around a forward ------------------------------------------------------------------------------------------

    def before_forward(
        self, model: nn.Module, arguments: Mapping[str, Any], *, compiled: bool = False, going_on: bool = False
    ) -> None:
        """Compare the call, inputs, generators and weights. A collective of the tp and cp axes.

        Args:
            arguments: by name (:func:`named_arguments`).
            compiled: the forward is a graph, after which :meth:`after_forward` is not called.
            going_on: the forward is given a cache that an earlier one has filled. In evaluation weights were compared
                there, and are again in one of :data:`_WATCHED_AGAIN` forwards.

        Raises:
            ConsistencyError: on every rank of the axis; names what differs, and both values.
        """
        if self.is_silent:
            return
        self._left = max(self._left - 1, -1)
        number = self._forwards[model.training]
        self._forwards[model.training] += 1
        whole = self._is_whole(model)
        full = number == 0 or whole or (self.every > 0 and number % self.every == 0)
        if not full and not self.every:
            return
        brief = going_on and full and not model.training and 0 < self.every <= number % _WATCHED_AGAIN
        seen = {"call": f"forward of {type(model).__name__}", "training mode": str(model.training)}
        seen |= {"optimizer steps so far": str(self.steps.made), "optimizer settings": self.steps.settings}
        seen["weights that are trained"] = f"{of_text(self._samples.trained(model)):x}"[:8]
        seen |= {"hooks that see whole tensors": self.hooks} if self.hooks else {}
        seen |= {"goes on from a cache": "yes"} if going_on else {}
        seen |= {name: _shape(value) for name, value in leaves(arguments) if not _is_opaque(value)}
        if brief:
            self._before = None
            inputs, states = of_values(arguments), of_text(repr(self._states(model)))
            if not self._compare([of_text(repr(seen)), inputs, states]).alike:
                self._raise(model, arguments, seen, full=True)
            return
        watched = self._watches and not compiled and (number < _WATCHED or number % _WATCHED_AGAIN == 0)
        self._before = Generators.now().digests() if full and watched else None
        numbers = self._digests(model, arguments, whole=whole) if full else []
        verdict = self._compare([of_text(repr(seen)), *numbers])
        if self.steps.last_shard is not None and verdict.same_step:
            raise ConsistencyError(same_gradient(self.mpu.tp.ranks, self.steps.last_shard.name, group_call(self.mpu)))
        if verdict.same_shard:
            raise ConsistencyError(same_shard(self.mpu.tp.ranks, group_call(self.mpu)))
        if not verdict.alike:
            self._raise(model, arguments, seen, full=full)
        if full and (number == 0 or self._is_due(verdict.redrawn)):
            with self.failures.wait("comparing the shards of weights", self.mpu.tp.ranks):
                equal = self._samples.equal_shards(model, self.mpu.tp)
            if equal:
                raise ConsistencyError(same_shard(self.mpu.tp.ranks, group_call(self.mpu), equal))

    def after_step(self, *_: Any) -> None:
        """Note what an optimizer has written into sharded weights."""
        self._samples.note_written()

    def after_forward(self, model: nn.Module) -> None:
        """Find the generators that the forward drew from: from then on their states are compared, and these at once.

        A collective of the axes where it drew from one for the first time, which it does on all ranks.
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
            if not self._compare([of_text(repr(states))]).alike:
                self._raise(model, {}, states, full=False)

    def check_call(self, call: str) -> None:
        """Check that all ranks make this ``call``, before its first collective. A collective of the tp and cp axes.

        Raises:
            ConsistencyError: another rank does something else, a forward for instance.
        """
        seen = {"call": call, "optimizer steps so far": str(self.steps.made)}
        if not self._compare([of_text(repr(seen))]).alike:
            self._raise(None, {}, seen, full=False)

    def report(self, call: str) -> None:
        """Take part in the collectives of :meth:`before_forward` on a rank that does not begin the forward.

        Peers that begin one raise and quote ``call``.
        """
        if self._left != 0 and self.every and not self._compare([of_text("refused")]).alike:
            self._count_anew()
            everyone = [{"call": call}] * self.mpu.tp_cp.size
            dist.all_gather_object(everyone, {"call": call}, group=self.mpu.tp_cp.group)

    # -- comparing -------------------------------------------------------------------------------------------------

    def _is_whole(self, model: nn.Module) -> bool:
        """Return whether this is the first training forward after a step whose weights are all compared."""
        made, every = self.steps.made, self.steps.whole_every
        due = every > 0 and model.training and made // every > self._whole_after // every
        self._whole_after = made if due else self._whole_after
        return due

    def _is_due(self, redrawn: bool) -> bool:
        """Return whether all shards are compared: the first times, and some later ones where that is how one trains."""
        self._redrawn += redrawn
        return redrawn and (self._redrawn <= _WATCHED or self._redrawn % _WATCHED_AGAIN == 0)

    def _digests(self, model: nn.Module, arguments: Mapping[str, Any], *, whole: bool = False) -> list[int]:
        states = self._states(model)
        sums = [sum_of_bits(part) for part in self._samples.replicated(model, whole=whole)]
        weights = torch.stack(sums).tolist() if sums else []
        shard = self._samples.sharded(model)
        apart = -1 - self.mpu.tp_cp.rank
        redrawn = self._samples.redrawn(model)
        last = self.steps.last_shard
        return [
            of_values(arguments),
            of_text(repr(states)),
            of_text(repr(weights)),
            apart if shard is None else of_tensor(shard),
            *([apart, apart] if last is None else last.digests(apart)),
            int(redrawn),
        ]

    def _states(self, model: nn.Module) -> dict[str, str]:
        """The states of the generators that the model draws from."""
        drawn = set(self._drawn[model.training])
        if self.draws(model.training):
            on_gpu = self.mpu.device.type != "cpu"
            drawn |= {"random state of torch"} | ({"random state of torch (GPU)"} if on_gpu else set())
        known = (self._before or Generators.now().digests()) if drawn else {}
        return {name: known[name] for name in sorted(drawn) if name in known}

    def _compare(self, numbers: list[int]) -> _Verdict:
        """Compare up to four digests that must be alike and three that must differ; those that are missing do.

        The last number is whether sharded weights were redrawn, on any rank. The values that must differ are compared
        over tp and cp together: cp ranks hold the same, so all are equal only if those of one tensor-parallel group
        are.
        """
        axis, alike, missing = self.mpu.tp_cp, numbers[:4], [-1 - self.mpu.tp_cp.rank] * 3
        numbers = [*alike, *[0] * (4 - len(alike)), *(numbers[4:] or [*missing, 0])]
        with self.failures.wait("comparing what the forward begins with", axis.ranks):
            largest, smallest = extremes_over(axis, numbers)
        same = [high == low for high, low in zip(largest, smallest, strict=True)]
        return _Verdict(all(same[:4]), same[4], same[5] or same[6], largest[7] > 0)

    @contextlib.contextmanager
    def first_only(self, compare: bool = True, watch: bool = True) -> Iterator[None]:
        """Compare the first forward inside, and no other: the later ones are computed from its result.

        Args:
            compare: False compares none.
            watch: see which generators the model draws from; not where other threads may draw from them.
        """
        before = self._left, self._watches
        self._left, self._watches = int(compare) if self._left else 0, watch
        try:
            yield
        finally:
            self._left, self._watches = before

    @property
    def is_silent(self) -> bool:
        """Whether the next forward is not compared: a later one inside :meth:`first_only`."""
        return self._left == 0

    def reset(self) -> None:
        """Collect the weights anew: modules have changed."""
        self._samples.reset()

    def _count_anew(self) -> None:
        """After a disagreement ranks may have counted apart: what the next forwards compare follows from the counts."""
        self._forwards = dict.fromkeys(self._forwards, 0)
        self._samples.count_anew()

    # -- naming ----------------------------------------------------------------------------------------------------

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
                    mine[name] = f"{list(value.shape)} {hexdigest(local_part(value))}{_wants(value)}"
            mine |= self._states(model)
            mine |= {f"weight {name}": hexdigest(weight) for name, weight in self._samples.named()}
        everyone = [mine] * axis.size
        with self.failures.wait("comparing what the forward begins with", axis.ranks):
            dist.all_gather_object(everyone, mine, group=axis.group)
        self._count_anew()
        weights = (name.removeprefix("weight ") for name in different(everyone) if name.startswith("weight "))
        text = explanation(everyone, list(axis.ranks), _kind_of_group(self.mpu))
        raise ConsistencyError(text, next(weights, ""))


def named_arguments(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward by name (``names``: :func:`parameters_of`), without this rank's cache."""
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    return {name: value for name, value in named.items() if name not in CACHES}


def parameters_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of what the forward of ``model`` takes."""
    return tuple(name for name in inspect.signature(type(model).forward).parameters if name != "self")


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries of nested arguments, by names such as ``images[0].mask``."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from leaves(entry, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from leaves(entry, f"{name}[{index}]")
    else:
        yield name, value


def _kind_of_group(mpu: MPU) -> str:
    names = [name for name, axis in (("tensor", mpu.tp), ("context", mpu.cp)) if axis.size > 1]
    return "- and ".join(names) + "-parallel"


def _is_opaque(value: Any) -> bool:
    return not isinstance(value, torch.Tensor | bool | int | float | str)


def _shape(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}{_wants(value)}"


def _wants(value: torch.Tensor) -> str:
    return ", wants a gradient" if value.requires_grad else ""
