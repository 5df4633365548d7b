"""The oracle: a parallelized model against the plain one, built from the same seed inside the same rank."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.layout import Layout
from autopar.tools.verification.outputs import named, reseed, total_loss
from autopar.tools.verification.small_models import randomise
from tests.exchange import everyones

__all__ = ["TOLERANCE", "all_close", "check", "close", "language_batches", "randomise", "reseed", "total_loss", "whole"]

TOLERANCE = 1e-5


def close(actual: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert torch.isfinite(expected).all(), f"{what}: the plain model's is not finite"
    if actual.dtype == expected.dtype and torch.equal(actual, expected):
        return
    error = (actual - expected).abs()
    allowed = tolerance * (1 + expected.abs())
    worst = (error - allowed).max().item() if error.numel() else -1.0
    assert worst <= 0, f"{what}: off by {error.max().item():.3e}, allowed {tolerance} absolute and relative"


def all_close(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str, tolerance: float = TOLERANCE
) -> None:
    """:func:`close` for each name in ``what.format(name)``; all in one comparison, one by one only to say which."""
    named = [(actual[name], value) for name, value in expected.items()]
    if len({tensor.dtype for pair in named for tensor in pair}) == 1 and all(a.shape == e.shape for a, e in named):
        mine, theirs = (torch.cat([tensor.reshape(-1) for tensor in tensors]) for tensors in zip(*named, strict=True))
        if torch.isfinite(theirs).all() and ((mine - theirs).abs() <= tolerance * (1 + theirs.abs())).all():
            return
    for name, value in expected.items():
        close(actual[name], value, what.format(name), tolerance)


def whole(model: nn.Module, tensor_of: Callable[[nn.Parameter], torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Name -> whole tensor (a parameter's data, or its gradient) of a parallelized model; a collective of tp."""
    plan, axis = model._autopar.plan, model.mpu.tp
    local = {}
    for name, parameter in model.named_parameters():
        tensor = tensor_of(parameter)
        assert tensor is not None, f"{name} has no gradient"
        local[name] = tensor.detach().cpu()
    everyone = _everyones(local, plan, axis)
    result = {}
    for name in local:
        parts = [shards[name] for shards in everyone]
        layout: Layout | None = plan.tensors[plan.canonical(name)].layout
        if layout is None:
            for rank, part in enumerate(parts[1:], 1):
                close(part, parts[0], f"{name}: replicated, but different on tp rank {rank}", 1e-6)
            result[name] = parts[0]
        else:
            result[name] = layout.unshard(parts)
            for rank, part in enumerate(parts if layout.replicated else ()):  # replicas hold the same
                close(part, layout.shard(result[name], rank), f"{name}: replicas differ", 1e-6)
    return result


def _everyones(local: dict[str, torch.Tensor], plan: Any, axis: Any) -> list[dict[str, torch.Tensor]]:
    """``local`` of every tp rank, in one exchange."""
    shapes = [
        {name: plan.tensors[plan.canonical(name)].local_shape(rank) for name in local} for rank in range(axis.size)
    ]
    if axis.size == 1:
        return [local]
    dtypes = {tensor.dtype for tensor in local.values()}
    if len(dtypes) != 1:
        return everyones(local, axis.group)
    longest = max(sum(math.prod(shape) for shape in listed.values()) for listed in shapes)
    flat = torch.zeros(longest, dtype=dtypes.pop())
    flat_local = torch.cat([tensor.reshape(-1) for tensor in local.values()])
    flat[: flat_local.numel()] = flat_local
    rows = [torch.empty_like(flat) for _ in range(axis.size)]
    dist.all_gather(rows, flat, group=axis.group)
    result = []
    for row, listed in zip(rows, shapes, strict=True):
        pieces = row[: sum(math.prod(shape) for shape in listed.values())].split(
            [math.prod(s) for s in listed.values()]
        )
        result.append({n: piece.view(shape) for (n, shape), piece in zip(listed.items(), pieces, strict=True)})
    return result


