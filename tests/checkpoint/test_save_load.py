"""The hand-made model of tiny.py, saved and loaded, also in unusual ways."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, SequentialLR

from autopar.checkpoint import merge_checkpoint
from autopar.distributed.mesh import MPU
from autopar.errors import CheckpointError
from tests.checkpoint.tiny import (
    local,
    same,
    tiny,
)
from tests.exchange import raises_everywhere
from tests.harness.worlds import distributed, pooled
from tests.small import gpt2, parallel


@distributed(world_size=1)
def test_without_torchrun(tmp_path):
    dist.destroy_process_group()
    model = tiny(MPU())  # starts its own group, with a store of another kind
    assert isinstance(dist.distributed_c10d._get_default_store(), dist.PrefixStore)
    for _ in range(3):
        model.save_parallelized(tmp_path / "ckpt")
    assert same(local(tiny(MPU(), 1).from_parallelized(tmp_path / "ckpt")), local(model))
    dist.destroy_process_group()
    with pytest.raises(CheckpointError, match="process group, but it was destroyed"):
        model.save_parallelized(tmp_path / "ckpt")


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_half_precision_is_saved_as_it_is_and_loading_converts_with_a_warning(tmp_path):
    mpu = MPU(tensor_parallel_size=2)
    model = tiny(mpu).to(torch.bfloat16)
    model.save_parallelized(tmp_path / "ckpt")
    assert json.loads((tmp_path / "ckpt" / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.warns(UserWarning, match="7 tensors were converted on loading, gate from bfloat16 to float16"):
        other = tiny(mpu, 1).from_parallelized(tmp_path / "ckpt")
    assert torch.equal(other.embed.weight, model.embed.weight.float())
    model.save_parallelized(tmp_path / "merged", merge_checkpoints=True)
    assert load_file(tmp_path / "merged" / "model.safetensors")["qkv.weight"].dtype == torch.bfloat16


class Words:
    """Stand in for a tokenizer."""

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        (Path(folder) / "tokenizer.json").write_text("words")


@pooled(world_size=2)
def test_the_tokenizers_files_come_along(tmp_path):
    model = tiny(MPU(tensor_parallel_size=2))
    shards, whole = tmp_path / "ckpt", tmp_path / "whole"
    model.save_parallelized(shards, tokenizer=Words())
    model.save_parallelized(shards)  # they are the user's, and stay
    model.save_parallelized(whole, merge_checkpoints=True, tokenizer=Words())
    model.from_parallelized(shards)
    for step in (1, 2):
        model.save_parallelized(tmp_path / f"step-{step}", tokenizer=Words(), keep_last=1)
    dist.barrier()
    assert not (tmp_path / "step-1").exists(), "they are part of a checkpoint, and go with it"
    if dist.get_rank() == 0:
        merge_checkpoint(shards, tmp_path / "merged")
        for folder in (shards, whole, tmp_path / "merged"):
            assert (folder / "tokenizer.json").read_text() == "words"


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pooled(world_size=1)
def test_an_optimizer_around_another_one_is_refused(tmp_path):
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner
            super().__init__(inner.param_groups[0]["params"], {})

    model = tiny(MPU())
    inner = torch.optim.AdamW(model.parameters())
    one_step(model, inner)
    for call in (model.save_parallelized, model.from_parallelized):
        model.save_parallelized(tmp_path / "ckpt", optimizer=inner)
        with pytest.raises(CheckpointError, match=r"Wrapper wraps a AdamW \(attribute 'inner'\)"):
            call(tmp_path / "ckpt", optimizer=Wrapper(inner))


@pooled(world_size=1)
def test_views_that_are_read_another_way_keep_their_values(tmp_path):
    model = tiny(MPU())
    value = torch.tensor([1 + 2j]).conj()
    model.save_parallelized(tmp_path / "ckpt", extra={"conj": value, "neg": value.imag})
    found: dict[str, torch.Tensor] = {}
    model.from_parallelized(tmp_path / "ckpt", extra=found)
    assert found["conj"].tolist() == [1 - 2j] and found["neg"].tolist() == [-2]


@pooled(world_size=1)
def test_another_scheduler_changes_nothing(tmp_path):
    model = tiny(MPU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.save_parallelized(tmp_path / "ckpt", lr_scheduler=LambdaLR(optimizer, lambda step: 1.0))
    with torch.no_grad():
        model.embed.weight.add_(1)
    before = local(model)
    other = CosineAnnealingLR(optimizer, 5)
    for scheduler in (other, SequentialLR(optimizer, [other, other], [3])):
        with pytest.raises(CheckpointError, match="lr_scheduler must be a LambdaLR"):
            model.from_parallelized(tmp_path / "ckpt", lr_scheduler=scheduler)
        assert same(local(model), before)


@pooled(world_size=2)
def test_replicas_whose_optimizers_differ_are_refused_when_saving(tmp_path):
    """What could not be loaded is not saved: the only optimizer that has stepped is not the one that writes."""
    mpu = MPU()
    model = tiny(mpu)
    optimizer = torch.optim.AdamW(model.parameters())
    if mpu.rank == 1:
        one_step(model, optimizer)
    with raises_everywhere(CheckpointError):
        model.save_parallelized(tmp_path / "ckpt", optimizer=optimizer)
    assert not (tmp_path / "ckpt").exists()


@pooled(world_size=1)
def test_a_generation_config_that_transformers_refuses_does_not_stop_a_save(tmp_path):
    model = parallel(gpt2(), 1)
    model.generation_config.do_sample = False
    model.generation_config.temperature = 0.3
    with pytest.warns(UserWarning, match="generation_config.json is not saved"):
        model.save_parallelized(tmp_path / "ckpt")
    assert not (tmp_path / "ckpt" / "generation_config.json").exists()
    assert json.loads((tmp_path / "ckpt" / "config.json").read_text())["model_type"] == "gpt2"


@pooled(world_size=1)
def test_inside_inference_mode(tmp_path):
    model = tiny(MPU())
    model.save_parallelized(tmp_path / "ckpt")
    with torch.inference_mode(), pytest.raises(CheckpointError, match=r"in torch.inference_mode"):
        model.from_parallelized(tmp_path / "ckpt")
