"""The oracle: a parallelized model against the plain one, built from the same seed inside the same rank.

``check(build, batches, tp)`` compares logits, loss, every gradient after two micro-batches, the weights after an
optimizer step, and the whole weights that come back. No golden files.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.layout import Layout

TOLERANCE = 1e-5


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give biases and norms random values: constants hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def close(actual: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert torch.isfinite(expected).all(), f"{what}: the plain model's is not finite"
    error = (actual - expected).abs()
    allowed = tolerance * (1 + expected.abs())
    worst = (error - allowed).max().item() if error.numel() else -1.0
    assert worst <= 0, f"{what}: off by {error.max().item():.3e}, allowed {tolerance} absolute and relative"


def whole(model: nn.Module, tensor_of: Callable[[nn.Parameter], torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Name -> whole tensor (a parameter's data, or its gradient) of a parallelized model; a collective of tp."""
    plan, axis = model._autopar.plan, model.mpu.tp
    result = {}
    for name, parameter in model.named_parameters():
        local = tensor_of(parameter)
        layout: Layout | None = plan.tensors[plan.canonical(name)].layout
        assert local is not None, f"{name} has no gradient"
        parts = [None] * axis.size
        if axis.size > 1:
            dist.all_gather_object(parts, local.detach().cpu(), group=axis.group)
        else:
            parts = [local.detach()]
        if layout is None:
            for rank, part in enumerate(parts):
                close(part, parts[0], f"{name}: replicated, but different on tp rank {rank}", 1e-6)
            result[name] = parts[0]
        else:
            result[name] = layout.unshard(parts)
            for rank, part in enumerate(parts):  # replicas hold the same
                close(part, layout.shard(result[name], rank), f"{name}: replicas differ", 1e-6)
    return result


def check(
    build: Callable[[], nn.Module],
    batches: list[dict[str, Any]],
    tp: int,
    *,
    policy: Any = None,
    tolerance: float = TOLERANCE,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    config: dict[str, Any] | None = None,
) -> nn.Module:
    """Compare everything; returns the parallelized model after the step."""
    make_optimizer = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3))
    plain = build().train()
    parallel = copy.deepcopy(plain)
    made_before = make_optimizer(parallel.parameters())
    identities = [id(parameter) for parameter in parallel.parameters()]
    config = {"model_parallelism": {"tensor_parallel_size": tp}, **(config or {})}
    parallel = autopar.initialize(parallel, config, policy=policy)
    assert identities == [id(parameter) for parameter in parallel.parameters()]
    reference_optimizer = make_optimizer(plain.parameters())
    for number, batch in enumerate(batches):  # gradients accumulate over micro-batches
        expected, actual = plain(**batch), parallel(**batch)
        close(actual.loss, expected.loss, f"loss of micro-batch {number}", tolerance)
        for key, value in expected.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                close(actual[key], value, f"{key} of micro-batch {number}", tolerance)
        expected.loss.backward()
        actual.loss.backward()
    used = {name for name, parameter in plain.named_parameters() if parameter.grad is not None}
    for name, parameter in parallel.named_parameters():
        assert (parameter.grad is not None) == (name in used), f"{name}: gradient present or missing"
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = whole(parallel, lambda parameter: parameter.grad)
    for name, parameter in plain.named_parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        close(gradients[name], parameter.grad, f"gradient of {name}", tolerance)
    reference_optimizer.step()
    made_before.step()
    weights = whole(parallel, lambda parameter: parameter.data)
    for name, parameter in plain.named_parameters():
        close(weights[name], parameter.data, f"{name} after the step", tolerance)
    return parallel


def language_batches(vocab: int, *, count: int = 2, batch: int = 2, seq: int = 7, seed: int = 1, **extra: Any) -> list[dict[str, Any]]:
    """Micro-batches for a causal or masked model: random ids, ragged padding, labels ignored there."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(count):
        ids = torch.randint(0, vocab, (batch, seq), generator=generator)
        mask = torch.ones_like(ids)
        mask[-1, seq - 2 :] = 0
        labels = ids.masked_fill(mask == 0, -100)
        result.append({"input_ids": ids, "attention_mask": mask, "labels": labels, **extra})
    return result
