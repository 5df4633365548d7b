import copy
import math

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.errors import ConfigError
from tests.compare import same_gradients
from tests.harness.worlds import pooled
from tests.parity import close, language_batches
from tests.small import gpt2, llama, parallel


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_the_norm_is_the_plain_models_on_every_rank_and_the_clipped_gradients_too():
    heads = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2}
    for build in (gpt2, lambda: llama(**heads, tie_word_embeddings=True)):
        for norm_type in (2.0, 1.0, math.inf):
            plain = build()
            model = parallel(copy.deepcopy(plain), 4)
            for batch in language_batches(131):
                plain(**batch).loss.backward()
                model(**batch).loss.backward()
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
            norm = autopar.clip_grad_norm_(model, 0.01, norm_type)
            close(norm, expected, f"norm of order {norm_type}")
            assert expected > 0.01  # else nothing was clipped
            everyone = [torch.zeros(()) for _ in range(4)]
            dist.all_gather(everyone, norm)
            assert len({value.item() for value in everyone}) == 1
            same_gradients(model, plain)


@pooled(world_size=2)
def test_a_norm_that_is_not_finite_raises_on_every_rank_and_a_parameter_added_later_is_named():
    model = parallel(gpt2(), 2)
    for order in (math.inf, 2.0):  # gloo's MAX would lose it
        model.zero_grad()
        model(**language_batches(131)[0]).loss.backward()
        if dist.get_rank() == 1:
            model.transformer.h[0].mlp.c_fc.weight.grad[0, 0] = math.nan
        assert order == 2.0 or torch.isnan(autopar.clip_grad_norm_(model, 1.0, order))
    with pytest.raises(RuntimeError, match=r"gradients is nan, which is not finite"):
        autopar.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    model.adapter = torch.nn.Linear(2, 2)
    model.adapter.weight.grad = torch.ones(2, 2)
    with pytest.raises(ConfigError, match=r"adapter.weight was added after autopar.initialize"):
        autopar.clip_grad_norm_(model, 1.0)


def test_a_plain_model_is_refused():
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel is not parallelized\n  Use torch.nn.utils.clip_grad_norm_"):
        autopar.clip_grad_norm_(gpt2(), 1.0)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_an_overflow_on_one_rank_skips_the_step_on_all():
    model = parallel(gpt2(), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = autopar.GradScaler(model.mpu, init_scale=8.0)
    for overflow in (True, False):
        before = model.transformer.wpe.weight.clone()
        scaler.scale(model(**language_batches(131)[0]).loss).backward()
        if overflow and dist.get_rank() == 1:
            model.transformer.h[0].mlp.c_fc.weight.grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(model.transformer.wpe.weight, before) == overflow
        assert scaler.get_scale() == 4.0


@pooled(world_size=4)
def test_the_norm_under_fsdp2():
    from torch.distributed.fsdp import fully_shard

    plain = gpt2()
    model = autopar.initialize(copy.deepcopy(plain), {"tp": 2})
    fully_shard(model, mesh=model.mpu.mesh["dp"])
    batch = language_batches(131)[0]
    plain(**batch).loss.backward()
    model(**batch).loss.backward()
    close(autopar.clip_grad_norm_(model, 0.01), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01), "norm")
    norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.001) for each in (model, plain)]
    close(*norms, "norm of what is clipped, by torch's function")
    whole = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    close(whole, torch.tensor(0.001), "norm of what is clipped twice")
