"""Gradients of half-precision weights that add up in fp32, and fp32 weights that are given back."""

import copy

import pytest
import torch
import torch.distributed as dist

import autopar
from tests.data_parallel.test_precision import IDS, start
from tests.harness.worlds import pooled
from tests.parity import close
from tests.small import gpt2


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
@pooled(world_size=4)
def test_deparallelize_gives_the_fp32_weights_back(tp: int, pp: int) -> None:
    for zero, clipping in ((0, 0.0), (1, 1.0)):
        model = gpt2(n_layer=3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = {"tp": tp, "pp": pp, "precision": {"dtype": "bf16"}, "zero": {"stage": zero}}
        model, optimizer = autopar.initialize(model, config | {"gradient_clipping": clipping}, optimizer=optimizer)
        plan, rank = model._autopar.plan, model.mpu.tp.rank
        ids = IDS[:2]
        model.execute_pipeline({"input_ids": ids, "labels": ids}, optimizer=optimizer)
        optimizer.step()
        step = optimizer._autopar
        expected = {n: step.master(p).clone() for n, p in model.named_parameters() if step.owns(p)}
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
        assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in expected.values())
        plain = autopar.deparallelize(model)
        for name, parameter in plain.named_parameters():
            assert parameter.dtype == parameter.grad.dtype == torch.float32, name
            layout = plan.tensors[plan.canonical(name)].layout
            for whole, shards in ((parameter.data, expected), (parameter.grad, gradients)):
                mine = whole if layout is None else layout.shard(whole, rank)
                assert name not in shards or torch.equal(mine, shards[name]), name
        sums = torch.stack([x.double().sum() for p in plain.parameters() for x in (p, p.grad)])
        other = sums.clone()
        dist.all_reduce(other)
        assert torch.equal(other, dist.get_world_size() * sums)
        plain(ids, labels=ids).loss.backward()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pooled(world_size=1)
def test_the_gradients_of_micro_batches_add_up_in_fp32(dtype: str) -> None:
    config = {"precision": {"dtype": dtype, "initial_scale": 1.0}, "pipeline": {"num_microbatches": 40}}
    plain = gpt2(tie_word_embeddings=False)  # the two parts of a tied weight's gradient are added before
    model, optimizer = start(copy.deepcopy(plain), **config)
    half = plain.to({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    expected = {name: torch.zeros(p.shape) for name, p in half.named_parameters()}
    for ids in IDS.split(1):
        loss = half(ids, labels=ids).loss
        (loss.float() / 40).backward()
        for name, parameter in half.named_parameters():
            expected[name] += parameter.grad.float()
            parameter.grad = None
    model.execute_pipeline({"input_ids": IDS, "labels": IDS}, optimizer=optimizer)
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32
        close(parameter.grad, expected[name], name, 1e-6)
        rounded = torch.zeros(parameter.shape, dtype=half.dtype)
        assert not torch.equal((rounded + parameter.grad).to(half.dtype).float(), parameter.grad), name
    optimizer.step()
    optimizer.zero_grad()
    ids = IDS[:2]  # a loop of one's own goes on
    optimizer.scale_loss(model(ids, labels=ids).loss).backward()
    optimizer.step()


@pytest.mark.parametrize("pp", [1, 2])
@pooled(world_size=2)
def test_frozen_weights_and_buffers_become_fp32_too(pp: int) -> None:
    model = gpt2(n_layer=2)
    for parameter in model.transformer.h.parameters():
        parameter.requires_grad_(False)
    model.register_buffer("scale", torch.full((), 0.3))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = {"model_parallelism": {"pipeline_parallel_size": pp}, "precision": {"dtype": "bf16"}}
    model, optimizer = autopar.initialize(model, config, optimizer=torch.optim.AdamW(trained, lr=1e-3))
    model.execute_pipeline({"input_ids": IDS[:2], "labels": IDS[:2]}, optimizer=optimizer)
    optimizer.step()
    plain = autopar.deparallelize(model)
    assert {each.dtype for each in (*plain.parameters(), *plain.buffers()) if each.dtype.is_floating_point} == {
        torch.float32
    }
    plain(IDS[:2], labels=IDS[:2]).loss.backward()


@pooled(world_size=2)
def test_gradients_that_were_there_before_are_kept_and_replicas_of_which_one_lacks_some() -> None:
    model, optimizer = start(gpt2(tie_word_embeddings=False), precision={"dtype": "bf16"})
    batch = {"input_ids": IDS[:1], "labels": IDS[:1]}
    model(**batch).loss.backward()
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    assert {gradient.dtype for gradient in before.values()} == {torch.bfloat16}
    with model.no_sync():
        model.execute_pipeline(batch, optimizer=optimizer)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, 2 * before[name].float()), name
    first, second, third, *_ = model.parameters()
    expected = [parameter.grad.clone() for parameter in (first, second, third)]
    if dist.get_rank():
        first.grad = None
        second.grad = second.grad.bfloat16()
    third.grad = third.grad.bfloat16()
    autopar.average_gradients(model)
    assert [parameter.grad.dtype for parameter in (first, second, third)] == [torch.float32] * 2 + [torch.bfloat16]
    close(first.grad, expected[0] / 2, "without a gradient on one replica")
    close(second.grad, (expected[1] + expected[1].bfloat16()) / 2, "a half one")
    optimizer.step()
