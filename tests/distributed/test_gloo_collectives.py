"""Collectives over gloo against torch's own, and sums of half precision in fp32."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.config import ParallelConfig
from autopar.distributed.collectives import copy, gather_sum, reduce, reduce_scatter, start_all_reduce
from autopar.distributed.gloo_collectives import all_gather_into_tensor, all_reduce, reduce_scatter_tensor
from autopar.distributed.mesh import MPU
from autopar.errors import ConfigError
from tests.harness.tiers import in_tier, mainly
from tests.harness.worlds import pooled
from tests.small import llama

RANKS = [*mainly(2, 3, 5), *in_tier("sweep", [4])]
SHAPES: list[tuple[int, ...]] = [(), (1, 1, 512), (3, 5, 7), (2, 0, 3), (7_001,)]
LONG = (300_003,)
HALVES, WHOLES = [torch.float16, torch.bfloat16], [torch.uint8, torch.int8, torch.int32, torch.int64]
DTYPES = [*HALVES, torch.float32, torch.float64, *WHOLES]
OPERATIONS = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]


def values(shape: Sequence[int], dtype: torch.dtype, seed: int = 0, rank: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + (dist.get_rank() if rank is None else rank))
    made = torch.randn(shape, generator=generator)
    return made.to(dtype) if dtype.is_floating_point else (made * 10).to(dtype)


def same_on_all(x: torch.Tensor) -> None:
    """Assert that all ranks hold the same bits."""
    bits = x.contiguous().view(-1).view(torch.uint8)
    everyone = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, bits)
    assert all(torch.equal(bits, other) for other in everyone)


def _sums_of_torch() -> None:
    for number, dtype in enumerate(DTYPES):
        for shape in [*SHAPES, LONG] if dtype is torch.float32 else SHAPES:
            mine = values(shape, dtype, number)
            for operation in OPERATIONS if shape == (3, 5, 7) else OPERATIONS[:1]:
                found, wanted = mine.clone(), mine.clone()
                all_reduce(found, operation)
                dist.all_reduce(wanted, operation)
                same_on_all(found)
                assert torch.equal(found, wanted), (dtype, shape, operation)


@pytest.mark.tier("test")
@pytest.mark.parametrize("size", RANKS)
def test_an_all_reduce_is_that_of_torch(size: int) -> None:
    pooled(size)(_sums_of_torch)()


def _others_of_torch() -> None:
    size, world = dist.get_world_size(), dist.group.WORLD
    assert world is not None
    for dtype in (*DTYPES, torch.bool):
        for width in (0, 1, 7, 140_001 // size):
            mine = values((width,), torch.uint8) > 3 if dtype is torch.bool else values((width,), dtype)
            found, wanted = mine.new_empty(size * width), mine.new_empty(size * width)
            all_gather_into_tensor(found, mine, world)
            dist.all_gather(list(wanted.view(size, -1)), mine)
            assert torch.equal(found, wanted)
            if dtype is not torch.bool:
                parts, part = values((size * width,), dtype), mine.new_empty(width)
                reduce_scatter_tensor(part, parts, world)
                all_reduce(parts)
                if size == 2 or not dtype.is_floating_point or width < 10:
                    assert torch.equal(part, parts.view(size, -1)[dist.get_rank()])


@pytest.mark.tier("test")
@pytest.mark.parametrize("size", RANKS)
def test_all_gather_and_reduce_scatter_are_those_of_torch(size: int) -> None:
    pooled(size)(_others_of_torch)()


@pooled(world_size=5)
def test_a_group_that_is_not_the_world() -> None:
    groups = [dist.new_group(ranks) for ranks in ([3, 1], [0, 2, 4])]
    ranks = [[1, 3], [0, 2, 4]][dist.get_rank() % 2 == 0]
    group = groups[dist.get_rank() % 2 == 0]
    x = torch.tensor([float(dist.get_rank())])
    all_reduce(x, group=group)
    assert x.item() == sum(ranks)
    own, everyone = torch.tensor([dist.get_rank()]), torch.empty(len(ranks), dtype=torch.int64)
    all_gather_into_tensor(everyone, own, group)
    assert everyone.tolist() == ranks
    part = torch.empty(1)
    reduce_scatter_tensor(part, torch.arange(float(len(ranks))), group)
    assert part.item() == len(ranks) * ranks.index(dist.get_rank())
    silent = dist.new_group([0, 1], backend="fake")
    if dist.get_rank() < 2:
        all_reduce(torch.ones(3), group=silent)


@pooled(world_size=2)
def test_an_error_of_the_group_is_raised() -> None:
    group = dist.new_group(timeout=dist.distributed_c10d.timedelta(seconds=0.2))
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            all_reduce(torch.ones(1), group=group)
    dist.barrier()


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
