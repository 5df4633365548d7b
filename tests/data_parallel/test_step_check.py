"""Replicas that do not step alike, in loops of the user's own whose optimizer initialize has never seen."""

import contextlib
import copy
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.errors import ConsistencyError, PipelineError
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled, spawn
from tests.parity import language_batches
from tests.pipeline_parallel.oracle import take_step
from tests.small import gpt2
from tests.timeouts import TIMEOUT, say, wait_for


def _model(tp: int = 1, **sections: object) -> torch.nn.Module:
    return autopar.initialize(gpt2(), {"model_parallelism": {"tensor_parallel_size": tp}, **sections}).train()


def _batches(model: torch.nn.Module, count: int) -> list[dict[str, torch.Tensor]]:
    return language_batches(131, count=count, seed=1 + model.mpu.get_data_parallel_rank())


@pytest.mark.parametrize("tp", [1, 2])
@pooled(world_size=4)
def test_if_nobody_averages_the_first_step_raises_though_the_optimizer_is_not_known(tp: int) -> None:
    model = _model(tp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    weights = copy.deepcopy(model.state_dict())
    model(**_batches(model, 1)[0]).loss.backward()
    with raises_everywhere(ConsistencyError, f"the gradients of the {4 // tp} data-parallel replicas differ: they"):
        optimizer.step()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    autopar.average_gradients(model)
    with pytest.raises(ConsistencyError):  # this rank's second word on the step is another one
        optimizer.step()
        raise ConsistencyError


@pytest.mark.parametrize("after", [0, 4])
@pooled(world_size=2)
def test_a_group_that_one_replica_alone_adds_raises(after: int) -> None:
    model = _model()
    named = dict(model.named_parameters())
    later = named.pop("transformer.wpe.weight")
    optimizer = torch.optim.SGD(named.values(), lr=1e-3)
    for step, batch in enumerate(_batches(model, after + 2)):
        model(**batch).loss.backward()
        autopar.average_gradients(model)
        if step == after:
            break
        take_step(optimizer)
    if model.mpu.get_data_parallel_rank() == 1:
        optimizer.add_param_group({"params": [later]})
    counts = f"step {after + 1} of SGD: it holds {len(named)} and {len(named) + 1} parameters"
    with raises_everywhere(ConsistencyError, "replicas step different parameters of the model", counts):
        optimizer.step()


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_a_later_step_inside_no_sync_raises():
    model = _model()
    engine = DistributedDataParallel(model, process_group=model.mpu.get_data_parallel_group())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, batch in enumerate(_batches(model, 9)):
        if step < 6:
            engine(**batch).loss.backward()
            optimizer.step()
        else:
            with engine.no_sync():
                engine(**batch).loss.backward()
            with raises_everywhere(ConsistencyError, "the 2 data-parallel replicas", "step 7 of AdamW: "):
                optimizer.step()
            break
        optimizer.zero_grad()


@pytest.mark.parametrize("given", [False, True])
@pooled(world_size=2)
def test_the_last_execute_pipeline_of_a_step_inside_no_sync(given: bool) -> None:
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if given:
        model, optimizer = autopar.initialize(model, {"zero": {"stage": 1}}, optimizer=optimizer)
    else:
        model = autopar.initialize(model, {})
    first, second, third = _batches(model, 3)
    model.train().execute_pipeline(first)
    optimizer.step()
    with model.no_sync():
        model.execute_pipeline(second)
    with raises_everywhere(ConsistencyError, "ran inside no_sync", "Run the last execute_pipeline of a step outside"):
        optimizer.step()
    model.execute_pipeline(third)
    optimizer.step()


@pooled(world_size=2, timeout=120)
def test_a_replica_that_skips_a_step_is_noticed():
    model = _model()
    engine = DistributedDataParallel(model, process_group=model.mpu.get_data_parallel_group())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    raised = None
    for step, batch in enumerate(_batches(model, 8)):
        engine(**batch).loss.backward()
        try:
            if step != 4 or dist.get_rank() == 0:
                optimizer.step()
        except ConsistencyError as error:
            raised = (step, str(error))
            break
        optimizer.zero_grad()
    assert raised is not None, "nobody noticed"
    assert raised[0] in (5, 6) and "data-parallel replicas differ" in raised[1] and "skipped a step" in raised[1]


@pytest.mark.tier("test")
@pytest.mark.parametrize("wrapped", [False, True])
@pooled(world_size=2)
def test_loops_that_are_right_raise_nothing(wrapped: bool) -> None:
    """Accumulation, two optimizers at different times, frozen weights, ZeroRedundancyOptimizer, late ranks."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

    model = _model()
    group = model.mpu.get_data_parallel_group()
    model.transformer.wpe.requires_grad_(False)
    engine = DistributedDataParallel(model, process_group=group) if wrapped else model
    named = dict(model.named_parameters())
    norms = [p for name, p in named.items() if "ln" in name]
    rest = [p for name, p in named.items() if "ln" not in name and p.requires_grad]
    optimizers = [torch.optim.AdamW(norms, lr=1e-3), ZeroRedundancyOptimizer(rest, torch.optim.AdamW, group, lr=1e-3)]
    for step, batch in enumerate(_batches(model, 40)):
        if step % 3 == 0:
            with engine.no_sync() if wrapped else contextlib.nullcontext():
                engine(**batch).loss.backward()
        engine(**batch).loss.backward()
        if not wrapped:
            autopar.average_gradients(model)
        for optimizer in optimizers[: 1 + step % 2]:
            take_step(optimizer)
        if dist.get_rank() == step % 7:
            time.sleep(0.01)
    assert model._autopar.dp.steps.made == 60


@pooled(world_size=2)
def test_it_can_be_turned_off_and_ends_with_the_model():
    for model in (_model(consistency_check={"enable": False}), autopar.deparallelize(_model())):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for batch in language_batches(131, count=2, seed=dist.get_rank()):
            model(**batch).loss.backward()
            optimizer.step()


def _step_alone() -> None:
    model = _model(pipeline={"timeout": TIMEOUT})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model(**_batches(model, 1)[0]).loss.backward()
    if dist.get_rank() == 1:
        wait_for("noticed", [0])
        return
    with pytest.raises(PipelineError, match=r"first SGD.step\(\) waited for rank 1.*\n.*rank 1 said nothing"):
        optimizer.step()
    say("noticed")


@pytest.mark.tier("all")
def test_a_replica_that_never_steps_is_named_within_the_timeout() -> None:
    spawn(__name__, "_step_alone", 2, 60.0)


@pooled(world_size=2)
def test_weights_that_only_one_replica_trains_are_named_when_they_are_averaged():
    model = _model()
    model.transformer.wpe.weight.requires_grad_(dist.get_rank() == 0)
    model(**_batches(model, 1)[0]).loss.backward()
    with raises_everywhere(
        ConsistencyError, "transformer.wpe.weight is frozen (requires_grad=False) on only some of the ranks [0, 1]"
    ):
        autopar.average_gradients(model)


@pooled(world_size=2)
def test_all_weights_are_compared_every_few_steps_and_the_one_that_drifted_is_named_with_both_digests():
    model = _model(consistency_check={"parameters": "every 5"})
    engine = DistributedDataParallel(model, process_group=model.mpu.get_data_parallel_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    name, weight = next((n, p) for n, p in model.named_parameters() if n.endswith("h.1.mlp.c_fc.bias"))
    number = [n for n, _ in model.named_parameters()].index(name)
    for step, batch in enumerate(_batches(model, 5)):
        engine(**batch).loss.backward()
        if step < 4:
            assert step < 3 or number not in range(4 * step, 4 * step + 4)  # not one of the sample
            take_step(optimizer)
        if step == 2 and dist.get_rank() == 1:
            weight.data[3] += 1e-3
    with raises_everywhere(
        ConsistencyError, "they have drifted apart", f"step 5 of SGD: {name}.", f"{name}: rank 0: ", ", rank 1: "
    ) as raised:
        optimizer.step()
    (line,) = [line for line in str(raised.value).splitlines() if f"{name}: rank 0" in line]
    first, second = line.split("rank 0: ")[1].split(", rank 1: ")
    assert len(first) == len(second) == 12 and first != second
