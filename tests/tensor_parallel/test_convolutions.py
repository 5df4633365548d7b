"""Convolutions by channel, batch norms of channels, outputs that count once, and one matrix that holds all experts."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import PolicyError
from tests.harness.worlds import pooled
from tests.parity import check
from tests.tensor_parallel.toys import MLP, MLP_RULES, ToyConfig, batches, checked_plan, share, toy, toy_policy

FFN = {"ffn": "ffn"}


class Conformer(nn.Module):
    """value | gate by a convolution, a depthwise filter, a batch norm, and back by a convolution."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        hidden, ffn = config.hidden_size, config.ffn
        self.up = nn.Conv1d(hidden, 2 * ffn, 1)
        self.deep = nn.Conv1d(ffn, ffn, 3, groups=ffn, padding=1)
        self.norm = nn.BatchNorm1d(ffn)
        self.down = nn.Conv1d(ffn, hidden, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.deep(F.glu(self.up(x.transpose(1, 2)), 1))).tanh()).transpose(1, 2)


CONFORMER_RULES: dict[str, Any] = {
    "up": {"column": ["ffn", "ffn"]},
    "deep": {"sharded": "ffn"},
    "norm": {"sharded": "ffn"},
    "down": {"row": "ffn"},
}


@pooled(world_size=2)
def test_convolutions_are_columns_and_rows_and_a_batch_norm_is_cut() -> None:
    plain: list[Any] = []
    model = check(
        lambda: toy(Conformer),
        batches(),
        2,
        policy=toy_policy(FFN, CONFORMER_RULES),
        first=lambda whole, _: plain.append(whole),
    )
    layer, own = model.layers[0], 3 if model.mpu.tp.rank == 0 else 2
    assert (layer.up.out_channels, layer.deep.groups, layer.norm.num_features, layer.down.in_channels) == (
        *(2 * own, own, own, own),
    )
    autopar.deparallelize(model)
    for name, buffer in plain[0].named_buffers():  # the statistics of both micro-batches
        assert torch.allclose(model.get_buffer(name), buffer, atol=1e-6), name
    assert (layer.deep.groups, layer.norm.num_features, layer.down.in_channels) == (5, 5, 5)
    assert type(layer.up) is nn.Conv1d and type(layer.norm) is nn.BatchNorm1d


def test_a_convolution_in_groups_is_no_column() -> None:
    with pytest.raises(PolicyError) as info:
        checked_plan(toy(Conformer), toy_policy(FFN, {**CONFORMER_RULES, "deep": {"column": "ffn"}}))
    assert str(info.value) == (
        "policy dict:blocks.modules.deep: 'column' of deep: a convolution takes it without groups (it has 5), "
        "gather_output and split_input"
    )

    class Own(nn.Conv1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model = toy(Conformer)
    model.layers[0].up.__class__ = Own
    with pytest.raises(PolicyError, match=r"^Own has a custom forward and cannot become ColumnParallelConv$"):
        checked_plan(model, toy_policy(FFN, CONFORMER_RULES))


class Stacked(nn.Module):
    """Three experts in one matrix, gate | up for each: ``[3 * 2 * ffn, hidden]``."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.ffn = config.ffn
        self.up = nn.Parameter(torch.empty(3 * 2 * config.ffn, config.hidden_size))
        self.down = nn.Parameter(torch.empty(config.hidden_size, 3 * config.ffn))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ self.up.T).unflatten(-1, (3, 2, self.ffn)).unbind(-2)
        return (gate.sigmoid() * up).flatten(-2) @ self.down.T


STACKED: dict[str, Any] = {
    "inner": {"region": "ffn"},
    "inner.up": {"sharded": ["ffn", "ffn"], "repeat": "n_experts"},
    "inner.down": {"sharded": "ffn", "dim": 1, "repeat": "3"},
}


class Holder(nn.Module):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.inner = Stacked(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pooled(world_size=2)
def test_a_list_that_repeats_itself_for_each_expert() -> None:
    policy = toy_policy(FFN, STACKED, attributes={"inner.ffn": "ffn"})
    check(lambda: toy(Holder, n_experts=3), batches(), 2, policy=policy)


OTHER = "  If this module has another size, use a policy that replicates it: blocks: {modules: {inner.up: replicated}}"


def test_a_list_repeats_itself_in_modules_too_and_at_least_once() -> None:
    rules = {**MLP_RULES, "between": {"sharded": "ffn", "repeat": 2}}
    model = share(toy(lambda config: MLP(config, nn.Linear(1, 10))), toy_policy(FFN, rules), 2, 0)
    assert model.layers[0].between.weight.shape == (6, 1)
    for repeat, message in [
        ("0", "'repeat' of inner.up must be a positive integer; got 0=0"),
        ("n_expert", "'inner.up' is n_expert, which ToyConfig lacks. Did you mean 'n_experts'?"),
        (
            "2",
            "inner.up has 30 features, [ffn, ffn, ffn, ffn] describes 20 equal parts: 30 / 20 is not an integer\n"
            + OTHER,
        ),
    ]:
        policy = toy_policy(FFN, {**STACKED, "inner.up": {"sharded": ["ffn", "ffn"], "repeat": repeat}})
        with pytest.raises(PolicyError) as info:
            checked_plan(toy(Holder, n_experts=3), policy)
        assert str(info.value) == f"policy dict:blocks.modules.inner.up: {message}"
