"""Loops of users that make one number of all weights: through stages it is one stage's, and the line is told, once."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

import autopar
from autopar.distributed.shard_reads import Part, ShardedParameter
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


def clipped_by_a_stack(model: Any) -> None:
    scaled(model, torch.stack([p.grad.norm() for p in model.parameters()]).norm())


def clipped_by_foreach(model: Any) -> None:
    norms = torch._foreach_norm([p.grad for p in model.parameters()])
    scaled(model, torch.linalg.vector_norm(torch.stack(norms)))


def clipped_by_the_largest(model: Any) -> None:
    scaled(model, max(p.grad.abs().max() for p in model.parameters()))


def one_vector(model: Any) -> None:
    scaled(model, torch.cat([p.grad.flatten() for p in model.parameters()]).norm())


def into_one_vector(model: Any) -> None:
    flat, start = torch.zeros(100_000), 0
    for p in model.parameters():
        flat[start : start + p.numel()] = p.grad.flatten()
        start += p.numel()
    scaled(model, flat.norm())


def vector_of_parameters(model: Any) -> None:
    vector = parameters_to_vector(model.parameters())
    vector_to_parameters(vector.detach() / 2, model.parameters())


def summed_in_place(model: Any) -> None:
    total = torch.zeros(())
    for name, p in model.named_parameters():
        if "norm" in name:
            total += p.grad.square().sum()
    scaled(model, 1 + total)


def penalised(model: Any) -> None:
    (0.1 * torch.sqrt(sum(p.square().sum() for p in model.parameters()))).backward()


def counted(model: Any) -> None:
    scaled(model, sum(p.numel() for p in model.parameters()) / 1000)


def zeros_counted(model: Any) -> None:
    zeros = 0
    for p in model.parameters():
        zeros += (p.abs() < 0.05).sum().item()
    scaled(model, zeros)


def mean_by_numpy(model: Any) -> None:
    norms = [p.grad.norm().item() for p in model.parameters()]
    scaled(model, np.mean(norms))


def skipped(model: Any) -> None:
    if any(torch.isnan(p.grad).any() for p in model.parameters()):
        model.zero_grad()


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


NOTICED: list[Change] = [
    clipped_in_a_loop, clipped_by_a_stack, clipped_by_foreach, clipped_by_the_largest, one_vector, into_one_vector,
    vector_of_parameters, summed_in_place, penalised, counted, zeros_counted, mean_by_numpy, skipped, pruned, noisy,
]  # fmt: skip


@pytest.mark.tier("sweep")
@pooled(world_size=2)
def test_a_line_is_told_once() -> None:
    rank, plain = dist.get_rank(), llama(num_hidden_layers=4).train()
    for change in NOTICED:
        model = autopar.initialize(copy.deepcopy(plain), stages())
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            train(model, change)
        told = [each for each in found if "weights alone" in str(each.message)]
        assert len(told) == 1, (change, [str(each.message) for each in found])
        text, code = str(told[0].message), change.__code__
        assert f"this rank holds stage {rank} of 2: {(19, 20)[rank]} of 39 parameters" in text
        assert "ith autopar.whole(model)" in text and len(text.splitlines()) == (3 if change is noisy else 4)
        assert ("model.num_parameters()" in text) is (change is not noisy)
        assert told[0].filename == __file__ and 0 < told[0].lineno - code.co_firstlineno < 8
        model.mpu.destroy()


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


def clamped(p: torch.Tensor) -> None:
    p.grad.clamp_(-0.005, 0.005)


HOOKED: list[tuple[Change, int]] = [
    (lambda p: p.register_hook(lambda gradient: gradient / (1 + gradient.norm())), 1),
    (lambda p: p.register_post_accumulate_grad_hook(clamped), 1),
    (lambda p: p.register_hook(lambda gradient: gradient * 0.5 * (torch.arange(gradient.shape[0]) > 3)[0]), 0),
]


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_hooks_see_one_microbatch() -> None:
    plain = llama(num_hidden_layers=4).train()
    for hook, lines in HOOKED:
        model, reference = autopar.initialize(copy.deepcopy(plain), stages()), copy.deepcopy(plain)
        for p in (*model.parameters(), *reference.parameters()):
            hook(p)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            train(model, lambda model: None)
        told = [
            str(each.message) for each in found if "sees the gradient of one of 2 micro-batches" in str(each.message)
        ]
        assert len(told) == lines == len(found), [str(each.message) for each in found]
        if not lines:
            same_weights(model, train(reference, lambda model: None), 2e-5)
        model.mpu.destroy()


@pytest.mark.tier("all")
@pooled(world_size=4)
def test_with_tensor_parallelism() -> None:
    plain = llama(num_hidden_layers=4).train()
    config: Any = {"model_parallelism": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}}
    model = autopar.initialize(copy.deepcopy(plain), config)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            sum(autopar.full(p).norm() for p in model.parameters())
            sum(p.norm() for p in model.parameters() if p.dim() == 1)  # of norms: no shards
    texts = [str(each.message) for each in found if issubclass(each.category, autopar.ShardWarning)]
    assert len(texts) == 2 and all("weights alone: this rank holds stage" in text for text in texts)
    penalty: Any = lambda own: 0.01 * sum(autopar.full(p).norm() for p in own.values())  # noqa: E731
    _check_right(model, copy.deepcopy(plain), lambda model: None, penalty)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_afterwards_parameters_are_plain_ones() -> None:
    model = autopar.initialize(llama(num_hidden_layers=2).train(), stages())
    weight = model.model.norm.weight if dist.get_rank() else model.model.embed_tokens.weight
    assert type(weight) is ShardedParameter and type(weight * 2) is Part and type(copy.deepcopy(weight)) is type(weight)
    assert "shard" not in repr(weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error", autopar.ShardWarning)
        assert torch.equal(weight, weight.detach().clone()) and weight.norm().item() > 0
        assert f"{weight.norm():.3f}" == f"{weight.norm().item():.3f}"
    plain = autopar.deparallelize(model)
    assert all(type(p) is torch.nn.Parameter for p in plain.parameters())
