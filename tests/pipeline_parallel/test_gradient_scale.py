"""A norm of a loop's own is that of one stage: factors that stages have scaled their gradients by are compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import autopar
from tests.parity import language_batches
from tests.pipeline_parallel.test_steps_of_stages import stages
from tests.pool import pooled
from tests.small import llama


def own_clip(model: Any) -> None:
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_((0.01 / norm).clamp(max=1.0))


def by_stage(model: Any) -> None:
    """Clip by value, and one layer more than the others."""
    for place, p in enumerate(model.parameters()):
        if p.grad is not None:
            p.grad.mul_(1 / (1 + place)).clamp_(-1, 1)


def halved(model: Any) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.div_(2)


RIGHT: list[Callable[[Any], Any]] = [
    lambda model: None,
    lambda model: autopar.clip_grad_norm_(model, 0.01),
    lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    by_stage,
    halved,
]


def _told(change: Callable[[Any], Any]) -> list[str]:
    model = llama(num_hidden_layers=4).train()
    model, optimizer = autopar.initialize(model, stages(), optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for batch in language_batches(131, count=3, batch=4, seq=9):
            model.execute_pipeline(batch)
            change(model)
            optimizer.step()
            optimizer.zero_grad()
    rank = model.mpu.pp.rank
    model.mpu.destroy()
    texts = [str(each.message) for each in found if "gradients were scaled" in str(each.message)]
    return texts if rank == 1 else ["nothing is told on the first rank"] * bool(texts)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_a_clip_by_the_norm_of_one_stage_is_told() -> None:
    texts = _told(own_clip)
    if torch.distributed.get_rank() == 1:
        assert "on rank 0, by" in texts[0] and "autopar.clip_grad_norm_(model, max_norm)" in texts[0]
    for change in RIGHT:
        assert _told(change) == []
