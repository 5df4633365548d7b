"""A dry run computes one of several equal blocks, and finds what is wrong in any of them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from autopar.dry_run import pipeline_parallel, tensor_parallel as dry_run
from autopar.dry_run.equal_blocks import equal_blocks
from autopar.dry_run.pipeline_parallel import find_reads
from autopar.dry_run.tensor_parallel import check_plan
from autopar.errors import PolicyError
from autopar.plan.make_plan import make_plan
from autopar.plan.plan import AttributePlan
from autopar.plan.stages import make_stages
from autopar.policy.load import read_user_policy
from autopar.policy.match import find_policy
from tests.pipeline_parallel.deep import deep
from tests.small import gpt2, llama
from tests.tensor_parallel.toys import MLP, MLP_RULES, ToyConfig, checked_plan, toy_policy

RULES = toy_policy({"ffn": "ffn"}, MLP_RULES)
MIXED = r"in layers.5 a replicated activation meets sharded ones"


class Deep(PreTrainedModel):
    """Eight residual blocks."""

    config_class = ToyConfig
    base_model_prefix = "model"
    main_input_name = "inputs_embeds"

    def __init__(self, block: Callable[[int], nn.Module], ffn: int = 5) -> None:
        super().__init__(ToyConfig(ffn=ffn))
        self.layers = nn.ModuleList(map(block, range(8)))

    def forward(self, inputs_embeds: torch.Tensor) -> BaseModelOutput:
        for layer in self.layers:
            inputs_embeds = inputs_embeds + self.one(layer, inputs_embeds)
        return BaseModelOutput(last_hidden_state=inputs_embeds)

    def one(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x)


class Counted(MLP):
    """Counts the forwards that compute."""

    computed: ClassVar[Counter[str]] = Counter()

    def __init__(self, layer: int) -> None:
        super().__init__(ToyConfig())
        self.layer, self.leaks = layer, layer == 5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.computed[type(self).__name__] += 1
        return super().forward(x)

    def leak(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) * x.mean(-1, keepdim=True))


def groups(model: nn.Module, **changes: Any) -> list[tuple[tuple[str, ...], tuple[Any, ...]]]:
    return [(group.paths, group.differing) for group in equal_blocks(model, **changes)]


def test_one_of_equal_blocks_computes():
    Counted.computed.clear()
    model = Deep(Counted)
    ((paths, differing),) = groups(model)
    assert paths == tuple(f"layers.{i}" for i in range(8))
    assert differing == (("", "layer"), ("", "leaks"))
    checked_plan(model, RULES)
    assert Counted.computed == {"Counted": 5}  # one of the plain model; of two ranks one on inputs, one on activations


def test_the_last_rank_runs_where_it_is_another():
    class Even(Counted):
        def __init__(self, layer: int) -> None:
            MLP.__init__(self, ToyConfig(ffn=4))

    even = Deep(Even, ffn=4)
    assert different_ranks(even, 2) == [0]
    assert different_ranks(even, 3) == [0, 2]
    checked_plan(even, RULES)
    assert Even.computed["Even"] == 3
    assert different_ranks(llama(num_attention_heads=8, num_key_value_heads=2, head_dim=4), 4) == [0, 3]  # KV heads
    plan = make_plan(even, read_user_policy(RULES), 2)
    assert dry_run.different_ranks(replace(plan, attributes=(AttributePlan("", "n", "", 3, (2, 1)),))) == [0, 1]
    experts = replace(plan.modules["layers.0.up"], rule="experts")
    assert dry_run.different_ranks(replace(plan, modules={**plan.modules, "layers.0.up": experts})) == [0, 1]


def different_ranks(model: Any, tp: int) -> list[int]:
    policy = RULES if isinstance(model, Deep) else find_policy(model)
    return dry_run.different_ranks(make_plan(model, read_user_policy(policy), tp))


def test_what_a_forward_reads_makes_a_difference():
    class Numbered(Counted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.leak(x) if self.layer == 5 else super().forward(x)

    class Flagged(Counted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.leak(x) if self.leaks else super().forward(x)

    for kind in (Numbered, Flagged):
        with pytest.raises(PolicyError, match=MIXED):
            checked_plan(Deep(kind), RULES)
        model = Deep(kind)
        model.layers[5] = kind(6)
        kind.computed.clear()
        checked_plan(model, RULES)
        assert sum(kind.computed.values()) == (21 if kind is Numbered else 5)  # seven numbers, or one flag


def test_another_module_in_the_middle_is_found():
    def block(layer: int) -> nn.Module:
        return MLP(ToyConfig(), nn.PReLU(1) if layer == 4 else nn.PReLU(1).requires_grad_(False) and nn.GELU())

    model = Deep(block)
    assert groups(model)[0][0] == tuple(f"layers.{i}" for i in range(8) if i != 4)
    policy = toy_policy({"ffn": "ffn"}, {**MLP_RULES, "between": "replicated"})
    with pytest.raises(PolicyError, match=r"layers\.4\.between\.weight works on sharded activations"):
        checked_plan(model, policy)
    checked_plan(model, toy_policy({"ffn": "ffn"}, {**MLP_RULES, "between": {"replicated": "ffn"}}))


@pytest.mark.parametrize("layer", [1, 3, 5])
def test_another_rule_in_the_middle_is_found(layer: int):
    model = llama(num_hidden_layers=6)
    plan = make_plan(model, find_policy(model), 2)
    assert check_plan(model, "", plan)
    path = f"model.layers.{layer}.mlp.up_proj"
    modules = {name: rule for name, rule in plan.modules.items() if name != path}
    tensors = {**plan.tensors, f"{path}.weight": replace(plan.tensors[f"{path}.weight"], layout=None)}
    wrong = replace(plan, modules=modules, tensors=tensors)
    ((paths, _),) = groups(model, plan=wrong)
    assert f"model.layers.{layer}" not in paths
    with pytest.raises(PolicyError, match=rf"fails in model.layers.{layer}.mlp, where the full model does not"):
        check_plan(model, "", wrong)
    values = [
        replace(a, values=a.values[::-1] if len(set(a.values)) > 1 else tuple(v + 1 for v in a.values))
        if a.path.startswith(f"model.layers.{layer}.")
        else a
        for a in plan.attributes
    ]
    if values:
        ((paths, _),) = groups(model, plan=replace(plan, attributes=tuple(values)))
        assert f"model.layers.{layer}" not in paths


def test_blocks_that_share_something_are_equal_to_none():
    shared = nn.Linear(6, 5)

    def tied(layer: int) -> nn.Module:
        block = MLP(ToyConfig())
        if layer in (2, 6):
            block.up = shared
        elif layer in (3, 7):
            block.up.weight = other
        elif layer == 4:
            block.friends = [shared]
        return block

    other = nn.Parameter(torch.zeros(5, 6))
    assert groups(Deep(tied)) == [(("layers.0", "layers.1", "layers.5"), ())]
    model = Deep(lambda _: MLP(ToyConfig()))
    model.config.output_attentions = True  # collected inside of the blocks
    assert groups(model) == []


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "t5", "bart", "mixtral"])
def test_reads_and_stages_are_those_of_every_block(kind: str, monkeypatch: pytest.MonkeyPatch):
    model = {"gpt2": lambda: gpt2(n_layer=5), "llama": lambda: llama(num_hidden_layers=5)}.get(
        kind, lambda: deep(kind, 5)
    )()
    policy = find_policy(model)

    def found() -> tuple[Any, ...]:
        reads = find_reads(model, policy)
        assert reads is not None
        plan = make_stages(model, policy, 3, reads=reads)
        assert reads.dry_run is not None
        return reads.order, reads.parameters, reads.earlier, plan, reads.dry_run(plan)

    replayed = found()
    asked = [len(equal_blocks(model)) > 0]
    monkeypatch.setattr(pipeline_parallel, "equal_blocks", lambda model: [])
    assert found() == replayed
    assert asked == [True]
