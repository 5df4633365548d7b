"""Loops of user code over the weights of a stage: one weight at a time, through torch, or inside of autopar.whole."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import autopar
from tests.compare import same_weights
from tests.parity import language_batches
from tests.pipeline_parallel.test_steps_of_stages import stages
from tests.pool import pooled
from tests.small import llama

Change = Callable[[Any], Any]
BATCHES = language_batches(131, count=3, batch=4, seq=9)


def train(model: Any, change: Change, penalty: Any = None) -> Any:
    """Train as on one process, and ``change`` gradients or weights before each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in BATCHES:
        if hasattr(model, "mpu"):
            model.execute_pipeline(batch, penalty=penalty)
        else:
            loss = model(**batch).loss
            (loss if penalty is None else loss + penalty(dict(model.named_parameters()))).backward()
        change(model)
        optimizer.step()
        optimizer.zero_grad()
    return model


def scaled(model: Any, norm: Any) -> None:
    for p in model.parameters():
        p.grad.mul_(0.1 / float(norm))


def clipped_in_a_loop(model: Any) -> None:
    total = 0.0
    for p in model.parameters():
        total += p.grad.data.norm(2).item() ** 2
    scaled(model, total**0.5)


def pruned(model: Any) -> None:
    with torch.no_grad():
        flat = torch.cat([p.abs().flatten() for p in model.parameters()])
        least = flat.kthvalue(flat.numel() // 4).values
        for p in model.parameters():
            p.mul_(p.abs() > least)


def noisy(model: Any) -> None:
    torch.manual_seed(3)
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p.grad), alpha=0.01)


def clipped_one_by_one(model: Any) -> None:
    for p in model.parameters():
        norm = p.grad.norm().item()
        p.grad.mul_(min(1.0, 0.05 / norm))
        if p.grad.abs().max() > 0.01:
            p.grad.clamp_(-0.01, 0.01)


def together_in_blocks(model: Any) -> None:
    for layer in model.model.layers:
        held = [p.grad for p in layer.parameters() if p.grad is not None]
        if held:
            norm = torch.stack([g.norm() for g in held]).norm() + sum(g.abs().sum() for g in held)
            for g in held:
                g.div_(norm)


def decayed_and_averaged(model: Any) -> None:
    average = getattr(model, "average", None) or {name: p.detach().clone() for name, p in model.named_parameters()}
    model.average = average
    for name, p in model.named_parameters():
        average[name].lerp_(p.detach(), 0.1)
        p.grad.add_(p.detach() - average[name], alpha=0.1).div_(p.numel() ** 0.5)
    torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)


def clipped_by_torch(model: Any) -> None:
    norm = clip_grad_norm_(model.parameters(), 0.1)
    scaled(model, 1 + norm)


def counted_by_the_model(model: Any) -> None:
    scaled(model, model.num_parameters() / 1000)


def clipped_whole(model: Any) -> None:
    if not hasattr(model, "mpu"):
        clipped_in_a_loop(model)
        return
    with autopar.whole(model):
        total = 0.0
        for p in model.parameters():
            total += p.grad.norm().item() ** 2
        scaled(model, total**0.5)


def noisy_whole(model: Any) -> None:
    if not hasattr(model, "mpu"):
        noisy(model)
        return
    torch.manual_seed(3)
    with autopar.whole(model):
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p.grad), alpha=0.01)


def noise_by_module(model: Any) -> None:
    torch.manual_seed(3)
    for layer in model.model.layers:
        noise = torch.randn_like(layer.mlp.up_proj.weight)
        if layer.mlp.up_proj.weight.grad is not None:
            layer.mlp.up_proj.weight.grad.add_(noise, alpha=0.01)


def pruned_whole(model: Any) -> None:
    if not hasattr(model, "mpu"):
        pruned(model)
        return
    with autopar.whole(model), torch.no_grad():
        flat = torch.cat([p.abs().flatten() for p in model.parameters()])
        least = flat.kthvalue(flat.numel() // 4).values
        for p in model.parameters():
            p.mul_(p.abs() > least)


RIGHT: list[Change] = [
    clipped_one_by_one, together_in_blocks, decayed_and_averaged, clipped_by_torch, counted_by_the_model,
    clipped_whole, pruned_whole, noisy_whole, noise_by_module,
]  # fmt: skip


def _check_right(model: Any, reference: Any, change: Change, penalty: Any = None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", autopar.ShardWarning)
        train(model, change, penalty)
    train(reference, change, penalty)
    same_weights(model, reference, 2e-5, when=getattr(change, "__name__", ""))


@pooled(world_size=2)
def test_what_is_right_is_that_of_one_process_and_nothing_is_told() -> None:
    plain = llama(num_hidden_layers=4).train()
    for change in RIGHT:
        model = autopar.initialize(copy.deepcopy(plain), stages())
        _check_right(model, copy.deepcopy(plain), change)
        model.mpu.destroy()
    model = autopar.initialize(copy.deepcopy(plain), stages())
    penalty: Any = lambda own: 0.01 * sum(p.norm() for p in own.values())  # noqa: E731
    _check_right(model, copy.deepcopy(plain), lambda model: None, penalty)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_parameters_of_stages_alone_are_plain_ones() -> None:
    model = autopar.initialize(llama(num_hidden_layers=2).train(), stages())
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())
