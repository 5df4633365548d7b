"""``generate`` on the ranks of a model replica, which choose the same tokens and stop together."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
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
from transformers.generation.streamers import BaseStreamer, TextStreamer

from autopar.distributed import gloo_collectives
from autopar.distributed.collectives import run
from autopar.distributed.digest import extremes
from autopar.distributed.failures import FailureLog
from autopar.distributed.rng import sync_generators
from autopar.setup.steps import Given, Parallelized
from autopar.swap import bind, unbind
from autopar.tensor_parallel.apply import generating_methods
from autopar.tensor_parallel.regions import Region

_OWNER = "generation"
_OF_TOKENS = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria, ConfidenceCriteria)
_streamers: weakref.WeakKeyDictionary[Region, GuardedStreamer] = weakref.WeakKeyDictionary()  # of running calls


def generate_together(model: nn.Module, state: Parallelized, given: Given) -> None:
    """After the hooks of forwards, which keep what the methods need on each Hugging Face model: replace the methods."""
    methods: dict[str, Any] = {"generate": _generate}
    for module in (each for each in state.inner_of(model).modules() if isinstance(each, PreTrainedModel)):
        names = generating_methods(module, state.plan, state.mpu)
        if "generate_batch" in names:
            from autopar.features.generation import continuous_batching as batching

            methods |= {each.__name__: each for each in (batching.init_continuous_batching, batching.generate_batch)}
        bind(module, _OWNER, **{name: methods[name] for name in names})
        if "generate" in names:
            bind(module, _OWNER, _get_stopping_criteria=_get_stopping_criteria)
    state.undo.append(_undo)


def _undo(model: nn.Module, state: Parallelized) -> None:
    if state.mpu.world_size > 1:
        from autopar.features.generation import continuous_batching

        for module in (module for module in model.modules() if isinstance(module, PreTrainedModel)):
            continuous_batching.forget(module)
    unbind(model, _OWNER)


class AgreedCriteria(StoppingCriteria):
    """Stop a sequence on all ranks of a model replica as soon as one of the criteria says so on one of them."""

    def __init__(self, criteria: Sequence[Any], failures: FailureLog) -> None:
        self.criteria, self.failures = StoppingCriteriaList(criteria), failures

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        """Return which sequences are done, ``[batch]``. A collective of the replica."""
        axis = self.failures.mpu.model
        done = self.criteria(input_ids, scores, **kwargs).to(torch.int32)
        with self.failures.blame("agreeing whether generate has come to its end", axis.ranks):
            run(gloo_collectives.all_reduce, axis, done)
        return done > 0

    def __getattr__(self, name: str) -> Any:
        """Return what one of the criteria has: generate looks for ``eos_token_id``."""
        for one in vars(self).get("criteria", ()):
            if hasattr(one, name):
                return getattr(one, name)
        raise AttributeError(name)


class GuardedStreamer(BaseStreamer, StoppingCriteria):
    """A streamer that may raise on one rank alone: then ``generate`` stops on all ranks of the replica.

    Args:
        streamer: None on a rank without one.

    Attributes:
        error: raised by the streamer.
    """

    def __init__(self, streamer: Any) -> None:
        self.streamer = streamer
        self.error: Exception | None = None

    def put(self, value: Any) -> None:
        """Give tokens to the streamer, until it raises."""
        self._try("put", value)

    def end(self) -> None:
        """Tell the streamer that there are no more tokens."""
        self._try("end")

    def _try(self, method: str, *args: Any) -> None:
        try:
            if self.streamer is not None and self.error is None:
                getattr(self.streamer, method)(*args)
        except Exception as error:
            self.error = error

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return which sequences are done: all of them, if the streamer has raised."""
        return torch.full((len(input_ids),), self.error is not None, device=input_ids.device)


def agreed(criteria: Sequence[Any], failures: FailureLog) -> StoppingCriteriaList:
    """Return the criteria, with those on which ranks may differ as one on which they agree, the last one."""
    apart = [one for one in criteria if type(one) not in _OF_TOKENS]
    alike = [one for one in criteria if type(one) in _OF_TOKENS]
    return StoppingCriteriaList([*alike, AgreedCriteria(apart, failures)] if apart else alike)


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``generate`` that samples alike on all ranks of a model replica, from the first one's random state.

    A ``TextStreamer`` prints on the first rank of the replica only; what gives the text to a program does so on all.
    A streamer that raises ends this call on all ranks. It raises where it did; other ranks return what there is.
    Replicas that share experts go on until the last of them has come to its end.
    """
    failures: FailureLog = self._autopar_failures
    check = self._autopar_check
    mpu, region = failures.mpu, self._autopar_region
    if region.check_thread is not None:
        region.check_thread()
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
        guard = GuardedStreamer(kwargs.get("streamer"))
        given = guard.streamer is not None
        if extremes([int(given)], mpu.model.group)[0][0] if mpu.model.size > 1 else given:  # on some rank
            _streamers[region] = kwargs["streamer"] = guard
        first = contextlib.nullcontext() if check is None else check.first_only()
        try:
            with first, keep_activations(self):
                tokens = type(self).generate(self, *args, **kwargs)
        finally:
            _streamers.pop(region, None)
    if guard.error is not None:
        raise guard.error
    return tokens


@contextlib.contextmanager
def keep_activations(model: nn.Module) -> Iterator[None]:
    """Keep activations inside of ``with``: transformers' blocks that recompute in training mode forget their cache."""
    on = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True]
    for module in on:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in on:
            module.gradient_checkpointing = True  # type: ignore[assignment]


def _get_stopping_criteria(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the criteria that ``generate`` asks after each token; transformers' own method of this private name."""
    guard, criteria = _streamers.get(self._autopar_region), type(self)._get_stopping_criteria(self, *args, **kwargs)
    return agreed([*criteria, *([] if guard is None else [guard])], self._autopar_failures)
