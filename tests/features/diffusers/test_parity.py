"""Each diffusion transformer with a policy against the single-process model: output, gradients, a step."""

import copy

import pytest
import torch

import autopar
from tests.compare import same_gradients, same_weights
from tests.features.diffusers.models import SMALL, make
from tests.fetched_packages import with_package
from tests.parity import close


def check(name: str, heads: int = 6, **sizes: int) -> None:
    """Compare the output, every gradient of two batches, and the weights after a step."""
    plain, inputs = make(name, heads)
    model = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    model, optimizer = autopar.initialize(model, {"model_parallelism": sizes}, optimizer=optimizer)
    other = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-3)
    for number in range(2):
        batch = {key: value * (1 + number / 8) for key, value in inputs.items()}
        expected, outputs = plain(**batch).sample, model(**batch).sample
        close(outputs, expected, f"output of {name}")
        for each in (expected, outputs):
            (each * torch.cos(torch.arange(each.numel()).view(each.shape))).sum().backward()
    same_gradients(model, plain, when=f"of {name}", scaled=True)
    for each in (optimizer, other):
        each.step()
    same_weights(model, plain, when=f"of {name} after a step")


@pytest.mark.tier("test")
@with_package("diffusers", world_size=2)
def test_two_ranks() -> None:
    check("wan", tensor_parallel_size=2)


@with_package("diffusers", world_size=3)
def test_three_ranks() -> None:
    for name in SMALL:
        check(name, heads=4, tensor_parallel_size=3)
