"""Real ranks save, load and merge the hand-made model of tiny.py."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from autopar.checkpoint import Manifest, merge_checkpoint
from autopar.distributed.mesh import MPU
from autopar.errors import CheckpointError
from tests.checkpoint.tiny import (
    TinyConfig,
    TinyModel,
    local,
    same,
    saved_state,
    tiny,
)
from tests.pool import pooled
from tests.worlds import distributed


def plain(seed: int) -> dict[str, torch.Tensor]:
    return saved_state(TinyModel(TinyConfig(), seed))


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_save_load_merge_on_two_replicas(tmp_path):
    mpu = MPU(tensor_parallel_size=2)
    model, other = tiny(mpu, seed=0), tiny(mpu, seed=1)
    before = local(model)
    config = dict(vars(model.config))
    model.save_parallelized(tmp_path / "runs" / "ckpt")
    dist.barrier()
    assert dict(vars(model.config)) == config, "saving must not touch the user's config"
    assert sorted(os.listdir(tmp_path / "runs")) == ["ckpt"]
    assert sorted(os.listdir(tmp_path / "runs" / "ckpt")) == [
        "autopar.json",
        "config.json",
        "model-tp0-pp0.safetensors",
        "model-tp1-pp0.safetensors",
    ]
    objects = {name: id(tensor) for name, tensor in other.named_parameters()}
    pointers = {name: tensor.data_ptr() for name, tensor in other.state_dict().items()}
    assert not same(local(other), before)
    assert other.from_parallelized(tmp_path / "runs" / "ckpt") is other
    assert same(local(other), before)
    assert objects == {name: id(tensor) for name, tensor in other.named_parameters()}
    assert pointers == {name: tensor.data_ptr() for name, tensor in other.state_dict().items()}
    if mpu.rank == 0:
        merge_checkpoint(tmp_path / "runs" / "ckpt", tmp_path / "offline")
    model.save_parallelized(tmp_path / "online", merge_checkpoints=True)
    one, two = (tmp_path / name / "model.safetensors" for name in ("offline", "online"))
    assert one.read_bytes() == two.read_bytes()
    assert load_file(two).keys() == plain(0).keys()
    assert all(torch.equal(tensor, plain(0)[name]) for name, tensor in load_file(two).items())
    assert sorted(os.listdir(tmp_path / "online")) == ["config.json", "model.safetensors"]
    manifest = Manifest.read(tmp_path / "runs" / "ckpt")
    assert tuple(manifest.sizes) == (2, 1, 2, 1)
    assert set(manifest.versions) == {"autopar", "torch", "transformers", "python"}


@distributed(world_size=1)
def test_without_torchrun(tmp_path):
    dist.destroy_process_group()
    model = tiny(MPU())  # starts its own group, with a store of another kind
    assert isinstance(dist.distributed_c10d._get_default_store(), dist.PrefixStore)
    for _ in range(3):
        model.save_parallelized(tmp_path / "ckpt")
    assert same(local(tiny(MPU(), 1).from_parallelized(tmp_path / "ckpt")), local(model))
    dist.destroy_process_group()
    with pytest.raises(CheckpointError, match="process group, which has been destroyed"):
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
