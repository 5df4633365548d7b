"""Dry runs that are remembered: of the same model and plan one, of another one its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autopar.plan.make_plan import make_plan
from autopar.policy.match import find_policy
from tests.rehearsals import _of_plan, _once
from tests.small import gpt2


def _wider(model: Any) -> None:
    model.config.n_inner = 38


def _in_half(model: Any) -> None:
    model.half()


def _with_a_forward(model: Any) -> None:
    model.transformer.forward = lambda *args, **kwargs: None


def _with_a_hook(model: Any) -> None:
    model.transformer.register_forward_hook(lambda *_: None)


def _with_a_scale(model: Any) -> None:
    model.transformer.h[1].attn.scaling = 0.25


def _untied(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


def _frozen(model: Any) -> None:
    model.transformer.wpe.requires_grad_(False)


@pytest.mark.parametrize(
    "change",
    [_wider, _in_half, _with_a_forward, _with_a_hook, _with_a_scale, _untied, _frozen],
    ids=lambda c: c.__name__,
)
def test_another_model_has_a_dry_run_of_its_own(change: Callable[[Any], None]) -> None:
    made = []
    run = _once(lambda *args: made.append(args), _of_plan)
    for _ in range(2):
        model = gpt2()
        run(model, "", make_plan(model, find_policy(model), 2))
    assert len(made) == 1
    run(model, "", make_plan(model, find_policy(model), 3))
    assert len(made) == 2
    model = gpt2()
    plan = make_plan(model, find_policy(model), 2)
    change(model)
    run(model, "", plan)
    assert len(made) == 3
