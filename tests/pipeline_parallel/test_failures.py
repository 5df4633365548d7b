"""A stage that dies or fails in the middle of a schedule: the others end with an error that names it, and soon."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForSequenceClassification

import autopar
from autopar.errors import ConfigError, ConsistencyError, PipelineError, UnsupportedModelError
from autopar.features.megatron.schedules import get_forward_backward_func
from tests.harness.tiers import mainly, rows
from tests.harness.worlds import distributed, pooled
from tests.parity import language_batches
from tests.pipeline_parallel.deep import deep
from tests.timeouts import TIMEOUT, hurry, say, told_at_once, wait_for

LONG = 30  # where nobody waits for it
SOON = 6


@contextlib.contextmanager
def _soon(kind: type[Exception] | tuple[type[Exception], ...], match: str) -> Iterator[Any]:
    """Assert that what is done inside ends with this error, and long before the time-out."""
    started = time.monotonic()
    with pytest.raises(kind, match=match) as info:
        yield info
    assert time.monotonic() - started < SOON


def _piped(pp: int) -> torch.nn.Module:
    return autopar.initialize(deep("gpt2", 4), {"pp": pp, "pipeline": {"timeout": LONG}})


@pytest.mark.tier("all")
@distributed(world_size=3)  # its time-out breaks the connections of the world
def test_a_stage_that_hangs() -> None:
    piped = _piped(3)
    (batch,) = language_batches(131, count=1, batch=4)
    piped.execute_pipeline(batch)
    hurry(piped)
    if dist.get_rank() == 2:
        piped.register_forward_pre_hook(lambda *_: wait_for("noticed", [0, 1]))
    started = time.monotonic()
    message = rf"rank 1 .*waited {TIMEOUT} s \(pipeline.timeout\) for stage 2's gradient of micro-batch 0"
    with pytest.raises(PipelineError, match=message if dist.get_rank() < 2 else None):  # also told to rank 0
        piped.execute_pipeline(batch)
    say("noticed")
    assert time.monotonic() - started < TIMEOUT + 12


@pytest.mark.tier("test")
@pooled(world_size=3)
@told_at_once
def test_an_error_on_one_stage_ends_all() -> None:
    piped = _piped(3)
    (batch,) = language_batches(131, count=1, batch=4)
    del batch["labels"]
    kind = ConfigError if dist.get_rank() == 2 else PipelineError
    with _soon(kind, "must contain a loss"):
        piped.execute_pipeline(batch)
    _works_again(piped)


@pytest.mark.parametrize("doomed", mainly(1, 0, 2, later="sweep"))
@pooled(world_size=3)
@told_at_once
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
        with _soon((ValueError, UnsupportedModelError, PipelineError), "something broke"), torch.no_grad():
            call()
        hook.remove()
        with torch.no_grad():
            assert torch.equal(piped(**batch).logits, plain(**batch).logits)


def _batches(count: int, batch: int = 4, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    return language_batches(131, count=count, batch=batch, seed=seed)


def _works_again(piped: torch.nn.Module) -> None:
    plain = deep("gpt2", 4)
    (batch,) = _batches(1, seed=9)
    loss = piped.execute_pipeline(batch, broadcast_loss=True).loss
    assert abs(loss - plain(**batch).loss).item() < 1e-5


@pytest.mark.parametrize("doomed", mainly(0, 1, 2, later="sweep"))
@pooled(world_size=3)
@told_at_once
def test_a_stage_that_fails_in_its_last_backward(doomed: int) -> None:
    piped = _piped(3)
    (batch,) = _batches(1)
    weight = piped.transformer.h[(0, 2, 3)[doomed]].mlp.c_fc.weight
    backwards = []

    def fail(gradient: torch.Tensor) -> None:
        backwards.append(None)
        if dist.get_rank() == doomed and len(backwards) == 4:
            raise ValueError("something broke at the end")

    hook = weight.register_hook(fail) if dist.get_rank() == doomed else None
    kind = ValueError if dist.get_rank() == doomed else PipelineError
    with _soon(kind, "something broke at the end"):
        piped.execute_pipeline(batch)
    if hook is not None:
        hook.remove()
    piped.zero_grad()
    _works_again(piped)


ENDS = rows(  # who has no more data, whether in a later step, whether without a backward
    test=[(0, True, False)],
    all=[(2, True, True), (0, False, True), (2, False, False)],
    sweep=[(2, True, False), (0, True, True), (0, False, False), (2, False, True)],
)


@pytest.mark.parametrize(("doomed", "later", "forward_only"), ENDS)
@pooled(world_size=3)
@told_at_once
def test_data_that_ends_on_one_stage(doomed: int, later: bool, forward_only: bool) -> None:
    piped = _piped(3)
    batches = _batches(2)
    data = iter(batches[: 1 + later - (dist.get_rank() == doomed)])
    if later:
        piped.execute_pipeline(data, forward_only=forward_only)
    with _soon(ConsistencyError, f"data iterator has ended on rank {doomed}, but not on"):
        piped.execute_pipeline(data, forward_only=forward_only)
    _works_again(piped)


@pytest.mark.parametrize("forward_only", mainly(False, True, later="sweep"))
@pytest.mark.parametrize("count", mainly(1, 0, 2, later="sweep"))
@pooled(world_size=3)
@told_at_once
def test_data_that_ends_on_all_stages(count: int, forward_only: bool) -> None:
    piped = _piped(3)
    data = iter(_batches(count))
    for _ in range(count):
        piped.execute_pipeline(data, forward_only=forward_only)
    started = time.monotonic()
    for _ in range(3):
        with pytest.raises(StopIteration):
            piped.execute_pipeline(data, forward_only=forward_only)
    assert time.monotonic() - started < 1.0  # nobody waits for anything
    _works_again(piped)


@pytest.mark.parametrize("later", mainly(True, False, later="sweep"))
@pooled(world_size=3)
@told_at_once
def test_a_loader_that_fails_on_one_stage(later: bool) -> None:
    piped = _piped(3)

    def read() -> Any:
        yield from _batches(int(later))
        if dist.get_rank() == 1:
            raise OSError("the disk is gone")
        yield from _batches(1)

    data = read()
    if later:
        piped.execute_pipeline(data)
    kind = OSError if dist.get_rank() == 1 else PipelineError
    with _soon(kind, "the disk is gone"):
        piped.execute_pipeline(data)
    _works_again(piped)


@pytest.mark.tier("test")
@pytest.mark.parametrize("what", mainly("labels", "ids", "count", later="sweep"))
@pooled(world_size=3)
@told_at_once
def test_another_batch_on_one_stage_after_the_first_step(what: str) -> None:
    piped = _piped(3)
    first, second = _batches(2)
    piped.execute_pipeline(first)
    if dist.get_rank() == 1:
        if what == "count":
            second = {name: tensor[:3] for name, tensor in second.items()}
        else:
            second = {**second, {"ids": "input_ids", "labels": "labels"}[what]: first["labels"].clamp(min=0)}
    counts = "number of micro-batches: rank 0: 4, rank 1: 3, rank 2: 4"
    name = {"ids": "input_ids", "labels": "labels", "count": counts}[what]
    with _soon(ConsistencyError, "got different batches") as info:
        piped.execute_pipeline(second)
    assert name in str(info.value)
    piped.zero_grad()
    _works_again(piped)


@pooled(world_size=2)
@told_at_once
def test_data_of_the_megatron_loop_that_ends_on_one_stage() -> None:
    piped = _piped(2)
    batches = _batches(4, batch=2)

    def forward_step(data_iterator: Any, model: Any) -> Any:
        return model(**next(data_iterator)), lambda outputs: (outputs.loss, None)

    run = functools.partial(
        get_forward_backward_func(), forward_step_func=forward_step, model=piped, num_microbatches=4
    )
    for _ in range(2):  # with the first step's exchange, and then without
        started = time.monotonic()
        with pytest.raises(ConsistencyError, match="data iterator has ended on rank 1, but not on"):
            run(data_iterator=iter(batches[: 4 - dist.get_rank()]))
        with pytest.raises(StopIteration):
            run(data_iterator=iter(batches[:2]))
        assert time.monotonic() - started < SOON
        run(data_iterator=iter(batches))
    with pytest.raises(ConsistencyError, match="got different batches"):
        run(data_iterator=iter(batches if dist.get_rank() else batches[::-1]))
    piped.zero_grad()
    run(data_iterator=iter(batches))


@pooled(world_size=2)
@told_at_once
def test_a_missing_padding_token_is_named_and_not_the_model() -> None:
    config = LlamaConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=9)
    settings = {"model_parallelism": {"pipeline_parallel_size": 2}, "pipeline": {"microbatch_size": 2}}
    ids, labels = torch.arange(24).view(4, 6) % 9, torch.tensor([0, 1, 1, 0])
    batch = {"input_ids": ids, "labels": labels}
    message = "Cannot handle batch sizes > 1 if no padding token is defined."
    model = autopar.initialize(LlamaForSequenceClassification(config), settings)
    calls: list[Callable[[], Any]] = [lambda: model.execute_pipeline(batch), lambda: model(**batch)]
    for repeat in range(2):
        for call, mode in zip(calls, (True, False), strict=True):
            with pytest.raises((ValueError, PipelineError)) as info, torch.set_grad_enabled(mode):
                model.train(mode)
                call()
            last = model.mpu.is_pipeline_last_stage()
            assert type(info.value) is (ValueError if last else PipelineError)
            assert str(info.value) == message if last else message in str(info.value)
        if repeat == 0:  # the same error where one sample has gone through before
            model.train()
            model.execute_pipeline({name: value[:1] for name, value in batch.items()})
    model.config.pad_token_id = 0
    assert model(**batch).logits.shape == (4, 2)


@pooled(world_size=2)
@told_at_once
def test_an_error_of_the_models_own_code_stays_what_it_is() -> None:
    (batch,) = language_batches(131, count=1, batch=2)
    batch["labels"] = batch["labels"] + 1000
    model = autopar.initialize(deep("gpt2", 4), {"model_parallelism": {"pipeline_parallel_size": 2}})
    with pytest.raises((IndexError, PipelineError), match="Target 1") as info:
        model.execute_pipeline(batch)
    if model.mpu.is_pipeline_last_stage():
        assert type(info.value) is IndexError
        (note,) = info.value.__notes__
        assert note.startswith("Raised after the elements 2 to 3 of the pipeline.")
