"""Notice at ``optimizer.step()`` that replicas do not step alike: nobody averaged, one skipped a step, weights differ.

A hook on every optimizer of the process looks at those that hold parameters of the model, whether they were given to
``initialize`` or not. Ranks that hold the same (one place of every data-parallel replica) write digests of gradients
and weights into torch.distributed's key-value store, and each reads those of others: no collective, in which a rank
that skips its step would leave the others waiting. The first step waits for the other ranks' words, later ones wait
only some seconds, and what comes late is compared late.
"""

from __future__ import annotations

import ast
import logging
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from autopar.data_parallel.process_hooks import forget, listen_to_steps
from autopar.distributed.digest import of_tensor, of_text, of_values, sum_of_bits
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.errors import ConsistencyError

__all__ = ["StepCheck"]

_log = logging.getLogger(__name__)

_WHOLE = 3  # first steps, of which all gradients and weights are compared
_SAMPLE = 16384  # elements that later ones look at
_PATIENCE = (5.0, 1.0, 1.0, 0.0)  # seconds that a later step waits for another rank, by how often that was late
_KEPT = 64  # steps that are remembered to be compared with what comes late
_GPU_INTERVAL = 10  # steps between two comparisons where reading a digest waits for the GPU
_OVERFLOW = -1  # the digest of a gradient that is not finite
_BUSY = 16  # ranks from which on the store is asked less often

Digests = dict[str, tuple[int, int]]
"""Name -> digests of (part of) a gradient and a weight."""


@dataclass
class _Followed:
    """One optimizer: what it steps, and how far this rank and the one before it have come.

    Attributes:
        number: among the optimizers of this model, in the order of their first steps.
        held: name and parameter of those of the model that it steps.
        sharded: those of which each tensor-parallel rank has another part.
        said: comparison -> what this rank said, as long as the other one's word is missing.
        late: steps in a row in which another rank's word did not come in time.
    """

    number: int
    held: list[tuple[str, nn.Parameter]]
    sharded: list[tuple[str, nn.Parameter]]
    parameters: int  # of the optimizer, when ``held`` was looked up
    steps: int = 0
    compared: int = 0
    heard: int = 0
    said: dict[int, str] = field(default_factory=dict)
    late: int = 0


