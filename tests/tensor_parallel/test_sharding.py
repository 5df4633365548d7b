"""Shards of fused projections, parameters, buffers, filters, embeddings, and of a made-up layout."""

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import autopar
from autopar.errors import ConfigError, PolicyError
from autopar.plan.make_plan import make_plan
from autopar.policy.match import find_policy
from tests.harness.worlds import pooled
from tests.parity import check
from tests.small import llama
from tests.tensor_parallel.toys import MLP, MLP_RULES, REFUSED, ToyConfig, batches, checked_plan, share, toy, toy_policy


class Fused(nn.Module):
    """One projection makes value | gate | a factor per head; the value passes a depthwise filter."""

    def __init__(self, config: ToyConfig, width: int = 3) -> None:
        super().__init__()
        self.heads, self.inner, self.ffn = config.heads, config.heads * width, config.ffn
        self.in_proj = nn.Linear(config.hidden_size, self.inner + self.ffn + self.heads)
        self.conv = nn.Conv1d(self.inner, self.inner, 2, groups=self.inner, padding=1)
        self.out_proj = nn.Linear(self.inner + self.ffn, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate, factor = self.in_proj(x).split([self.inner, self.ffn, self.heads], -1)
        value = self.conv(value.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        value = (value.unflatten(-1, (self.heads, -1)) * factor.sigmoid().unsqueeze(-1)).flatten(-2)
        return self.out_proj(torch.cat([value, F.gelu(gate)], -1))


FUSED = toy_policy(
    {"heads": "heads", "ffn": "ffn"},
    {
        "in_proj": {"column": ["heads * 3", "ffn", "heads"]},
        "conv": {"sharded": "heads * 3"},
        "out_proj": {"row": ["heads * 3", "ffn"]},
    },
    attributes={"heads": "heads", "inner": "heads", "ffn": "ffn"},
)


@pytest.mark.tier("test")
@pooled(world_size=3)
def test_parts_of_unequal_width_and_a_depthwise_filter_on_three() -> None:
    check(lambda: toy(Fused), batches(), 3, policy=FUSED)


def test_a_filter_holds_as_many_channels_and_groups_as_its_rank() -> None:
    model = share(toy(Fused), FUSED, 3, 0)  # 4 heads: 2 + 1 + 1
    conv = model.layers[0].conv
    assert (conv.in_channels, conv.out_channels, conv.groups, conv.weight.shape) == (6, 6, 6, (6, 1, 2))
    assert type(conv) is nn.Conv1d  # nothing else about it changes
    assert (model.layers[0].in_proj.out_features, model.layers[0].out_proj.in_features) == (2 * 3 + 2 + 2, 8)


@pytest.mark.parametrize(("parts", "message"), REFUSED["parts"])
def test_parts_that_do_not_add_up_give_both_numbers(parts: list[str], message: str) -> None:
    policy = copy.deepcopy(FUSED)
    policy["blocks"]["modules"]["in_proj"] = {"column": parts}
    with pytest.raises(PolicyError) as info:
        checked_plan(toy(Fused), policy)
    assert str(info.value).startswith(f"policy dict:blocks.modules.in_proj: {message}")


class Attention(nn.Module):
    """A bias per head and distance, sinks and a scale per head, a table of slopes that no checkpoint has."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.heads, hidden = config.heads, config.hidden_size
        self.qkv = nn.Linear(hidden, self.heads * 6)
        self.distance = nn.Embedding(9, self.heads)
        self.sinks = nn.Parameter(torch.zeros(self.heads))
        self.scale = nn.Parameter(torch.ones(2, self.heads))
        self.register_buffer("slopes", torch.arange(1.0, self.heads + 1).view(1, self.heads, 1), persistent=False)
        self.register_buffer("kept", torch.linspace(0, 1, self.heads))
        self.out = nn.Linear(self.heads * 2, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (self.heads, 6)).transpose(1, 2).chunk(3, -1)  # [batch, heads, seq, 2]
        at = torch.arange(x.shape[1], device=x.device)
        bias = self.distance((at[:, None] - at).abs()).permute(2, 0, 1)  # [heads, seq, seq]
        scores = q @ k.transpose(-1, -2) + bias + self.slopes.unsqueeze(-1)
        sinks = (self.sinks + self.kept)[:, None, None].expand(len(x), -1, x.shape[1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] * self.scale[0, :, None, None]
        return self.out((weights @ v * self.scale[1, :, None, None]).transpose(1, 2).flatten(-2))


ATTENTION_RULES: dict[str, Any] = {
    "qkv": {"column": "heads"},
    "distance": {"sharded": "heads", "dim": 1},
    "sinks": {"sharded": "heads"},
    "scale": {"sharded": "heads", "dim": -1},
    "slopes": {"sharded": "heads", "dim": 1},
    "kept": {"sharded": "heads"},
    "out": {"row": "heads"},
}
ATTENTION = toy_policy({"heads": "heads"}, ATTENTION_RULES, attributes={"heads": "heads"})


@pooled(world_size=3)
def test_bare_parameters_buffers_and_the_columns_of_an_embedding_on_three() -> None:
    model = check(lambda: toy(Attention), batches(), 3, policy=ATTENTION)
    layer, own = model.layers[1], 2 if model.mpu.tp.rank == 0 else 1
    assert (layer.distance.embedding_dim, layer.sinks.shape, layer.slopes.shape) == (own, (own,), (1, own, 1))
    autopar.deparallelize(model)
    plain = toy(Attention)
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    assert model.layers[1].distance.embedding_dim == 4 and type(model.layers[1]) is Attention
    assert {name: p.shape for name, p in model.named_parameters()} == {
        name: p.shape for name, p in plain.named_parameters()
    }


@pytest.mark.parametrize(("path", "rule", "message"), REFUSED["cuts"])
def test_a_cut_that_does_not_fit_what_stands_there(path: str, rule: Any, message: str) -> None:
    policy = toy_policy({"heads": "heads"}, {**ATTENTION_RULES, path: rule}, attributes={"heads": "heads"})
    with pytest.raises(PolicyError) as info:
        checked_plan(toy(Attention), policy)
    assert str(info.value).startswith(f"policy dict:blocks.modules.{path}")
    assert message in str(info.value)


@pytest.mark.parametrize(
    ("between", "attributes", "expected"),
    [
        (lambda: nn.GroupNorm(2, 6), ("num_channels", "num_groups"), [3, 1]),
        (lambda: nn.Conv1d(6, 6, 1, groups=2), ("in_channels", "out_channels", "groups"), [3, 3, 1]),
        (lambda: nn.Linear(4, 6), ("in_features", "out_features"), [4, 3]),
        (lambda: nn.Embedding(6, 4), ("num_embeddings", "embedding_dim"), [3, 4]),
    ],
)
def test_a_cut_module_tells_the_sizes_that_it_has(between: Any, attributes: tuple[str, ...], expected: list) -> None:
    policy = toy_policy({"ffn": "ffn"}, {**MLP_RULES, "between": {"sharded": "ffn"}})
    model = share(toy(lambda config: MLP(config, between()), ffn=6), policy, 2, 1)
    assert [getattr(model.layers[1].between, name) for name in attributes] == expected
    assert model.layers[1].between.weight.shape[0] == 3


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_whose_mean_would_be_cut_is_refused(norm: Any) -> None:
    policy = toy_policy({"ffn": "ffn"}, {**MLP_RULES, "between": {"sharded": "ffn"}})
    with pytest.raises(
        PolicyError, match=r"between computes a mean over sharded features and needs \{norm_over: \.\.\.\}"
    ):
        share(toy(lambda config: MLP(config, norm(6)), ffn=6), policy, 2, 1)


class Nested(nn.Module):
    """Branches in a list of lists."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.ModuleDict({"a": MLP(config)} if number else {"a": MLP(config), "b": MLP(config)}) for number in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for branch in self.branches:
            for mlp in branch.values():
                x = x + mlp(x)
        return x


@pooled(world_size=2)
def test_a_star_stands_for_every_member_of_a_list() -> None:
    rules = {f"branches.*.{name}.{path}": rule for name in ("a", "b?") for path, rule in MLP_RULES.items()}
    check(lambda: toy(Nested), batches(), 2, policy=toy_policy({"ffn": "ffn"}, rules))
    rules = {f"branches.*.*.{path}": rule for path, rule in MLP_RULES.items()}
    check(lambda: toy(Nested), batches(), 2, policy=toy_policy({"ffn": "ffn"}, rules))


@pooled(world_size=4)
def test_what_is_made_of_too_few_units_stays_whole_on_every_rank() -> None:
    policy = toy_policy({"heads": {"count": "heads", "or_whole": True}}, ATTENTION_RULES, attributes={"heads": "heads"})
    model = check(lambda: toy(Attention, heads=3), batches(), 4, policy=policy)
    assert all(tensor.layout is None for tensor in model._autopar.plan.tensors.values())
    assert model.layers[0].heads == 3
    model = check(lambda: toy(Attention), batches(), 4, policy=policy)
    assert model.layers[0].heads == 1
    with pytest.raises(ConfigError, match="3 heads cannot be sharded over 4 ranks"):
        checked_plan(toy(Attention, heads=3), ATTENTION, 4)


@pooled(world_size=2)
def test_units_go_out_in_multiples() -> None:
    policy = toy_policy({"ffn": {"count": "ffn", "align": 4}}, MLP_RULES)
    model = check(lambda: toy(MLP, ffn=12), batches(), 2, policy=policy)
    assert model.layers[0].up.weight.shape[0] == (8 if model.mpu.tp.rank == 0 else 4)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_a_module_that_several_blocks_share_is_cut_once() -> None:
    def build() -> Any:
        model = toy(Attention)
        model.layers = nn.ModuleList([model.layers[0], model.layers[0], model.layers[1]])
        return model

    model = check(build, batches(), 2, policy=ATTENTION)
    assert model.layers[0] is model.layers[1] and model.layers[0].heads == 2


def test_a_tied_module_without_a_rule_that_cuts_it_is_refused() -> None:
    class Tied(MLP):
        def __init__(self, config: ToyConfig) -> None:
            super().__init__(config)
            self.inner = nn.ModuleDict({"other": nn.Linear(config.hidden_size, config.ffn, bias=False)})
            self.inner["other"].weight = self.up.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.inner["other"](x).sum(-1, keepdim=True)

    with pytest.raises(PolicyError) as info:
        checked_plan(toy(Tied), toy_policy({"ffn": "ffn"}, MLP_RULES))
    assert str(info.value) == (
        "policy dict:blocks.modules.up: layers.0.inner.other.weight is the same tensor as layers.0.up.weight, "
        "which this rule shards, and needs a rule that shards it too"
    )
    with pytest.raises(
        PolicyError, match=r"inner.other.weight is the same tensor as layers.0.up.weight, but replicated here"
    ):
        checked_plan(toy(Tied), toy_policy({"ffn": "ffn"}, {**MLP_RULES, "inner": "replicated"}))
    gathered = {**MLP_RULES, "inner.other": {"column": "ffn", "gather_output": True}}
    assert checked_plan(toy(Tied), toy_policy({"ffn": "ffn"}, gathered))


def test_a_row_reads_as_many_units_as_a_column_makes() -> None:
    policy = toy_policy({"ffn": "inferred"}, {"up": {"column": ["ffn", "ffn"]}, "down": {"row": "ffn"}})
    with pytest.raises(PolicyError) as info:
        checked_plan(toy(MLP, ffn=6), policy)
    assert str(info.value) == (
        "policy dict:blocks.modules.down: down reads 6 'ffn', but up makes 3 (policy dict:blocks.modules.up)"
    )


@pytest.mark.parametrize("how", ["prune", "spectral_norm", "weight_norm"])
def test_a_weight_that_is_computed_is_refused_and_what_undoes_it_is_named(how: str) -> None:
    model = llama()
    layer = model.model.layers[0].mlp.down_proj
    if how == "prune":
        prune.l1_unstructured(layer, "weight", 0.3)
    else:
        getattr(parametrizations, how)(layer)
    words = (
        "mlp.down_proj.weight must be a parameter; got a Tensor, as of pruning, weight_norm or "
        "spectral_norm.\n  Make it a parameter before initialize: torch.nn.utils.prune.remove(module, 'weight'), or\n  "
        "torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')."
    )
    with pytest.raises(PolicyError, match=re.escape(words)):
        make_plan(model, find_policy(model), 2)
    prune.remove(layer, "weight") if how == "prune" else parametrize.remove_parametrizations(layer, "weight")
    assert make_plan(model, find_policy(model), 2)


class Ipsum(nn.Module):
    """Everything in one projection, stored ``v0 q0 v1 q1 ... | k | strength of each head | gate | up``."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.heads, self.keys, self.ffn, hidden = config.heads, config.groups, config.ffn, config.hidden_size
        self.parts = [self.heads * 5, self.keys * 2, self.heads, 2 * self.ffn]
        self.everything = nn.Linear(hidden, sum(self.parts))
        self.sharpness = nn.Parameter(torch.ones(self.keys, 2))
        self.back = nn.Linear(self.ffn + self.heads * 3, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = [self.heads * 5, self.keys * 2, self.heads, 2 * self.ffn]
        qv, k, strength, both = self.everything(x).split(sizes, -1)
        v, q = qv.unflatten(-1, (self.heads, 5)).transpose(1, 2).split([3, 2], -1)  # [batch, heads, seq, 3 and 2]
        k = k.unflatten(-1, (self.keys, 2)) * self.sharpness
        k = k.transpose(1, 2).repeat_interleave(self.heads // self.keys, 1)
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v * strength.transpose(1, 2).unsqueeze(-1)
        gate, up = both.chunk(2, -1)
        return self.back(torch.cat([F.silu(gate) * up, mixed.transpose(1, 2).flatten(-2)], -1))


IPSUM = """
match: {model_type: toy}
units:
  keys: {count: groups, replicate: true}
  heads: {count: heads, follows: keys}
  ffn: ffn
blocks:
  path: layers
  modules:
    everything: {column: [heads * 5, keys * 2, heads, ffn, ffn]}
    sharpness: {sharded: keys}
    back: {row: [ffn, heads * 3]}
  attributes:
    heads: heads
    keys: keys
    ffn: ffn
"""


@pooled(world_size=3)
def test_a_layout_that_nobody_stored_before_takes_one_file() -> None:
    for heads, keys in ((6, 3), (6, 2), (4, 1)):
        check(lambda h=heads, k=keys: toy(Ipsum, heads=h, groups=k), batches(), 3, policy=IPSUM)
