"""User code around DTensors, ZeRO's stages 2 and 3: numbers of full tensors; written values are never lost."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import autopar
from autopar.errors import ConfigError, ConsistencyError
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.parity import close
from tests.small import llama

IDS = torch.arange(72).view(4, 18) % 131
Change = Callable[[Any], Any]


def fully_sharded(plain: Any, stage: int = 3, **config: Any) -> Any:
    return autopar.initialize(copy.deepcopy(plain), {"zero": {"stage": stage}, "loss": {"read_timeout": 2}, **config})


def train(model: Any, change: Change) -> Any:
    """Three steps as on one process, each replica with its half of the batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = IDS.chunk(2)[dist.get_rank()] if hasattr(model, "mpu") else IDS
    for _ in range(3):
        model(rows, labels=rows).loss.backward()
        change(model)
        optimizer.step()
        optimizer.zero_grad()
    return model


def scaled(model: Any, norm: float) -> None:
    for p in model.parameters():
        p.grad.mul_(0.1 / norm)


def clipped_in_a_loop(model: Any) -> None:
    total = 0.0
    for p in model.parameters():
        total += p.grad.data.norm(2).item() ** 2
    scaled(model, total**0.5)


def clipped_one_by_one(model: Any) -> None:
    for p in model.parameters():
        factor = 0.05 / (float(p.grad.norm()) + 1e-6)
        if factor < 1:
            p.grad.mul_(factor)


def zeros_counted(model: Any) -> None:
    zeros, elements = 0, 0
    for p in model.parameters():
        zeros += int((p.abs() < 0.05).sum())
        elements += p.numel()
    scaled(model, 10 * zeros / elements)


def clipped_by_torch(model: Any) -> None:
    scaled(model, 1 + torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())


def skipped_by_some_rows(model: Any) -> None:
    """Not a number in one row, which one replica has: all skip, or none."""
    gradient = model.lm_head.weight.grad
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    if dist.get_rank() == 1 or local is gradient:
        local[-1, 0] = torch.nan
    if torch.isnan(gradient).any():
        model.zero_grad()


def noisy(model: Any) -> None:
    torch.manual_seed(3)
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p.grad), alpha=0.01)


def drawn(model: Any) -> None:
    torch.manual_seed(3)
    for name, p in model.named_parameters():
        if "layers.1" in name and p.dim() > 1:
            nn.init.kaiming_uniform_(p)
    nn.init.normal_(model.lm_head.weight, std=0.1)


def penalised(model: Any) -> None:
    (0.01 * torch.sqrt(sum(p.square().sum() for p in model.parameters()))).backward()


def masked(model: Any) -> None:
    gradient, mask = model.model.embed_tokens.weight.grad, (torch.arange(131) > 40).float()[:, None]
    gradient.mul_(_like(mask, gradient))