class StepCheck:
    """Watches the optimizers of one parallelized model. Every rank makes it.

    Args:
        inner: the Hugging Face model in ``model``.
        alike: ``id(parameter)`` -> the tensor-parallel ranks that hold the same part.
        compare: compare over the data-parallel replicas; False only counts steps.

    Attributes:
        made: optimizer steps so far with parameters of the model.
        settings: of the optimizer in the last step (learning rates and the like), as text.
        last_shard: name of a sharded weight, and digests of part of its gradient and of its state in the last step;
            of another one each time.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: nn.Module,
        mpu: MPU,
        failures: FailureLog,
        alike: Mapping[int, tuple[int, ...]],
        *,
        compare: bool,
    ) -> None:
        self.mpu, self.failures, self.made = mpu, failures, 0
        self.settings = ""
        self.last_shard: tuple[str, int, int] | None = None
        self._fed: int | None = None  # digest of what the last training forward was given, in the first steps
        self._all_fed: list[int] = []  # of these steps, where all replicas were given the same
        self._model = weakref.ref(model)
        self._sharded = {key for key, ranks in alike.items() if len(ranks) == 1}
        self._followed: weakref.WeakKeyDictionary[Optimizer, _Followed] = weakref.WeakKeyDictionary()
        self._count = 0
        self._compare = compare and mpu.dp.size > 1
        if self._compare:
            self._input_hook = inner.register_forward_pre_hook(self._note_inputs, with_kwargs=True)
            self._store = PrefixStore(f"autopar steps {failures.name}", _get_default_store())
            self._before = mpu.dp.ranks[mpu.dp.rank - 1]
            self._others = [rank for rank in mpu.dp.ranks if rank != mpu.rank]
        self._interval = (_GPU_INTERVAL if mpu.device.type == "cuda" else 1) * max(1, mpu.world_size // _BUSY)
        listen_to_steps(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepCheck:
        return self

    def remove(self) -> None:
        """Watch no longer."""
        forget(self)
        if self._compare:
            self._input_hook.remove()

    def _note_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and self.made < _WHOLE:
            self._fed = of_values([args, kwargs])

    # -- at a step -------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a step of ``optimizer``, and compare it with that of the other replicas.

        With a closure gradients are computed inside of the step, and only weights can be compared.

        Raises:
            ConsistencyError: gradients or weights differ between the replicas, or were left unaveraged by ``no_sync``.
            PipelineError: in the first step, if the other rank does not step within ``pipeline.timeout``.
        """
        closure = kwargs.get("closure") is not None or len(args) > 1
        model = self._model()
        followed = None if model is None else self._follow(model, optimizer)
        if model is None or followed is None or _inside_another_step():
            return
        if getattr(vars(model).get("_autopar_pipeline"), "unaveraged", False):
            raise ConsistencyError(
                f"the gradients of the {self.mpu.dp.size} data-parallel replicas were not averaged: the last "
                "execute_pipeline before step() ran inside no_sync, too.\n  Run the last one of a step outside of it."
            )
        if self._compare:
            self._compare_step(optimizer, followed, closure)
        followed.steps += 1
        self.made += 1
        if self.mpu.tp.size > 1:
            self.settings = repr([_settings(group) for group in optimizer.param_groups])
            apart = -1 - self.mpu.tp.rank
            self.last_shard = None if closure else _shard_of(followed.sharded, self.made, optimizer, apart)

    def watch(self, apart: set[int]) -> None:
        """Take notice of the gradients of these parameters (``id``) only: their shards differ."""
        self._sharded &= apart

    def _follow(self, model: nn.Module, optimizer: Optimizer) -> _Followed | None:
        """What is known of ``optimizer``; None if it steps nothing of the model."""
        followed = self._followed.get(optimizer)
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if followed is None or followed.parameters != count:
            stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
            held = [(name, p) for name, p in model.named_parameters() if id(p) in stepped]
            sharded = [(name, p) for name, p in held if id(p) in self._sharded]
            if followed is None:
                followed = self._followed[optimizer] = _Followed(-1, held, sharded, count)
            followed.held, followed.sharded, followed.parameters = held, sharded, count
        if not followed.held:
            return None
        if followed.number < 0 and not _inside_another_step():
            followed.number, self._count = self._count, self._count + 1
        return followed

    def _compare_step(self, optimizer: Optimizer, followed: _Followed, closure: bool) -> None:
        step = followed.steps
        if step >= _WHOLE and step % self._interval:
            return
        held = [(name, p) for name, p in followed.held if not isinstance(p, DTensor) and not p.is_meta]
        turn, followed.compared = followed.compared, followed.compared + 1
        scaled = getattr(getattr(optimizer, "_autopar", None), "scale", None) is not None  # may overflow, and skip
        digests = _digests(held, None if step < _WHOLE else turn, closure, scaled)
        word = repr((of_text(repr([name for name, _ in held])), step, digests))
        if step < _WHOLE:
            word = f"{word}|{self._fed}"
        self._store.set(self._key(followed, turn, self.mpu.rank), word)
        followed.said[turn] = word
        self._compare_with_others(type(optimizer).__name__, followed, turn)
        old = turn - _KEPT
        followed.said.pop(old, None)
        if old >= 0:
            self._store.delete_key(self._key(followed, old, self.mpu.rank))

    def _key(self, followed: _Followed, turn: int, rank: int) -> str:
        return f"{followed.number}/{turn}/{rank}"

    def _compare_with_others(self, optimizer: str, followed: _Followed, turn: int) -> None:
        """Compare with all replicas in the first steps, so that all raise alike; later with the one before."""
        for earlier in range(max(followed.heard, turn - _KEPT + 1), turn + 1):
            others = self._others if earlier < _WHOLE else [self._before]
            keys = {rank: self._key(followed, earlier, rank) for rank in others}
            patience = self.failures.timeout if earlier == 0 else _PATIENCE[min(followed.late, len(_PATIENCE) - 1)]
            for rank, key in keys.items():
                if not self._wait_for(rank, key, patience):
                    if earlier == 0:
                        self._missing(optimizer, rank)
                    followed.late += 1
                    return
            followed.heard = earlier + 1
            mine = followed.said.get(earlier)
            fed = set[str]()
            for rank, key in keys.items():
                theirs, _, their_input = self._store.get(key).decode().partition("|")
                if mine is not None:
                    own, _, own_input = mine.partition("|")
                    fed |= {own_input, their_input}
                    if theirs != own:
                        self._refuse(optimizer, own, theirs, rank)
            if earlier < _WHOLE and len(fed) == 1:
                self._same_inputs(fed.pop())
        followed.late = 0

    def _same_inputs(self, fed: str) -> None:
        """Warn once, if the replicas were given the same batches in all of the first steps, others in each."""
        self._all_fed.append(int(fed) if fed.isdigit() else -1)
        if len(self._all_fed) == _WHOLE == len({*self._all_fed} - {-1}) and self.mpu.rank == 0:
            _log.warning(
                "all %d data-parallel replicas were given the same batches in the first %d steps: the data is not "
                "sharded. Use autopar.prepare_dataloader(dataset, ..., mpu=model.mpu), or "
                "DistributedSampler(dataset, mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()).",
                self.mpu.dp.size,
                _WHOLE,
            )

    def _wait_for(self, rank: int, key: str, patience: float) -> bool:
        deadline, pause = time.monotonic() + patience, 0.0002
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return False
            if pause > 0.05 and self.failures.has_ended(rank):
                return bool(self._store.check([key]))
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return True

    def _missing(self, optimizer: str, rank: int) -> None:
        raise self.failures.failure(
            f"the first {optimizer}.step() waited for rank {rank}, which holds the same weights in data-parallel "
            f"replica {self.mpu.dp.ranks.index(rank)} and has not stepped.",
            [rank],
            TimeoutError(f"{self.failures.timeout:g} s (pipeline.timeout)"),
        )

    def _refuse(self, optimizer: str, mine: str, theirs: str, rank: int) -> None:
        (names, step, ours), (other_names, _, others) = _parsed(mine), _parsed(theirs)
        if names != other_names:
            return  # each steps parameters of its own, as in ZeRO
        weights = [name for name in ours if name in others and ours[name][1] != others[name][1]]
        gradients = ((name, ours[name][0], others[name][0]) for name in ours if name in others)
        different = weights or [name for name, one, two in gradients if one != two and _OVERFLOW not in (one, two)]
        if not different:
            return
        size, pair = self.mpu.dp.size, sorted([self.mpu.rank, rank])
        listed = ", ".join(different[:3]) + (f" and {len(different) - 3} more" if len(different) > 3 else "")
        text = f"  Ranks {pair[0]} and {pair[1]}, step {step + 1} of {optimizer}: {listed}.\n"
        if weights:
            text = (
                f"the weights of the {size} data-parallel replicas differ: they have drifted apart.\n{text}"
                "  One of them skipped a step, or stepped with gradients or settings of its own. Go on from the last "
                "checkpoint.\n"
            )
        else:
            text = (
                f"the gradients of the {size} data-parallel replicas differ: nothing has averaged them, and the "
                f"replicas would drift apart.\n{text}"
                "  Call the model through DistributedDataParallel(model, process_group="
                "model.mpu.get_data_parallel_group()), or average before step():\n"
                "  autopar.average_gradients(model). (Or one of them has skipped a step.)\n"
            )
        text += "  consistency_check: {enable: false} turns this check off."
        self.failures.publish(text)
        raise ConsistencyError(text)


