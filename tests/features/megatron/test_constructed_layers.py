"""Models built of ColumnParallelLinear, RowParallelLinear and VocabParallelEmbedding, against plain ones."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.distributed.mesh import MPU
from autopar.errors import CheckpointError, ConfigError, ConsistencyError
from autopar.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    full_state_dict,
    load_full_state_dict,
    vocab_parallel_cross_entropy,
)
from tests.harness.worlds import pooled
from tests.parity import close
from tests.small import gpt2, llama

WIDTH, HEADS, FFN, VOCAB = 20, 5, 13, 31  # none of them divides by 2 or 4


class Tiny(nn.Module):
    """A small transformer; with a group its layers are parallel, without one plain."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        parallel, head = {"group": group}, WIDTH // HEADS
        if group is None:
            self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=3)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH, bias=False)
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        else:
            self.embed = VocabParallelEmbedding(VOCAB, WIDTH, padding_idx=3, **parallel)
            self.qkv = ColumnParallelLinear(WIDTH, 3 * WIDTH, stride=3, unit=head, **parallel)
            self.out = RowParallelLinear(WIDTH, WIDTH, unit=head, input_is_parallel=True, **parallel)
            self.up = ColumnParallelLinear(WIDTH, FFN, **parallel)
            self.down = RowParallelLinear(FFN, WIDTH, bias=False, input_is_parallel=True, **parallel)
            self.head = ColumnParallelLinear(WIDTH, VOCAB, bias=False, **parallel)
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.head.weight = self.embed.weight
        self.group = group

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids[:, :-1])
        q, k, v = self.qkv(self.norm_1(x)).chunk(3, -1)  # [batch, seq, heads/tp * head]
        q, k, v = (y.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for y in (q, k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norm_2(x))))
        logits, target = self.head(x), ids[:, 1:]
        if self.group is None:
            return logits, F.cross_entropy(logits.flatten(0, 1), target.flatten())
        return logits, vocab_parallel_cross_entropy(logits, target, group=self.group, reduction="mean")


def ids(seed: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(seed))


@pooled(world_size=4)
def test_a_transformer_of_ones_own_is_exact() -> None:
    for tp in (2, 4):
        mpu = MPU(tensor_parallel_size=tp)
        torch.manual_seed(7)
        plain = Tiny()
        torch.manual_seed(7)
        parallel = Tiny(mpu)
        for name, tensor in full_state_dict(parallel).items():
            assert torch.equal(tensor, plain.state_dict()[name]), f"{name} starts differently"
        for seed in (1, 2):
            expected, actual = plain(ids(seed)), parallel(ids(seed))
            close(actual[1], expected[1], "the loss")
            expected[1].backward()
            actual[1].backward()
        for name, gradient in gradients(parallel).items():
            close(gradient, plain.get_parameter(name).grad, f"gradient of {name}")
        for p in (2.0, math.inf):
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5, p)
            close(autopar.clip_grad_norm_(parallel, 0.5, p), norm, "the norm of the gradients")
        for model in (plain, parallel):
            torch.optim.SGD(model.parameters(), lr=0.3).step()
        whole = full_state_dict(parallel)
        for name, tensor in whole.items():
            close(tensor, plain.state_dict()[name], f"{name} after a step")
        other = Tiny(mpu.tp.group)  # a process group is as good
        load_full_state_dict(other, whole)
        assert all(torch.equal(tensor, whole[name]) for name, tensor in full_state_dict(other).items())
        copied = copy.deepcopy(parallel)
        close(copied(ids(1))[1], parallel(ids(1))[1], "the loss of a copy")
        mpu.destroy()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    held = copy.deepcopy(model)
    for own, parameter in zip(held.parameters(), model.parameters(), strict=True):
        own.data = parameter.grad
    found = full_state_dict(held)
    return {name: found[name] for name, _ in model.named_parameters()}


@pooled(world_size=2)
def test_an_mlp_as_in_megatron() -> None:
    mpu = MPU(tensor_parallel_size=2)
    method = nn.init.xavier_normal_
    torch.manual_seed(3)
    weights = [method(torch.empty(7, 6)), method(torch.empty(4, 7))]
    torch.manual_seed(3)
    up = ColumnParallelLinear(
        6, 7, gather_output=True, init_method=method, skip_bias_add=True, keep_master_weight_for_test=True, group=mpu
    )
    down = RowParallelLinear(7, 4, init_method=method, skip_bias_add=True, group=mpu)
    assert isinstance(up, nn.Linear)
    assert torch.equal(up.master_weight, weights[0])
    assert up.output_size_per_partition == up.weight.shape[0] == (4, 3)[mpu.tp.rank]
    assert not up.bias.any(), "Megatron's biases begin with 0"
    x = torch.randn(5, 6, requires_grad=True)
    y, bias = up(x)
    close(y.detach(), x.detach() @ weights[0].T, "the gathered output")
    assert bias.shape == (7,)
    z, bias = down(F.relu(y + bias))
    assert bias is down.bias
    (z + bias).square().sum().backward()
    expected = x.detach().clone().requires_grad_()
    F.linear(F.relu(F.linear(expected, weights[0])), weights[1]).square().sum().backward()
    close(x.grad, expected.grad, "the input's gradient")
    for layer, dim in ((up, 0), (down, 1)):
        weight = layer.weight
        assert (weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride) == (True, dim, 1)
    assert not hasattr(down.bias, "tensor_model_parallel")
    torch.manual_seed(5)
    sequential = nn.Sequential(
        ColumnParallelLinear(6, 7, group=mpu), nn.ReLU(), RowParallelLinear(7, 3, input_is_parallel=True, group=mpu)
    )
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3))
    close(sequential(x).detach(), plain(x).detach(), "a Sequential")
    assert sequential[0](x).shape == (5, (4, 3)[mpu.tp.rank])
    with pytest.raises(ConfigError, match="ColumnParallelLinear at 0 is a parallel layer already; initialize needs"):
        autopar.initialize(sequential, policy={"units": {"f": "inferred"}, "prefix": {"0": {"column": "f"}}})


