"""What of an optimizer cannot be saved, and what does not fit when it is restored: refused, and nothing has changed."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from autopar.checkpoint.optimizer_state import merge_metadata, prepare, take
from autopar.errors import CheckpointError
from autopar.plan.make_plan import make_plan
from autopar.plan.plan import Plan, TensorPlan
from autopar.policy.match import find_policy
from tests.checkpoint.optimizers import OPTIMIZERS, plan_of, saved_by_all, stored, trained
from tests.checkpoint.refusals import refusals
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


@functools.cache
def adam(tp: int = 1) -> tuple[Any, Plan, Any]:
    """A trained model with its optimizer, the plan, and what ``tp`` ranks have stored; nobody changes them."""
    plan = plan_of("gpt2", tp)
    plain = trained("gpt2", OPTIMIZERS["AdamW"])
    return plain, plan, stored(saved_by_all("gpt2", OPTIMIZERS["AdamW"], plan, plain))


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    (model, optimizer), plan, (facts, saved, _) = adam()
    _, _, (by_two, tensors, _) = adam(2)
    first, second = ([*group["params"]] for group in optimizer.param_groups)
    last = next(n for n, p in model.named_parameters() if p is second[-1])
    fewer = optim.AdamW([{"params": first}, {"params": second[:-1]}])
    of_fewer = stored([take(fewer, model, plan, 0)])[:2]
    moved = optim.AdamW([{"params": [*first, second[-1]]}, {"params": second[:-1]}])
    name = "transformer.wpe.weight::exp_avg"
    less = {key: value for key, value in tensors.items() if key != name}
    smuggled, twice = copy.deepcopy(facts), copy.deepcopy(facts)
    smuggled["groups"][0]["options"]["params"] = []
    twice["groups"][0]["params"] *= 2
    rows: list[tuple[str, str, optim.Optimizer, Any, Any]] = [
        ("class", "holds the state of torch.optim.adamw.AdamW, the optimizer is torch.optim.sgd.SGD",
         optim.SGD(model.parameters()), facts, saved),
        ("one group", "holds 2 parameter groups of the optimizer, this .*AdamW has 1",
         optim.AdamW(model.parameters()), facts, saved),
        ("moved", rf"^{last} is in parameter group 0 of .*; it was saved in group 1", moved, facts, saved),
        ("fewer", rf"1 of the {len(first + second)} parameters .* are not in .*: {last}", fewer, facts, saved),
        ("more", rf"^{last} is in parameter group 1 of .* it was saved in none", optimizer, *of_fewer),
        ("missing", rf"1 of {len(tensors)} tensors are missing, 0 unexpected\n  Missing: {name}",
         optimizer, by_two, less),
        ("unexpected", "0 of .* missing, 1 unexpected\n  Unexpected: ghost::exp_avg",
         optimizer, by_two, {**tensors, "ghost::exp_avg": tensors[name]}),
        ("shape", rf"{name} has shape \[3, 36\] in the checkpoint, .* has \[32, 36\]",
         optimizer, by_two, {**tensors, name: TensorPlan(name, (3, 36), "float32")}),
        ("dtype", rf"{name} is damaged in the checkpoint: 'qint8'",
         optimizer, by_two, {**tensors, name: TensorPlan(name, (32, 36), "qint8")}),
        *((f"facts {number}", "is damaged", optimizer, wrong, saved)
          for number, wrong in enumerate((None, [], {}, smuggled, twice))),
    ]  # fmt: skip
    before = {row: copy.deepcopy(given.state_dict()) for row, _, given, *_ in rows}

    def kept() -> bool:
        after = {row: given.state_dict() for row, _, given, *_ in rows}
        return all(
            before[row]["param_groups"] == after[row]["param_groups"]
            and before[row]["state"].keys() == after[row]["state"].keys()
            for row in before
        )

    with refusals(kept) as refuse:
        for row, match, *given in rows:
            refuse(row, re.compile(match), prepare, given[0], model, plan, 0, *given[1:])
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


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda f: f.update({"class": "SGD"}), "class is 'torch.optim.adamw.AdamW' on the first and 'SGD' on number 1"),
        (lambda f: f["groups"].pop(), "the number of parameter groups is 2 on the first and 1 on number 1"),
        (lambda f: f["groups"][1]["options"].update(lr=7.0), "lr of parameter group 1 is 0.02 on the first and 7.0 on"),
        (
            lambda f: f["state"]["transformer.wpe.weight"].update(step={"kind": "value", "value": 3}),
            "state 'step' of transformer.wpe.weight is {'kind': 'whole'} on the first and .*3",
        ),
    ],
)
def test_ranks_that_contradict_each_other(change: Callable[[Any], Any], match: str):
    _, _, (facts, _, _) = adam()
    other = copy.deepcopy(facts)
    change(other)
    with pytest.raises(CheckpointError, match=match):
        merge_metadata([facts, other])
