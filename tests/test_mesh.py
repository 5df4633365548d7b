from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.compat.c10d import number_of_next_group
from autopar.distributed.axis import MeshSizes
from autopar.distributed.mesh import MPU, rank_groups
from autopar.distributed.process import Accelerator
from autopar.errors import ConfigError
from tests.harness.worlds import pooled
from tests.small import gpt2


def test_the_groups_of_every_axis_partition_a_world_of_ten_thousand():
    groups = rank_groups(MeshSizes(tp=4, pp=10, dp=125, cp=2))
    for axis in ("tp", "cp", "dp", "pp", "dp_cp", "tp_cp", "tp_pp", "model"):
        ranks = [rank for group in groups[axis] for rank in group]
        assert sorted(ranks) == list(range(10_000)), axis


def test_experts_lie_on_tp_and_the_innermost_replicas():
    groups = rank_groups(MeshSizes(tp=2, pp=2, dp=4, cp=2), experts=4)
    assert groups["ep"][:3] == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13]]
    assert groups["edp"][:3] == [[0, 8], [1, 9], [2, 10]]
    assert groups["edp_cp"][0] == [0, 2, 8, 10]  # ranks with the same experts: over rows of sequences, too
    assert groups["ep_pp"][0] == [0, 1, 4, 5, 16, 17, 20, 21]
    for axis in ("ep", "edp", "edp_cp", "ep_pp", "dp", "dp_cp", "model"):
        assert sorted(rank for group in groups[axis] for rank in group) == list(range(32)), axis
    assert rank_groups(MeshSizes(tp=2, dp=4), experts=2)["ep"] == rank_groups(MeshSizes(tp=2, dp=4))["tp"]
    assert rank_groups(MeshSizes(tp=2, dp=2))["ep"] == [[0], [1], [2], [3]]


@pooled(world_size=8)
def test_ranks_of_experts_under_megatrons_names_and_places_of_shards():
    mpu = MPU(tensor_parallel_size=2, expert_parallel_size=4, context_parallel_size=2)
    assert mpu.get_expert_model_parallel_world_size() == 4 and mpu.get_expert_data_parallel_world_size() == 1
    assert mpu.get_expert_parallel_rank() == mpu.ep.rank == mpu.shards.rank
    assert mpu.places()[mpu.rank] == (mpu.shards.rank, mpu.pp.rank, mpu.copies.rank)
    assert mpu.saved_sizes == MeshSizes(4, 1, 2) and mpu.shards_mesh.size() == 4
    mpu.destroy()
    mpu = MPU(tensor_parallel_size=2)
    assert mpu.shards is mpu.tp and mpu.copies is mpu.dp_cp and mpu.ep.size == 1 and mpu.edp is mpu.dp
    assert mpu.places()[mpu.rank] == (mpu.tp.rank, 0, mpu.dp.rank)


