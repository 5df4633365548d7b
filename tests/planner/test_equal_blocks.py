"""The planner computes one of several equal blocks, and counts what it would count if all of them computed."""

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from autopar.plan.make_plan import make_plan
from autopar.policy.match import find_policy
from autopar.tools.planner import planned_model
from autopar.tools.planner.candidate import Rows
from autopar.tools.planner.equal_blocks import BlockReplay, equal_blocks
from autopar.tools.planner.planned_model import PlannedModel
from tests.pipeline_parallel.deep import deep
from tests.small import gpt2, llama

KINDS = ("gpt2", "llama", "bert", "t5", "bart", "mixtral")


def _model(kind: str) -> Any:
    own = {"gpt2": lambda: gpt2(n_layer=5), "llama": lambda: llama(num_hidden_layers=5)}
    return own.get(kind, lambda: deep(kind, 5))()


def groups(model: Any) -> list[tuple[str, ...]]:
    return equal_blocks(model, make_plan(model, find_policy(model), 2))


def blocks(*numbers: int) -> list[tuple[str, ...]]:
    return [tuple(f"model.layers.{number}" for number in numbers)]


@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_those_of_every_block(kind: str, monkeypatch: pytest.MonkeyPatch):
    computed: list[nn.Module] = []
    call = BlockReplay._call

    def count() -> Any:
        computed.clear()
        return PlannedModel(_model(kind), sequence=7).count(Rows(2), 2)

    def counted(self: Any, block: nn.Module, group: int, forward: Any, args: Any, kwargs: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            computed.append(block)
            return forward(*args, **kwargs)

        return call(self, block, group, noted, args, kwargs)

    monkeypatch.setattr(BlockReplay, "_call", counted)
    replayed, few = count(), len(computed)
    monkeypatch.setattr(planned_model, "equal_blocks", lambda model, plan: [])
    every, all_of_them = count(), len(computed)
    assert few < all_of_them
    for place, unit in every.elements.items():
        assert sorted(replayed.elements[place].saved.values()) == sorted(unit.saved.values())
        assert replayed.elements[place].operations == unit.operations


def test_a_number_that_counts_the_blocks_makes_no_difference_and_another_attribute_does():
    model = llama(num_hidden_layers=6)
    assert groups(model) == blocks(*range(6))
    model.model.layers[3].self_attn.scaling *= 2
    assert groups(model) == blocks(0, 1, 2, 4, 5)
    model.model.layers[5].self_attn.layer_idx = 7
    assert groups(model) == []
    model = llama(num_hidden_layers=6)
    model.config.output_hidden_states = True  # collected from the blocks
    assert groups(model) == []


@pytest.mark.parametrize("layer", [1, 3, 5])
def test_another_module_rule_or_attribute_of_a_plan_makes_a_difference(layer: int):
    model = llama(num_hidden_layers=6)
    plan = make_plan(model, find_policy(model), 2)
    others = blocks(*(number for number in range(6) if number != layer))
    path = f"model.layers.{layer}.mlp.up_proj"
    modules = {name: rule for name, rule in plan.modules.items() if name != path}
    assert equal_blocks(model, replace(plan, modules=modules)) == others
    values = [
        replace(a, values=tuple(v + 1 for v in a.values)) if a.path.startswith(f"model.layers.{layer}.") else a
        for a in plan.attributes
    ]
    assert values and equal_blocks(model, replace(plan, attributes=tuple(values))) == others
    model.model.layers[layer].mlp.act_fn = nn.GELU()
    assert equal_blocks(model, plan) == others
