"""``reduce_dtype: fp32``: tensors of half precision are summed over ranks in fp32, and rounded once."""

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.config import ParallelConfig
from autopar.distributed.collectives import copy, gather_sum, reduce, reduce_scatter, start_all_reduce
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError
from tests.pool import pooled
from tests.small import llama

SIZE = 4 * 75_001  # goes over gloo's ring, which rounds at every step


def value(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randint(-128, 128, (SIZE,), generator=generator) / 64).bfloat16()


def exact() -> torch.Tensor:
    return sum(value(rank).float() for rank in range(dist.get_world_size())).bfloat16()  # type: ignore[union-attr]


def sums(mpu: MPU) -> dict[str, torch.Tensor]:
    """What each collective that sums makes of the values, whole."""
    mine, axis = value(mpu.tp.rank), mpu.tp
    leaf = mine.clone().requires_grad_()
    copy(leaf, axis).backward(mine)
    begun = mine.clone()
    start_all_reduce(begun, axis)()
    shard = torch.zeros(SIZE // 4, dtype=torch.bfloat16, requires_grad=True)
    gather_sum(shard, axis).backward(mine)
    parts = {"reduce-scatter": reduce_scatter(mine, axis), "gradient of a gather": shard.grad}
    found = {"reduce": reduce(mine, axis), "gradient of a copy": leaf.grad, "in the background": begun}
    for name, part in parts.items():
        everyone = [torch.empty_like(part) for _ in range(4)]
        dist.all_gather(everyone, part, group=axis.group)
        found[name] = torch.cat(everyone)
    assert torch.equal(mine, value(axis.rank))
    return found


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_every_sum_is_rounded_once() -> None:
    wanted = exact()
    for transport in ("gloo", "shm"):
        mpu = MPU(4, cpu_transport=transport, reduce_dtype="fp32")
        for name, found in sums(mpu).items():
            assert found.dtype == torch.bfloat16 and torch.equal(found, wanted), (transport, name)
        mpu.destroy()
    mpu = MPU(4, cpu_transport="gloo")
    assert not torch.equal(sums(mpu)["reduce"], wanted)  # what the option is for


@pooled(world_size=4)
def test_gradients_of_replicas_are_averaged_in_fp32() -> None:
    plain = llama(vocab_size=SIZE // 24).bfloat16()
    for choice in ("same", "fp32"):
        model = autopar.initialize(
            llama(vocab_size=SIZE // 24).bfloat16(), {"model_parallelism": {"reduce_dtype": choice}}
        )
        weight = model.get_input_embeddings().weight
        weight.grad = value(dist.get_rank())[: weight.numel()].view_as(weight)
        autopar.average_gradients(model)
        mean = sum(value(rank).float() / 4 for rank in range(4)).bfloat16()  # type: ignore[union-attr]
        assert weight.grad.dtype == torch.bfloat16
        assert torch.equal(weight.grad.view(-1), mean[: weight.numel()]) == (choice == "fp32")
        assert weight.shape == plain.get_input_embeddings().weight.shape
        model.mpu.destroy()


@pooled(world_size=2)
def test_a_model_in_half_precision_trains_and_one_in_fp32_is_as_before() -> None:
    ids = torch.arange(24).view(2, 12)
    losses = {}
    for dtype in (torch.bfloat16, torch.float32):
        for choice in ("same", "fp32"):
            sizes = {"tensor_parallel_size": 2, "reduce_dtype": choice, "sequence_parallel": dtype == torch.bfloat16}
            model = autopar.initialize(llama().to(dtype), {"model_parallelism": sizes})
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in model.parameters())
            losses[dtype, choice] = loss.item()
            model.mpu.destroy()
    assert losses[torch.float32, "same"] == losses[torch.float32, "fp32"]
    assert losses[torch.bfloat16, "fp32"] == pytest.approx(losses[torch.float32, "fp32"], rel=2e-2)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model_parallelism.reduce_dtype must be same or fp32, not bf16"):
        ParallelConfig.parse({"model_parallelism": {"reduce_dtype": "bf16"}})
    with pytest.raises(ConfigError, match=r"use model_parallelism.reduce_dtype: same or fp32"):
        ParallelConfig.parse({"communication_data_type": "fp32"})
