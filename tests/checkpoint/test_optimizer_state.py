"""The state of every torch optimizer, taken on each rank, and restored onto any other sharding or refused."""

import copy
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import optim

from autopar.checkpoint.optimizer_state import merge_metadata, prepare, take
from autopar.errors import CheckpointError
from autopar.plan.make_plan import make_plan
from autopar.plan.plan import Plan, TensorPlan
from autopar.policy.match import find_policy
from tests.checkpoint.optimizers import (
    FACTORED,
    MODELS,
    OPTIMIZERS,
    assert_same,
    by_name,
    give,
    one_step,
    plan_of,
    rank_of,
    restore,
    saved_by_all,
    stored,
    trained,
)
from tests.checkpoint.refusals import refusals
from tests.checkpoint.test_plain_data import same
from tests.harness.tiers import in_tier
from tests.small import gpt2

FIRST = ["momentum", "AdamW", "ASGD", "Rprop", "Muon"]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", [*FIRST, *in_tier("all", [name for name in OPTIMIZERS if name not in FIRST])])
def test_any_sharing_out_to_any_other(name: str, kind: str):
    make = OPTIMIZERS[name]
    plain = trained(kind, make)
    plans = {tp: plan_of(kind, tp) for tp in (1, 2, 3)}
    assert any(t.layout and t.layout.replicated for t in plans[3].tensors.values()) is (kind == "llama")
    for old in plans.values():
        checkpoint = stored(saved_by_all(kind, make, old, plain))
        for parameter, state in by_name(*plain, old).items():  # unsharded, it is the plain state
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    assert same(checkpoint[2][f"{parameter}::{key}"], value)
        for new in plans.values():
            for rank in range(new.tp):
                mine, expected = (rank_of(kind, make, new, rank) for _ in range(2))
                one_step(*mine, seed=9)  # what it had is dropped
                for target, source in zip(mine[0].parameters(), expected[0].parameters(), strict=True):
                    target.data.copy_(source.data)
                give(plain, expected, new, rank)
                restore(mine, new, rank, checkpoint)
                assert_same(mine, expected, new)
                for target in (mine, expected):
                    one_step(*target, seed=7)
                assert_same(mine, expected, new)
                for target, source in zip(mine[0].parameters(), expected[0].parameters(), strict=True):
                    assert torch.equal(target, source)


@pytest.mark.parametrize("name", FACTORED)
def test_factored_state_of_shards_is_refused(name: str):
    plan = plan_of("gpt2", 2)
    model, optimizer = rank_of("gpt2", FACTORED[name], plan, 0)
    one_step(model, optimizer, seed=0)
    words = r"Adafactor has state .*\n  Statistics of a shard fit.*Pass the optimizer to autopar"
    with pytest.raises(CheckpointError, match=words):
        take(optimizer, model, plan, 0)


def test_a_number_of_each_shard_is_refused():
    plan, found = plan_of("gpt2", 2), []
    for rank in range(2):
        model, optimizer = rank_of("gpt2", OPTIMIZERS["AdamW"], plan, rank)
        one_step(model, optimizer, seed=0)
        for index, parameter in enumerate(model.parameters()):
            optimizer.state[parameter]["rms"] = torch.tensor(1.0 + index * rank)
        found.append(take(optimizer, model, plan, rank).metadata)
    with pytest.raises(CheckpointError, match=r"state 'rms' of .* 'number': '1.0'} on rank 0 and .* on rank 1"):
        merge_metadata(found)


@pytest.mark.parametrize("name", FACTORED)
def test_factored_state_of_whole_parameters_is_not_cut(name: str):
    plan = plan_of("gpt2", 1)
    checkpoint = stored([take(*reversed(trained("gpt2", FACTORED[name])), plan, 0)])
    target = rank_of("gpt2", FACTORED[name], plan, 0)
    restore(target, plan, 0, checkpoint)
    assert_same(target, trained("gpt2", FACTORED[name]), plan)
    other = plan_of("gpt2", 2)
    model, optimizer = rank_of("gpt2", FACTORED[name], other, 1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointError, match="was saved for the full parameter, which is sharded now"):
        prepare(optimizer, model, other, 1, *checkpoint[:2])
    assert optimizer.state_dict() == before


def test_an_optimizer_that_has_not_stepped():
    plan = plan_of("gpt2", 2)
    target = rank_of("gpt2", OPTIMIZERS["AdamW"], plan, 1)
    taken = take(target[1], target[0], plan, 1)
    assert taken.tensors == {} and taken.metadata["state"] == {}
    mine = rank_of("gpt2", OPTIMIZERS["AdamW"], plan, 1)
    one_step(*mine, seed=0)
    restore(mine, plan, 1, stored([taken]))
    assert not mine[1].state


def test_state_of_no_parameter_and_numbers_and_the_saved_dtype():
    model = gpt2(n_layer=1).bfloat16()
    plan = make_plan(model, find_policy(model), 1)
    parameters = list(model.parameters())
    optimizer = optim.SGD(parameters)
    optimizer.state["seen"] = {"tokens": 12, "window": (1, 2.5)}
    lists = [torch.ones(3, 3), [torch.zeros(2), None, math.inf], []]
    optimizer.state[parameters[0]] = {"master": parameters[0].detach().float(), "count": 3, "no": None, "Q": lists}
    mine = optim.SGD(parameters)
    restore((model, mine), plan, 0, stored([take(optimizer, model, plan, 0)]))
    assert optimizer.state.keys() == mine.state.keys()
    assert all(same(value, mine.state[key]) for key, value in optimizer.state.items())
    optimizer.state["odd"] = torch.ones(2)
    with pytest.raises(CheckpointError, match="odd is a tensor that belongs to no parameter"):
        take(optimizer, model, plan, 0)


