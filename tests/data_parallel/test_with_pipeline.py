"""ZeRO-1, precision and clipping around a pipeline, against one process."""

import copy

import pytest
import torch
import torch.distributed as dist

import autopar
from tests.harness.worlds import pooled
from tests.parity import close
from tests.small import gpt2, llama

IDS = torch.randint(0, 131, (40, 9), generator=torch.Generator().manual_seed(3))


def tied():
    return llama(tie_word_embeddings=True)


def start(plain, tp, **sections):
    model = copy.deepcopy(plain)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": decayed}, {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-4)
    config = {
        "model_parallelism": {"tensor_parallel_size": tp, "pipeline_parallel_size": 2},
        "pipeline": {"microbatch_size": 1},
        "zero": {"stage": 1},
        **sections,
    }
    return autopar.initialize(model, config, optimizer=optimizer)


def compare(model, plain, tolerance):
    plan, mpu = model._autopar.plan, model.mpu
    for name, parameter in model.named_parameters():
        canonical = plan.canonical(name)
        layout = plan.tensors[canonical].layout
        expected = plain.get_parameter(canonical).data
        close(parameter.data, expected if layout is None else layout.shard(expected, mpu.tp.rank), name, tolerance)


def check(tp):
    for build in (gpt2, tied):
        plain = build()
        reference = torch.optim.AdamW(
            [
                {"params": [p for p in plain.parameters() if p.ndim > 1]},
                {"params": [p for p in plain.parameters() if p.ndim == 1], "weight_decay": 0.0},
            ],
            lr=1e-3,
            eps=1e-4,
        )
        model, optimizer = start(plain, tp, gradient_clipping=0.5)
        held = {id(p) for p in model.parameters()}
        assert {id(p) for group in optimizer.param_groups for p in group["params"]} == held
        for step in range(5):
            batch = IDS[4 * step : 4 * step + 4]
            mine = batch[model.mpu.dp.rank :: model.mpu.dp.size]
            model.execute_pipeline({"input_ids": mine, "labels": mine}, optimizer=optimizer)
            plain(batch, labels=batch).loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            assert norm > 0.5
            for o in (optimizer, reference):
                o.step()
                o.zero_grad()
            close(optimizer.gradient_norm, norm, "norm", 2e-5)
            compare(model, plain, 2e-5)
        total = sum(v.numel() for e in reference.state.values() for v in e.values())
        here = sum(v.numel() for e in optimizer.state.values() for v in e.values())
        assert here <= 0.75 * total / model.mpu.dp.size
        if build is gpt2:
            weight = (model.transformer.wte if model.mpu.pp.rank == 0 else model.lm_head).weight.data
            both = [torch.empty_like(weight) for _ in range(2)]
            dist.all_gather(both, weight.contiguous(), group=model.mpu.pp.group)
            assert torch.equal(*both)  # the tied weight, bit by bit


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_two_stages_two_replicas():
    check(1)


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_fp16_one_verdict_for_stages_and_replicas():
    for tp in (1, 2):
        plain = gpt2()
        model, optimizer = start(plain, tp, precision={"dtype": "fp16", "initial_scale": 1024, "hysteresis": 1})
        for step in range(4):
            batch = IDS[4 * step : 4 * step + 4]
            before = [parameter.detach().clone() for parameter in model.parameters()]
            model.execute_pipeline({"input_ids": batch, "labels": batch}, optimizer=optimizer)
            if step == 1 and dist.get_rank() == 3:
                next(p for p in model.parameters() if p.grad is not None).grad.view(-1)[0] = torch.inf
            optimizer.step()
            optimizer.zero_grad()
            same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
            assert all(same) == (step == 1) == optimizer.step_was_skipped
        assert optimizer.loss_scale == 512 and optimizer.skipped_steps == 1


@pooled(world_size=2)
def test_rotary_tables_of_a_later_stage_have_the_dtype_of_the_model():
    """They are made of embeddings that lie on another stage."""
    losses = []
    for stages in (1, 2):
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters())
        sizes = {"model_parallelism": {"pipeline_parallel_size": stages}, "precision": {"dtype": "bf16"}}
        model, optimizer = autopar.initialize(model, sizes, optimizer=optimizer)
        batch = {"input_ids": IDS[:4], "labels": IDS[:4]}
        losses.append(model.train().execute_pipeline(batch, optimizer=optimizer, broadcast_loss=True).loss)
    close(losses[1], losses[0], "loss", 1e-3)
