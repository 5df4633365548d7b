"""The gradient norm over stages, clipping in the optimizer's step, averages; ZeRO 1 and precision around a pipeline."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.data_parallel.grad_sync import sum_gradients
from autopar.distributed.axis import Axis
from tests.compare import same_weights
from tests.data_parallel.test_fully_sharded_compositions import adamw
from tests.harness.worlds import pooled
from tests.parity import close, language_batches
from tests.pipeline_parallel.oracle import take_step
from tests.small import gpt2, grouped, llama


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_clipping_in_the_config_is_the_plain_models():
    for build in (gpt2, grouped):
        for stage in (0, 1):
            plain = build()
            model = copy.deepcopy(plain)
            optimizer, reference = (torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (model, plain))
            config = {"tp": 2, "gradient_clipping": 0.5, "zero": {"stage": stage}}
            model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
            assert optimizer.gradient_norm is None
            engine = DistributedDataParallel(model, process_group=model.mpu.dp.group)
            for batch in language_batches(131, count=4):
                mine = {name: tensor[model.mpu.dp.rank :: 2] for name, tensor in batch.items()}
                full = dict(batch, labels=batch["input_ids"])
                mine["labels"] = mine["input_ids"]
                engine(**mine).loss.backward()
                # the mean of the replicas' losses, as data parallelism has it
                (sum(plain(**{n: t[d::2] for n, t in full.items()}).loss for d in range(2)) / 2).backward()
                norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
                assert norm > 0.5
                take_step(optimizer, reference)
                close(optimizer.gradient_norm, norm, "norm", 2e-5)
            same_weights(model, plain, 2e-5)
            states = [sum(v.numel() for e in o.state.values() for v in e.values()) for o in (optimizer, reference)]
            assert stage == 0 or states[0] <= (0.3 if build is gpt2 else 0.6) * states[1]


@pooled(world_size=2)
def test_clipped_gradients_are_seen_after_the_step_and_others_stay():
    plain = gpt2()
    for limit in (0.25, 1e9):
        model = copy.deepcopy(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer = autopar.initialize(model, {"tp": 2, "gradient_clipping": limit}, optimizer=optimizer)
        model(**language_batches(131)[0]).loss.backward()
        before = copy.deepcopy([parameter.grad for parameter in model.parameters()])
        optimizer.step()
        factor = min(1.0, limit / optimizer.gradient_norm.item())
        assert (factor < 1) == (limit == 0.25)
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            close(parameter.grad, gradient * factor, "clipped gradient")


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_the_mean_over_the_axis_in_pieces_of_each_dtype():
    rank = dist.get_rank()
    axis = Axis.of(dist.group.WORLD, "dp")
    shapes = [(2, 3), (), (5,), (0,), (3, 2)]
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.float32]
    parameters = [torch.nn.Parameter(torch.zeros(s, dtype=d)) for s, d in zip(shapes, dtypes, strict=True)]
    for index, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, 2.0 * index + 4 * rank)
    parameters[2].grad.fill_(60000.0)  # the sum of two overflows, the mean does not
    parameters[4].grad = torch.arange(6.0).view(2, 3).t() * (1 + rank)  # not contiguous
    strides = parameters[4].grad.stride()
    sum_gradients([parameters], axis, 1 / axis.size)
    assert parameters[4].grad.stride() == strides
    assert torch.equal(parameters[0].grad, torch.full((2, 3), 2.0))
    assert parameters[1].grad == 4.0 and parameters[2].grad[0] == 60000.0
    assert torch.equal(parameters[4].grad, torch.arange(6.0).view(2, 3).t() * 1.5)


IDS = torch.randint(0, 131, (40, 9), generator=torch.Generator().manual_seed(3))


def start(plain, tp, **sections):
    model = copy.deepcopy(plain)
    sizes = {"tp": tp, "pp": 2, "pipeline": {"microbatch_size": 1}, "zero": {"stage": 1}}
    return autopar.initialize(model, {**sizes, **sections}, optimizer=adamw(model))


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_two_stages_two_replicas():
    for build in (gpt2, grouped):
        plain = build()
        reference = adamw(plain)
        model, optimizer = start(plain, 1, gradient_clipping=0.5)
        held = {id(p) for p in model.parameters()}
        assert {id(p) for group in optimizer.param_groups for p in group["params"]} == held
        for step in range(5):
            batch = IDS[4 * step : 4 * step + 4]
            mine = batch[model.mpu.dp.rank :: model.mpu.dp.size]
            model.execute_pipeline({"input_ids": mine, "labels": mine}, optimizer=optimizer)
            plain(batch, labels=batch).loss.backward()
            for order in (1.0, math.inf):
                norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()], order)
                close(autopar.clip_grad_norm_(model, 1e9, order), norm, f"norm of order {order}", 2e-5)
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            assert norm > 0.5
            take_step(optimizer, reference)
            close(optimizer.gradient_norm, norm, "norm", 2e-5)
            same_weights(model, plain, 2e-5)  # and tied ones are equal to the bit
        total = sum(v.numel() for e in reference.state.values() for v in e.values())
        here = sum(v.numel() for e in optimizer.state.values() for v in e.values())
        assert here <= 0.75 * total / model.mpu.dp.size


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
            take_step(optimizer)
            same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
            assert all(same) == (step == 1) == optimizer.step_was_skipped
        assert optimizer.loss_scale == 512 and optimizer.skipped_steps == 1


@pooled(world_size=2)
def test_rotary_tables_of_a_later_stage_have_the_dtype_of_the_model():
    losses = []
    for stages in (1, 2):
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters())
        sizes = {"pp": stages, "precision": {"dtype": "bf16"}}
        model, optimizer = autopar.initialize(model, sizes, optimizer=optimizer)
        batch = {"input_ids": IDS[:4], "labels": IDS[:4]}
        losses.append(model.train().execute_pipeline(batch, optimizer=optimizer, broadcast_loss=True).loss)
    close(losses[1], losses[0], "loss", 1e-3)
