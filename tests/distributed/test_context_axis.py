"""The context-parallel axis: its ranks hold the same weights and read the same data."""

import contextlib
import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.distributed.axis import MeshSizes
from autopar.distributed.mesh import MPU, rank_groups
from autopar.errors import ConfigError, ConsistencyError
from tests.exchange import everyones, raises_everywhere
from tests.harness.worlds import pooled
from tests.parity import language_batches
from tests.small import gpt2


def _model(cp: int, tp: int = 1) -> torch.nn.Module:
    return autopar.initialize(gpt2(), {"tp": tp, "cp": cp}).train()


@contextlib.contextmanager
def _raises(error: type[Exception], *parts: str) -> Iterator[None]:
    """``pytest.raises`` on every rank, each of which may name another group."""
    with pytest.raises(error) as info:
        yield
    for part in parts:
        assert part in str(info.value), str(info.value)


def test_rank_order_is_tp_then_cp_then_dp_then_pp():
    sizes = MeshSizes(tp=2, pp=2, dp=2, cp=2)
    groups = rank_groups(sizes)
    assert groups["tp"][:2] == [[0, 1], [2, 3]]
    assert groups["cp"][:3] == [[0, 2], [1, 3], [4, 6]]
    assert groups["dp"][:2] == [[0, 4], [1, 5]]
    assert groups["pp"][:2] == [[0, 8], [1, 9]]
    assert groups["dp_cp"][0] == [0, 2, 4, 6]
    assert groups["tp_cp"][:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups["model"][0] == [0, 1, 2, 3, 8, 9, 10, 11]
    assert groups["tp_pp"][:2] == [[0, 1, 8, 9], [2, 3, 10, 11]]
    assert groups["embedding"][0] == [0, 8]
    for axis, every in groups.items():
        assert sorted(rank for ranks in every for rank in ranks) == list(range(16)), axis
    for p, d, c, t in torch.cartesian_prod(*[torch.arange(2)] * 4).tolist():
        rank = ((p * 2 + d) * 2 + c) * 2 + t
        (joint,) = [ranks for ranks in groups["dp_cp"] if rank in ranks]
        assert joint.index(rank) == d * 2 + c  # as in the mesh without cp
    saved = rank_groups(MeshSizes(sizes.tp, sizes.pp, sizes.dp * sizes.cp))  # to weights, cp is more dp
    assert saved["dp"] == groups["dp_cp"] and saved["tp"] == groups["tp"] and saved["pp"] == groups["pp"]


def test_without_context_parallelism_the_mesh_is_what_it_was():
    groups = rank_groups(MeshSizes(tp=2, pp=2, dp=3))
    assert groups["dp_cp"] == groups["dp"] and groups["tp_cp"] == groups["tp"] and groups["tp_pp"] == groups["model"]
    assert groups["cp"] == [[rank] for rank in range(12)]


@pooled(world_size=8)
def test_getters_and_mesh():
    mpu = MPU(tensor_parallel_size=2, context_parallel_size=2)
    rank = dist.get_rank()
    t, c, d = rank % 2, rank // 2 % 2, rank // 4
    assert repr(mpu) == f"MPU(rank {rank} of 8: tp {t}/2, pp 0/1, dp {d}/2, cp {c}/2)"
    assert mpu.sizes == (2, 1, 2, 2)
    assert (mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()) == (c, 2)
    assert mpu.get_context_parallel_global_ranks() == [rank - 2 * c, rank - 2 * c + 2]
    assert mpu.get_context_parallel_src_rank() == rank - 2 * c
    assert (mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()) == (d, 2)
    joint = {"with_context_parallel": True}
    assert (mpu.get_data_parallel_rank(**joint), mpu.get_data_parallel_world_size(**joint)) == (2 * d + c, 4)
    assert mpu.get_data_parallel_group_ranks() == [rank % 4, rank % 4 + 4]
    assert mpu.get_data_parallel_group_ranks(**joint) == [t, t + 2, t + 4, t + 6]
    assert (mpu.get_data_parallel_src_rank(), mpu.get_data_parallel_src_rank(**joint)) == (rank % 4, t)
    assert dist.get_process_group_ranks(mpu.get_data_parallel_group(**joint)) == [t, t + 2, t + 4, t + 6]
    assert dist.get_process_group_ranks(mpu.get_data_parallel_group()) == [rank % 4, rank % 4 + 4]
    assert dist.get_process_group_ranks(mpu.get_context_parallel_group()) == list(mpu.cp.ranks)
    assert dist.get_process_group_ranks(mpu.get_tensor_and_context_parallel_group()) == [*range(4 * d, 4 * d + 4)]
    assert mpu.get_tensor_and_context_parallel_rank() == rank % 4
    assert mpu.get_tensor_and_context_parallel_world_size() == 4
    assert mpu.get_tensor_and_context_parallel_src_rank() == 4 * d
    assert (mpu.get_model_parallel_world_size(), mpu.get_model_parallel_rank()) == (2, t)  # Megatron's: one copy
    assert mpu.get_model_parallel_src_rank() == rank - t and mpu.model.ranks == tuple(range(4 * d, 4 * d + 4))
    assert mpu.mesh.mesh_dim_names == ("pp", "dp", "cp", "tp") and mpu.mesh["cp"].size() == 2
    assert mpu.mesh["cp"].get_group() is mpu.get_context_parallel_group()
    assert mpu.dp_cp_mesh.get_group() is mpu.dp_cp.group and mpu.dp_cp_mesh.mesh.tolist() == [t, t + 2, t + 4, t + 6]


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_context_ranks_that_nobody_averages_are_found() -> None:
    model = _model(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in language_batches(131, count=4):  # the same on both ranks, as it has to be
        model(**batch).loss.backward()
        autopar.average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    model(**batch).loss.backward()  # each rank has its part
    text = "the gradients of the 2 ranks with the same weights (dp x cp) differ: they were not averaged"
    with raises_everywhere(ConsistencyError, text, "model.mpu.dp_cp.group"):
        optimizer.step()


@pooled(world_size=4)
def test_inputs_states_and_weights_are_compared_over_context() -> None:
    kind = "tensor- and context-parallel"
    model = _model(2, 2)
    axis, rank = model.mpu.tp_cp, model.mpu.cp.rank
    (batch,) = language_batches(131, count=1)
    model(**batch)
    other = {**batch, "input_ids": (batch["input_ids"] + rank) % 131}
    where = f"the ranks {list(axis.ranks)} of one {kind} group"
    with _raises(ConsistencyError, where, "got different inputs"):
        model(**other)
    with torch.no_grad():
        model.get_parameter("transformer.ln_f.bias").add_(rank)
    with _raises(ConsistencyError, where, "have drifted apart: replicated weights differ (1)"):
        for _ in range(20):  # a sample each time
            model(**batch)


@pooled(world_size=4)
def test_dropout_draws_alike_on_context_ranks() -> None:
    model = gpt2(resid_pdrop=0.3)
    torch.manual_seed(dist.get_rank())
    model = autopar.initialize(model, {"cp": 2}).train()
    (batch,) = language_batches(131, count=1)
    losses = [model(**batch).loss.item() for _ in range(2)]
    everyone = everyones(losses)
    assert everyone[0] == everyone[1] != everyone[2] == everyone[3]  # dp 0: ranks 0 and 1
    if model.mpu.cp.rank == 0:
        torch.rand(())
    with _raises(ConsistencyError, "of one context-parallel group have different random states"):
        model(**batch)


@pooled(world_size=4)
def test_wrappers_over_data_alone_are_refused() -> None:
    model = _model(2)
    mpu = model.mpu
    text = f"DistributedDataParallel over ranks {list(mpu.dp.ranks)} would leave out ranks that share their sequences"
    with _raises(ConfigError, text, "[0, 1, 2, 3]. Pass process_group=model.mpu.dp_cp.group"):
        DistributedDataParallel(model, process_group=mpu.get_data_parallel_group())
    sharded = copy.deepcopy(model)
    fully_shard(sharded, mesh=mpu.mesh["dp"])
    (batch,) = language_batches(131, count=1)
    with _raises(ConfigError, "fully_shard over ranks", "Pass mesh=model.mpu.dp_cp_mesh"):
        sharded(**batch).loss.backward()
        torch.optim.SGD(sharded.parameters(), lr=0.1).step()
