"""Megatron-LM's and DeepSpeed's norms count each logical parameter once, by the attributes of the parameters."""

from typing import Any

import torch
import torch.distributed as dist

import autopar
from tests.harness.worlds import pooled
from tests.small import gpt2, llama

NAMES = ("tensor_model_parallel", "partition_dim", "partition_stride", "shared", "ds_pipe_replicated")


def norm_by_marks(model: Any) -> torch.Tensor:
    """As Megatron reads them: on every rank what is sharded, the rest on the first one; what stages share once."""
    first = model.mpu.get_tensor_parallel_rank() == 0
    counted = [
        parameter.grad
        for parameter in model.parameters()
        if not getattr(parameter, "shared", False) and (getattr(parameter, "tensor_model_parallel", False) or first)
    ]
    total = sum(gradient.square().sum() for gradient in counted) + torch.zeros(())
    dist.all_reduce(total)  # one replica is the world
    return total.sqrt()


@pooled(world_size=2)
def test_a_norm_by_the_marks_is_the_plain_one() -> None:
    ids = torch.arange(12).view(2, 6)
    for build in (llama, lambda: llama(num_key_value_heads=1), gpt2):
        for sizes in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
            plain, model = build().train(), autopar.initialize(build().train(), {"model_parallelism": sizes})
            plain(ids, labels=ids).loss.backward()
            model.execute_pipeline({"input_ids": ids, "labels": ids})
            true = torch.nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters()])
            torch.testing.assert_close(norm_by_marks(model), true, rtol=1e-5, atol=0)


@pooled(world_size=2)
def test_what_the_marks_say_and_what_drops_them() -> None:
    model = autopar.initialize(gpt2(), {"model_parallelism": {"tensor_parallel_size": 2}})
    block = model.transformer.h[0]
    for _ in range(2):
        fused, row, norm = block.attn.c_attn.weight, block.attn.c_proj.weight, block.ln_1.weight
        assert [getattr(fused, name) for name in NAMES[:3]] == [True, 1, 3]
        assert [getattr(row, name) for name in NAMES[:3]] == [True, 0, 1]
        assert [getattr(norm, name) for name in NAMES[:3]] == [False, -1, 1]
        model.to(torch.float64)
    plain = autopar.deparallelize(model)
    assert not any(hasattr(parameter, name) for parameter in plain.parameters() for name in NAMES)
