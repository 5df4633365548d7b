"""The end of ``generate``, agreed over the ranks of a model replica: what each finds by itself may differ.

A clock (``max_time``) runs out on one rank a token before it does on another, and a criterion of the user's may look at
anything. Ranks that stop at other tokens part for good. Length, ends of texts and the like follow from the tokens,
which are the same on all ranks: for those nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.generation.stopping_criteria import ConfidenceCriteria

from autopar.distributed import gloo_collectives
from autopar.distributed.collectives import run
from autopar.distributed.failures import FailureLog
from autopar.errors import ConfigError

__all__ = ["AgreedCriteria", "agreed", "refuse_continuous_batching"]

_OF_TOKENS = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria, ConfidenceCriteria)


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


def agreed(criteria: Sequence[Any], failures: FailureLog) -> StoppingCriteriaList:
    """Return the criteria, with those on which ranks may differ as one on which they agree, the last one."""
    apart = [one for one in criteria if type(one) not in _OF_TOKENS]
    alike = [one for one in criteria if type(one) in _OF_TOKENS]
    return StoppingCriteriaList([*alike, AgreedCriteria(apart, failures)] if apart else alike)


def refuse_continuous_batching(self: Any, *_: Any, **__: Any) -> NoReturn:
    """Refuse what transformers' ``generate_batch`` and its managers begin with."""
    size = self._autopar_failures.mpu.model.size
    raise ConfigError(
        f"continuous batching (generate_batch, paged attention) of {type(self).__name__}: each of the {size} ranks of "
        "a model replica would\n  choose by itself which requests run next, and they compute one model together.\n"
        "  Use model.generate(**tokenizer(prompts, padding=True, padding_side='left', return_tensors='pt')) on all of "
        "them; of TRL\n  leave use_transformers_paged (use_transformers_continuous_batching) out. Replicas without "
        "tensor, context and\n  pipeline parallelism have it."
    )
