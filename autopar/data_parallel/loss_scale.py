"""The scale of an fp16 loss: shrinks after overflows, grows after a while without. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autopar.config import ParallelConfig

__all__ = ["LossScale"]


@dataclass
class LossScale:
    """What the loss is multiplied by before backward, so that small gradients survive in fp16.

    An overflow uses up one of ``hysteresis`` chances; when none is left it multiplies the scale by ``backoff_factor``,
    down to ``min_scale``, and so does each further one. ``growth_interval`` steps in a row without an overflow multiply
    it by ``growth_factor``, up to ``max_scale``, and give the chances back.
    """

    scale: float
    min_scale: float
    max_scale: float
    growth_interval: int
    growth_factor: float
    backoff_factor: float
    hysteresis: int
    steps: int = 0  # in a row without an overflow
    chances: int = field(default=-1)

    def __post_init__(self) -> None:
        self.chances = self.hysteresis if self.chances < 0 else self.chances

    @classmethod
    def of(cls, config: ParallelConfig) -> LossScale:
        """As the config's section ``precision`` says."""
        return cls(
            config.initial_scale,
            config.min_scale,
            config.max_scale,
            config.growth_interval,
            config.growth_factor,
            config.backoff_factor,
            config.hysteresis,
        )

    def update(self, overflow: bool) -> None:
        """After a step, or after one that was skipped because of an overflow."""
        if overflow:
            self.steps = 0
            self.chances = max(self.chances - 1, 0)
            if self.chances == 0:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            return
        self.steps += 1
        if self.steps == self.growth_interval:
            self.steps, self.chances = 0, self.hysteresis
            self.scale = min(self.scale * self.growth_factor, self.max_scale)

    def limit(self, largest: float) -> None:
        """Never be above ``largest`` from now on."""
        self.scale, self.min_scale, self.max_scale = (
            min(value, largest) for value in (self.scale, self.min_scale, self.max_scale)
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "steps": self.steps, "chances": self.chances}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self.scale, self.steps, self.chances = float(state["scale"]), int(state["steps"]), int(state["chances"])
