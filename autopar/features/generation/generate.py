"""``generate`` on the ranks of a model replica: sample identical tokens and stop at the same time."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.stopping_criteria import ConfidenceCriteria
from transformers.generation.streamers import TextStreamer

from autopar.distributed import gloo_collectives
from autopar.distributed.collectives import run
from autopar.distributed.failures import FailureLog
from autopar.distributed.rng import sync_generators
from autopar.features.generation import continuous_batching as batching
from autopar.setup.steps import Given, Parallelized
from autopar.swap import bind, unbind
from autopar.tensor_parallel.apply import generating_methods

_OWNER = "generation"
_OF_TOKENS = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria, ConfidenceCriteria)


def generate_together(model: nn.Module, state: Parallelized, given: Given) -> None:
    """Replace the generation methods. The step runs after the hooks of forwards, whose data it uses."""
    methods = {each.__name__: each for each in (batching.init_continuous_batching, batching.generate_batch)}
    methods["generate"] = _generate
    for module in (each for each in state.inner_of(model).modules() if isinstance(each, PreTrainedModel)):
        names = generating_methods(module, state.plan, state.mpu)
        bind(module, _OWNER, **{name: methods[name] for name in names})
        if "generate" in names:
            bind(module, _OWNER, _get_stopping_criteria=_get_stopping_criteria)
    state.undo.append(_undo)


def _undo(model: nn.Module, state: Parallelized) -> None:
    for module in (module for module in model.modules() if isinstance(module, PreTrainedModel)):
        batching.forget(module)
    unbind(model, _OWNER)


class AgreedCriteria(StoppingCriteria):
    """Stop a sequence on all ranks of a model replica as soon as one criterion is met on one rank."""

    def __init__(self, criteria: Sequence[Any], failures: FailureLog) -> None:
        self.criteria, self.failures = StoppingCriteriaList(criteria), failures

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        """Return the flags of finished sequences, ``[batch]``. A collective of the replica."""
        axis = self.failures.mpu.model
        done = self.criteria(input_ids, scores, **kwargs).to(torch.int32)
        with self.failures.blame("agreeing whether generate has come to its end", axis.ranks):
            run(gloo_collectives.all_reduce, axis, done)
        return done > 0

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of one of the criteria; transformers reads ``eos_token_id``."""
        for one in vars(self).get("criteria", ()):
            if hasattr(one, name):
                return getattr(one, name)
        raise AttributeError(name)


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``generate`` with identical samples on all ranks of a model replica, from the first rank's random state.

    A ``TextStreamer`` prints on the first rank of the replica only; other streamers run on all ranks. Replicas that
    share experts continue until all of them have finished.
    """
    failures: FailureLog = self._autopar_failures
    check = self._autopar_check
    mpu = failures.mpu
    if self._autopar_region.check_thread is not None:
        self._autopar_region.check_thread()
    streamer = kwargs.get("streamer")
    prints = isinstance(streamer, TextStreamer) and type(streamer).on_finalized_text is TextStreamer.on_finalized_text
    if prints and mpu.model.rank != 0:
        kwargs["streamer"] = None
    if mpu.shards.size > mpu.tp.size:
        kwargs["synced_gpus"] = True
    with failures.deadline(), failures.blame("a collective in generate", mpu.model.ranks):
        if check is not None and mpu.pp.size == 1:
            check.check_call("generate")
        sync_generators(mpu.model)
        first = contextlib.nullcontext() if check is None else check.first_only()
        with first, batching.keep_activations(self):
            return type(self).generate(self, *args, **kwargs)


def _get_stopping_criteria(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the criteria of ``generate``; those that may differ by rank become one :class:`AgreedCriteria`."""
    criteria = type(self)._get_stopping_criteria(self, *args, **kwargs)
    apart = [one for one in criteria if type(one) not in _OF_TOKENS]
    same = [one for one in criteria if type(one) in _OF_TOKENS]
    return StoppingCriteriaList([*same, AgreedCriteria(apart, self._autopar_failures)] if apart else same)