def _like(whole: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return distribute_tensor(whole, p.device_mesh, p.placements) if isinstance(p, DTensor) else whole


def rows_written(model: Any) -> None:
    p = model.model.embed_tokens.weight.detach()
    rows = p.full_tensor().clone() if isinstance(p, DTensor) else p.clone()
    rows[:10] = 0.1
    p.copy_(_like(rows, p))


def perturbed(model: Any) -> None:
    """Text of adversarial training (FGM): a step along the gradient, and back."""
    kept = {name: p.data.clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data.add_(0.05 * p.grad.sign())
    for name, p in model.named_parameters():
        p.data = kept[name]


def averaged(model: Any) -> None:
    for p in model.parameters():
        p.data = 0.9 * p.data + 0.01 * p.grad


def gradients_set(model: Any) -> None:
    for p in model.parameters():
        p.grad.data = p.grad.data * 0.5


NUMBERS: list[Change] = [noisy, drawn, clipped_in_a_loop, clipped_one_by_one, zeros_counted, clipped_by_torch]
NUMBERS += [skipped_by_some_rows, penalised, masked, rows_written, perturbed, averaged, gradients_set]


def _whole(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in autopar.hf_weights(model)}


def _check(model: Any, plain: Any, what: str) -> None:
    found = _whole(model)
    for name, expected in plain.named_parameters():
        close(found[name], expected.detach(), f"{name}, {what}", 1e-5)


@pytest.mark.tier("test", only=("3",))
@pytest.mark.parametrize("stage", [2, 3])
@pooled(world_size=2)
def test_numbers_are_those_of_whole_tensors(stage: int) -> None:
    plain = llama(num_hidden_layers=2).train()
    for change in NUMBERS:
        model = train(fully_sharded(plain, stage), change)
        _check(model, train(copy.deepcopy(plain), change), change.__name__)
    patched = [patch.name for patch in autopar.patches()]
    assert "torch.distributed.tensor.DTensor.item" in patched


@pytest.mark.tier("sweep")
@pooled(world_size=2)
def test_a_rank_that_reads_alone_does_not_hang() -> None:
    model = fully_sharded(llama().train())
    norm = model.lm_head.weight.norm()
    if dist.get_rank() == 0:
        with pytest.raises(ConsistencyError, match=r"rank 0 reads a number of .* in .*:\d+, and rank 1"):
            norm.item()
    dist.barrier()
    assert norm.to_local().item() > 0  # what is here is always there
    own = distribute_tensor(torch.zeros(4, 2), init_device_mesh("cpu", (2,)), model.lm_head.weight.placements)
    assert own.normal_() is own and own.to_local().abs().min() > 0 and torch.rand_like(own).shape == (4, 2)
    assert own.abs().sum().item() == own.to_local().abs().sum()  # of others' DTensors as torch does
    mesh, whole = model.lm_head.weight.device_mesh, torch.ones(4)
    assert distribute_tensor(whole, mesh, model.lm_head.weight.placements).sum().full_tensor().item() == 4


def clamped(p: torch.Tensor) -> None:
    p.grad.clamp_(-0.005, 0.005)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_hooks_behind_the_accumulation_run() -> None:
    plain = llama(num_hidden_layers=2).train()
    model, reference = fully_sharded(plain), copy.deepcopy(plain)
    for p in (*model.parameters(), *reference.parameters()):
        p.register_post_accumulate_grad_hook(clamped)
    with warnings.catch_warnings():
        warnings.simplefilter("error", autopar.ShardWarning)
        train(model, lambda model: None)
    _check(model, train(reference, lambda model: None), "hooks behind the accumulation")


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_parameters_that_are_replaced_are_refused() -> None:
    plain = llama().train()
    model = fully_sharded(plain)
    model.lm_head.weight = model.model.embed_tokens.weight
    replaced = "1 parameters were replaced after autopar.initialize (lm_head.weight)"
    with raises_everywhere(ConfigError, replaced):
        model(IDS, labels=IDS)
    model = fully_sharded(plain)
    with raises_everywhere(ConfigError, "parameter.data with zero.stage 2 and 3 must be a DTensor of"):
        model.lm_head.weight.data = torch.zeros(131, 24)
    for _ in range(2):
        model(IDS, labels=IDS).loss.backward()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 0.5)
    with raises_everywhere(ConfigError, replaced):
        model(IDS, labels=IDS)
    tied = llama(tie_word_embeddings=True).train()
    model = fully_sharded(tied)
    with warnings.catch_warnings():
        warnings.simplefilter("error", autopar.ShardWarning)
        train(model.to(torch.float64), lambda model: None)
    reference = train(copy.deepcopy(tied).double(), lambda model: None)
    close(_whole(model)["model.embed_tokens.weight"], reference.model.embed_tokens.weight.detach(), "tied", 1e-9)


@pooled(world_size=2)
def test_an_evaluation_on_one_rank_is_named() -> None:
    """Text of a user: ``if rank == 0: evaluate(model)``. The others go on to a barrier of their own."""
    model = fully_sharded(llama(), pipeline={"timeout": 7}).eval()
    with torch.no_grad():
        both = model(IDS).logits
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        with (
            pytest.warns(UserWarning, match="rank 0 reads weights, sharded by zero.stage"),
            pytest.raises(ConsistencyError, match=r"test_whole_numbers.py:\d+, and rank 1 did not within 7 s"),
            torch.no_grad(),
        ):
            model(IDS)
        store.set("evaluated alone", "yes")
    else:
        store.wait(["evaluated alone"])
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, both), "all of them again"
    assert torch.equal(model.generate(IDS[:, :4], max_new_tokens=3)[0, :4], IDS[0, :4])
