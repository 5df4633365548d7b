from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.errors import ConsistencyError
from tests.small import gpt2, parallel
from tests.worlds import distributed, raises_everywhere


@distributed(world_size=2)
def test_different_batches_on_tp_ranks_are_an_error_that_names_the_argument():
    model = parallel(gpt2(), 2).train()
    rank = dist.get_rank()
    with raises_everywhere(
        ConsistencyError,
        "the ranks [0, 1] of one tensor-parallel group got different inputs (1 argument):",
        "labels: rank 0: [1, 4] ",
        "autopar.prepare_dataloader",
    ):
        model(torch.arange(4)[None], labels=torch.arange(4)[None] + rank)
    model = parallel(gpt2(), 2).train()
    with raises_everywhere(ConsistencyError, "input_ids", "attention_mask"):
        model(torch.arange(4 + rank)[None], **({"attention_mask": torch.ones(1, 5)} if rank else {}))


@distributed(world_size=2)
def test_the_check_is_made_once_per_mode_and_can_be_turned_off():
    rank = dist.get_rank()
    model = parallel(gpt2(), 2).train()
    model(torch.arange(4)[None])
    model(torch.arange(4)[None] + rank)  # no longer checked
    with pytest.raises(ConsistencyError):
        model.eval()(torch.arange(4)[None] + rank)
    off = parallel(gpt2(), 2, consistency_check={"enable": False}).train()
    off(torch.arange(4)[None] + rank)


@distributed(world_size=2)
def test_random_states_that_differ_are_an_error_when_dropout_is_on():
    rank = dist.get_rank()
    model = parallel(gpt2(attn_pdrop=0.1), 2).train()
    torch.manual_seed(rank)
    with raises_everywhere(ConsistencyError, "random state", "seed all ranks of a group alike"):
        model(torch.arange(4)[None])
    model = parallel(gpt2(), 2).train()
    torch.manual_seed(rank)
    model(torch.arange(4)[None])  # nothing is drawn, nothing to compare


@distributed(world_size=4)
def test_data_parallel_replicas_may_and_do_differ():
    model = autopar.initialize(gpt2(), {"model_parallelism": {"tensor_parallel_size": 2}})
    model.train()(torch.arange(4)[None] + model.mpu.get_data_parallel_rank())
