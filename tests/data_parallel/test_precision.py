"""bf16 and fp16 with fp32 weights in the optimizer, and the loss scale."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.config import ParallelConfig
from autopar.data_parallel.precision import LossScale
from autopar.errors import ConfigError
from tests.checkpoint.loading import logged
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.parity import close
from tests.pipeline_parallel.deep import deep
from tests.pipeline_parallel.oracle import take_step
from tests.small import gpt2

IDS = torch.randint(0, 131, (40, 9), generator=torch.Generator().manual_seed(3))


def adamw(model, lr=1e-3):
    return torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-4)


def start(model, tp=1, make=adamw, **sections):
    return autopar.initialize(model, {"tp": tp, **sections}, optimizer=make(model))


def by_hand(plain, dtype, make=adamw):
    """The textbook loop: a half-precision model beside fp32 weights with an optimizer of their own."""
    half = copy.deepcopy(plain).to(dtype)
    optimizer = make(plain)

    def step(ids):
        half(ids, labels=ids).loss.backward()
        for weight, parameter in zip(plain.parameters(), half.parameters(), strict=True):
            weight.grad = parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for weight, parameter in zip(plain.parameters(), half.parameters(), strict=True):
                parameter.copy_(weight)

    return half, step


@pytest.mark.tier("test")
@pooled(world_size=1)
def test_bf16_is_the_loop_by_hand_bit_by_bit():
    plain = gpt2()
    model, optimizer = start(copy.deepcopy(plain), precision={"dtype": "bf16"})
    identities = [id(p) for p in optimizer.param_groups[0]["params"]]
    half, step = by_hand(plain, torch.bfloat16)
    for number in range(5):
        ids = IDS[4 * number : 4 * number + 4]
        optimizer.scale_loss(model(ids, labels=ids).loss).backward()
        take_step(optimizer)
        step(ids)
    assert identities == [id(p) for p in model.parameters()]
    for (name, parameter), expected, weight in zip(
        model.named_parameters(), half.parameters(), plain.parameters(), strict=True
    ):
        assert parameter.dtype == torch.bfloat16 and torch.equal(parameter, expected), name
        assert torch.equal(optimizer._autopar.master(parameter), weight), name
        assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_fp16_with_zero_and_tensor_parallelism_follows_fp32_on_one_process():
    plain = gpt2()
    reference = adamw(plain)
    model, optimizer = start(
        copy.deepcopy(plain), 2, zero={"stage": 1}, precision={"dtype": "fp16"}, gradient_clipping=1.0
    )
    engine = DistributedDataParallel(model, process_group=model.mpu.dp.group)
    losses = []
    for number in range(10):
        ids = IDS[4 * number : 4 * number + 4]
        mine = ids[model.mpu.dp.rank :: 2]
        loss = engine(mine, labels=mine).loss
        optimizer.scale_loss(loss).backward()
        expected = plain(ids, labels=ids).loss
        expected.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        take_step(optimizer, reference)
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=model.mpu.dp.group)
        close(mean / 2, expected.detach(), f"loss of step {number}", 5e-3)
        close(optimizer.gradient_norm, norm, f"norm of step {number}", 1e-2)  # of the unscaled gradients
        losses.append(expected.item())
    assert optimizer.loss_scale == 65536.0 and optimizer.skipped_steps == 0
    owned = [parameter for parameter in model.parameters() if optimizer._autopar.owns(parameter)]
    assert 0 < len(owned) < len(list(model.parameters()))
    assert len(optimizer._autopar.masters._weights) == len(owned)  # fp32 weights only of what is stepped here
    with raises_everywhere(ConfigError, "clip_grad_norm_ is not supported with precision.dtype fp16"):
        autopar.clip_grad_norm_(model, 1.0)


@pytest.mark.tier("test")
@pooled(world_size=1)
def test_the_scale_is_taken_off_before_the_step_with_and_without_clipping():
    for limit in (0, 0.5):
        plain = gpt2()
        reference = torch.optim.SGD(plain.parameters(), lr=1.0)
        model, optimizer = start(
            copy.deepcopy(plain),
            make=lambda m: torch.optim.SGD(m.parameters(), lr=1.0),
            precision={"dtype": "fp16", "initial_scale": 4096},
            gradient_clipping=limit,
        )
        before = copy.deepcopy(plain)
        optimizer.scale_loss(model(IDS[:4], labels=IDS[:4]).loss).backward()
        plain(IDS[:4], labels=IDS[:4]).loss.backward()
        if limit:
            assert torch.nn.utils.clip_grad_norm_(plain.parameters(), limit) > 2 * limit
        optimizer.step()
        reference.step()
        moved = 0.0
        for (name, new), old, ours in zip(
            plain.named_parameters(), before.parameters(), model.parameters(), strict=True
        ):
            close(optimizer._autopar.master(ours) - old.data, (new - old).detach(), name, 1e-3)
            moved = max(moved, (new - old).abs().max().item())
        assert moved > 1e-2


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_an_overflow_on_one_rank_of_four_skips_the_step_on_all():
    settings = {"dtype": "fp16", "initial_scale": 1024, "hysteresis": 1, "growth_interval": 2}
    model, optimizer = start(gpt2(), 2, lambda m: adamw(m, 0.01), zero={"stage": 1}, precision=settings)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    scales = []
    for number in range(6):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        state = copy.deepcopy(list(optimizer.state.values()))
        optimizer.scale_loss(model(IDS[:2], labels=IDS[:2]).loss).backward()
        bad = number in (0, 2)  # the first step too, where the replicas are compared
        if bad and dist.get_rank() == 3:
            model.transformer.h[0].mlp.c_fc.weight.grad[0, 0] = (torch.inf, torch.nan)[number > 0]
        take_step(optimizer)
        scheduler.step()
        assert optimizer.step_was_skipped == bad
        same = [torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
        assert all(same) if bad else not any(same)
        if bad:
            now = list(optimizer.state.values())
            assert len(now) == len(state)
            for old, new in zip(state, now, strict=True):
                assert all(torch.equal(old[key], new[key]) for key in old)
        scales.append(optimizer.loss_scale)
        for name, parameter in model.named_parameters():
            others = [torch.empty_like(parameter) for _ in range(2)]
            dist.all_gather(others, parameter.data.contiguous(), group=model.mpu.dp.group)
            assert torch.equal(*others), f"{name} drifts apart after step {number}"
    assert optimizer.skipped_steps == 2
    assert scales == [512, 512, 256, 256, 512, 512]


@pooled(world_size=2)
def test_a_loss_that_was_not_scaled_is_noticed_and_one_in_fp16_limits_the_scale():
    model, optimizer = start(gpt2(), 2, precision={"dtype": "fp16"})
    model(IDS[:2], labels=IDS[:2]).loss.backward()
    said = "the loss of this step was not scaled", "optimizer.scale_loss(loss).backward()"
    with raises_everywhere(ConfigError, *said):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()  # nothing to step
    loss = model(IDS[:2], labels=IDS[:2]).loss
    # In a pipeline only the last stage has a loss to scale.
    (optimizer.scale_loss(loss) if dist.get_rank() == 1 else loss * optimizer.loss_scale).backward()
    optimizer.step()
    assert not optimizer.step_was_skipped
    optimizer.zero_grad()
    before = model.lm_head.weight.detach().clone()
    loss = model(IDS[:2], labels=IDS[:2]).loss.half()  # its gradient is the scale; 65536 is infinite in fp16
    if dist.get_rank() == 1:
        loss = optimizer.scale_loss(loss)
        assert torch.isfinite(loss)
    else:
        loss = loss.float() * 32768
    loss.backward()
    optimizer.step()
    assert optimizer.loss_scale == 32768 and not optimizer.step_was_skipped
    assert not torch.equal(model.lm_head.weight, before)
    assert optimizer._autopar.scale.max_scale == 32768


@pooled(world_size=1)
def test_at_the_smallest_scale_it_warns():
    settings = {"dtype": "fp16", "initial_scale": 4, "min_scale": 2, "hysteresis": 1}
    model, optimizer = start(gpt2(), precision=settings)
    with logged("autopar") as records:
        for expected in (0, 1):
            optimizer.scale_loss(model(IDS[:2], labels=IDS[:2]).loss).backward()
            model.lm_head.weight.grad.fill_(torch.inf)
            optimizer.step()
            assert len(records) == expected
    assert "precision.min_scale=2" in records[0]


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_a_state_dict_brings_back_the_same_steps_bit_by_bit():
    sections = {"zero": {"stage": 1}, "precision": {"dtype": "fp16", "initial_scale": 256, "growth_interval": 2}}

    def steps(model, optimizer, numbers):
        for number in numbers:
            ids = IDS[2 * number : 2 * number + 2]
            optimizer.scale_loss(model(ids, labels=ids).loss).backward()
            take_step(optimizer)

    model, optimizer = start(gpt2(), **sections)
    steps(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    steps(model, optimizer, range(3, 6))
    again, other = start(gpt2(seed=5), **sections)
    steps(again, other, range(5, 6))
    for part, (loader, state) in enumerate(((again, saved[0]), (other, saved[1]))):
        assert loader.load_state_dict(state) is None or part == 0
    assert other.loss_scale == 512
    steps(again, other, range(3, 6))
    for (name, parameter), expected in zip(again.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, expected), name
    assert other.loss_scale == optimizer.loss_scale == 2048
    for ours, expected in zip(again.parameters(), model.parameters(), strict=True):
        if other._autopar.owns(ours):
            assert torch.equal(other._autopar.master(ours), optimizer._autopar.master(expected))
            for key, value in other.state[ours].items():
                assert value.dtype == torch.float32 and torch.equal(value, optimizer.state[expected][key])


@pytest.mark.tier("test")
@pooled(world_size=1)
def test_weights_that_were_loaded_later_win():
    model, optimizer = start(
        gpt2(), make=lambda m: torch.optim.SGD(m.parameters(), lr=0.1), precision={"dtype": "bf16"}
    )
    other = gpt2(seed=7)
    for parameter in other.parameters():
        parameter.data = (parameter.data * 1.5).to(torch.bfloat16)
    model.load_state_dict(other.state_dict())
    model(IDS[:2], labels=IDS[:2]).loss.backward()
    optimizer.step()
    for parameter, loaded in zip(model.parameters(), other.parameters(), strict=True):
        expected = loaded.detach().float() - 0.1 * parameter.grad.float()
        weight = optimizer._autopar.master(parameter)
        close(weight, expected, "fp32 weight", 2**-8)  # where both round to the same, the finer one stays
        assert ((weight - expected).abs() < 1e-6).float().mean() > 0.8


@pooled(world_size=2)
def test_what_transformers_keeps_in_fp32_stays_there():
    model, optimizer = start(deep("t5", 2), 2, precision={"dtype": "fp16", "initial_scale": 128})
    kept = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    assert kept and all(".wo." in name for name in kept)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    loss = model(input_ids=IDS[:2], labels=IDS[2:4]).loss
    optimizer.scale_loss(loss).backward()
    scaled = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if name in kept}
    optimizer.step()
    assert not optimizer.step_was_skipped
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name]), name
        if name in kept:
            close(parameter.grad * 128, scaled[name], name)  # the scale was taken off
            assert optimizer._autopar.master(parameter) is None


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pooled(world_size=1)
def test_a_model_that_is_in_half_precision_already(dtype):
    half = gpt2().to({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    model, optimizer = start(half, precision={"dtype": dtype})
    for parameter in model.parameters():
        assert torch.equal(optimizer._autopar.master(parameter), parameter.float())
    model, optimizer = start(gpt2().to(torch.bfloat16))  # precision was not asked for: as plain torch does
    for parameter in model.parameters():
        assert optimizer._autopar.master(parameter) is None
    model(IDS[:2], labels=IDS[:2]).loss.backward()
    optimizer.step()
    assert {v["exp_avg"].dtype for v in optimizer.state.values()} == {torch.bfloat16}


def scale(**changes):
    settings = {"initial_scale": 8.0, "min_scale": 2.0, "max_scale": 16.0, "growth_interval": 3, "hysteresis": 2}
    return LossScale(ParallelConfig(precision="fp16", **{**settings, **changes}))


def after(one, overflows):
    seen = []
    for overflow in overflows:
        one.update(bool(overflow))
        seen.append(one.scale)
    return seen


@pytest.mark.parametrize(
    ("changes", "overflows", "scales"),
    [  # it shrinks when no chance is left, down to the minimum
        ({}, [1, 1, 1, 1], [8, 4, 2, 2]),
        ({"hysteresis": 1}, [1, 1], [4, 2]),
        ({"hysteresis": 1, "backoff_factor": 0.25}, [1], [2]),
        # chances come back with growth and not before
        ({}, [1, 0, 0, 1, 1], [8, 8, 8, 4, 2]),
        ({}, [1, 0, 0, 0, 1, 1], [8, 8, 8, 16, 16, 8]),
        # it grows after steps in a row, up to the maximum
        ({}, [0, 0, 0, 0, 0, 0], [8, 8, 16, 16, 16, 16]),
        ({}, [0, 0, 1, 0, 0, 0], [8, 8, 8, 8, 8, 16]),
        ({"growth_factor": 1.5}, [0, 0, 0], [8, 8, 12]),
    ],
)
def test_it_shrinks_and_grows(changes, overflows, scales):
    assert after(scale(**changes), overflows) == scales


def test_a_saved_one_goes_on_where_it_was_and_a_limit_holds_for_ever():
    one, other = scale(), scale()
    after(one, [1, 0, 0])
    other.load_state_dict(one.state_dict())
    assert vars(other) == vars(one)
    assert after(other, [0]) == after(one, [0]) == [16]
    one = scale()
    one.limit(4.0)
    assert (one.scale, one.max_scale, one.min_scale) == (4, 4, 2)
    assert after(one, [0] * 3) == [4, 4, 4]
    one.limit(8.0)
    assert one.max_scale == 4
