"""A decoder with grouped queries, fused weights and experts, for the guide in docs/policies.md."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class GroupedConfig(PretrainedConfig):
    model_type = "grouped"

    def __init__(
        self, vocab_size=131, width=48, heads=6, kv_heads=2, ffn=40, experts=4, expert_ffn=20, layers=2, **kwargs
    ):
        super().__init__(**kwargs)
        self.vocab_size, self.width, self.heads, self.kv_heads, self.layers = vocab_size, width, heads, kv_heads, layers
        self.ffn, self.experts, self.expert_ffn = ffn, experts, expert_ffn


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, self.kv_heads, self.head_width = config.heads, config.kv_heads, config.width // config.heads
        self.groups = config.heads // config.kv_heads
        self.qkv = nn.Linear(config.width, (self.heads + 2 * self.kv_heads) * self.head_width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x):
        x = self.qkv(x).unflatten(-1, (-1, self.head_width))  # [batch, length, heads + 2 kv_heads, head_width]
        q, k, v = x.transpose(1, 2).split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        k, v = (each.repeat_interleave(self.groups, dim=1) for each in (k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_up, self.down = nn.Linear(config.width, 2 * config.ffn), nn.Linear(config.ffn, config.width)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Experts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(config.experts, 2 * config.expert_ffn, config.width) / 7)
        self.down = nn.Parameter(torch.randn(config.experts, config.width, config.expert_ffn) / 7)

    def forward(self, x, weights):
        total = torch.zeros_like(x)
        for weight, gate_up, down in zip(weights.unbind(-1), self.gate_up, self.down, strict=True):
            gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
            total = total + weight.unsqueeze(-1) * F.linear(F.silu(gate) * up, down)
        return total


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.attention, self.mlp = Attention(config), MLP(config)
        self.router, self.experts = nn.Linear(config.width, config.experts), Experts(config)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        scores = self.router(y).softmax(-1)
        weights = scores * (scores >= scores.topk(2).values[..., -1:])  # of the best two experts of each token
        return x + self.mlp(y) + self.experts(y, weights)


class GroupedModel(PreTrainedModel):
    config_class, base_model_prefix = GroupedConfig, "model"

    def __init__(self, config):
        super().__init__(config)
        self.tokens, self.norm = nn.Embedding(config.vocab_size, config.width), nn.RMSNorm(config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.post_init()

    def forward(self, input_ids, **kwargs):
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class GroupedForCausalLM(PreTrainedModel):
    config_class, base_model_prefix = GroupedConfig, "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = GroupedModel(config)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.head(self.model(input_ids))
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)
