"""A rank of any axis that dies, fails or hangs: all others end with an error that names it, and soon."""

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LogitsProcessor, LogitsProcessorList

import autopar.pipeline_parallel.pipeline
from autopar.distributed.failures import GRACE
from autopar.errors import ConsistencyError, PipelineError
from autopar.features.megatron.schedules import get_forward_backward_func
from tests.harness.tiers import rows
from tests.harness.worlds import distributed, spawn
from tests.parity import language_batches
from tests.pipeline_parallel.deep import deep
from tests.timeouts import TIMEOUT, hang_until, hurry, say, wait_for

LONG = 30  # where nobody waits for it


def _parallel(tp: int, pp: int, transport: str = "gloo", **config: Any) -> tuple[torch.nn.Module, Any]:
    model = deep("gpt2", 4)
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "cpu_transport": transport}
    sections = {"model_parallelism": sizes, "pipeline": {"timeout": LONG, "microbatch_size": 1}, **config}
    return autopar.initialize(model, sections, optimizer=torch.optim.SGD(model.parameters(), 1e-3))


def _batch(model: torch.nn.Module, seed: int = 1) -> dict[str, torch.Tensor]:
    (batch,) = language_batches(131, count=1, batch=4, seed=seed + model.mpu.dp.rank)
    return batch


def _after_a_step(*mesh: int, transport: str = "gloo") -> torch.nn.Module:
    model, _ = _parallel(*mesh[:2], transport)
    model.execute_pipeline(_batch(model))
    hurry(model)
    return model


def _stay_until_done(ranks: set[int]) -> None:
    """Keep this process alive until these ranks have got so far: they may still be asking it."""
    say("done")
    wait_for("done", ranks)


def _die(tp: int, pp: int, doomed: int, when: str, transport: str = "gloo") -> None:
    zero = {"zero": {"stage": 1}, "gradient_clipping": 1.0} if when == "step" else {}
    model, optimizer = _parallel(tp, pp, transport, **zero)
    model.execute_pipeline(_batch(model))
    optimizer.step()
    forwards = []

    def count(*_: object) -> None:
        forwards.append(None)
        if dist.get_rank() == doomed and len(forwards) == 3:
            os._exit(1)

    if when == "forward":
        model.register_forward_pre_hook(count)
    elif when == "step" and dist.get_rank() == doomed:
        model.execute_pipeline(_batch(model))
        os._exit(1)
    started = time.monotonic()
    with pytest.raises(PipelineError) as info:
        model.execute_pipeline(_batch(model))
        optimizer.step()
    assert f"rank {doomed} has ended: its process " in str(info.value)
    assert time.monotonic() - started < 15, "not at once, but after the timeout"
    time.sleep(1)  # the others may still be asking this one; then its end tells those that wait for it


DEATHS = rows(  # tp, pp, dp; who dies, when, and what carries the collectives
    test=[((2, 2, 1), 3, "forward", "shm")],
    all=[((1, 2, 2), 0, "step", "gloo"), ((2, 1, 2), 3, "step", "gloo"), ((4, 1, 1), 3, "forward", "shm")],
    sweep=[((1, 2, 2), 3, "forward", "gloo"), ((2, 1, 2), 0, "forward", "gloo"), ((2, 2, 1), 0, "forward", "gloo")],
)


@pytest.mark.parametrize(("mesh", "doomed", "when", "transport"), DEATHS)
def test_a_rank_that_dies(mesh: tuple[int, int, int], doomed: int, when: str, transport: str) -> None:
    spawn(__name__, "_die", 4, 60.0, (*mesh[:2], doomed, when, transport), expect_dead=(doomed,))


ENDS = rows(
    test=[("hangs", (2, 2, 1), "shm")],
    all=[
        ("fails", (2, 2, 1), "gloo"),
        ("hangs", (1, 2, 2), "gloo"),
        ("fails", (2, 1, 2), "shm"),
        ("fails", (4, 1, 1), "gloo"),
    ],
    sweep=[
        ("fails", (1, 2, 2), "shm"),
        ("hangs", (2, 1, 2), "gloo"),
        ("fails", (4, 1, 1), "shm"),
        ("hangs", (2, 2, 1), "gloo"),
    ],
)


@pytest.mark.parametrize(("how", "mesh", "transport"), ENDS)
def test_a_rank_that(how: str, mesh: tuple[int, int, int], transport: str) -> None:
    spawn(__name__, "_end", 4, 60.0, (how, mesh, transport), expect_dead=(3,) if how == "hangs" else ())


def _end(how: str, mesh: tuple[int, int, int], transport: str) -> None:
    model, fails = _after_a_step(*mesh, transport=transport), how == "fails"

    def end(*_: object) -> None:
        if dist.get_rank() == 3:
            hang_until("done", {0, 1, 2}) if how == "hangs" else _broken()

    model.transformer.h[-1].mlp.register_forward_pre_hook(end)
    started, text = time.monotonic(), "something broke" if fails else "rank 3 said nothing"
    with pytest.raises(ValueError if fails and dist.get_rank() == 3 else PipelineError, match=text):
        model.execute_pipeline(_batch(model))
    assert time.monotonic() - started < TIMEOUT + (8 if fails else 2 * GRACE + 4)
    _stay_until_done({0, 1, 2, 3} if fails else {0, 1, 2})


