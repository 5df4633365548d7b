"""Training as users do it: optimizers made before or after, losses, FSDP2 and ZeRO of torch against one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import autopar
from tests.compare import same_gradients, same_weights
from tests.docs.test_coming_from import POLICY
from tests.harness.worlds import pooled
from tests.parity import check, close, language_batches
from tests.small import gpt2, llama, parallel

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3, foreach=True),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3, fused=True),
}


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_optimizers_made_before():
    for make in OPTIMIZERS.values():
        check(gpt2, language_batches(131), tp=2, optimizer=make)


@pooled(world_size=2)
def test_optimizers_made_after_and_param_groups_of_the_users_own():
    for make in OPTIMIZERS.values():
        plain = gpt2()
        model = parallel(copy.deepcopy(plain), 2)

        def groups(m):
            decayed = [p for p in m.parameters() if p.ndim > 1]
            return [{"params": decayed, "lr": 0.05}, {"params": [p for p in m.parameters() if p.ndim == 1]}]

        ours, reference = make(groups(model)), make(groups(plain))
        scheduler = torch.optim.lr_scheduler.StepLR(ours, 1, 0.5), torch.optim.lr_scheduler.StepLR(reference, 1, 0.5)
        for _ in range(3):
            for m, optimizer in ((model, ours), (plain, reference)):
                m(**language_batches(131)[0]).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            for s in scheduler:
                s.step()
        same_weights(model, plain, 2e-5)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_fp16_and_bf16_forward_stays_near_fp32():
    for dtype, tolerance in ((torch.bfloat16, 0.05), (torch.float16, 0.01)):
        expected = gpt2()(torch.arange(6)[None]).logits
        model = parallel(gpt2().to(dtype), 2)
        close(model(torch.arange(6)[None]).logits.float(), expected, str(dtype), tolerance)


@pooled(world_size=2)
def test_the_loss_is_taken_from_the_local_logits_and_is_the_plain_models():
    for build in (gpt2, llama):
        plain = build()
        model = parallel(copy.deepcopy(plain), 2)
        for extra in ({}, {"num_items_in_batch": 5}, {"num_items_in_batch": torch.tensor(7)}):
            for batch in language_batches(131):
                expected, actual = plain(**batch, **extra), model(**batch, **extra)
                close(actual.loss, expected.loss, "loss")
                close(actual.logits + 0, expected.logits, "logits")
                (expected.loss + expected.logits.square().mean()).backward()  # logits may be used besides
                (actual.loss + actual.logits.square().mean()).backward()
        same_gradients(model, plain, 2e-5)
        assert autopar.deparallelize(model).loss_function is plain.loss_function
    all_ignored = torch.full((1, 4), -100)
    model = parallel(gpt2(), 2)
    assert torch.isnan(model(torch.arange(4)[None], labels=all_ignored).loss)  # as torch's mean over nothing


@pooled(world_size=2)
def test_the_policy_of_the_colo_tensor_tutorial():
    model = check(gpt2, language_batches(131), tp=2, policy=POLICY)
    assert model.transformer.wte.weight.shape == (131, 18)
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_zero_redundancy_and_fsdp2_compose_over_the_data_parallel_axis():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ids = torch.randint(0, 131, (4, 8), generator=torch.Generator().manual_seed(3))
    for kind in ("zero", "fsdp2"):
        plain = gpt2()
        model = autopar.initialize(copy.deepcopy(plain), {"model_parallelism": {"tensor_parallel_size": 2}})
        mpu = model.mpu
        reference = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-4)
        if kind == "zero":
            engine = DistributedDataParallel(model, process_group=mpu.get_data_parallel_group())
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.AdamW, process_group=mpu.get_data_parallel_group(), lr=1e-3, eps=1e-4
            )
        else:
            for block in model.transformer.h:
                fully_shard(block, mesh=mpu.mesh["dp"])
            engine = fully_shard(model, mesh=mpu.mesh["dp"])
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
        mine = ids[mpu.get_data_parallel_rank() :: 2]
        for step in range(3):
            expected, loss = plain(ids, labels=ids).loss, engine(mine, labels=mine).loss
            loss.backward(), expected.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=mpu.get_data_parallel_group())
            close(mean / 2, expected.detach(), f"loss of step {step} with {kind}")
            for each in (optimizer, reference):
                each.step(), each.zero_grad()
