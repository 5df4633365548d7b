"""Gradients that a loop scales by a factor of each stage: its own norm over ``model.parameters()`` is that of a stage.

Some elements are looked at behind a pass and again before the step. Where all of a stage have been scaled alike, as a
clip by the norm of all gradients does, the stages compare their factors in the next pass.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from autopar.call_site import warn_user
from autopar.checks.samples import local_part

__all__ = ["GradientScale", "warn_of_scales"]

_SAMPLE = 8  # weights
_ALIKE = 1e-3  # relative: factors of one stage are one factor
_APART = 1e-2  # of two stages are two


class GradientScale:
    """The factor by which this stage's gradients are scaled between a pass and the step behind it."""

    def __init__(self) -> None:
        self._weights: list[nn.Parameter] = []
        self._behind: torch.Tensor | None = None  # [sample], of the gradients behind the pass
        self._before: torch.Tensor | None = None  # and before the step

    @torch.no_grad()
    def note(self, model: nn.Module) -> None:
        """Look at the gradients that a pass has left."""
        held = [p for p in model.parameters() if p.grad is not None and local_part(p.grad).numel()]
        spread = held[:: max(len(held) // _SAMPLE, 1)]  # over all blocks: each may be scaled by itself
        self._weights, self._before = spread[:_SAMPLE], None
        self._behind = self._sample()

    @torch.no_grad()
    def look(self) -> None:
        """Look at them again, once, before the first step behind the pass."""
        if self._behind is not None and self._before is None and all(p.grad is not None for p in self._weights):
            self._before = self._sample()

    def factor(self) -> float | None:
        """Return the factor, of the last step; None if there is not one for all."""
        behind, before, self._behind, self._before = self._behind, self._before, None, None
        if behind is None or before is None or behind.shape != before.shape:
            return None
        factors = (before / behind)[behind != 0].tolist()
        if len(factors) < 2 or not max(factors) - min(factors) <= _ALIKE * abs(factors[0]):
            return None
        return float(factors[0])

    def _sample(self) -> torch.Tensor | None:
        gradients = [local_part(p.grad) for p in self._weights if p.grad is not None]
        picked = [each.flatten()[each.numel() // 2].double() for each in gradients if not each.is_sparse]
        return torch.stack(picked) if picked else None


def warn_of_scales(said: Mapping[int, float | None], own: int) -> None:
    """Warn on the last of these ranks if their stages have scaled gradients by different factors."""
    factors = {rank: factor for rank, factor in said.items() if factor is not None}
    if not said or len(factors) < len(said) or own != max(said):
        return
    low, high = min(factors.values()), max(factors.values())
    if high - low > _APART * max(abs(low), abs(high)):
        listed = ", ".join(f"by {factor:.4g} on rank {rank}" for rank, factor in factors.items())
        warn_user(
            f"the gradients were scaled between execute_pipeline and optimizer.step(): {listed}.\n  A norm that a loop "
            "adds up over model.parameters() is that of one stage. torch.nn.utils.clip_grad_norm_,\n  "
            "autopar.clip_grad_norm_(model, max_norm) and gradient_clipping in the config take that of all stages."
        )