def _parsed(word: str) -> tuple[int, int, Digests]:
    parsed: tuple[int, int, Digests] = ast.literal_eval(word)
    return parsed


def _inside_another_step() -> bool:
    """Whether an optimizer's step is called by that of another one (ZeroRedundancyOptimizer's, a wrapper's)."""
    code = _WRAPPER
    frame, found = sys._getframe(1), 0
    while frame is not None and found < 2:
        found += frame.f_code is code
        frame = frame.f_back  # type: ignore[assignment]
    return found > 1


_WRAPPER = Optimizer.profile_hook_step(lambda: None).__code__


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What is plain data in a param group."""
    plain = (bool, int, float, str, tuple, type(None))
    return {name: value for name, value in group.items() if name != "params" and isinstance(value, plain)}


@torch.no_grad()
def _shard_of(
    sharded: list[tuple[str, nn.Parameter]], turn: int, optimizer: Optimizer, apart: int
) -> tuple[str, int, int] | None:
    """Name of one of the weights, digests of some elements of its gradient and of its state; ``apart`` for none."""
    if not sharded:
        return None
    name, parameter = sharded[turn % len(sharded)]
    state = optimizer.state.get(parameter, {})
    moments = next((x for x in state.values() if isinstance(x, torch.Tensor) and x.shape == parameter.shape), None)
    return name, _digest_of(parameter.grad, apart), _digest_of(moments, apart)


def _digest_of(tensor: torch.Tensor | None, apart: int) -> int:
    """Digest of some rows; ``apart`` if they are all the same number, or not numbers."""
    if tensor is None or tensor.is_sparse or isinstance(tensor, DTensor) or tensor.numel() < 2:
        return apart
    part = tensor[: max(1, 2048 * len(tensor) // tensor.numel())]
    known = (part != part.flatten()[0]).any() and torch.isfinite(part).all()
    return of_tensor(part) if known else apart


@torch.no_grad()
def _digests(held: list[tuple[str, nn.Parameter]], turn: int | None, closure: bool, scaled: bool) -> Digests:
    """Digests of everything, or with ``turn`` of a sample that moves on with it.

    Args:
        scaled: of a loss with a scale: gradients that are not finite make the step one to skip, and cannot be compared.
    """
    names, sums = [], []
    for name, parameter, start, rows in _windows(held, turn):
        gradient = None if closure else parameter.grad
        names.append(name)
        sums.append(_sum(gradient, parameter.device, start, rows))
        if scaled and gradient is not None and not torch.isfinite(gradient).all():
            sums[-1] = torch.full_like(sums[-1], _OVERFLOW)
        sums.append(_sum(parameter, parameter.device, start, rows))
    numbers = torch.stack(sums).tolist() if sums else []
    return {name: (numbers[2 * i], numbers[2 * i + 1]) for i, name in enumerate(names)}


def _windows(
    held: list[tuple[str, nn.Parameter]], turn: int | None
) -> Iterator[tuple[str, nn.Parameter, int, int | None]]:
    """Name, parameter, first row, rows (None: all)."""
    if turn is None:
        for name, parameter in held:
            yield name, parameter, 0, None
        return
    left = _SAMPLE
    for number in range(min(4, len(held))):
        name, parameter = held[(4 * turn + number) % len(held)]
        if parameter.ndim == 0 or parameter.numel() <= left:
            yield name, parameter, 0, None
            left -= parameter.numel()
        elif left > 0:
            rows = max(1, left * len(parameter) // parameter.numel())
            yield name, parameter, turn * rows % (len(parameter) - rows + 1), rows
            left = 0


def _sum(tensor: torch.Tensor | None, device: torch.device, start: int, rows: int | None) -> torch.Tensor:
    if tensor is None or isinstance(tensor, DTensor):
        return torch.zeros((), dtype=torch.int64, device=device)
    if tensor.is_sparse or rows is None:
        return sum_of_bits(tensor)
    return sum_of_bits(tensor.narrow(0, start, rows))
