"""ZeRO stage 3 against the plain model, and beside what else looks at forwards: ``generate``, norms, wrappers."""

import copy
import functools
import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import (
    MambaConfig,
    MambaForCausalLM,
)

import autopar
from autopar.data_parallel import fully_sharded
from autopar.data_parallel.fully_sharded import blocks_of
from autopar.errors import ConfigError
from tests.exchange import raises_everywhere
from tests.features.experts.mixtures import mixtral
from tests.harness.worlds import pooled
from tests.parity import close, randomise, whole
from tests.pipeline_parallel.deep import deep
from tests.pipeline_parallel.oracle import take_step
from tests.small import gpt2, llama


def _sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.tier("all")
@pytest.mark.parametrize("stage", [2, 3])
@pooled(world_size=2)
def test_generate_between_a_backward_and_its_step(stage: int) -> None:
    plain = deep("t5", 2).train()
    model = copy.deepcopy(plain)
    model, optimizer = autopar.initialize(model, {"zero": {"stage": stage}}, optimizer=_sgd(model))
    reference, ids = _sgd(plain), torch.arange(5, 19).view(2, 7)
    for _ in range(3):
        losses = []
        for each, stepped in ((plain, reference), (model, optimizer)):
            loss = each.train()(input_ids=ids, labels=ids).loss
            loss.backward()
            each.eval().generate(ids, max_new_tokens=3, do_sample=False)
            take_step(stepped)
            losses.append(loss.detach())
        close(losses[1], losses[0], "loss")


def mamba() -> Any:
    torch.manual_seed(0)
    return randomise(MambaForCausalLM(MambaConfig(vocab_size=96, hidden_size=16, num_hidden_layers=2, state_size=4)))


@pooled(world_size=2)
def test_generate_waits_once_and_keeps_its_weights() -> None:
    """The cache has other names before transformers 5.24, and a Mamba's holds no keys."""
    ids, calls = torch.arange(5, 19).view(2, 7), Counter[str]()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("meet", "free_weights"):
            patch.setattr(fully_sharded, name, functools.partial(_counted, calls, name, getattr(fully_sharded, name)))
        for build, way in (
            (llama, {}),
            (llama, {"cache_implementation": "static"}),
            (mamba, {}),
            (functools.partial(deep, "bart", 2), {}),
        ):
            plain = build().eval()
            model = autopar.initialize(copy.deepcopy(plain), {"zero": {"stage": 3}})
            how: Any = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, **way}
            for _ in range(2):  # replicas meet at each block until they know which one follows
                model.generate(ids, **how)
            for _ in range(2):
                calls.clear()
                assert torch.equal(*(each.generate(ids, **how) for each in (plain, model)))
                assert calls == {"meet": 1}, (build, way)
            with torch.no_grad():
                model(ids)
            assert calls["free_weights"] == 1


def _counted(calls: Counter[str], name: str, plain: Any, *args: Any) -> Any:
    calls[name] += 1
    return plain(*args)


@pooled(world_size=2)
def test_a_forward_without_a_backward_leaves_norms_and_weights_and_ddp_is_refused() -> None:
    plain = llama().train()
    model = copy.deepcopy(plain)
    model, _ = autopar.initialize(model, {"zero": {"stage": 2}}, optimizer=_sgd(model))
    ids = torch.arange(5, 19).view(2, 7)
    for each in (plain, model):
        each(ids, labels=ids).loss.backward()
        each(ids, labels=ids)
    close(autopar.clip_grad_norm_(model, 0.1), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1), "norm")
    model(ids, labels=ids)
    weights = dict(autopar.hf_weights(model))
    assert all(torch.equal(weights[name], parameter) for name, parameter in plain.named_parameters())
    with raises_everywhere(ConfigError, "around a model with zero.stage 2 or 3", "Leave the wrapper out."):
        torch.nn.parallel.DistributedDataParallel(model)


IDS = torch.randint(0, 131, (20, 9), generator=torch.Generator().manual_seed(3))


def adamw(model):
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) is kind] for kind in (True, False))
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=1e-3, eps=1e-4)


def start(plain, tp=2, **more):
    model = copy.deepcopy(plain)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    config = {"model_parallelism": {"tensor_parallel_size": tp}, "zero": {"stage": 3}, **more}
    return (*autopar.initialize(model, config, optimizer=optimizer, lr_scheduler=scheduler), scheduler)


def one_kv_head():
    return llama(hidden_size=32, num_attention_heads=8, num_key_value_heads=1)


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_loss_gradients_norm_and_steps_are_the_plain_models():
    for build in (gpt2, llama, one_kv_head):
        plain = build()
        reference = adamw(plain)
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
            take_step(optimizer, reference)
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
            take_step(optimizer)
            same = [torch.equal(a, b.data.to_local()) for a, b in zip(before, model.parameters(), strict=True)]
            assert all(same) == bad == optimizer.step_was_skipped
            if bad:
                continue
            plain(batch, labels=batch).loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            close(optimizer.gradient_norm, norm, "norm", 0.05)
            take_step(reference)
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


def test_blocks_share_no_weight_with_what_is_outside():
    model = gpt2()
    assert blocks_of(model) == [model.transformer.h[1], model.transformer.h[0]]
    model.lm_head.weight = model.transformer.h[0].mlp.c_fc.weight
    assert blocks_of(model) == [model.transformer.h[1]]
