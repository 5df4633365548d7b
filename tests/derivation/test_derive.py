"""Policies derived from structure: the sharding of those by hand, and the numbers of the plain model."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from autopar.dry_run.tensor_parallel import check_plan
from autopar.errors import PolicyError, UnsupportedModelError
from autopar.plan.make_plan import make_plan
from autopar.policy.load import read_user_policy
from autopar.policy.match import find_policy
from autopar.tools.derivation.derive import check_units, derive
from autopar.tools.derivation.families import decide
from autopar.tools.derivation.policy_tree import yaml_text
from autopar.tools.derivation.trace import Decisions, traced
from tests.derivation.odd_model import (
    LossByFeatures,
    LossByRows,
    OddConfig,
    OddForCausalLM,
    TangledModel,
    Unpredictable,
)
from tests.derivation.tricky_models import TrickyConfig, TrickyModel
from tests.harness.worlds import pooled
from tests.parity import check, language_batches, randomise
from tests.random_models import Case, build
from tests.representatives import first_types

TP = 2

LIKE_BY_HAND = yaml.safe_load(Path(__file__).with_name("like_by_hand.yaml").read_text())


def sharding(policy: Any, model: Any) -> dict[str, Any]:
    plan = make_plan(model, policy, TP)
    return {
        name: tensor.layout and (tensor.layout.dim, [tensor.layout.ranges(rank) for rank in range(TP)])
        for name, tensor in plan.tensors.items()
    }


@pytest.mark.parametrize("kind", first_types(("gpt2", "phi3", "bloom", "t5"), list(LIKE_BY_HAND), later="all"))
def test_the_derived_policy_shards_as_the_one_by_hand(kind: str) -> None:
    model = build(Case(kind, LIKE_BY_HAND[kind][0]), 4, 2)
    derived = sharding(read_user_policy(derive(model).tree), model)
    by_hand = sharding(find_policy(model), model)
    assert derived == by_hand


def test_a_structure_that_nobody_stored_before() -> None:
    torch.manual_seed(0)
    model: Any = randomise(OddForCausalLM(OddConfig(initializer_range=0.2)))
    tree = derive(model).tree
    modules = tree["blocks"]["modules"]
    unit = next(name for name, count in tree["units"].items() if count == "voices")
    assert modules["all"] == {"column": unit} and modules["back"] == {"row": unit}
    assert modules["loudness"] == {"sharded": unit} and modules["calm"] == {"replicated": unit}
    assert tree["prefix"]["table"] == {"sharded": unit, "dim": 1}
    assert tree["head"]["logits?"] == {"column": "vocab", "gather_output": True}
    shards = sharding(read_user_policy(tree), model)
    assert shards["stack.2.all.weight"] == (0, [((0, 36),), ((36, 60),)])  # three voices and two
    assert shards["stack.2.both.weight"] == (0, [((0, 18),), ((18, 34),)])


def tricky(block: str) -> TrickyModel:
    torch.manual_seed(0)
    return TrickyModel(TrickyConfig(block=block))


def test_a_number_of_units_that_shapes_do_not_show() -> None:
    """Without the attribute a shard has four heads of half the width, and every shape fits; the dry run is content."""
    model = tricky("Halved")
    tree = derive(model).tree
    assert tree["blocks"]["attributes"] == {"heads": "heads"}
    mistaken = {**tree, "blocks": {name: part for name, part in tree["blocks"].items() if name != "attributes"}}
    plan = make_plan(model, read_user_policy(mistaken), TP)
    assert check_plan(model, "", plan)
    models, blocks = traced(model), ("blocks.0", "blocks.1")
    seen, decisions = decide(models, blocks, Decisions())
    with pytest.raises(
        PolicyError,
        match=r"in blocks\.0 view returns shape \[2, 5, 4, 2\] in a shard, expected \[2, 5, 2, 4\]: a number of units "
        r"may not be scaled \(attributes\)",
    ):
        check_units(models, blocks, decisions, seen, plan)


def test_what_forward_wants_whole_is_sharded_and_gathered() -> None:
    derived = derive(tricky("Width"))
    assert derived.tree["blocks"]["modules"] == {
        "query": {"column": "heads", "gather_output": True},
        "key": {"column": "heads", "gather_output": True},
        "back": {"row": "heads", "split_input": True},
    }
    assert derived.gathered == ("blocks.*.back", "blocks.*.key", "blocks.*.query") and derived.replicated == ()


def test_a_weight_that_training_uses_by_itself_stays_whole() -> None:
    with pytest.raises(UnsupportedModelError, match="no policy can be derived for TrickyModel"):
        derive(tricky("Clipped"))


@pooled(world_size=2)
def test_tricky_blocks_on_ranks() -> None:
    batch = [{"inputs_embeds": torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))}]
    for block in ("Halved", "Width"):
        check(lambda block=block: randomise(tricky(block)), batch, 2, policy="derive").mpu.destroy()


@pooled(world_size=2)
def test_losses_that_read_the_size_of_the_head() -> None:
    for kind, sharded in ((LossByRows, False), (LossByFeatures, True)):
        torch.manual_seed(0)
        plain = randomise(kind(OddConfig(initializer_range=0.2)))
        assert ("column" in str(derive(plain).tree.get("head"))) is sharded
        model = check(lambda plain=plain: plain, language_batches(61), 2, policy="derive")
        assert model.logits.out_features == 61
    case = Case("apertus1p5_text", "Apertus1p5TextForCausalLM")
    check(lambda: build(case, 4, 2), language_batches(131), 2, policy="derive")


def test_the_text_is_the_policy() -> None:
    model = build(Case("llama", "LlamaForCausalLM"), 4, 2)
    tree = derive(model).tree
    text = yaml_text(tree, ["A line about it."])
    assert text.startswith("# A line about it.\nmatch:\n  model_type: [llama]\n")
    assert sharding(read_user_policy(text), model) == sharding(read_user_policy(tree), model)


def test_nothing_can_be_sharded() -> None:
    with pytest.raises(UnsupportedModelError, match="no two consecutive layers share units"):
        derive(TangledModel(OddConfig()))


def test_a_forward_that_asks_for_values() -> None:
    with pytest.raises(UnsupportedModelError, match=r"does not run without data \(\w+: .*Write one by hand"):
        derive(Unpredictable(OddConfig()))
