"""Small mixtures whose experts are modules in a list, of transformers and of a user's own; all in fp64."""

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutput


def _precise(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """In fp64 throughout: routers compute in a dtype of their own."""
    for module in model.modules():
        if type(module).__name__.endswith("Router"):
            module.dtype = torch.float64
    return model.double()


def switch(experts: int = 5, **fields: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 12, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}
    sparse = {"num_experts": experts, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    more = {"vocab_size": 31, "router_jitter_noise": 0.0, "dropout_rate": 0.0}
    ids = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1}
    config = transformers.SwitchTransformersConfig(**{**sizes, **sparse, **more, **ids, **fields})
    return _precise(transformers.SwitchTransformersForConditionalGeneration(config))


def nllb(experts: int = 4, **fields: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64}
    sparse = {"num_experts": experts, "encoder_sparse_step": 2, "decoder_sparse_step": 2}
    names = ("dropout", "attention_dropout", "activation_dropout", "moe_token_dropout", "encoder_layerdrop")
    drops = dict.fromkeys((*names, "decoder_layerdrop"), 0.0)
    ids = {"pad_token_id": 1, "decoder_start_token_id": 2, "eos_token_id": 2, "vocab_size": 31, "init_std": 0.2}
    config = transformers.NllbMoeConfig(**{**sizes, **heads, **sparse, **drops, **ids, **fields})
    return _precise(transformers.NllbMoeForConditionalGeneration(config))


class ListedConfig(transformers.PretrainedConfig):
    model_type = "listed"

    def __init__(self, experts: int = 5, style: str = "hit", reachable: int = 5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vocab_size, self.width, self.ffn, self.layers, self.heads = 31, 16, 12, 2, 4
        self.experts, self.style, self.reachable = experts, style, reachable


class Expert(nn.Module):
    def __init__(self, config: ListedConfig) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(config.width, config.ffn), nn.Linear(config.ffn, config.width)
        self.scale = nn.Parameter(torch.rand(config.width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x))) * self.scale


class Mixture(nn.Module):
    """A router, a list of experts that the module itself calls, in one of several styles, and a shared expert."""

    def __init__(self, config: ListedConfig) -> None:
        super().__init__()
        self.style, self.reachable = config.style, config.reachable
        self.gate, self.shared = nn.Linear(config.width, config.experts), Expert(config)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config.experts))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        logits = self.gate(x).flatten(0, 1)
        logits[:, self.reachable :] -= 1e9  # in place, and of what the router returned
        weights, chosen = logits.softmax(-1).topk(2)
        rows = x.flatten(0, 1)
        if self.style == "sometimes" and x.shape[1] % 2 == 0:
            return self.shared(x)
        if self.style == "dense":  # all experts see all tokens
            full = torch.zeros_like(logits).scatter(1, chosen, weights)
            y = sum(expert(x) * w.view(*x.shape[:2], 1) for expert, w in zip(self.experts, full.unbind(1), strict=True))
            return y + self.shared(x)
        y = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if len(token) or self.style == "all":
                y = y.index_add(0, token, expert(rows[token]) * weights[token, place, None])
        return y.view_as(x) + self.shared(x)


class Block(GradientCheckpointingLayer):
    def __init__(self, config: ListedConfig) -> None:
        super().__init__()
        self.norm, self.q, self.k = (layer(config.width) for layer in (nn.RMSNorm, _square, _square))
        self.v, self.o, self.mlp = _square(config.width), _square(config.width), Mixture(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm(x))


def _square(width: int) -> nn.Linear:
    return nn.Linear(width, width, bias=False)  # the bias of keys would have rounding for a gradient


class ListedModel(transformers.PreTrainedModel):
    config_class, base_model_prefix, supports_gradient_checkpointing = ListedConfig, "model", True

    def __init__(self, config: ListedConfig) -> None:
        super().__init__(config)
        self.tokens, self.norm = nn.Embedding(config.vocab_size, config.width), nn.RMSNorm(config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Listed(transformers.PreTrainedModel):
    config_class, base_model_prefix, supports_gradient_checkpointing = ListedConfig, "model", True

    def __init__(self, config: ListedConfig) -> None:
        super().__init__(config)
        self.model = ListedModel(config)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, labels: Any = None, **_: Any) -> CausalLMOutput:
        logits = self.head(self.model(input_ids))
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)


def listed(**fields: Any) -> Listed:
    torch.manual_seed(0)
    return Listed(ListedConfig(**fields)).double()


LISTED = {
    "units": {"vocab": "vocab_size", "heads": "heads", "ffn": "inferred", "experts": "experts"},
    "prefix": {"tokens": {"embedding": "vocab"}},
    "blocks": {
        "path": "blocks",
        "modules": {
            "norm": "replicated",
            **{name: {"column": "heads"} for name in "qkv"},
            "o": {"row": "heads"},
            "mlp.gate": "replicated",
            "mlp.experts": {"by_expert": "experts"},
            **{f"mlp.{path}.up": {"column": "ffn"} for path in ("shared", "experts.*")},
            **{f"mlp.{path}.down": {"row": "ffn"} for path in ("shared", "experts.*")},
            **{f"mlp.{path}.scale": "replicated" for path in ("shared", "experts.*")},
        },
    },
    "suffix": {"norm": "replicated"},
    "head": {"head": {"column": "vocab", "gather_output": True}},
    "loss": {"Listed": "loss_function"},
}
