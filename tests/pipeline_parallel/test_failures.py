"""A stage that dies or fails in the middle of a schedule: the others end with an error that names it, and soon."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.errors import AutoparError, ConfigError, PipelineError, UnsupportedModelError
from tests.parity import language_batches
from tests.pipeline_parallel.deep import deep
from tests.worlds import distributed, spawn

TIMEOUT = 6


def _piped(pp: int) -> torch.nn.Module:
    sizes = {"pipeline_parallel_size": pp}
    return autopar.initialize(deep("gpt2", 4), {"model_parallelism": sizes, "pipeline": {"timeout": TIMEOUT}})


def _die_in_the_third_forward(doomed: int) -> None:
    piped = _piped(4)
    forwards = []

    def count(*_: object) -> None:
        forwards.append(None)
        if dist.get_rank() == doomed and len(forwards) == 3:
            os._exit(1)

    piped.register_forward_pre_hook(count)
    started = time.monotonic()
    with pytest.raises(PipelineError) as info:
        piped.execute_pipeline(language_batches(131, count=1, batch=6)[0])
    assert time.monotonic() - started < 2 * TIMEOUT + 5
    assert f"from rank {doomed} (place {doomed}): that process ended" in str(info.value)


@pytest.mark.parametrize("doomed", [0, 2, 3])
def test_a_rank_that_dies(doomed: int) -> None:
    spawn(__name__, "_die_in_the_third_forward", 4, 90.0, (doomed,), expect_dead=(doomed,))


@distributed(world_size=3)
def test_a_stage_that_hangs() -> None:
    piped = _piped(3)
    if dist.get_rank() == 2:
        piped.register_forward_pre_hook(lambda *_: time.sleep(TIMEOUT + 6))
    started = time.monotonic()
    message = r"rank 1 .*waited up to 6 s \(pipeline.timeout\) for stage 2's gradient of micro-batch 0"
    with pytest.raises(PipelineError, match=message if dist.get_rank() < 2 else None):  # also told to rank 0
        piped.execute_pipeline(language_batches(131, count=1, batch=4)[0])
    assert time.monotonic() - started < 3 * TIMEOUT


@distributed(world_size=3)
def test_an_error_on_one_stage_ends_all() -> None:
    piped = _piped(3)
    (batch,) = language_batches(131, count=1, batch=4)
    del batch["labels"]
    started = time.monotonic()
    kind = ConfigError if dist.get_rank() == 2 else PipelineError
    with pytest.raises(kind, match="hold no loss: put labels into the batch"):
        piped.execute_pipeline(batch)
    assert time.monotonic() - started < TIMEOUT


@pytest.mark.parametrize("doomed", [0, 1, 2])
@distributed(world_size=3)
def test_a_plain_call_that_fails_on_one_stage_ends_all_and_the_next_one_works(doomed: int) -> None:
    plain = deep("gpt2", 4).eval()
    piped = _piped(3).eval()
    (batch,) = language_batches(131, count=1, batch=2)
    place = (0, 2, 3)[doomed]
    failing = list(piped.transformer.h)[place]

    def fail(*_: object) -> None:
        if dist.get_rank() == doomed:
            raise ValueError("something broke")

    for call in (lambda: piped(**batch), lambda: piped.generate(batch["input_ids"], max_new_tokens=3)):
        hook = failing.mlp.register_forward_pre_hook(fail)
        started = time.monotonic()
        with (
            pytest.raises((ValueError, UnsupportedModelError, PipelineError), match="something broke"),
            torch.no_grad(),
        ):
            call()
        assert time.monotonic() - started < TIMEOUT
        hook.remove()
        with torch.no_grad():
            assert torch.equal(piped(**batch).logits, plain(**batch).logits)


@distributed(world_size=2)
def test_a_plain_call_with_wrong_arguments_leaves_nothing_behind() -> None:
    plain = deep("gpt2", 4).eval()
    piped = _piped(2).eval()
    (batch,) = language_batches(131, count=1, batch=2)
    for wrong in (torch.zeros(3, 5), {"mask": 1}):
        started = time.monotonic()
        with pytest.raises((RuntimeError, AttributeError, TypeError, ValueError, AutoparError)), torch.no_grad():
            piped(input_ids=batch["input_ids"], attention_mask=wrong)
        assert time.monotonic() - started < TIMEOUT
        with torch.no_grad():
            assert torch.equal(piped(**batch).logits, plain(**batch).logits)