@pooled(world_size=8)
def test_getters_answer_the_same_under_every_spelling():
    mpu = MPU(tensor_parallel_size=4, pipeline_parallel_size=2)
    rank = dist.get_rank()
    assert mpu.get_tensor_parallel_rank() == mpu.get_tensor_model_parallel_rank() == rank % 4
    assert mpu.get_tensor_parallel_world_size() == mpu.get_tensor_model_parallel_world_size() == 4
    assert mpu.get_tensor_parallel_group() is mpu.get_tensor_model_parallel_group()
    assert mpu.get_tensor_parallel_src_rank() == mpu.get_tensor_model_parallel_src_rank() == rank // 4 * 4
    assert mpu.get_pipeline_parallel_rank() == mpu.get_pipeline_model_parallel_rank() == rank // 4
    assert mpu.get_pipe_parallel_rank() == mpu.get_pipeline_parallel_rank()
    assert mpu.get_pipeline_parallel_world_size() == mpu.get_pipeline_model_parallel_world_size() == 2
    assert mpu.get_pipeline_parallel_next_rank() == mpu.get_pipeline_model_parallel_next_rank() == (rank + 4) % 8
    assert mpu.get_pipeline_parallel_prev_rank() == mpu.get_pipeline_model_parallel_prev_rank() == (rank - 4) % 8
    assert mpu.is_pipeline_first_stage() == (rank < 4)
    assert mpu.is_pipeline_last_stage() == (rank >= 4)
    assert mpu.get_data_parallel_world_size() == 1
    assert mpu.get_data_parallel_rank() == 0
    assert mpu.get_model_parallel_world_size() == 8
    assert mpu.get_model_parallel_rank() == rank
    assert mpu.is_master == (rank == 0)
    assert mpu.get_embedding_group() is not None
    assert mpu.get_data_parallel_group_ranks() == [rank]
    assert mpu.get_model_parallel_src_rank() == 0
    stages = [rank % 4, rank % 4 + 4]
    assert mpu.get_pipeline_model_parallel_global_ranks_per_group() == stages
    assert mpu.get_pipeline_parallel_global_ranks_per_group() == mpu.get_embedding_global_ranks() == stages
    assert mpu.get_pipeline_parallel_global_ranks_across_all_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert mpu.get_embedding_tied_group() is mpu.get_embedding_group() and mpu.is_rank_in_embedding_group()
    assert (
        mpu.get_virtual_pipeline_model_parallel_rank() is mpu.get_virtual_pipeline_model_parallel_world_size() is None
    )
    assert (mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()) == (0, 1)
    assert mpu.model_parallel_is_initialized() and mpu.is_initialized()
    assert not hasattr(mpu, "initialize_sequence_parallel")  # by which DeepSpeed tells another kind of mpu
    with pytest.raises(AttributeError, match=r"no 'get_tensor_rank'\. Did you mean 'get_tensor_parallel_rank'\?"):
        mpu.get_tensor_rank()
    with pytest.raises(AttributeError, match=r"^an MPU has no 'qwertz'\.$"):
        mpu.qwertz()
    assert mpu.mesh["tp"].size() == 4
    assert mpu.mesh["tp"].get_group() is mpu.get_tensor_parallel_group()
    assert mpu.mesh.mesh_dim_names == ("pp", "dp", "cp", "tp")
    mpu.initialize_distributed()  # it runs already
    mpu.destroy_model_parallel()
    assert not mpu.model_parallel_is_initialized()


def test_names_that_are_elsewhere_or_nearly_right():
    with pytest.raises(AttributeError, match=r"'get_model_parallel_rank'\. It is a method of the MPU here: model\."):
        autopar.tensor_parallel.get_model_parallel_rank()
    with pytest.raises(AttributeError, match=r"'ColumnParalelLinear'\. Did you mean 'ColumnParallelLinear'\?"):
        _ = autopar.tensor_parallel.ColumnParalelLinear
    with pytest.raises(AttributeError, match=r"'clip_grad_norm'\. Did you mean 'clip_grad_norm_'\?"):
        _ = autopar.clip_grad_norm


def test_more_processes_than_gpus_is_an_error_with_both_numbers(monkeypatch):
    monkeypatch.setattr("autopar.distributed.process.accelerator", lambda: Accelerator("cuda", "nccl"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="4 processes were started on a machine with 2 GPUs"):
        MPU(tensor_parallel_size=2)


@pooled(world_size=4)
def test_ranks_that_have_made_other_numbers_of_groups_meet(tmp_path: Path) -> None:
    """torch would name the next group otherwise on each of them, and every rank would wait for the others."""
    ids = torch.arange(10).view(2, 5)

    def apart() -> None:
        for _ in range(dist.get_rank()):
            dist.new_group([dist.get_rank()], use_local_synchronization=True)  # counts since torch 2.14
            number_of_next_group(number_of_next_group() + 1)

    apart()
    model = autopar.initialize(gpt2(), {"model_parallelism": {"tensor_parallel_size": 2}})
    assert torch.allclose(model(ids).logits, gpt2()(ids).logits, atol=1e-5)
    apart()
    model.save_parallelized(str(tmp_path), async_save=True)
    autopar.deparallelize(model)
