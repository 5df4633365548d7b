"""Updates that no torch optimizer makes: replicas that forget to average are told, others are left alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.errors import ShardWarning
from autopar.guards.free_weights import FreeWeights
from tests.parity import language_batches
from tests.pool import pooled
from tests.small import gpt2

Update = Callable[[list[nn.Parameter]], None]


def by_data(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data -= 0.1 * parameter.grad


@torch.no_grad()
def at_once(parameters: list[nn.Parameter]) -> None:
    torch._foreach_add_(parameters, [parameter.grad for parameter in parameters], alpha=-0.1)


@contextlib.contextmanager
def told(*parts: str) -> Iterator[None]:
    """Each rank is told once: the one that is ahead at a later forward, which finds the others' digests."""
    with pytest.warns(ShardWarning) as found:
        yield
    (text,) = [str(each.message) for each in found if issubclass(each.category, ShardWarning)]
    assert all(part in text for part in parts), text


class Descent:
    """An optimizer that is no torch optimizer."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            parameter.sub_(parameter.grad, alpha=0.1)


def by_class(parameters: list[nn.Parameter]) -> None:
    Descent(parameters).step()


def _model(**sizes: int) -> Any:
    return autopar.initialize(gpt2(), {"model_parallelism": sizes}).train()


def _batches(model: Any, count: int) -> list[dict[str, torch.Tensor]]:
    return language_batches(131, count=count, seed=1 + model.mpu.get_data_parallel_rank())


def train(model: Any, update: Update, steps: int, *, average: bool, parameters: list[nn.Parameter] | None = None):
    for batch in _batches(model, steps):
        model(**batch).loss.backward()
        if average:
            autopar.average_gradients(model)
        update(list(model.parameters()) if parameters is None else parameters)
        model.zero_grad()
        dist.barrier()  # a loop that evaluates: the others' digests are there at the next forward


@pytest.mark.tier("test", only=("by_data",))
@pytest.mark.parametrize("update", [by_data, at_once, by_class])
@pooled(world_size=2)
def test_forgotten_averaging_is_told_at_the_next_forward(update: Update):
    with told(
        "the weights of the 2 data-parallel replicas differ: they have drifted apart.\n"
        "  Ranks 0 and 1, step 1 of an update without a torch optimizer: transformer.wte.weight, ",
        "Average the gradients before you change weights yourself: autopar.average_gradients(model)",
    ):
        train(_model(), update, 3, average=False)


@pooled(world_size=2)
def test_in_evaluation_mode_and_of_one_weight_among_many_that_rest():
    model = _model().eval()
    with told("an update without a torch optimizer: "):
        train(model, by_data, 3, average=False)
    model.mpu.destroy()
    model = _model()
    table = model.transformer.h[1].mlp.c_fc.bias
    with told("an update without a torch optimizer: transformer.h.1.mlp.c_fc.bias."):
        train(model, by_data, 30, average=False, parameters=[table])


@pooled(world_size=4)
def test_beside_shards():
    with told("step 1 of an update without a torch optimizer: "):
        train(_model(tensor_parallel_size=2), by_data, 3, average=False)


@pooled(world_size=2)
def test_one_weight_beside_an_optimizer_of_all_others():
    model = _model()
    bias = model.transformer.ln_f.bias
    optimizer = torch.optim.SGD([p for p in model.parameters() if p is not bias], lr=1e-2)

    def step(own: list[nn.Parameter]) -> None:
        optimizer.step()
        bias.data += 0.1 * (1 + dist.get_rank())

    with told("an update without a torch optimizer: transformer.ln_f.bias."):
        train(model, step, 3, average=True)


@pytest.mark.parametrize("sizes", [{}, {"tensor_parallel_size": 2}], ids=["dp", "tp-dp"])
@pooled(world_size=4)
def test_fifty_averaged_updates_with_evaluations_and_accumulation_raise_no_alarm(sizes: dict[str, int]):
    model = _model(**sizes)
    for turn in range(5):
        for _ in range(dist.get_rank()):  # replicas look at as many batches as they like
            model.eval()
            with torch.no_grad():
                model(**language_batches(131, count=1)[0]).loss.item() if not sizes else None
        model.train()
        train(model, by_data if turn % 2 else at_once, 10, average=True)
        with torch.no_grad():  # accumulation in between: weights stay
            model(**_batches(model, 1)[0])


@pooled(world_size=4)
def test_through_stages():
    model = _model(pipeline_parallel_size=2)
    with told("an update without a torch optimizer: "):
        for batch in _batches(model, 4):
            model.execute_pipeline(batch)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.data -= 0.1 * (1 + model.mpu.get_data_parallel_rank()) * parameter.grad
            dist.barrier()


def test_which_weights_are_looked_at():
    model, free = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), FreeWeights()
    first, second = list(model[0].parameters()), list(model[1].parameters())
    assert not free.have_changed(model, [])
    with torch.no_grad():
        first[0][1, 1] += 1
    assert free.have_changed(model, []) and not free.have_changed(model, [])
    assert not free.have_changed(model, first)
    assert [name for name, _ in free.named] == ["1.weight", "1.bias"]
    first[1].data += 1  # an optimizer's
    assert not free.have_changed(model, first)
    second[1].data += 1
    assert free.have_changed(model, first)
    assert not free.have_changed(model, [*first, *second])
    assert free.named == []


@pytest.mark.filterwarnings("ignore::autopar.errors.ShardWarning")
@pooled(world_size=2)
def test_a_replica_without_a_batch_in_one_step_goes_on():
    model = _model()
    for step, batch in enumerate(_batches(model, 8)):
        if step == 3 and dist.get_rank() == 1:  # it takes part with gradients of zero
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        else:
            model(**batch).loss.backward()
        autopar.average_gradients(model)
        by_data(list(model.parameters()))
        model.zero_grad()
    sums = [torch.stack([p.double().sum() for p in model.parameters()]).sum().item()] * 2
    dist.all_gather_object(sums, sums[0])
    assert sums[0] == sums[1]
