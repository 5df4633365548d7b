"""Check at ``optimizer.step()`` that replicas step alike: that gradients are averaged, none skips, weights are equal.

A hook on every optimizer of the process looks at those that hold parameters of the model, whether they were given to
``initialize`` or not. Ranks that hold the same (one place of every data-parallel replica) write digests of gradients
and weights into torch.distributed's key-value store, and each reads those of others: no collective, in which a rank
that skips its step would leave the others waiting. The first step waits for the other ranks' digests, later ones wait
only some seconds, and what comes late is compared late.

Weights that no torch optimizer steps are compared in the same way at the training forward after they have changed; what
differs is a warning there, since replicas may look at them after different updates.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from autopar.call_site import warn_user
from autopar.distributed.digest import of_text, of_values
from autopar.distributed.failures import FailureLog
from autopar.distributed.mesh import MPU
from autopar.errors import ConsistencyError
from autopar.foreign.groups import PrefixStore, default_store
from autopar.guards.messages import router_loss, unlike_gradients, unlike_weights
from autopar.guards.optimizer_probe import refuse_unlike, refuse_whole_state, warn_of_fp16
from autopar.guards.process_hooks import forget, listen
from autopar.guards.samples import OVERFLOW, FreeWeights, ShardSample, digest_step, plain_settings, sample_shard
from autopar.guards.wrappers import group_call

_log = logging.getLogger(__name__)

_WHOLE = 3  # first steps, of which all gradients and weights are compared
_DEADLINES = (5.0, 1.0, 1.0, 0.0)  # seconds that a later step waits for another rank, by how often that was late
_KEPT = 64  # steps that are remembered to be compared with what comes late
_GPU_INTERVAL = 10  # steps between two comparisons where reading a digest waits for the GPU
_BUSY = 16  # ranks from which on the store is asked less often
_OWN, _UPDATE = -2, "an update without a torch optimizer"  # number and name of those of the user's own


@dataclass
class _Progress:
    """The progress of one optimizer: what it steps, and which of its steps were compared.

    Attributes:
        number: among the optimizers of this model, in the order of their first steps; -1 before.
        held: name and parameter of those of the model that it steps.
        sharded: those of which each tensor-parallel rank has another part.
        published: comparison -> digests that this rank has published, as JSON, while some of the others' are missing.
        read: comparisons that all others' digests were read for.
        whole: comparisons of all gradients and weights.
        late: steps in a row in which another rank's digests did not come in time.
    """

    number: int
    held: list[tuple[str, nn.Parameter]]
    sharded: list[tuple[str, nn.Parameter]]
    parameters: int  # of the optimizer, when ``held`` was looked up
    steps: int = 0
    compared: int = 0
    read: int = 0
    published: dict[int, str] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    late: int = 0


class StepCheck:
    """Watches the optimizers of one parallelized model. Every rank makes it.

    Args:
        inner: the Hugging Face model in ``model``.
        alike: ``id(parameter)`` -> those of the ranks that hold a stage's shards that hold the same one.
        experts: names of parameters that are sharded over replicas, too.
        routers_apart: each replica balances the routers of its own tokens, which is worth a warning.
        compare: compare over the data-parallel replicas; False only counts steps.
        whole_every: steps between two comparisons of all gradients and weights; 0: in the first steps only.

    Attributes:
        made: optimizer steps so far with parameters of the model.
        settings: of the optimizer in the last step (learning rates and the like), as text.
        last_shard: part of the gradient and of the state of a sharded weight in the last step; another one each time.
        last_experts: the same, of experts that replicas hold different ones of.
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
        whole_every: int = 0,
        experts: frozenset[str] = frozenset(),
        routers_apart: bool = True,
    ) -> None:
        self.mpu, self.failures, self.made, self.whole_every = mpu, failures, 0, whole_every
        self.settings = ""
        self.last_shard: ShardSample | None = None
        self.last_experts: ShardSample | None = None
        self._input: int | None = None  # digest of what the last training forward was given, in the first steps
        self._same: list[int | None] = []  # those of these steps, where all replicas were given the same
        self._model = weakref.ref(model)
        tp, own = mpu.tp.size, mpu.shards.rank // mpu.tp.size
        self._sharded = {key for key, ranks in alike.items() if sum(rank // tp == own for rank in ranks) == 1}
        self._experts = experts
        self._names: set[str] | None = None  # of those in a model that is copied, until its parameters are there
        self._free, self._own = FreeWeights(), _Progress(_OWN, [], [], 0)
        self._progress: weakref.WeakKeyDictionary[Optimizer, _Progress] = weakref.WeakKeyDictionary()
        self._count, self._told_of_routers, self._told_of_own_updates = 0, not routers_apart, False
        self._replicas = "data-parallel replicas" if mpu.cp.size == 1 else "ranks with the same weights (dp x cp)"
        self._compare = compare and mpu.dp_cp.size > 1
        self._input_hook: Any = None
        if self._compare:
            self._input_hook = inner.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            self._store = PrefixStore(f"autopar steps {failures.name}", default_store())
            self._before = mpu.dp_cp.ranks[mpu.dp_cp.rank - 1]
            self._others = [rank for rank in mpu.dp_cp.ranks if rank != mpu.rank]
        self._interval = (1 if mpu.device.type == "cpu" else _GPU_INTERVAL) * max(1, mpu.world_size // _BUSY)
        listen(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepCheck:
        """Return one for the copied model; a copy of a part of it has none.

        It compares nothing over the replicas: each may train a copy on data of its own (Reptile, local SGD).
        """
        model = self._model()
        if model is None or id(model) not in memo:
            return self
        copied = memo[id(self)] = copy.copy(self)
        copied._model = weakref.ref(memo[id(model)])
        copied._names = {name for name, p in model.named_parameters() if id(p) in self._sharded}
        copied._progress, copied._count, copied.made = weakref.WeakKeyDictionary(), 0, 0
        copied.settings, copied.last_shard = "", None
        copied._input_hook, copied._compare = copy.deepcopy(self._input_hook, memo), False
        listen(copied)
        return copied

    def remove(self) -> None:
        """Remove the hooks."""
        forget(self)
        if self._input_hook is not None:
            self._input_hook.remove()

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._compare or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        self._compare_own_update()
        if module.training and self.made < _WHOLE:
            self._input = of_values([args, kwargs])
            if not self._told_of_routers and adds_router_loss(module, kwargs):
                self._told_of_routers = True
                warn_user(router_loss(type(module).__name__, self.mpu.dp_cp.size))

    # -- at a step -------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a step of ``optimizer``, and compare it with that of the other replicas.

        With a closure gradients are computed inside of the step, and only weights can be compared.

        Raises:
            ConfigError: in the first step, if steps of shards are others than steps of whole parameters.
            ConsistencyError: gradients or weights differ between the replicas, or were left unaveraged by ``no_sync``.
            PipelineError: in the first step, if the other rank does not step within ``pipeline.timeout``.
        """
        closure = any(argument is not None for argument in (*args[1:], kwargs.get("closure")))  # step(None) has none
        model = self._model()
        progress = None if model is None else self._progress_of(model, optimizer)
        if model is None or progress is None or _inside_another_step():
            return
        pipeline: Any = getattr(vars(model).get("_autopar"), "pp", None)
        if pipeline is not None and pipeline.unaveraged:
            raise ConsistencyError(
                f"the gradients of the {self.mpu.dp_cp.size} {self._replicas} were not averaged: the last "
                "execute_pipeline before step() ran inside no_sync, too.\n  Run the last one of a step outside of it."
            )
        if progress.steps == 0 and not hasattr(optimizer, "_autopar"):  # else initialize has looked at it
            held = [p for _, p in progress.held if not isinstance(p, DTensor)]
            if "_autopar" in vars(model):
                refuse_whole_state(optimizer, progress.held, vars(model)["_autopar"].plan)
            mpu = self.mpu
            refuse_unlike(optimizer, held, tp=mpu.tp.size, stages=mpu.pp.size, experts=mpu.shards.size)
            if self.mpu.is_master:
                warn_of_fp16(optimizer, held)
        if self._compare:
            scaled = getattr(getattr(optimizer, "_autopar", None), "scale", None) is not None  # may overflow, and skip
            self._compare_now(type(optimizer).__name__, progress, closure=closure, scaled=scaled)
        progress.steps += 1
        self.made += 1
        if self._experts:
            own = [] if closure else [(name, p) for name, p in progress.held if name in self._experts]
            self.last_experts = sample_shard(own, self.made, optimizer) or self.last_experts
        if self.mpu.tp_cp.size > 1:
            self.settings = repr([plain_settings(group) for group in optimizer.param_groups])
            self.last_shard = None if closure else sample_shard(progress.sharded, self.made, optimizer)

    def watch(self, apart: set[int]) -> None:
        """Digest gradients of these parameters (``id``) only: their shards differ."""
        self._sharded &= apart

    def _progress_of(self, model: nn.Module, optimizer: Optimizer) -> _Progress | None:
        """Return the progress of ``optimizer``; None if it steps nothing of the model."""
        progress = self._progress.get(optimizer)
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if progress is None or progress.parameters != count:
            if self._names is not None:
                self._sharded = {id(p) for name, p in model.named_parameters() if name in self._names}
                self._names = None
            stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
            held = [(name, p) for name, p in model.named_parameters() if id(p) in stepped]
            sharded = [(name, p) for name, p in held if id(p) in self._sharded]
            if progress is None:
                progress = self._progress[optimizer] = _Progress(-1, held, sharded, count)
            progress.held, progress.sharded, progress.parameters = held, sharded, count
        if not progress.held:
            return None
        if progress.number < 0 and not _inside_another_step():
            progress.number, self._count = self._count, self._count + 1
        return progress

    def _compare_own_update(self) -> None:
        """Compare the weights that no torch optimizer steps, if something has changed them since the last forward."""
        model = self._model()
        stepped = (parameter for progress in self._progress.values() for _, parameter in progress.held)
        if self._told_of_own_updates or model is None or not self._free.have_changed(model, stepped):
            return
        self._own.held = self._free.named
        self._compare_now(_UPDATE, self._own, closure=True)
        self._own.steps += 1

    def _compare_now(self, update: str, progress: _Progress, *, closure: bool, scaled: bool = False) -> None:
        """Publish the digests of this step, and compare those of the other ranks that are there.

        Args:
            update: the optimizer's name, for errors.
            closure: gradients are computed inside of the step: only weights are compared.
            scaled: a step that overflows is skipped.
        """
        step = progress.steps
        whole = step < _WHOLE or (self.whole_every > 0 and (step + 1) % self.whole_every == 0)
        if not whole and step % self._interval:
            return
        held = [(name, p) for name, p in progress.held if not isinstance(p, DTensor) and not p.is_meta]
        turn, progress.compared = progress.compared, progress.compared + 1
        digests = digest_step(held, None if whole else turn, closure, scaled)
        if whole:
            progress.whole.add(turn)
        mine = json.dumps([[of_text(repr([name for name, _ in held])), step, digests], self._input])
        self._store.set(self._key(progress, turn, self.mpu.rank), mine)
        progress.published[turn] = mine
        self._compare_with_others(update, progress, turn)
        old = turn - _KEPT
        progress.published.pop(old, None)
        progress.whole.discard(old)
        if old >= 0:
            self._store.delete_key(self._key(progress, old, self.mpu.rank))

    def _key(self, progress: _Progress, turn: int, rank: int) -> str:
        return f"{progress.number}/{turn}/{rank}"

    def _compare_with_others(self, update: str, progress: _Progress, turn: int) -> None:
        """Compare with all replicas where all weights are, so that all raise alike; samples with the one before."""
        waits = progress.number != _OWN  # an update of the user's own may come later on another replica, or never
        for earlier in range(max(progress.read, turn - _KEPT + 1), turn + 1):
            others = self._others if earlier in progress.whole else [self._before]
            keys = {rank: self._key(progress, earlier, rank) for rank in others}
            seconds = _DEADLINES[min(progress.late, len(_DEADLINES) - 1)]
            seconds = self.failures.timeout if earlier == 0 and waits else seconds
            for rank, key in keys.items():
                if not self._wait_for(rank, key, seconds):
                    if earlier == 0 and waits:
                        self._missing(update, rank)
                    progress.late += 1
                    return
            progress.read = earlier + 1
            own, own_input = json.loads(progress.published[earlier])
            inputs = {own_input}
            for rank, key in keys.items():
                theirs, their_input = json.loads(self._store.get(key))
                inputs.add(their_input)
                if theirs != own:
                    self._refuse(update, own, theirs, rank)
            if waits and earlier < _WHOLE and len(inputs) == 1 and self.mpu.dp.size > 1:
                self._same_inputs(inputs.pop())
        progress.late = 0

    def _same_inputs(self, inputs: int | None) -> None:
        """Warn once, if the replicas were given the same batches in all of the first steps, others in each."""
        self._same.append(inputs)
        if len(self._same) == _WHOLE == len({*self._same} - {None}) and self.mpu.rank == 0:
            _log.warning(
                "all %d data-parallel replicas were given the same batches in the first %d steps: the data is not "
                "sharded. Use autopar.prepare_dataloader(dataset, ..., mpu=model.mpu), or "
                "DistributedSampler(dataset, mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()).",
                self.mpu.dp.size,
                _WHOLE,
            )

    def _wait_for(self, rank: int, key: str, seconds: float) -> bool:
        deadline, pause = time.monotonic() + seconds, 0.0002
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return False
            if pause > 0.05 and self.failures.has_ended(rank):
                return bool(self._store.check([key]))
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return True

    def _missing(self, optimizer: str, rank: int) -> None:
        replica, place = divmod(self.mpu.dp_cp.ranks.index(rank), self.mpu.cp.size)
        where = f"replica {replica}" + (f" (context-parallel rank {place})" if self.mpu.cp.size > 1 else "")
        raise self.failures.failure(
            f"the first {optimizer}.step() waited for rank {rank}, which holds the same weights in data-parallel "
            f"{where} and has not stepped.",
            [rank],
            TimeoutError(f"{self.failures.timeout:g} s (pipeline.timeout)"),
        )

    def _refuse(self, update: str, mine: Any, theirs: Any, rank: int) -> None:
        (names, step, ours), (other_names, _, others) = mine, theirs
        if names != other_names:
            return  # each steps parameters of its own, as in ZeRO
        pair = sorted([self.mpu.rank, rank])
        first, second = (ours, others) if self.mpu.rank == pair[0] else (others, ours)
        place = f"  Ranks {pair[0]} and {pair[1]}, step {step + 1} of {update}"
        replicas = f"{self.mpu.dp_cp.size} {self._replicas}"
        if rank not in self.mpu.copies.ranks:  # it holds other experts
            ours = {name: two for name, two in ours.items() if name not in self._experts}
        weights = {name: (first[name][1], second[name][1]) for name in ours if name in others}
        weights = {name: two for name, two in weights.items() if two[0] != two[1]}
        gradients = ((name, ours[name][0], others[name][0]) for name in ours if name in others)
        different = [name for name, one, two in gradients if one != two and OVERFLOW not in (one, two)]
        if weights and update == _UPDATE:  # replicas may update in other forwards, so that it is no proof
            self._told_of_own_updates = True
            warn_user(unlike_weights(replicas, place, pair, weights, own=True))
            return
        if weights:
            text = unlike_weights(replicas, place, pair, weights, own=False)
        elif different:
            text = unlike_gradients(replicas, place, different, group_call(self.mpu))
        else:
            return
        self.failures.publish(text)
        raise ConsistencyError(text)


_WRAPPER = Optimizer.profile_hook_step(lambda: None).__code__


def _inside_another_step() -> bool:
    """Return whether an optimizer's step is called by that of another one (ZeroRedundancyOptimizer's, a wrapper's)."""
    frame, found = sys._getframe(1), 0
    while frame is not None and found < 2:
        found += frame.f_code is _WRAPPER
        frame = frame.f_back  # type: ignore[assignment]
    return found > 1


def adds_router_loss(model: Any, given: Mapping[str, Any]) -> bool:
    """Return whether a forward with these arguments adds the routers' auxiliary loss to its own.

    It is not a mean over samples, so replicas make another one than one process.
    """
    config = getattr(model, "config", None)
    configs = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    asked = given.get("output_router_logits")
    if asked is None:
        asked = any(getattr(each, "output_router_logits", False) for each in configs)
    return bool(asked)
