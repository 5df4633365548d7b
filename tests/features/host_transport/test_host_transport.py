"""Collectives through shared memory against those of gloo: values, bits, dtypes, shapes, errors, and what remains."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.distributed import collectives
from autopar.distributed.axis import Axis
from autopar.distributed.mesh import MPU
from autopar.features.host_transport import transport as host_transport
from autopar.features.host_transport.transport import HostTransport
from autopar.layout import Block, Layout
from tests.compare import same_gradients
from tests.distributed.test_gloo_collectives import same_on_all, values
from tests.harness.tiers import in_tier, mainly
from tests.harness.worlds import pooled
from tests.small import gpt2, llama

SUMMED = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SUMMED += [torch.uint8, torch.int8, torch.int32, torch.int64]
RANKS = [*mainly(2, 3, 5), *in_tier("sweep", [4])]


def axes_of(size: int) -> tuple[Axis, Axis]:
    return MPU(size, cpu_transport="gloo").tp, MPU(size, cpu_transport="shm").tp


def _assert_sum(found: torch.Tensor, gloo: torch.Tensor, mine: torch.Tensor) -> None:
    """Assert that a sum has the bits of gloo's over two ranks, and over more is as near as one rounding to it."""
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine.contiguous())
    exact = torch.stack([each.double() for each in everyone]).sum(0)
    if len(everyone) == 2 or not found.dtype.is_floating_point:
        assert torch.equal(found, gloo)
    else:
        size = torch.stack([each.double().abs() for each in everyone]).sum(0)
        steps = 1 if found.dtype in (torch.float16, torch.bfloat16) else len(everyone)
        assert ((found.double() - exact).abs() <= steps * torch.finfo(found.dtype).eps * size).all()


