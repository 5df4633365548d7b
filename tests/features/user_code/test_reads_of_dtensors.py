"""Parameters that ZeRO 2 and 3 share between replicas, and ranks or stages besides: reads of a part are told, once."""

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import ConfigError
from autopar.features.user_code.reads import ShardedDTensor
from tests.exchange import raises_everywhere
from tests.features.user_code.techniques import NOTICED, adaptive_clipping, own_clipping, sam, silent, told
from tests.harness.tiers import mainly
from tests.harness.worlds import pooled
from tests.parity import close
from tests.small import llama

IDS = torch.arange(72).view(4, 18) % 131
Change = Callable[[Any], Any]


def config(tp: int, pp: int, stage: int) -> dict[str, Any]:
    return {"tp": tp, "pp": pp, "zero": {"stage": stage}, "pipeline": {"num_microbatches": 2, "timeout": 20}}


def trained(stage: int = 3) -> Any:
    """A model on tp 2 x dp 2, behind a backward pass."""
    model = autopar.initialize(llama().train(), config(2, 1, stage))
    rows = IDS.chunk(2)[model.mpu.dp.rank]
    model(rows, labels=rows).loss.backward()
    return model


def same_weights(model: Any, reference: Any, when: str) -> None:
    due = dict(reference.named_parameters())
    for name, weight in autopar.hf_weights(model):
        close(weight, due[name], f"{when}: {name}", 2e-5)


OF_TENSOR_PARALLEL: list[Change] = [
    sam, own_clipping, adaptive_clipping, NOTICED["count"], NOTICED["width"], NOTICED["squares"],
    NOTICED["norm"], NOTICED["finite"], NOTICED["drawn in place"],
    lambda model: torch.save({name: p.detach() for name, p in model.named_parameters()}, io.BytesIO()),
    lambda model: torch.cat([p.full_tensor().flatten() for p in model.parameters()]).median(),
    lambda model: sum(p.grad.norm().item() ** 2 for p in model.parameters()),
    lambda model: nn.init.normal_(model.lm_head.weight),
    lambda model: nn.Parameter(model.lm_head.weight).norm(),
    lambda model: copy.deepcopy(model.lm_head.weight).norm(),
]  # fmt: skip


@pooled(world_size=4)
def test_a_shard_of_tensor_parallel_ranks_is_told_and_keeps_its_class() -> None:
    """torch's DTensor gives the norm of all replicas' rows: still of one tensor-parallel rank's shard."""
    for number, change in enumerate(OF_TENSOR_PARALLEL):
        model = trained()
        texts = told(change, model)
        assert len(texts) == 1, (number, texts)
        assert f"sees the shard of tensor-parallel rank {model.mpu.tp.rank}: shape (" in texts[0]
        assert "autopar.full_params" not in texts[0], texts  # it refuses with FSDP2

    model = trained()
    weight: Any = model.lm_head.weight
    assert type(weight) is ShardedDTensor and isinstance(weight, DTensor) and isinstance(weight, nn.Parameter)
    assert repr(weight).startswith("DTensor(") and type(copy.deepcopy(weight)) is ShardedDTensor
    assert type(weight.to_local()) is torch.Tensor
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(weight.detach(), file)
    file.seek(0)
    again: Any = torch.load(file, weights_only=True)
    assert type(again) is DTensor
    close(again.to_local(), weight.to_local(), "saved rows")
    refused = raises_everywhere(ConfigError, "full_params is not supported with zero.stage 3 (FSDP2)")
    with refused, autopar.full_params(model):
        pass


def elementwise(model: Any) -> None:
    for p in model.parameters():
        p.grad.clamp_(-0.01, 0.01).add_(p.detach(), alpha=0.01)
        p.data.mul_(0.99)


def penalised(model: Any) -> None:
    """A backward of its own."""
    (0.1 * sum(autopar.full_tensor(p).norm() for p in model.parameters())).backward()