class _Agreed:
    """Collects what goes wrong on this rank; :meth:`settle` raises it on every rank, so that none waits for another."""

    def __init__(self, mpu: Any) -> None:
        self.mpu, self.problems = mpu, list[str]()

    def close(self, *args: Any) -> None:
        try:
            close(*args)
        except AssertionError as error:
            self.problems.append(str(error))

    def settle(self) -> None:
        tp = self.mpu.tp
        for rank, problems in enumerate(everyones(self.problems, tp.group) if tp.size > 1 else [self.problems]):
            assert not problems, f"on tp rank {rank}: {problems[0]}"


def check(
    build: Callable[[], nn.Module],
    batches: list[dict[str, Any]],
    tp: int,
    *,
    policy: Any = None,
    tolerance: float = TOLERANCE,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    config: dict[str, Any] | None = None,
    first: Callable[[nn.Module, nn.Module], None] | None = None,
    step: bool = True,
    too: Sequence[Callable[[Callable[[], nn.Module]], nn.Module | None]] = (),
) -> nn.Module:
    """Compare everything; returns the parallelized model after the step. ``first(plain, parallel)`` runs before."""
    make_optimizer = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3))
    plain = build().train()
    parallel = copy.deepcopy(plain)
    made_before = make_optimizer(parallel.parameters())
    identities = [id(parameter) for parameter in parallel.parameters()]
    config = {"model_parallelism": {"tensor_parallel_size": tp}, **(config or {})}
    parallel = autopar.initialize(parallel, config, policy=policy)
    assert identities == [id(parameter) for parameter in parallel.parameters()]
    weights = whole(parallel, lambda parameter: parameter.data)
    for name, parameter in plain.named_parameters():
        assert torch.equal(weights[name], parameter.data), f"{name}: cut and put together again it is another"
    if first is not None:
        first(plain, parallel)  # a short prompt switches BigBird to full attention, for good
    others = [made for make in too if (made := make(lambda: copy.deepcopy(plain))) is not None]
    reference_optimizer = make_optimizer(plain.parameters())
    agreed = _Agreed(parallel.mpu)
    models = [parallel, *others]
    for number, batch in enumerate(batches):  # gradients accumulate over micro-batches
        reseed(number)
        expected = named(plain(**copy.deepcopy(batch)))  # some clamp labels in place
        total_loss(expected).backward()
        for model in models:
            reseed(number)
            actual = named(model(**copy.deepcopy(batch)))
            for key, value in expected.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    agreed.close(actual[key], value, f"{key} of micro-batch {number}{_which(model)}", tolerance)
            total_loss(actual).backward()
    agreed.settle()
    used = {name for name, parameter in plain.named_parameters() if parameter.grad is not None}
    for parameter in plain.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for model in models:
        if model.mpu.cp.size > 1:  # each rank has a part of every gradient
            autopar.average_gradients(model)
        for name, parameter in model.named_parameters():
            assert (parameter.grad is not None) == (name in used), f"{name}: gradient present or missing{_which(model)}"
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = whole(model, lambda parameter: parameter.grad)
        expected_gradients = {n: p.grad for n, p in plain.named_parameters()}
        all_close(gradients, expected_gradients, f"gradient of {{}}{_which(model)}", tolerance)
    for other in others:
        other.mpu.destroy()
    if not step:
        return parallel
    reference_optimizer.step()
    made_before.step()
    weights = whole(parallel, lambda parameter: parameter.data)
    all_close(weights, {n: p.data for n, p in plain.named_parameters()}, "{} after the step", tolerance)
    return parallel


def _which(model: nn.Module) -> str:
    config = model._autopar.config
    rows = ", with sequence_parallel" if config.sequence_parallel else ""
    return f", with context_parallel_size {model.mpu.cp.size}" if model.mpu.cp.size > 1 else rows


def language_batches(
    vocab: int, *, count: int = 2, batch: int = 2, seq: int = 7, seed: int = 1, **extra: Any
) -> list[dict[str, Any]]:
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
