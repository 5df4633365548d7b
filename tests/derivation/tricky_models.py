"""Blocks in which shards of the right shapes compute something else, or which only seem to be units."""

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


class TrickyConfig(PretrainedConfig):
    model_type = "tricky"

    def __init__(self, width: int = 16, heads: int = 4, block: str = "Halved", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.width, self.heads, self.block = width, heads, block
        self.hidden_size = width


class Halved(nn.Module):
    """Views features as ``(heads, -1)``: of half the features, heads of half the width. ``sharpness`` is no count."""

    def __init__(self, config: TrickyConfig) -> None:
        super().__init__()
        self.heads, self.sharpness, width = config.heads, config.heads, config.width
        self.query, self.key, self.back = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.query(x), self.key(x)))
        return x + self.back(((q @ k.mT * self.sharpness).softmax(-1) @ k).transpose(1, 2).flatten(-2))


class Width(Halved):
    """Shapes its output by its input's width, as no shard does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k = (each.view(batch, length, self.heads, width // self.heads) for each in (self.query(x), self.key(x)))
        return x + self.back((q * k).softmax(-1).reshape(batch, length, width))


class Clipped(nn.Module):
    """Multiplies by its row's weight itself while it is trained."""

    def __init__(self, config: TrickyConfig) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(config.width, config.width), nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.up(x))
        clipped = nn.functional.linear(inner, self.down.weight.clamp(-0.1, 0.1)) if self.training else self.down(inner)
        return x + clipped


class TrickyModel(PreTrainedModel):
    config_class = TrickyConfig
    main_input_name = "inputs_embeds"

    def __init__(self, config: TrickyConfig) -> None:
        super().__init__(config)
        kind = {each.__name__: each for each in (Halved, Width, Clipped)}[config.block]
        self.blocks = nn.ModuleList(kind(config) for _ in range(2))
        self.post_init()

    def forward(self, inputs_embeds: torch.Tensor, **kwargs: Any) -> BaseModelOutput:
        x = inputs_embeds
        for block in self.blocks:
            x = block(x)
        return BaseModelOutput(last_hidden_state=x)
