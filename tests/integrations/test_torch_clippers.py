"""torch's own clippers and loss scalers, and what calls them, on a parallelized model."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_ as imported_before, clip_grad_value_, clip_grads_with_norm_, get_total_norm

import autopar
from autopar.errors import ConfigError, ConsistencyError
from tests.compare import same_gradients, same_weights
from tests.exchange import raises_everywhere
from tests.harness.worlds import distributed, pooled
from tests.parity import close, language_batches
from tests.small import gpt2, grouped, parallel


def with_gradients(build, tp=2, **config):
    """A plain model and its parallel copy, with the gradients of two micro-batches."""
    plain = build()
    model = parallel(copy.deepcopy(plain), tp, **config)
    for batch in language_batches(131):
        plain(**batch).loss.backward()
        model(**batch).loss.backward()
    return plain, model


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


@distributed(world_size=2)
def test_functions_that_were_imported_before_are_right() -> None:
    assert imported_before is torch.nn.utils.clip_grad_norm_
    plain, model = with_gradients(gpt2)
    assert imported_before is torch.nn.utils.clip_grad_norm_ is torch.nn.utils.clip_grad.clip_grad_norm_
    expected = imported_before(plain.parameters(), 0.01)
    close(imported_before(model.parameters(), 0.01), expected, "norm")
    assert expected > 0.01
    same_gradients(model, plain)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_the_norm_and_the_clipped_gradients_are_the_plain_models() -> None:
    for build in (gpt2, grouped):
        for p in (2.0, 1.0, "inf"):
            plain, model = with_gradients(build)
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01, p, error_if_nonfinite=True)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, p, error_if_nonfinite=True)
            close(norm, expected, f"norm of order {p}")
            same_gradients(model, plain)
        plain, model = with_gradients(build)
        outside = torch.nn.Parameter(torch.ones(3))  # of no model: the same on each rank
        outside.grad = torch.full((3,), 2.0)
        for one in (plain, model):
            listed = [p for name, p in one.named_parameters() if "norm" in name or "ln" in name or "mlp" in name]
            one.norms = [
                torch.nn.utils.clip_grad_norm_(listed, 0.5),  # some of them only
                get_total_norm([g.detach() for g in gradients(one)]),
                get_total_norm([*gradients(one), outside.grad], math.inf),
                get_total_norm(one.parameters()),  # of weights
            ]
            clip_grads_with_norm_([*one.parameters()], 0.1, one.norms[1])
            clip_grad_value_(one.parameters(), 1e-3)
        for actual, expected in zip(model.norms, plain.norms, strict=True):
            close(actual, expected, "norm")
        same_gradients(model, plain)


@pooled(world_size=2)
def test_copies_of_a_model_are_watched_and_what_is_plain_again_is_not() -> None:
    plain, model = with_gradients(gpt2)
    other = copy.deepcopy(model)
    for one in (model, other):
        for parameter, given in zip(one.parameters(), gradients(model), strict=True):
            parameter.grad = given.clone()
    expected = get_total_norm(gradients(plain))
    close(torch.nn.utils.clip_grad_norm_(other.parameters(), 1e9), expected, "norm of the copy")
    close(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9), expected, "norm")
    whole = autopar.deparallelize(model)
    if dist.get_rank() == 0:  # nothing waits for the other rank
        close(torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e9), expected, "norm of the plain model")


@pooled(world_size=2)
def test_over_stages() -> None:
    plain = grouped().train()
    model = autopar.initialize(copy.deepcopy(plain), {"model_parallelism": {"pipeline_parallel_size": 2}}).train()
    batch = language_batches(131)[0]
    plain(**batch).loss.backward()
    model.execute_pipeline(batch)
    with pytest.raises(ConfigError, match=r"supported with 2 pipeline stages(.|\n)*autopar\.clip_grad_norm_\(model"):
        get_total_norm(p.grad for p in model.parameters() if p.grad is not None)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    close(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01), expected, "norm")
    same_gradients(model, plain)
    for plain, sizes in ((gpt2(), {"pipeline_parallel_size": 2}), (grouped(), {"tensor_parallel_size": 2})):
        model = autopar.initialize(copy.deepcopy(plain), {"model_parallelism": sizes}).train()
        plain.train()(**batch).loss.backward()
        model.execute_pipeline(batch)
        for one in (plain, model):  # each stage has other parameters, and as many as it has
            for parameter in one.parameters():
                torch.nn.utils.clip_grad_norm_(parameter, 0.001)
        same_gradients(model, plain)


@pooled(world_size=4)
def test_a_stage_without_any_of_the_parameters_takes_part() -> None:
    plain = grouped().train()
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    model = autopar.initialize(copy.deepcopy(plain), {"model_parallelism": sizes}).train()
    batch = language_batches(131)[0]
    plain(**batch).loss.backward()
    model.execute_pipeline(batch)

    def block(one, number):
        return [p for name, p in one.named_parameters() if f"layers.{number}." in name]

    for number in range(2):
        assert bool(block(model, number)) == (number == model.mpu.pp.rank)
        for p, limit in ((2.0, 0.1), (math.inf, 0.001)):
            expected = torch.nn.utils.clip_grad_norm_(block(plain, number), limit, p)
            assert expected > limit
            close(torch.nn.utils.clip_grad_norm_((p for p in block(model, number)), limit, p), expected, f"norm {p}")
        clip_grads_with_norm_(block(plain, number), 1e-4, expected)
        clip_grads_with_norm_(block(model, number), 1e-4, expected)
        with raises_everywhere(ConfigError, "get_total_norm is not supported with 2 pipeline stages"):
            get_total_norm([p.grad for p in block(model, number)])
    same_gradients(model, plain)
    other = autopar.initialize(gpt2(), {"model_parallelism": sizes})
    with pytest.raises(ConfigError, match=r"holds none of the parameters, and 2 models(.|\n)*autopar\.clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_([], 1.0)
    other.mpu.destroy()
    assert torch.nn.utils.clip_grad_norm_([], 1.0) == 0


@pooled(world_size=2)
def test_a_norm_of_ones_own_that_differs_between_the_ranks_is_refused() -> None:
    _, model = with_gradients(gpt2)
    own = torch.stack([g.norm() for g in gradients(model)]).norm()
    before = [g.clone() for g in gradients(model)]
    clip_grads_with_norm_(model.parameters(), 1e9, own)  # clips nothing on any rank
    with pytest.raises(ConsistencyError, match=r"must get the same norm on the ranks \[0, 1\](.|\n)*autopar\.clip"):
        clip_grads_with_norm_(model.parameters(), 0.1, own)
    assert all(torch.equal(one, two) for one, two in zip(gradients(model), before, strict=True))


@pooled(world_size=2)
def test_what_cannot_be_right_is_refused() -> None:
    mpu = autopar.MPU(2)
    layer = autopar.tensor_parallel.ColumnParallelLinear(4, 6, group=mpu)
    layer.weight.grad = torch.ones_like(layer.weight)
    for call in (
        lambda: torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0),
        lambda: clip_grads_with_norm_(layer.parameters(), 1.0, torch.ones(())),
    ):
        with pytest.raises(ConfigError, match=r"ColumnParallelLinear, of which(.|\n)*autopar\.clip_grad_norm_\(model"):
            call()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(ConfigError, match=r"GradScaler is not supported with(.|\n)*autopar\.GradScaler\(mpu\)"):
        scaler.step(torch.optim.SGD(layer.parameters(), lr=0.1))
    model = gpt2()
    config = {"model_parallelism": {"tensor_parallel_size": 2}, "precision": {"dtype": "fp16"}}
    model, optimizer = autopar.initialize(model, config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.scale_loss(model(**language_batches(131)[0]).loss).backward()
    with pytest.raises(ConfigError, match="gradient_clipping into the config"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@pooled(world_size=2)
def test_an_overflow_on_one_rank_skips_the_step_of_torchs_scalers_on_all() -> None:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    batch = language_batches(131)[0]
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    for fused in (False, True):
        for scaler in (
            torch.amp.GradScaler("cpu", init_scale=8.0),
            ShardedGradScaler("cpu", init_scale=8.0, process_group=alone),
        ):
            plain, model = gpt2(), parallel(gpt2(), 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
            reference = torch.optim.SGD(plain.parameters(), lr=0.1)
            for overflow in (True, False):
                scaler.scale(model(**batch).loss).backward()
                if overflow and dist.get_rank() == 1:
                    model.transformer.h[0].mlp.c_fc.weight.grad[0, 0] = math.inf
                before = model.transformer.wpe.weight.clone()
                if not fused:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                assert torch.equal(model.transformer.wpe.weight, before) == overflow
                assert scaler.get_scale() == 4.0
            plain(**batch).loss.backward()
            reference.step()
            same_weights(model, plain)
