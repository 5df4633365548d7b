"""Traces of torch.profiler name collectives, stages and micro-batches; without a profiler nothing is made."""

from typing import Any

import pytest
import torch

import autopar
from autopar.distributed import autograd_functions
from autopar.distributed.axis import Axis
from tests.harness.worlds import pooled
from tests.parity import language_batches
from tests.small import gpt2, llama, parallel


def _names(work: Any) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as made:
        work()
    return {event.name for event in made.events() or ()}


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_collectives_of_a_tensor_parallel_step_are_named() -> None:
    model = parallel(llama(), 2)
    (batch,) = language_batches(131, count=1)
    batch["labels"] = batch["input_ids"]
    shape = [*batch["input_ids"].shape, 24]

    def step() -> None:
        model(**batch).loss.backward()

    names = _names(step)
    assert f"all-reduce over tp {shape}: exit of a sharded region" in names
    assert f"all-reduce over tp {shape}: gradient at the entry of a sharded region" in names
    assert any(name.startswith("all-gather over tp ") for name in names)


@pooled(world_size=2)
def test_actions_of_a_pipeline_are_named() -> None:
    model = autopar.initialize(gpt2(n_layer=4), {"pp": 2, "pipeline": {"microbatch_size": 1}})
    (batch,) = language_batches(131, count=1, batch=2)
    names = _names(lambda: model.execute_pipeline(batch))
    stage = model.mpu.pp.rank
    for microbatch in (0, 1):
        for action in ("forward", "backward"):
            assert f"stage {stage}: {action} of micro-batch {microbatch}" in names
    assert f"receive: stage {1 - stage}'s {('gradient', 'output')[stage]} of micro-batch 1 (for stage {stage})" in names


def test_no_name_is_made_while_no_profiler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> str:
        raise AssertionError("a name was made")

    monkeypatch.setattr(autograd_functions, "_described", fail)
    monkeypatch.setattr(autograd_functions.profiler, "record_function", fail)
    named = autograd_functions.named_collective("all-reduce: here")(lambda x, axis: x)
    with autograd_functions.record(fail):
        assert named(3, None) == 3
    assert not autograd_functions.is_profiling()


def test_a_profiler_is_seen_and_a_name_has_collective_axis_shape_and_place() -> None:
    axis = Axis("dp", None, [0], 0)
    named = autograd_functions.named_collective("all-gather: here")(lambda x, axis: autograd_functions.is_profiling())
    seen = []
    assert "all-gather over dp [3, 5]: here" in _names(lambda: seen.append(named(torch.ones(3, 5), axis)))
    assert seen == [True]

    def work() -> None:
        with autograd_functions.record("{} {}".format, "some", "words"):
            pass

    assert "some words" in _names(work)