def clipped_by_torch(model: Any) -> None:
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for p in model.parameters():
        p.grad.mul_(1 + float(norm))


def clipped_by_full(model: Any) -> None:
    for p in model.parameters():
        whole = autopar.full_tensor(p.grad, of=p)
        p.grad.mul_(min(1.0, 0.05 / whole.norm().item()))


@pytest.mark.parametrize("stage", mainly(3, 2, later="all"))
@pooled(world_size=4)
def test_what_is_right_is_that_of_one_process(stage: int) -> None:
    plain = llama().train()
    for change in (elementwise, penalised, clipped_by_torch, clipped_by_full):
        own, reference = copy.deepcopy(plain), copy.deepcopy(plain)
        optimizer, step = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (own, reference))
        model, optimizer = autopar.initialize(own, config(2, 1, stage), optimizer=optimizer)
        with silent():
            for _ in range(3):
                rows = IDS.chunk(2)[model.mpu.dp.rank]
                model(rows, labels=rows).loss.backward()
                reference(IDS, labels=IDS).loss.backward()
                for each, using in ((model, optimizer), (reference, step)):
                    change(each)
                    using.step()
                    using.zero_grad()
        same_weights(model, reference, change.__name__)


@pytest.mark.parametrize("stage", mainly(3, 2, later="all"))
@pooled(world_size=2)
def test_a_second_derivative_is_refused(stage: int) -> None:
    """torch would read weights that it has freed, and end in a segmentation fault."""
    model = autopar.initialize(llama().train(), {"zero": {"stage": stage}})
    hidden = torch.randn(*IDS.shape, model.config.hidden_size).requires_grad_()
    loss = model(inputs_embeds=hidden, labels=IDS).loss
    with raises_everywhere(ConfigError, f"create_graph=True is not supported with zero.stage {stage}"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    weight, head = model.model.layers[0].mlp.up_proj.weight, model.lm_head.weight
    for inputs in (weight, [weight, head], head):
        loss = model(IDS, labels=IDS).loss
        with raises_everywhere(ConfigError, "torch.autograd.grad(loss, parameters) is not supported with zero.stage 2"):
            torch.autograd.grad(loss, inputs, create_graph=True)
    loss = model(IDS, labels=IDS).loss
    if isinstance(weight, DTensor):
        with raises_everywhere(ConfigError, "Use loss.backward() and parameter.grad"):
            torch.autograd.grad(loss, weight, allow_unused=True)
    config = {"zero": {"stage": stage}, "activation_checkpointing": {"enable": True}}
    model = autopar.initialize(llama().train(), config)
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def regularised(model: Any, full: Any, ids: torch.Tensor) -> torch.Tensor:
    """A loss with parameters in it: before the forward, and after it, where FSDP2 holds some of them gathered."""
    before = sum(full(parameter).norm() for parameter in model.parameters())
    loss = model(ids, labels=ids).loss
    table = full(model.model.embed_tokens.weight)
    after = sum(full(parameter).norm() for parameter in model.parameters())
    return loss + 0.01 * (before + after) + 0.1 * torch.nn.functional.embedding(ids, table).square().mean()


@pytest.mark.parametrize("stage", mainly(3, 2, later="all"))
@pooled(world_size=2)
def test_full_parameters_in_the_loss_of_replicas(stage: int) -> None:
    plain = llama().train()
    model = autopar.initialize(copy.deepcopy(plain), {"zero": {"stage": stage}})
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        full = autopar.full_tensor(parameter)
        assert type(full) is torch.Tensor and torch.equal(full, other)
    ids = torch.arange(40).view(4, 10)
    mine = ids.chunk(2)[model.mpu.dp.rank]  # the mean over replicas: embeddings of other tokens on each
    for _ in range(2):
        regularised(model, autopar.full_tensor, mine).backward()
        regularised(plain, lambda parameter: parameter, ids).backward()
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        close(autopar.full_tensor(parameter.grad, of=parameter), other.grad, f"gradient of {name}")
