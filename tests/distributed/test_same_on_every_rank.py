from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.distributed.agree import differences
from autopar.errors import ConsistencyError
from tests.pool import pooled
from tests.small import gpt2
from tests.worlds import raises_everywhere


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ({"a": {"b": 2}}, {"a": {"b": 1}}, [("a.b", "2", "1")]),
        ({"a": 1}, {"b": None}, [("a", "1", "missing"), ("b", "missing", "null")]),
        ([[1, "x"], 2], [[1, "y"], 2], [("[0][1]", '"x"', '"y"')]),
        ({"shape": [2, 3]}, {"shape": [2]}, [("shape", "2 entries", "1 entries")]),
        ({"x": [1, {"y": True}]}, {"x": [1, {"y": True}]}, []),
        ({"x": "a" * 500}, {"x": None}, [("x", '"' + "a" * 95 + " ...", "null")]),
    ],
)
def test_differences_are_named_with_both_values(one: Any, other: Any, found: list[tuple[str, str, str]]) -> None:
    assert list(differences(one, other)) == found


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_ranks_that_call_initialize_differently_learn_the_key_and_both_values():
    rank = dist.get_rank()
    sizes = {"model_parallelism": {"tensor_parallel_size": 2}}
    with raises_everywhere(
        ConsistencyError,
        "ranks [1] call autopar.initialize with other arguments than rank 0:",
        "  config.pipeline.timeout: rank 0: 60, rank 1: 61\n",
    ):
        autopar.initialize(gpt2(), {**sizes, "pipeline": {"timeout": 60 + rank}})
    with raises_everywhere(ConsistencyError, "config.tensor_parallel_size: rank 0: 2, rank 1: 1"):
        autopar.initialize(gpt2(), {"model_parallelism": {"tensor_parallel_size": 1 if rank else 2}})
    with raises_everywhere(
        ConsistencyError, "tensors.transformer.wte.weight.shape[0]: rank 0: 131, rank 1: 132", "and more"
    ):
        autopar.initialize(gpt2(vocab_size=131 + rank), sizes)
    model = gpt2()
    model.transformer.wpe.weight.requires_grad_(rank == 0)
    with raises_everywhere(ConsistencyError, "parameters.transformer.wpe.weight.requires_grad: rank 0: true, rank 1"):
        autopar.initialize(model, sizes)


@pooled(world_size=2)
def test_buffers_may_be_registered_in_another_order_on_each_rank():
    """As by a model that goes through a set: every process has its own order."""
    model = gpt2()
    for value in (1.0, 2.0) if dist.get_rank() == 0 else (2.0, 1.0):
        model.transformer.register_buffer(f"angles_{value:g}", torch.full((3,), value), persistent=False)
    model = autopar.initialize(model, {"model_parallelism": {"tensor_parallel_size": 2}})
    assert [model.transformer.angles_1[0].item(), model.transformer.angles_2[0].item()] == [1.0, 2.0]
