"""Whole weights of a parallelized model, streamed under the names of save_pretrained."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.errors import CheckpointError, ConsistencyError
from tests.pool import pooled
from tests.random_models import Case, build
from tests.small import gpt2, llama


def grouped() -> Any:
    return llama(hidden_size=32, num_attention_heads=8, num_key_value_heads=1, tie_word_embeddings=True)


def written(plain: Any) -> dict[str, torch.Tensor]:
    """What ``save_pretrained`` writes, on rank 0."""
    found = [None]
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            plain.save_pretrained(folder)
            found = [load_file(f"{folder}/model.safetensors")]
    dist.broadcast_object_list(found)
    return found[0]


def same(model: Any, plain: Any, **options: Any) -> None:
    found, expected = dict(autopar.hf_weights(model, **options)), written(plain)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert not own & {tensor.data_ptr() for tensor in found.values()}, "they are copies"


def mixture() -> Any:
    return build(Case("mixtral", "MixtralForCausalLM"), 6, 3)


@pooled(world_size=4)
def test_names_and_values_are_those_of_save_pretrained() -> None:
    for make in (gpt2, grouped, mixture):
        for sizes in ({"tensor_parallel_size": 4}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}):
            if make is mixture and len(sizes) == 2:
                continue
            plain = make()
            model = autopar.initialize(copy.deepcopy(plain), {"model_parallelism": sizes})
            same(model, plain)
            same(model, plain, bucket_size=1)  # each tensor by itself
            model.mpu.destroy()
    plain = gpt2()
    config = {"model_parallelism": {"tensor_parallel_size": 2}, "zero": {"stage": 3}}
    model = copy.deepcopy(plain)
    model, _ = autopar.initialize(model, config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    same(model, plain)


@pooled(world_size=2)
def test_a_rank_that_leaves_early_hangs_nobody() -> None:
    model = autopar.initialize(gpt2(), {"model_parallelism": {"tensor_parallel_size": 2}})
    total = len(dict(autopar.hf_weights(model)))
    for number, _ in enumerate(autopar.hf_weights(model, bucket_size=1)):  # all leave at the same one
        if number == 2:
            break
    message = f"rank 1 left the loop early, and its shards with it: this rank has 3 of {total} tensors"
    for how in (StopIteration, ZeroDivisionError):
        seen = 0
        try:
            for _ in autopar.hf_weights(model, bucket_size=1):
                seen += 1
                if dist.get_rank() == 1 and seen == 3:
                    raise how
        except how:
            assert dist.get_rank() == 1
        except ConsistencyError as error:
            assert dist.get_rank() == 0 and message in str(error), error
        assert seen == 3
    for number, _ in enumerate(autopar.hf_weights(DistributedDataParallel(model, process_group=model.mpu.dp.group))):
        if dist.get_rank() == 1 and number == total - 1:
            break  # in the last bucket: the others have all of them
    dist.barrier()
    with pytest.raises(CheckpointError, match="is not parallelized"):
        autopar.hf_weights(gpt2())