def _all_reduce_like_gloo() -> None:
    gloo, shm = axes_of(dist.get_world_size())
    slot = host_transport._SLOT
    shapes: list[tuple[int, ...]] = [(), (1,), (1, 1, 512), (3, 5, 7), (0,), (2, 0, 3), (17_001,), (slot // 4 + 3,)]
    for dtype in SUMMED:
        for number, shape in enumerate(shapes):
            mine = values(shape, dtype, number)
            wanted, found = collectives.reduce(mine, gloo), collectives.reduce(mine, shm)
            assert found.shape == wanted.shape and found.dtype == dtype
            _assert_sum(found, wanted, mine)
            same_on_all(found)
            in_place = mine.clone()
            assert collectives.reduce_(in_place, shm) is in_place
            assert torch.equal(in_place, found)
            assert torch.equal(mine, values(shape, dtype, number)), "the input was mutated"


@pytest.mark.tier("test")
@pytest.mark.parametrize("size", RANKS)
def test_an_all_reduce_is_that_of_gloo(size: int) -> None:
    pooled(size)(_all_reduce_like_gloo)()


def _others_like_gloo() -> None:
    gloo, shm = axes_of(dist.get_world_size())
    size, slot = gloo.size, host_transport._SLOT
    for dtype in (*SUMMED, torch.bool, torch.complex64, torch.int16, torch.float8_e4m3fn):
        for width in (1, 3, 0, slot // dtype.itemsize + 5):
            raw = values((2, width * dtype.itemsize), torch.uint8, width)
            mine = raw > 3 if dtype is torch.bool else raw.view(dtype) if width else torch.empty(2, 0, dtype=dtype)
            layout = collectives.even_layout(2 * size, size)
            wanted = collectives.all_gather(mine.view(torch.uint8), gloo, layout, 0)  # gloo does not know all dtypes
            assert torch.equal(collectives.all_gather(mine, shm, layout, 0).view(torch.uint8), wanted)
            sent = mine.clone()
            assert shm.transport.run("broadcast", sent, shm.ranks[size - 1])
            assert torch.equal(sent.view(torch.uint8), wanted[-2:])
            if dtype in SUMMED and width < 10:
                parts = values((2 * size, 3 * width), dtype, width)
                wanted, found = (collectives.reduce_scatter(parts, axis) for axis in (gloo, shm))
                assert found.shape == (2, 3 * width)
                if size == 2 or not dtype.is_floating_point:
                    assert torch.equal(found, wanted)
                else:  # what one all-reduce gives
                    assert torch.equal(found, collectives.reduce(parts, shm)[2 * shm.rank : 2 * shm.rank + 2])
    long = values((size * (slot // 8 + 5),), torch.float32)  # in parts
    summed = collectives.reduce(long, shm)
    assert torch.equal(collectives.reduce_scatter(long, shm), summed.view(size, -1)[shm.rank])


@pytest.mark.tier("test")
@pytest.mark.parametrize("size", RANKS)
def test_gather_and_scatter_are_those_of_gloo(size: int) -> None:
    pooled(size)(_others_like_gloo)()


@pooled(world_size=3)
def test_shards_of_different_width_are_gathered() -> None:
    gloo, shm = axes_of(3)
    for elements in (7, 2, 1):  # with fewer than ranks some hold none
        layout = collectives.even_layout(elements, 3)
        width = layout.local_size(gloo.rank)
        for mine in (values((4, width), torch.float32), values((width, 4), torch.float32).t()):
            wanted, found = (collectives.all_gather(mine, axis, layout, 1) for axis in (gloo, shm))
            assert torch.equal(found, wanted)
    layout = Layout.of(0, [Block("element", 3, 1, ((0, 2), (0, 2), (2, 3)))])  # two ranks hold the same units
    mine = values((layout.local_size(gloo.rank), 2), torch.float32)
    wanted, found = (collectives.sum_shards(mine, axis, layout, 0) for axis in (gloo, shm))
    assert torch.equal(found, wanted)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_tensors_that_are_not_contiguous() -> None:
    gloo, shm = axes_of(2)
    slot = host_transport._SLOT
    for base in (values((6, 4), torch.float32), values((slot // 1024, 700), torch.float32)):
        for mine in (base.t(), base[:, ::2], base[1:].t()[1:], base[:1].expand(5, -1)):
            before = mine.clone()
            assert torch.equal(collectives.reduce(mine, shm), collectives.reduce(mine, gloo))
            assert torch.equal(mine, before)
            if mine.stride(0) != 0:
                strided = mine.clone(memory_format=torch.preserve_format)
                shm.transport.run("all_reduce", strided)
                assert torch.equal(strided, collectives.reduce(mine, gloo))
    rows = values((4, 6), torch.float32)
    shm.transport.run("all_reduce", rows[:, 1:3])
    wanted = collectives.reduce(values((4, 6), torch.float32), gloo)
    assert torch.equal(rows[:, 1:3], wanted[:, 1:3])
    assert torch.equal(rows[:, 3:], values((4, 6), torch.float32)[:, 3:])
    # Numbers that are none have the same bits on all ranks: nan, inf, denormal.
    bits = torch.tensor([0x7FC00001 + dist.get_rank(), 0x7F800000, 0x00000001], dtype=torch.int32)
    same_on_all(collectives.reduce(bits.view(torch.float32), shm))


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_modes_of_autograd() -> None:
    gloo, shm = axes_of(2)
    mine = values((3, 4), torch.float32)
    layout = collectives.even_layout(6, 2)
    for mode in (torch.inference_mode(), torch.no_grad(), torch.enable_grad(), torch.inference_mode()):
        with mode:  # views that are made in one mode are used in all
            x = values((5, 5), torch.float32)
            assert torch.equal(collectives.reduce(x, shm), collectives.reduce(x, gloo))
            assert torch.equal(*(collectives.all_gather(mine, axis, layout, 0) for axis in (gloo, shm)))
    leaf = mine.clone().requires_grad_()
    assert not collectives.all_gather(leaf, shm, layout, 0).requires_grad
    results = []
    for axis in (gloo, shm):
        x = mine.clone().requires_grad_()
        y = collectives.gather_sum(collectives.reduce_(collectives.copy(x, axis) * 2, axis), axis).square()
        collectives.reduce_scatter(y, axis).sum().backward()
        results.append((y.detach(), x.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pooled(world_size=2)
def test_who_follows_tensors_sees_what_a_collective_makes() -> None:
    from autopar.tensor_tracking import TensorTracking, storage_key, tensors_in

    _, shm = axes_of(2)

    class Follow(TensorTracking):
        def track(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
            self.alive.append((args, result))  # a storage that has ended gives its number to another one
            if any(storage_key(tensor) in self.marked for tensor in tensors_in((args, kwargs))):
                touched = [*tensors_in(result), *(tensors_in(args[:1]) if func._schema.is_mutable else ())]
                self.marked.update(storage_key(tensor) for tensor in touched)

    marked, plain = torch.ones(4), torch.ones(4)
    with Follow() as follow:
        follow.marked, follow.alive = {storage_key(marked)}, []
        outs = []
        for x in (marked, plain):
            gathered = collectives.all_gather(x, shm, collectives.even_layout(8, 2), 0)
            outs.append((collectives.reduce(x, shm), gathered, collectives.reduce_scatter(x, shm)))
    assert [[storage_key(x) in follow.marked for x in made] for made in outs] == [[True] * 3, [False] * 3]
    assert torch.equal(outs[0][1], torch.ones(8))
    assert torch.equal(outs[0][2], torch.full((2,), 2.0))


@pytest.mark.parametrize("make", [llama, gpt2])
@pooled(world_size=2)
def test_a_model_gives_what_it_gives_over_gloo(make: Any) -> None:
    ids = torch.arange(40).view(2, 20) % 131
    plain = make()
    plain(input_ids=ids, labels=ids).loss.backward()
    models = []
    for transport in ("gloo", "shm"):
        sizes = {"tensor_parallel_size": 2, "cpu_transport": transport}
        model = autopar.initialize(make(), {"model_parallelism": sizes})
        assert isinstance(model.mpu.tp.transport, HostTransport) == (transport == "shm")
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        with torch.no_grad():
            tokens = model.generate(ids[:, :4], max_new_tokens=6, do_sample=False)
        same_gradients(model, plain)
        models.append([out.loss.detach(), out.logits.detach(), tokens, *(p.grad for p in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*models, strict=True))
    same_on_all(models[1][0])
    autopar.deparallelize(model)
