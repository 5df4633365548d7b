"""Hooks of the user's that see rows of the sequence or some features: each is told once, those of libraries are not."""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import ShardWarning
from tests.parity import close
from tests.pool import pooled
from tests.small import llama

IDS = torch.arange(16).view(2, 8)


def told(model: Any, count: int = 1) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(count):
            model(IDS, labels=IDS, use_cache=False)
    return [str(each.message) for each in found if issubclass(each.category, ShardWarning)]


def steer(module: Any, args: Any, output: Any, by: float = 1.0) -> None:
    pass


@pooled(world_size=2)
def test_each_is_told_once_under_context_parallelism() -> None:
    model = autopar.initialize(llama().train(), {"model_parallelism": {"context_parallel_size": 2}})
    for whole in (model, model.model, model.lm_head):
        whole.register_forward_hook(lambda *_: None)
    assert told(model, 2) == []
    model.model.layers[1].mlp.register_forward_hook(functools.partial(steer, by=2.0))
    line = inspect.getsourcelines(steer)[1]
    assert told(model, 9) == [
        f"the hook steer ({__file__}:{line}) on model.layers.1.mlp sees the rows of the sequence that this rank "
        "computes, not all of them: context_parallel_size shards\n  the sequence there. (With tensor_parallel_size "
        "too, features inside of attention and MLP.) Position 5 is not row 5, and what it changes or trains is changed "
        "in these\n  rows only. Hooks on the whole model see the whole sequence; so do all of them without context "
        "parallelism, and output_hidden_states=True."
    ]
    model.model.norm.register_forward_hook(lambda *_: None)  # behind the blocks
    assert len(told(model, 11)) == 1
    model.model.layers[0].register_full_backward_hook(lambda *_: None)
    assert len(told(model, 11)) == 1
    model.mpu.destroy()


@pytest.mark.parametrize("rows", [False, True])
@pooled(world_size=2)
def test_under_tensor_and_sequence_parallelism_nothing_is_told(rows: bool) -> None:
    sizes = {"tensor_parallel_size": 2, "sequence_parallel": rows}
    model = autopar.initialize(llama().train(), {"model_parallelism": sizes})
    for module in model.modules():
        module.register_forward_hook(steer)
    assert told(model, 2) == []
    model.mpu.destroy()


@pytest.mark.parametrize("rows", [False, True])
@pooled(world_size=2)
def test_gradients_of_hidden_states_are_the_plain_models_where_blocks_have_all_rows(rows: bool) -> None:
    sizes = {"tensor_parallel_size": 2, "sequence_parallel": rows}
    model = autopar.initialize(llama().train(), {"model_parallelism": sizes})
    plain = llama().train()
    for name in ("plain", "own"):
        found = []
        for each in (plain, model):
            output = each(IDS, labels=IDS, use_cache=False, output_hidden_states=True)
            hidden = output.hidden_states[1]
            loss = output.loss if name == "plain" else hidden.square().sum()
            found.append(torch.autograd.grad(loss, hidden, allow_unused=True)[0])
        if rows and name == "plain":
            assert found[1] is None  # the page says so
        else:
            close(found[1], found[0], f"gradient of the {name} loss")
