"""What of an optimizer cannot be saved, and what does not fit when it is restored: refused, and nothing has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from autopar.checkpoint.optimizer_metadata import merge_metadata
from autopar.checkpoint.optimizer_state import prepare, take
from autopar.errors import CheckpointError
from autopar.plan.make_plan import make_plan
from autopar.plan.plan import Plan, TensorPlan
from autopar.policy.match import find_policy
from tests.checkpoint.optimizers import (
    OPTIMIZERS,
    plan_of,
    saved_by_all,
    stored,
    trained,
)
from tests.small import gpt2


def test_lbfgs_is_refused_by_name():
    model = gpt2(n_layer=1)
    optimizer = optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(CheckpointError, match=r"LBFGS keeps state 'old_dirs' of transformer.wte.weight as a list"):
        take(optimizer, model, make_plan(model, find_policy(model), 1), 0)


def adam(tp: int = 1) -> tuple[Any, Plan, Any]:
    plan = plan_of("gpt2", tp)
    plain = trained("gpt2", OPTIMIZERS["AdamW"])
    return plain, plan, stored(saved_by_all("gpt2", OPTIMIZERS["AdamW"], plan, plain))


def refused(match: str, optimizer: optim.Optimizer, model: nn.Module, plan: Plan, facts: Any, saved: Any) -> None:
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointError, match=match):
        prepare(optimizer, model, plan, 0, facts, saved)
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"] and before["state"].keys() == after["state"].keys()


def test_another_optimizer_is_refused():
    (model, optimizer), plan, (facts, saved, _) = adam()
    sgd = optim.SGD(model.parameters())
    refused(
        r"holds the state of torch.optim.adamw.AdamW, the optimizer is torch.optim.sgd.SGD",
        sgd,
        model,
        plan,
        facts,
        saved,
    )
    one = optim.AdamW(model.parameters())
    refused("holds 2 parameter groups of the optimizer, this .*AdamW has 1", one, model, plan, facts, saved)
    first, second = ([*group["params"]] for group in optimizer.param_groups)
    name = next(n for n, p in model.named_parameters() if p is second[-1])
    moved = optim.AdamW([{"params": [*first, second[-1]]}, {"params": second[:-1]}])
    refused(rf"^{name} is in parameter group 0 of .*; it was saved in group 1", moved, model, plan, facts, saved)
    fewer = optim.AdamW([{"params": first}, {"params": second[:-1]}])
    refused(rf"1 of the {len(first + second)} parameters .* are not in .*: {name}", fewer, model, plan, facts, saved)
    small = stored([take(fewer, model, plan, 0)])
    refused(rf"^{name} is in parameter group 1 of .* none of the 2", optimizer, model, plan, *small[:2])
    shuffled = optim.AdamW([{"params": first[::-1]}, {"params": second}])
    prepare(shuffled, model, plan, 0, facts, saved)


def test_a_parameter_that_is_not_the_models():
    model = gpt2(n_layer=1)
    plan = make_plan(model, find_policy(model), 1)
    optimizer = optim.SGD([{"params": list(model.parameters())}, {"params": [nn.Parameter(torch.ones(3, 2))]}])
    with pytest.raises(
        CheckpointError, match=r"parameter 0 of group 1 of .*SGD, of shape \[3, 2\], is not a parameter"
    ):
        take(optimizer, model, plan, 0)


def test_state_from_before_the_model_was_cut_is_refused():
    plan = plan_of("gpt2", 2)
    model = gpt2(n_layer=1)
    optimizer = optim.Adagrad(model.parameters())  # has state from the start
    weight = model.transformer.wte.weight
    weight.data = plan.tensors["transformer.wte.weight"].layout.shard(weight.data, 0)
    with pytest.raises(
        CheckpointError, match=r"'sum' of transformer.wte.weight of shape \[131, 36\].*holds \[66, 36\]"
    ):
        take(optimizer, model, plan, 0)


def test_missing_unexpected_and_misshapen_states():
    (model, optimizer), plan, (facts, saved, _) = adam(2)
    plan = plan_of("gpt2", 1)
    name = "transformer.wpe.weight::exp_avg"
    less = {key: value for key, value in saved.items() if key != name}
    refused(
        rf"1 of {len(saved)} tensors are missing, 0 unexpected\n  Missing: {name}", optimizer, model, plan, facts, less
    )
    more = {**saved, "ghost::exp_avg": saved[name]}
    refused("0 of .* missing, 1 unexpected\n  Unexpected: ghost::exp_avg", optimizer, model, plan, facts, more)
    bent = {**saved, name: TensorPlan(name, (3, 36), "float32")}
    refused(rf"{name} has shape \[3, 36\] in the checkpoint, .* has \[32, 36\]", optimizer, model, plan, facts, bent)
    odd = {**saved, name: TensorPlan(name, (32, 36), "qint8")}
    refused(rf"{name} is damaged in the checkpoint: 'qint8'", optimizer, model, plan, facts, odd)


def test_damaged_facts_never_end_in_another_error():
    (model, optimizer), plan, (facts, saved, _) = adam()

    def places(value: Any) -> list[tuple[Any, Any]]:
        children = (
            list(value.items())
            if isinstance(value, dict)
            else list(enumerate(value))
            if isinstance(value, list)
            else []
        )
        return [(value, key) for key, _ in children] + [place for _, child in children for place in places(child)]

    refusals = 0
    for number in range(len(places(facts))):
        for junk in (None, -1, "x", [], {"$": "tuple"}, [[1]], {"params": 1}):
            broken = copy.deepcopy(facts)
            holder, key = places(broken)[number]
            holder[key] = junk
            try:
                prepare(optimizer, model, plan, 0, broken, saved)
            except CheckpointError:
                refusals += 1
    assert refusals > number  # options may be anything
    smuggled = copy.deepcopy(facts)
    smuggled["groups"][0]["options"]["params"] = []
    twice = copy.deepcopy(facts)
    twice["groups"][0]["params"] *= 2
    for wrong in (None, [], {}, smuggled, twice):
        with pytest.raises(CheckpointError, match="is damaged"):
            prepare(optimizer, model, plan, 0, wrong, saved)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda f: f.update({"class": "SGD"}), "class is 'torch.optim.adamw.AdamW' on the first and 'SGD' on number 1"),
        (lambda f: f["groups"].pop(), "the first has 2 parameter groups, number 1 has 1"),
        (lambda f: f["groups"][1]["options"].update(lr=7.0), "lr of parameter group 1 is 0.02 on the first, 7.0 on"),
        (
            lambda f: f["state"]["transformer.wpe.weight"].update(step={"kind": "value", "value": 3}),
            "different states of transformer.wpe.weight: 'step' is {'kind': 'whole'} on one and .*3",
        ),
    ],
)
def test_ranks_that_contradict_each_other(change: Callable[[Any], Any], match: str):
    _, _, (facts, _, _) = adam()
    other = copy.deepcopy(facts)
    change(other)
    with pytest.raises(CheckpointError, match=match):
        merge_metadata([facts, other])
