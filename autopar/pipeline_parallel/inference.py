"""Run plain calls of a model in stages, also those of ``generate``: every rank gets the result."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from autopar.distributed.rng import base_seed
from autopar.errors import ConfigError
from autopar.pipeline_parallel.batch_checks import compare_call
from autopar.pipeline_parallel.engine import Engine
from autopar.pipeline_parallel.outputs import complete, find_cache, incomplete, record_lengths, unavailable
from autopar.pipeline_parallel.p2p import Message
from autopar.pipeline_parallel.stage_forward import StageForward, StageOutput, Streams, run_stage

_RESULT = Message("the model's result", 1_000_001)
_COMPARED = "_autopar_compared"  # of a cache with which the stages were called already


@torch.no_grad()
def call_through_stages(
    module: nn.Module,
    span: tuple[int, int],
    engine: Engine,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return what ``module(*args, **kwargs)`` of the whole model returns, on every rank; without gradients.

    Every rank calls it with the same arguments. A KV cache holds this rank's layers only.

    Args:
        module: the model, or a model inside it (an encoder by itself).
        span: which elements it runs: from, up to.

    Raises:
        ConfigError: a KV cache was given, and ranks have several stages.
        ConsistencyError: stages got different arguments in the first call with a cache, or in one without.
    """
    start, stop = span
    context, plan, p2p = engine.context, engine.plan, engine.p2p
    if context.encoder is not None and kwargs.get("encoder_outputs") is not None and stop > context.encoder + 1:
        start = max(start, context.encoder + 1)
    stages = [s for s in range(plan.stages) if plan.bounds[s] < stop and plan.bounds[s + 1] > start]
    given = find_cache(args, kwargs)
    _check_cache(given, [plan.rank_of[stage] for stage in stages])
    plain = functools.partial(type(module).forward, module)  # the hooks around it have run
    rank, owner = p2p.axis.rank, plan.rank_of[stages[-1]]
    with p2p.one_pass():
        if engine.steps is not None and not hasattr(given, _COMPARED):  # in generate the first call only
            compare_call(module, args, kwargs, p2p)
        if given is not None:
            setattr(given, _COMPARED, True)
        blame = p2p.failures.blame("a collective in a plain call of the model", p2p.failures.mpu.tp_cp.ranks)
        with base_seed(plan.stages > 1 and module.training) as seed, blame:
            result, used = _run_stages(plain, stages, engine, args, kwargs, seed)
        cache = given or used
        if owner == rank:
            p2p.send_to_others((complete(result), unavailable(result)), _RESULT)
        else:
            result = incomplete(*p2p.receive(owner, _RESULT, cache=cache))
        p2p.wait_sent()
    if cache is not None and all(plan.rank_of[stage] != rank for stage in stages):
        record_lengths(cache, kwargs)
    return result


def _check_cache(cache: Cache | None, ranks: list[int]) -> None:
    """Check that each rank runs one stage with a KV cache: a second one would find its lengths after this call.

    Raises:
        ConfigError: on every rank.
    """
    if cache is not None and len(set(ranks)) < len(ranks):
        raise ConfigError(
            f"a KV cache goes through {len(ranks)} stages on {len(set(ranks))} ranks: of several on a rank the later "
            "ones read how long\n  the sequence was from a cache that the first has extended already. Use "
            "generate(..., use_cache=False), or a schedule with\n  one stage on each rank: 1f1b, gpipe, zero-bubble."
        )


def _run_stages(
    plain: Any,
    stages: list[int],
    engine: Engine,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    seed: int | None,
) -> tuple[Any, Cache | None]:
    """The output of this rank's stages, the last one's result if it is here, and the cache that they used."""
    plan, p2p = engine.plan, engine.p2p
    output: StageOutput | None = None
    result: Any = None
    cache: Cache | None = None
    for stage, before, after in zip(stages, [None, *stages], [*stages[1:], None], strict=False):
        if plan.rank_of[stage] != p2p.axis.rank:
            continue
        if before is not None and plan.rank_of[before] != p2p.axis.rank:
            output, seed = p2p.receive(plan.rank_of[before], _output(before, stage))
        received = None if before is None else output
        bounds, streams = plan.bounds[stage : stage + 2], Streams(seed, plan.stages)
        forward = StageForward(engine.context, bounds, after is None, received, streams, stage)
        result = run_stage(forward, plain, args, dict(kwargs))
        cache = cache or forward.cache
        if after is not None:
            output = result
            if plan.rank_of[after] != p2p.axis.rank:
                p2p.send((output, seed), plan.rank_of[after], _output(stage, after))
    return result, cache


def _output(origin: int, stage: int) -> Message:
    return Message(f"stage {origin}'s output (for stage {stage})", 1_000_002 + stage)