def test_counters_are_on_the_host_unless_they_are_captured():
    model = gpt2(n_layer=1)
    plan = make_plan(model, find_policy(model), 1)
    one_step(model, optimizer := optim.NAdam(model.parameters()), seed=0)
    checkpoint = stored([take(optimizer, model, plan, 0)])
    far = gpt2(n_layer=1).to("meta")
    for captured in (False, True):
        for group in checkpoint[0]["groups"]:
            group["options"]["capturable"] = captured
        wanted = prepare(optim.NAdam(far.parameters()), far, plan, 0, *checkpoint[:2])[0]
        places = {(name.rpartition("::")[2], tensor.device.type) for name, (tensor, _) in wanted.items()}
        counters = "meta" if captured else "cpu"
        assert places == {("step", counters), ("mu_product", counters), ("exp_avg", "meta"), ("exp_avg_sq", "meta")}


def test_options_keep_their_types_and_a_tensor_stays_the_same_object():
    model = gpt2(n_layer=1)
    plan = make_plan(model, find_policy(model), 1)
    saved = optim.AdamW(model.named_parameters(), lr=torch.tensor(0.5), betas=(0.1, 0.2))
    saved.param_groups[0]["milestones"] = [1, 2]
    facts = stored([take(saved, model, plan, 0)])
    mine = optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    rate = mine.param_groups[0]["lr"]
    restore((model, mine), plan, 0, facts)
    group = mine.param_groups[0]
    assert group["lr"] is rate and rate == 0.5 and group["betas"] == (0.1, 0.2) and group["milestones"] == [1, 2]
    assert "param_names" not in group and group["params"] == list(model.parameters())
    as_number = optim.AdamW(model.parameters(), lr=0.25)
    restore((model, mine), plan, 0, stored([take(as_number, model, plan, 0)]))
    assert group["lr"] is rate and rate == 0.25
    restore((model, as_number), plan, 0, facts)
    assert torch.equal(as_number.param_groups[0]["lr"], torch.tensor(0.5))


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
    rows: list[tuple[str, str, optim.Optimizer, Any, Any]] = [
        ("class", "holds the state of torch.optim.adamw.AdamW; got a torch.optim.sgd.SGD",
         optim.SGD(model.parameters()), facts, saved),
        ("one group", "holds 2 parameter groups of the optimizer; this .*AdamW has 1",
         optim.AdamW(model.parameters()), facts, saved),
        ("moved", rf"^{last} is in parameter group 0 of .*; it was saved in group 1", moved, facts, saved),
        ("fewer", rf"1 of the {len(first + second)} parameters .* are missing in .*: {last}", fewer, facts, saved),
        ("more", rf"^{last} is in parameter group 1 of .* it was saved in no group", optimizer, *of_fewer),
        ("missing", rf"1 of {len(tensors)} tensors are missing, 0 unexpected\n  Missing: {name}",
         optimizer, by_two, less),
        ("unexpected", "0 of .* missing, 1 unexpected\n  Unexpected: ghost::exp_avg",
         optimizer, by_two, {**tensors, "ghost::exp_avg": tensors[name]}),
        ("shape", rf"{name} has shape \[3, 36\] in the checkpoint, .* has \[32, 36\]",
         optimizer, by_two, {**tensors, name: TensorPlan(name, (3, 36), "float32")}),
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


def test_state_from_before_the_model_was_cut_is_refused():
    plan = plan_of("gpt2", 2)
    model = gpt2(n_layer=1)
    optimizer = optim.Adagrad(model.parameters())  # has state from the start
    weight = model.transformer.wte.weight
    weight.data = plan.tensors["transformer.wte.weight"].layout.shard(weight.data, 0)
    words = r"'sum' of transformer.wte.weight of shape \[131, 36\].*holds, \[66, 36\]"
    with pytest.raises(CheckpointError, match=words):
        take(optimizer, model, plan, 0)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda f: f.update({"class": "SGD"}), "class is 'torch.optim.adamw.AdamW' on rank 0 and 'SGD' on rank 1"),
        (lambda f: f["groups"].pop(), "the number of parameter groups is 2 on rank 0 and 1 on rank 1"),
        (lambda f: f["groups"][1]["options"].update(lr=7.0), "lr of parameter group 1 is 0.02 on rank 0 and 7.0 on"),
        (
            lambda f: f["state"]["transformer.wpe.weight"].update(step={"kind": "value", "value": 3}),
            "state 'step' of transformer.wpe.weight is {'kind': 'whole'} on rank 0 and .*3",
        ),
    ],
)
def test_ranks_that_contradict_each_other(change: Callable[[Any], Any], match: str):
    _, _, (facts, _, _) = adam()
    other = copy.deepcopy(facts)
    change(other)
    with pytest.raises(CheckpointError, match=match):
        merge_metadata([facts, other])
