"""A plain call of a model that is cut into stages, and ``generate``: through all stages, the result on every rank."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from autopar.pipeline_parallel.outputs import complete, partial
from autopar.pipeline_parallel.p2p import Post
from autopar.pipeline_parallel.rng import draws_of, seed_of_pass
from autopar.pipeline_parallel.stage import run_stage
from autopar.pipeline_parallel.stage_forward import Conductor, Course, Handed, keep_length
from autopar.plan.stages import StagePlan

__all__ = ["call_through_stages"]


@torch.no_grad()
def call_through_stages(
    module: nn.Module,
    span: tuple[int, int],
    conductor: Conductor,
    plan: StagePlan,
    rank: int,
    post: Post,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What ``module(*args, **kwargs)`` of the whole model returns, on every rank; without gradients.

    Every rank calls it with the same arguments. A key-value cache holds this rank's layers only.

    Args:
        module: the model, or a model inside it (an encoder by itself).
        span: which elements it runs: from, up to.
    """
    start, stop = span
    if conductor.encoder is not None and kwargs.get("encoder_outputs") is not None and stop > conductor.encoder + 1:
        start = max(start, conductor.encoder + 1)
    stages = [s for s in range(plan.stages) if plan.bounds[s] < stop and plan.bounds[s + 1] > start]
    cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
    plain = functools.partial(type(module).forward, module)  # the hooks around it have run
    owner = plan.rank_of[stages[-1]]
    ran = any(plan.rank_of[stage] == rank for stage in stages)
    post.begin()
    try:
        lost = post.failures.blame("a collective in a plain call of the model", post.failures.mpu.tp.ranks)
        with seed_of_pass(plan.stages, module.training) as seed, lost:
            result, used = _through(plain, stages, conductor, plan, rank, post, args, kwargs, seed)
        cache = cache or used
        if owner == rank:
            for other in range(plan.ranks):
                if other != rank:
                    post.send((complete(result), getattr(result, "_withheld", ())), other, **_RESULT)
        else:
            result = partial(*post.receive(owner, **_RESULT, cache=cache))
        post.settle()
    except Exception as error:
        waiting = [(other, _RESULT["tag"]) for other in range(plan.ranks) if owner == rank and other != rank]
        for stage, following in itertools.pairwise(stages):
            if plan.rank_of[stage] == rank != plan.rank_of[following]:
                waiting.append((plan.rank_of[following], _how(stage, following)["tag"]))
        post.send_failure(error, waiting)
        raise
    if not ran and cache is not None:
        _keep_lengths(module, cache, kwargs)
    return result


def _through(
    plain: Any,
    stages: list[int],
    conductor: Conductor,
    plan: StagePlan,
    rank: int,
    post: Post,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    seed: int | None,
) -> tuple[Any, Cache | None]:
    """What this rank's stages make, the last one's result if it is here, and the cache that they used."""
    handed: Handed | None = None
    result: Any = None
    cache: Cache | None = None
    for number, stage in enumerate(stages):
        if plan.rank_of[stage] != rank:
            continue
        if number and plan.rank_of[stages[number - 1]] != rank:
            handed = Handed(*post.receive(plan.rank_of[stages[number - 1]], **_how(stages[number - 1], stage)))
        last = number == len(stages) - 1
        course = Course(plan.bounds[stage], plan.bounds[stage + 1], last, handed if number else None)
        with draws_of(seed, stage):
            result = run_stage(plain, conductor, course, args, dict(kwargs))
        cache = cache or course.cache
        if not last:
            handed = result
            following = plan.rank_of[stages[number + 1]]
            if following != rank:
                post.send((handed.output, handed.encoder), following, **_how(stage, stages[number + 1]))
    return result, cache


_RESULT: dict[str, Any] = {"way": "forward", "tag": 1_000_001, "what": "the model's result"}


def _how(origin: int, stage: int) -> dict[str, Any]:
    return {"way": "forward", "tag": 1_000_002 + stage, "what": f"stage {origin}'s output (for stage {stage})"}


def _keep_lengths(module: nn.Module, cache: Cache, kwargs: dict[str, Any]) -> None:
    """On a rank that ran nothing of it: the length that its cache would have."""
    tokens = kwargs.get("decoder_input_ids", kwargs.get("input_ids"))
    if isinstance(tokens, torch.Tensor):
        layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
        for index in range(len(layers)):
            keep_length(cache, index, tokens.shape[0], tokens.shape[1], tokens)
