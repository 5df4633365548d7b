"""ZeRO stage 3 over a tensor-parallel model against the plain one."""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import autopar
from autopar.data_parallel.fully_sharded import blocks_of
from autopar.errors import ConfigError
from tests.features.experts.mixtures import mixtral
from tests.harness.worlds import pooled
from tests.parity import close, whole
from tests.small import gpt2, llama

IDS = torch.randint(0, 131, (20, 9), generator=torch.Generator().manual_seed(3))


def start(plain, tp=2, **more):
    model = copy.deepcopy(plain)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": decayed}, {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    config = {"model_parallelism": {"tensor_parallel_size": tp}, "zero": {"stage": 3}, **more}
    return (*autopar.initialize(model, config, optimizer=optimizer, lr_scheduler=scheduler), scheduler)


def one_kv_head():
    """On two ranks, each of which holds all of it."""
    return llama(hidden_size=32, num_attention_heads=8, num_key_value_heads=1)


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_loss_gradients_norm_and_steps_are_the_plain_models():
    for build in (gpt2, llama, one_kv_head):
        plain = build()
        decayed = [p for p in plain.parameters() if p.ndim > 1]
        groups = [{"params": decayed}, {"params": [p for p in plain.parameters() if p.ndim == 1], "weight_decay": 0.0}]
        reference = torch.optim.AdamW(groups, lr=1e-3, eps=1e-4)
        halving = torch.optim.lr_scheduler.StepLR(reference, 1, 0.5)
        model, optimizer, scheduler = start(plain, gradient_clipping=0.5)
        assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
        here = sum(p.to_local().numel() for p in model.parameters())
        assert here <= 0.3 * sum(p.numel() for p in plain.parameters()) + 200  # a quarter, and what tp replicates
        for step in range(3):
            batch = IDS[4 * step : 4 * step + 4]
            mine = batch[model.mpu.dp.rank :: 2]
            loss, expected = model(mine, labels=mine).loss, plain(batch, labels=batch).loss
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=model.mpu.dp.group)
            close(mean / 2, expected.detach(), f"loss of step {step}")
            loss.backward()
            expected.backward()
            gradients = whole(model, lambda parameter: parameter.grad.full_tensor())
            for name, parameter in plain.named_parameters():
                close(gradients[name], parameter.grad, f"gradient of {name} in step {step}")
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            assert norm > 0.5
            for o in (optimizer, reference):
                o.step()
                o.zero_grad()
            close(optimizer.gradient_norm, norm, "norm")
            for s in (scheduler, halving):
                s.step()
        assert optimizer.param_groups[1]["lr"] == reference.param_groups[1]["lr"] == 1e-3 / 8
        weights = whole(model, lambda parameter: parameter.data.full_tensor())
        for name, parameter in plain.named_parameters():
            close(weights[name], parameter.data, name)
        with pytest.raises(ConfigError, match=r"deparallelize is not supported with zero\.stage 3"):
            autopar.deparallelize(model)


@pooled(world_size=4)
def test_half_precision_keeps_fp32_shares_and_one_verdict():
    for dtype in ("bf16", "fp16"):
        plain = gpt2()
        reference = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-4)
        settings = {"dtype": dtype, "initial_scale": 512, "hysteresis": 1}
        model, optimizer, _ = start(plain, precision=settings, gradient_clipping=1.0)
        for step in range(4):
            batch = IDS[4 * step : 4 * step + 4]
            mine = batch[model.mpu.dp.rank :: 2]
            loss = model(mine, labels=mine).loss
            optimizer.scale_loss(loss).backward()
            before = [parameter.data.to_local().clone() for parameter in model.parameters()]
            bad = dtype == "fp16" and step == 1
            if bad and dist.get_rank() == 2:
                model.transformer.h[1].mlp.c_fc.weight.grad.to_local().fill_(torch.nan)
            optimizer.step()
            optimizer.zero_grad()
            same = [torch.equal(a, b.data.to_local()) for a, b in zip(before, model.parameters(), strict=True)]
            assert all(same) == bad == optimizer.step_was_skipped
            if bad:
                continue
            plain(batch, labels=batch).loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            close(optimizer.gradient_norm, norm, "norm", 0.05)
            reference.step()
            reference.zero_grad()
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert optimizer.loss_scale == (256 if dtype == "fp16" else 1)


@pooled(world_size=4)
def test_whole_weights_are_freed_when_they_are_sharded():
    ep = {"tensor_parallel_size": 2, "expert_parallel_size": 4}
    meshes = [(llama, {"tensor_parallel_size": 2}, 3), (mixtral, ep, 2), (llama, {"context_parallel_size": 2}, 3)]
    meshes += [(llama, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 2)]
    for build, mesh, stage in meshes:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters())
        held = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
        config = {"model_parallelism": mesh, "zero": {"stage": stage}}
        model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
        gc.collect()
        left = {name: ref() for name, ref in held.items() if ref() is not None}
        own = [*map(id, model.parameters())]
        assert not [name for name, p in left.items() if id(p) not in own and p.untyped_storage().nbytes()], mesh


@pooled(world_size=2)
def test_without_an_optimizer_one_made_after_works():
    plain = gpt2()
    model = autopar.initialize(copy.deepcopy(plain), {"zero": {"stage": 3}})
    ours, reference = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    for m, o in ((model, ours), (plain, reference)):
        m(IDS[:2], labels=IDS[:2]).loss.backward()
        o.step()
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        close(parameter.data.full_tensor(), other.data, name)


def test_blocks_share_no_weight_with_what_is_outside():
    model = gpt2()
    assert blocks_of(model) == [model.transformer.h[1], model.transformer.h[0]]
    model.lm_head.weight = model.transformer.h[0].mlp.c_fc.weight
    assert blocks_of(model) == [model.transformer.h[1]]
