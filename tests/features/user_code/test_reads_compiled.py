"""Shards in what torch.compile compiles: as many graphs as of plain parameters, and nothing is told."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from autopar.features.user_code.reads import unwatch
from tests.features.user_code.test_reads import IDS, silent
from tests.harness.worlds import pooled
from tests.small import llama, parallel


def a_step(model: Any, optimizer: Any) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def own_gradients(model: Any) -> None:
    for p in model.parameters():
        p.grad.mul_(0.5)


@pooled(world_size=2)
@pytest.mark.parametrize("reads", [False, True])
def test_compiled_steps_have_as_many_graphs(reads: bool) -> None:
    found = []
    for watched in (False, True, False):  # the first in a process also looks at frames that torch then skips
        torch._dynamo.reset()
        counters.clear()
        model = parallel(llama(), 2).train()
        for p in model.parameters() if not watched else ():
            unwatch(p)
        step = torch.compile(a_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3)), backend="eager")
        with silent():
            for _ in range(4):
                model(IDS, labels=IDS).loss.backward()
                if reads:
                    own_gradients(model)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                step()
        stats = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), counters["frames"]["total"]
        found.append((stats, {name: tensor.clone() for name, tensor in model.state_dict().items()}))
    assert found[1][0] == found[2][0] and found[1][0][-1] > 0
    assert all(torch.equal(tensor, found[2][1][name]) for name, tensor in found[1][1].items())


@pooled(world_size=2)
def test_what_a_compiled_function_does_with_the_model_is_silent() -> None:
    torch._dynamo.reset()
    model = parallel(llama(num_hidden_layers=1), 2).eval()
    call = torch.compile(lambda ids: model(ids).logits, backend="eager")
    with silent(), torch.no_grad():
        assert torch.allclose(call(IDS), model(IDS).logits[:], atol=1e-5)
