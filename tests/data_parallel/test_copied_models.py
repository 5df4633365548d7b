"""A copy of a parallelized model that is trained, as by Reptile: watched as the model that it is a copy of."""

import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.errors import ConfigError, ConsistencyError
from tests.compare import same_weights
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.parity import all_close, language_batches
from tests.pipeline_parallel.oracle import take_step
from tests.small import gpt2, llama


def parallel(plain: torch.nn.Module, **sizes: int) -> Any:
    pipeline = {"num_microbatches": 2, "timeout": 20}
    return autopar.initialize(copy.deepcopy(plain), {"model_parallelism": sizes, "pipeline": pipeline}).train()


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def inner(each: Any, batches: list[Any]) -> Any:
    """Train a copy."""
    fast = copy.deepcopy(each)
    optimizer = torch.optim.AdamW(fast.parameters(), lr=1e-3)
    for batch in batches:
        fast(**batch).loss.backward()
        take_step(optimizer)
    return fast


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_each_replica_may_train_a_copy_on_a_task_of_its_own() -> None:
    plain = gpt2().train()
    model = parallel(plain)
    tasks = [language_batches(131, count=3, seed=1 + task) for task in range(2)]

    moved = [list(inner(plain, batches).parameters()) for batches in tasks]
    mine = inner(model, tasks[dist.get_rank()])
    with torch.no_grad():
        for slow, *fast in zip(plain.parameters(), *moved, strict=True):
            slow.copy_(sum(fast) / 2)
        for slow, own in zip(model.parameters(), mine.parameters(), strict=True):
            dist.all_reduce(own)
            slow.copy_(own / 2)
    same_weights(model, plain, 1e-5)
    optimizer = sgd(model)
    model(**tasks[dist.get_rank()][0]).loss.backward()
    with raises_everywhere(ConsistencyError, "gradients of the 2 data-parallel replicas differ: they were not"):
        optimizer.step()  # of the model itself


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_an_inner_loop_on_copies_moves_the_model_as_on_one_process() -> None:
    plain = llama(num_hidden_layers=2).train()
    model = parallel(plain, tensor_parallel_size=2)
    for start in range(3):
        for each in (plain, model):
            fast = inner(each, language_batches(131, count=3, seed=start))
            with torch.no_grad():
                for slow, moved in zip(each.parameters(), fast.parameters(), strict=True):
                    slow.lerp_(moved, 0.5)
    same_weights(model, plain, 2e-5)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_a_copy_is_asked_and_looked_at_as_the_model_is() -> None:
    model = parallel(llama(num_hidden_layers=2), tensor_parallel_size=2)
    (batch,) = language_batches(131, count=1)
    model(**batch)
    fast = copy.deepcopy(model)
    fast(**batch).loss.backward()
    muon = torch.optim.Muon([p for name, p in fast.named_parameters() if p.ndim == 2 and "layers" in name], lr=1e-2)
    with raises_everywhere(ConfigError, "Muon"):
        muon.step()
    drawn = copy.deepcopy(model)
    torch.manual_seed(3)
    torch.nn.init.normal_(drawn.model.layers[1].self_attn.o_proj.weight)
    with raises_everywhere(ConsistencyError, "hold the same shard of the weights"):
        drawn(**batch)
    model(**batch)


@pooled(world_size=2)
def test_a_stage_of_a_copy_that_forgets_its_step() -> None:
    model = parallel(llama(num_hidden_layers=2), pipeline_parallel_size=2)
    (batch,) = language_batches(131, count=1, batch=2)
    fast = copy.deepcopy(model)
    optimizer = sgd(fast)
    for number in range(3):
        fast.execute_pipeline(batch)
        if number < 2 or dist.get_rank() == 0:
            optimizer.step()
    with pytest.raises(ConsistencyError, match="optimizer steps so far: rank 0: 3, rank 1: 2"):
        fast.execute_pipeline(batch)
    dist.barrier()


def same_tensors(model: torch.nn.Module, plain: torch.nn.Module) -> None:
    all_close(dict(model.named_parameters()), dict(plain.named_parameters()), "{}")


@pytest.mark.tier("test", only=("stages",))
@pytest.mark.parametrize("kind", ["shards", "stages"])
@pooled(world_size=4)
def test_a_copy_becomes_plain_and_the_model_goes_on(kind: str) -> None:
    sizes = {"tensor_parallel_size": 2} if kind == "shards" else {"pipeline_parallel_size": 2}
    plain = llama(num_hidden_layers=2).train()
    model = parallel(plain, **sizes)
    reference, optimizer = sgd(plain), sgd(model)
    for first in (True, False):
        for batch in language_batches(131, count=2, batch=2):
            plain(**batch).loss.backward()
            take_step(reference)
            if kind == "stages":
                model.execute_pipeline(batch)
            else:
                model(**batch).loss.backward()
                autopar.average_gradients(model)
            take_step(optimizer)
        if first:
            same_tensors(autopar.deparallelize(copy.deepcopy(model)), plain)
    mpu = model.mpu
    kept = copy.deepcopy(model) if dist.get_rank() == 0 else None  # averages of weights, on one rank only
    same_tensors(autopar.deparallelize(copy.deepcopy(model)), plain)
    assert mpu.alive
    del kept
    gc.collect()
    same_tensors(autopar.deparallelize(model), plain)
    assert not mpu.alive
