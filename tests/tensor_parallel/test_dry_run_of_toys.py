"""Each mistake that only a run can show, on the smallest model that makes it."""

from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import PolicyError
from tests.tensor_parallel.test_region_modules import HEADS, LATENT_RULES, MIXTURE_RULES, Latent, Mixture, Selective
from tests.tensor_parallel.toys import MLP, MLP_RULES, Toy, ToyConfig, checked_plan, filled, toy, toy_policy


def refused(model: Any, policy: Any, path: str, message: str) -> None:
    with pytest.raises(PolicyError) as info:
        checked_plan(model, policy)
    assert str(info.value).startswith(f"policy dict:blocks.modules.{path}: {message}"), str(info.value)


def latent(**changes: Any) -> dict[str, Any]:
    return toy_policy(HEADS, {**LATENT_RULES, **changes}, attributes=HEADS)


def test_the_right_rules_pass() -> None:
    checked_plan(toy(Latent), latent())
    checked_plan(toy(Mixture), toy_policy({"ffn": "ffn"}, MIXTURE_RULES))


MIXED = (
    "a replicated activation meets sharded ones: its gradient would be partial.\n  The module that made it needs "
    "{enter_output: UNIT}, or a rule that shards it."
)


def test_a_replicated_activation_that_meets_sharded_ones() -> None:
    rules = latent(latent="replicated", norm="replicated", k={"column": "heads"})
    made = "\n  The activation was made by layers.1.latent (policy dict:blocks.modules.latent)"
    refused(toy(Latent), rules, "latent", f"in layers.1 {MIXED}{made}")  # nothing flows back into the model's inputs

    class Twice(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x) * x.mean(-1, keepdim=True))

    made = "\n  The activation was made by layers.0.down (policy dict:blocks.modules.down)"
    refused(toy(Twice), toy_policy({"ffn": "ffn"}, MLP_RULES), "up", f"in layers.1 {MIXED}{made}")

    class Normed(Latent):
        def __init__(self, config: ToyConfig) -> None:
            super().__init__(config)
            self.latent_norm = nn.LayerNorm(5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.q(x).unflatten(-1, (self.heads, 4))
            return self.o(torch.tanh(q * self.latent_norm(self.latent(x)).mean(-1)[..., None, None]).flatten(-2))

    rules = latent(latent="replicated", norm="replicated", k="replicated", latent_norm="replicated")
    made = (
        "\n  The activation was made by layers.1.latent (policy dict:blocks.modules.latent), then layers.1.latent_norm "
        "(policy dict:blocks.modules.latent_norm)"
    )
    refused(toy(Normed), rules, "latent", f"in layers.1 {MIXED}{made}")


def test_a_parameter_whose_gradient_stays_partial_or_must_not_be_summed() -> None:
    message = "layers.0.norm.bias works on sharded activations, but its rule leaves its gradient partial\n"
    message += "  Write {replicated: UNIT} to sum it, or shard the parameter."
    refused(toy(Latent), latent(norm="replicated"), "q", message)

    class Scaled(MLP):
        def __init__(self, config: ToyConfig) -> None:
            super().__init__(config)
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x) * self.scale)

    units = {"ffn": "ffn"}
    message = "layers.0.scale works on sharded activations, but its rule leaves its gradient partial\n"
    refused(toy(Scaled), toy_policy(units, {**MLP_RULES, "scale": "replicated"}), "up", message)
    assert checked_plan(toy(Scaled), toy_policy(units, {**MLP_RULES, "scale": {"replicated": "ffn"}}))

    class Before(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(self.between(x)))

    model = toy(lambda config: Before(config, nn.LayerNorm(config.hidden_size)))
    rules = {**MLP_RULES, "between": {"replicated": "ffn"}}
    message = (
        "layers.1.between.bias works on replicated activations: its gradient must not be summed\n  Write 'replicated'."
    )
    refused(model, toy_policy({"ffn": "ffn"}, rules), "between", message)


def test_what_layers_read() -> None:
    ffn = {"ffn": "ffn"}

    class Cut(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x) + self.between(x))

    model = toy(lambda config: Cut(config, nn.Linear(config.hidden_size, config.ffn)))
    refused(
        model,
        toy_policy(ffn, {**MLP_RULES, "between": {"sharded": "ffn"}}),
        "between",
        "layers.1.between is sharded, but its input is replicated and needs a gradient\n"
        "  Use a column rule here or earlier.",
    )
    refused(
        model,
        toy_policy(ffn, {**MLP_RULES, "between": {"column": "ffn", "inside": True}}),
        "between",
        "layers.0.between is a column inside a region, but its input is replicated",
    )
    assert checked_plan(model, toy_policy(ffn, {**MLP_RULES, "between": {"column": "ffn"}}))
    rules = {"up": {"column": "ffn"}, "steer": {"row": "ffn", "enter_output": True}, "down": {"row": "ffn"}}
    refused(
        toy(Selective),
        toy_policy(ffn, {**rules, "step": {"column": "ffn"}}),
        "step",
        "layers.0.step is a column, but its input is already sharded\n"
        "  The activation was made by layers.0.steer (policy dict:blocks.modules.steer)",
    )

    class Swapped(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(self.down(x))

    refused(
        toy(Swapped, hidden_size=5),
        toy_policy(ffn, MLP_RULES),
        "down",
        "layers.0.down is a row, but its input is replicated: no column feeds it",
    )
    refused(
        toy(MLP),
        toy_policy(ffn, {**MLP_RULES, "up": {"column": "ffn", "inside": True}}),
        "up",
        "layers.0.up is a column inside a region, but its input is replicated",
    )


class Reports(Toy):
    """Hands out more than its last hidden state."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config, MLP)
        self.heads = config.heads

    def forward(self, inputs_embeds: torch.Tensor) -> Any:
        out = super().forward(inputs_embeds)
        if self.config.report == "inside":
            return {"last": out.last_hidden_state, "hidden": self.layers[0].up(inputs_embeds)}
        return {"last": out.last_hidden_state, "count": torch.zeros(self.heads, device=inputs_embeds.device)}


def test_outputs_are_whole_and_of_the_right_shape() -> None:
    policy = toy_policy({"ffn": "ffn", "heads": "heads"}, MLP_RULES)
    inside = filled(Reports(ToyConfig(report="inside")))
    refused(inside, policy, "up", "output 'hidden' is still sharded: a row rule or gather_output is missing")
    assert checked_plan(filled(Reports(ToyConfig(report="count"))), policy)
    policy["attributes"] = {"heads": "heads"}
    refused(
        filled(Reports(ToyConfig(report="count"))),
        policy,
        "up",
        "expected outputs with shapes [(2, 5, 6), (4,)], as the full model has, got [(2, 5, 6), (2,)]",
    )


def test_regions_that_names_alone_show_to_be_wrong() -> None:
    once = {**MIXTURE_RULES, "experts": "replicated"}
    policy = toy_policy({"ffn": "ffn", "other": "ffn"}, {**MIXTURE_RULES, "experts.down_bias": {"once": "other"}})
    message = "experts.down_bias works on activations sharded by 'other', but no column opens them"
    refused(toy(Mixture), policy, "experts.down_bias", message)
    with pytest.raises(
        PolicyError, match=r"layers.0.experts.up is matched by two rules, here and, with layers.0.experts, in"
    ):
        checked_plan(toy(Mixture), toy_policy({"ffn": "ffn"}, once))
