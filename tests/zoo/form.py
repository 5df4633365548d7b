"""How a small model type is described for the tests: :class:`Kind`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import PretrainedConfig

Batch = dict[str, Any]


class Draw(Protocol):
    """``draw(low, high, *shape)``: integers in ``[low, high)``; ``draw.normal(*shape)``: floats."""

    def __call__(self, low: int, high: int, *shape: int) -> torch.Tensor: ...

    def normal(self, *shape: int) -> torch.Tensor: ...


# (heads, kv_heads, vocab, changes) -> config. ``changes`` are those of the variant; composite configs place them.
Make = Callable[[int, int, int, Mapping[str, Any]], PretrainedConfig]

# (head class name, config, what the engine made for text: input_ids, attention_mask, labels; draw) -> the batch
Inputs = Callable[[str, PretrainedConfig, Batch, Draw], Batch]


@dataclass(frozen=True)
class Scene:
    """Whom inputs are made for: the class name of a head, the config, and where random numbers come from."""

    head: str
    config: PretrainedConfig
    draw: Draw


@dataclass(frozen=True)
class Kind:
    """What one model type needs beside the settings that all small models share.

    Attributes:
        settings: config fields, for flat configs that make their models alone.
        make: makes the whole config instead; for composite ones (text_config, vision_config).
        inputs: changes or replaces the batch; ragged padding, labels for the loss where the head takes any.
        variants: name -> config fields: more configs of the head that makes text (or of the first head).
        without: heads that cannot be built or run, with the reason: "class name" -> "reason".
        double: why the model is compared in float64 and not in float32, whose rounding alone takes the plain model's
            gradients further from the exact ones than the tolerance.
        inside: this type is a part: it is built, run and compared inside models of that other type.
        labels: kind of a head -> what adds its labels instead of what heads of this kind take.
        crosses: whether its decoder with cross-attention is a case too.
        cross: what adds the states for cross-attention instead.
        generates: whether ``generate`` is compared for heads that make text.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    make: Make | None = None
    inputs: Inputs | None = None
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    without: Mapping[str, str] = field(default_factory=dict)
    double: str = ""
    inside: str = ""
    labels: Mapping[str, Inputs] = field(default_factory=dict)
    crosses: bool = False
    cross: Inputs | None = None
    generates: bool = True
