"""Dry runs that are remembered: of the same model and plan one, of another one its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autopar.plan.make_plan import make_plan
from autopar.policy.match import find_policy
from tests.rehearsals import _of_plan, _once
from tests.small import gpt2

CHANGES: dict[str, Callable[[Any], Any]] = {
    "wider": lambda m: setattr(m.config, "n_inner", 38),
    "in half": lambda m: m.half(),
    "with a forward": lambda m: setattr(m.transformer, "forward", lambda *args, **kwargs: None),
    "with a hook": lambda m: m.transformer.register_forward_hook(lambda *_: None),
    "with a scale": lambda m: setattr(m.transformer.h[1].attn, "scaling", 0.25),
    "untied": lambda m: setattr(m.lm_head, "weight", torch.nn.Parameter(m.lm_head.weight.detach().clone())),
    "frozen": lambda m: m.transformer.wpe.requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_has_a_dry_run_of_its_own(change: str) -> None:
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
    CHANGES[change](model)
    run(model, "", plan)
    assert len(made) == 3
