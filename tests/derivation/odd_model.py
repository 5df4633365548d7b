"""A model as nobody wrote one before: odd names, fused projections, a table beside the blocks."""

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class OddConfig(PretrainedConfig):
    model_type = "odd"

    def __init__(self, vocab_size: int = 61, width: int = 20, voices: int = 5, inner: int = 17, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vocab_size, self.width, self.voices, self.inner = vocab_size, width, voices, inner


class Mix(nn.Module):
    """``v0 q0 k0 v1 q1 k1 ...`` in one projection, ``gate0 up0 gate1 up1 ...`` in another."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.voices, self.inner, self.each = config.voices, config.inner, 4
        self.all = nn.Linear(config.width, config.voices * 3 * self.each)
        self.both = nn.Linear(config.width, 2 * config.inner)
        self.loudness = nn.Parameter(torch.rand(config.voices))
        self.calm = nn.LayerNorm(self.each)
        self.back, self.down = nn.Linear(config.voices * self.each, config.width), nn.Linear(config.inner, config.width)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).unflatten(-1, (-1, 2)).unbind(-1)
        v, q, k = self.all(x).unflatten(-1, (self.voices, 3 * self.each)).transpose(1, 2).split(self.each, -1)
        scores = self.calm(q) @ k.transpose(-1, -2) + table.T[None, :, None, : x.shape[1]]
        mixed = (scores.softmax(-1) @ v) * self.loudness[:, None, None]
        return self.back(mixed.transpose(1, 2).flatten(-2)) + self.down(gate.tanh() * up)


class OddForCausalLM(PreTrainedModel):
    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.width)
        self.table = nn.Embedding(32, config.voices)
        self.stack = nn.ModuleList(Mix(config) for _ in range(3))
        self.bottleneck = nn.Sequential(nn.Linear(config.width, 3), nn.Tanh(), nn.Linear(3, config.width))
        self.logits = nn.Linear(config.width, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.words

    def get_output_embeddings(self) -> nn.Linear:
        return self.logits

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> CausalLMOutput:
        x = self.words(input_ids)
        for block in self.stack:
            x = x + block(x, self.table.weight)
        logits = self.logits(x + self.bottleneck(x))
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)


class LossByRows(OddForCausalLM):
    """Its loss alone reads how many words the table of the head has; or what the head says of itself."""

    by_layer = False

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any) -> CausalLMOutput:
        out = super().forward(input_ids)
        if labels is not None:
            count = self.logits.out_features if self.by_layer else self.logits.weight.shape[0]
            out.loss = self.loss_function(out.logits, labels, vocab_size=count)
        return out


class LossByFeatures(LossByRows):
    by_layer = True


class Tangled(nn.Module):
    """A block of which all features meet: nothing of it can be sharded."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.other(self.one(x).softmax(-1))


class TangledModel(PreTrainedModel):
    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.code = nn.Linear(1, config.width)
        self.blocks = nn.ModuleList(Tangled(config.width) for _ in range(2))
        self.post_init()

    def get_input_embeddings(self) -> None:  # type: ignore[override]
        return None

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        x = self.code(input_ids[..., None].to(self.code.weight.dtype))
        for block in self.blocks:
            x = block(x)
        return CausalLMOutput(logits=x)


class Unpredictable(TangledModel):
    """Its forward asks for values."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(torch.tensor(input_ids.tolist()))


def make_plain() -> nn.Module:
    """Return a module that is no model of transformers."""
    return nn.Linear(3, 3)