@pytest.mark.tier("all")
@pytest.mark.parametrize("reduction", ["tokens", "microbatch"])
@pytest.mark.parametrize("pp", [1, 2])
@distributed(world_size=4)
def test_data_that_ends_on_one_replica(pp: int, reduction: str) -> None:
    config = {"pp": pp, "pipeline": {"timeout": LONG, "loss_reduction": reduction}}
    model = autopar.initialize(deep("gpt2", 4), config)
    replica = model.mpu.dp.rank
    started = time.monotonic()
    for later in (0, 1):
        data = iter([_batch(model, seed) for seed in range(later + (replica != 1))])
        for _ in range(later):
            model.execute_pipeline(data)
        others = "0, 2, 3" if pp == 1 else "0"
        text = f"ended on data-parallel replica 1 of {4 // pp}, but not on {others}."
        with pytest.raises(ConsistencyError, match=text):
            model.execute_pipeline(data)
        with pytest.raises(ConsistencyError, match=text):
            _megatron(model, iter([_batch(model)] * (replica != 1)))
    with pytest.raises(StopIteration):  # on all of them
        model.execute_pipeline(iter([]))
    with pytest.raises(StopIteration):
        _megatron(model, iter([]))
    with torch.no_grad():
        for _ in range(replica):  # replicas evaluate as much as they like
            model.execute_pipeline(_batch(model), forward_only=True)
    loss = model.execute_pipeline(_batch(model), broadcast_loss=True).loss
    if reduction == "tokens":
        assert abs(loss - deep("gpt2", 4)(**_batch(model)).loss).item() < 1e-5
    assert time.monotonic() - started < 8


def _megatron(model: torch.nn.Module, data: Any) -> None:
    def forward_step(data_iterator: Any, model: Any) -> Any:
        return model(**next(data_iterator)), lambda outputs: (outputs.loss, None)

    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=data, model=model, num_microbatches=1, forward_only=False
    )


def _fail_while_averaging(model: torch.nn.Module) -> None:
    model.execute_pipeline(_batch(model))
    hurry(model)
    if dist.get_rank() == 3:
        model._autopar.dp.replicas._end = _broken
    model.execute_pipeline(_batch(model))


def _fail_in_the_first_batch(model: torch.nn.Module) -> None:
    def data() -> Any:
        yield _broken() if dist.get_rank() == 3 else _batch(model)

    hurry(model)
    model.execute_pipeline(data())


def _fail_in_generate(model: torch.nn.Module) -> None:
    class Processor(LogitsProcessor):
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return _broken() if dist.get_rank() == 3 and ids.shape[1] > 8 else scores

    ids = _batch(model)["input_ids"]
    with torch.no_grad():
        model.eval().generate(ids, max_new_tokens=1)
        hurry(model)
        model.generate(ids, max_new_tokens=5, logits_processor=LogitsProcessorList([Processor()]))


def _broken(*_: Any) -> Any:
    raise ValueError("something broke")


PLACES = {
    "averaging": (_fail_while_averaging, 1, 2, (2,)),  # what fails, tp, pp, who waits for it
    "first batch": (_fail_in_the_first_batch, 1, 2, (0, 1, 2)),
    "generate over stages": (_fail_in_generate, 1, 2, (1,)),
    "generate over shards": (_fail_in_generate, 4, 1, (0, 1, 2)),
}


@pytest.mark.tier("all")
@pytest.mark.parametrize("place", PLACES)
@distributed(world_size=4)
def test_a_rank_that_fails_outside_of_the_stages(place: str) -> None:
    fail, tp, pp, waiting = PLACES[place]
    model, _ = _parallel(tp, pp)
    if dist.get_rank() == 3:
        with pytest.raises(ValueError, match="something broke"):
            fail(model)
    elif dist.get_rank() in waiting:
        with pytest.raises((PipelineError, ConsistencyError), match="something broke"):
            fail(model)
    else:
        fail(model)
    _stay_until_done({0, 1, 2, 3})


def _hang_before_gradients_are_reduced(stage: int) -> None:
    """Rank 3, on the last stage, in a micro-batch: rank 2, which has the same weights, waits for its rows."""
    model, _ = _parallel(1, 2, zero={"stage": stage})
    model.execute_pipeline(_batch(model))
    hurry(model)

    def criterion(outputs: Any, _: Any) -> torch.Tensor:
        if dist.get_rank() == 3:
            hang_until("done", {2})
        loss: torch.Tensor = outputs.loss
        return loss

    text = r"(?s)gathering weights and reducing gradients over the data-parallel replicas \(FSDP2\).*rank 3 "
    with pytest.raises(PipelineError, match=text if dist.get_rank() == 2 else None):
        model.execute_pipeline(_batch(model), criterion=criterion)
    _stay_until_done({2})


@pytest.mark.tier("all")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_replica_that_hangs_while_weights_are_sharded_over_replicas(stage: int) -> None:
    spawn(__name__, "_hang_before_gradients_are_reduced", 4, 60.0, (stage,), expect_dead=(3,))