@pooled(world_size=2)
def test_what_cannot_be_built_says_why() -> None:
    mpu = MPU(tensor_parallel_size=2)
    for wrong, text in [
        (lambda: ColumnParallelLinear(4, 4), "ColumnParallelLinear requires group=, a torch ProcessGroup or an MPU"),
        (lambda: ColumnParallelLinear(4, 1, group=mpu), "output_size=1 has 1 unit of 1 x 1 features, which cannot"),
        (lambda: RowParallelLinear(6, 4, unit=4, group=mpu), "input_size=6 must be divisible into 1 x units of 4"),
        (lambda: VocabParallelEmbedding(4, 4, padding_idx=4, group=mpu), r"padding_idx must be in .-4, 4., got 4"),
    ]:
        with pytest.raises(ConfigError, match=text):
            wrong()
    layer = ColumnParallelLinear(4, 4, bias=False, group=mpu)
    with pytest.raises(CheckpointError, match="missing weight; unexpected wheel"):
        load_full_state_dict(layer, {"wheel": torch.ones(4, 4)})
    with pytest.raises(CheckpointError, match=r"weight: expected the full shape \[4, 4\], got \[2, 4\]"):
        load_full_state_dict(layer, layer.state_dict())
    torch.manual_seed(dist.get_rank())
    with pytest.raises(ConsistencyError, match=r"random states of the ranks \[0, 1\] differ: they would draw"):
        ColumnParallelLinear(4, 4, group=mpu)


@pooled(world_size=2)
def test_classes_and_marks_of_layers_that_initialize_swapped() -> None:
    model = autopar.initialize(llama(), {"tp": 2})
    block = model.model.layers[0]
    assert isinstance(block.mlp.gate_proj, ColumnParallelLinear)
    assert isinstance(block.mlp.down_proj, RowParallelLinear)
    assert not isinstance(block.mlp.down_proj, ColumnParallelLinear)
    assert isinstance(model.get_input_embeddings(), VocabParallelEmbedding)

    model = autopar.initialize(gpt2(), {"tp": 2})
    block = model.transformer.h[0]
    for _ in range(2):
        fused, row, norm = block.attn.c_attn.weight, block.attn.c_proj.weight, block.ln_1.weight
        assert [getattr(fused, name) for name in NAMES[:3]] == [True, 1, 3]
        assert [getattr(row, name) for name in NAMES[:3]] == [True, 0, 1]
        assert [getattr(norm, name) for name in NAMES[:3]] == [False, -1, 1]
        model.to(torch.float64)
    plain = autopar.deparallelize(model)
    assert not any(hasattr(parameter, name) for parameter in plain.parameters() for name in NAMES)

    ids = torch.arange(12).view(2, 6)
    for build in (llama, lambda: llama(num_key_value_heads=1), gpt2):
        for sizes in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
            plain, model = build().train(), autopar.initialize(build().train(), {"model_parallelism": sizes})
            plain(ids, labels=ids).loss.backward()
            model.execute_pipeline({"input_ids": ids, "labels": ids})
            true = torch.nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters()])
            torch.testing.assert_close(norm_by_marks(model), true, rtol=1e-5, atol=0)


NAMES = ("tensor_model_parallel", "partition_dim", "partition_stride", "shared", "ds_pipe_replicated")


def norm_by_marks(model: Any) -> torch.Tensor:
    """As Megatron reads them: on every rank what is sharded, the rest on the first one; what stages share once."""
    first = model.mpu.get_tensor_parallel_rank() == 0
    counted = [
        parameter.grad
        for parameter in model.parameters()
        if not getattr(parameter, "shared", False) and (getattr(parameter, "tensor_model_parallel", False) or first)
    ]
    total = sum(gradient.square().sum() for gradient in counted) + torch.zeros(())
    dist.all_reduce(total)  # one replica is the world
    return total.sqrt()
