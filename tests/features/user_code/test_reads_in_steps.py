"""Reads of shards while an optimizer steps: those of a class that cannot be tried are told."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import autopar
from autopar.features.user_code.reads import switch
from tests.harness.worlds import pooled
from tests.small import llama

IDS = torch.arange(36).view(4, 9) % 131
CONFIG = {"tp": 2, "consistency_check": {"enable": False}}


class Sharpness(Optimizer):
    """SAM, as users write it: a class of optimizers around which it steps, and a closure that has to be given."""

    def __init__(self, params: Any, base: type[Optimizer], rho: float = 0.05) -> None:
        super().__init__(list(params), {"rho": rho})
        self.base = base(self.param_groups, lr=0.1)  # type: ignore[call-arg]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        moved = [(p, p.grad * (0.05 / (float(norm) + 1e-12))) for p in held]
        for p, by in moved:
            p.add_(by)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p, by in moved:
            p.sub_(by)
        self.base.step()


def backward(model: Any) -> None:
    model(IDS, labels=IDS).loss.backward()


def told(model: Any, optimizer: Any, *given: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            backward(model)
            optimizer.step(*given)
            optimizer.zero_grad()
    assert not switch.off and not switch.in_hook
    return [str(each.message) for each in found if issubclass(each.category, autopar.ShardWarning)]


@pytest.mark.tier("all")
@pooled(world_size=2)
def test_norms_in_a_step_that_cannot_be_tried() -> None:
    model = autopar.initialize(llama(num_hidden_layers=4).train(), CONFIG)
    own = Sharpness(model.parameters(), torch.optim.SGD)
    texts = told(model, own, lambda: backward(model))
    assert len([text for text in texts if "norm of values of " in text]) == 1, texts
    assert told(model, torch.optim.AdamW(model.parameters(), lr=1e-3)) == []
