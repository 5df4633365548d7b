"""Real ranks save, load and merge the hand-made model of tiny.py."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from autopar.checkpoint import Manifest, attach, detach, merge_checkpoint
from autopar.distributed.mesh import MPU
from autopar.errors import CheckpointError
from tests.checkpoint.tiny import (
    TinyConfig,
    TinyModel,
    local,
    make_plan,
    same,
    save_alone,
    saved_state,
    shard,
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


@pooled(world_size=3)
def test_any_number_of_replicas_loads_and_saving_replaces(tmp_path):
    if dist.get_rank() == 0:
        save_alone(tmp_path / "ckpt", 1, seed=7)
        save_alone(tmp_path / "three", 3, seed=7)
    dist.barrier()
    alone = tiny(MPU())
    alone.from_parallelized(tmp_path / "ckpt")
    assert same(saved_state(alone), plain(7))
    model = tiny(MPU(tensor_parallel_size=3))
    model.from_parallelized(str(tmp_path / "three"))
    with torch.no_grad():
        model.norm.weight.fill_(3)
    first = Manifest.read(tmp_path / "three").save_id
    dist.barrier()
    model.save_parallelized(tmp_path / "three")
    assert Manifest.read(tmp_path / "three").save_id != first
    dist.barrier()
    fresh = tiny(MPU(tensor_parallel_size=3))
    fresh.from_parallelized(tmp_path / "three")
    assert same(local(fresh), local(model))


@pooled(world_size=2)
def test_a_model_inside_a_users_module_and_inside_ddp(tmp_path):
    mpu = MPU(tensor_parallel_size=2)

    class Users(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.inner = TinyModel(TinyConfig(), seed)
            self.extra = nn.Linear(2, 2)

    def build(seed: int) -> Users:
        from autopar.plan.plan import Plan, TensorPlan

        model = Users(seed)
        extra = {
            name: TensorPlan(name, tuple(p.shape), "float32")
            for name in ("extra.weight", "extra.bias")
            for p in [model.get_parameter(name)]
        }
        plan = Plan(2, "tiny", "tiny.yaml", {**make_plan(2, "inner.").tensors, **extra}, {})
        shard(model, plan, mpu.tp.rank)
        attach(model, plan, mpu, model.inner, "inner")
        return model

    model, other = build(0), build(1)
    dist.broadcast(model.extra.weight.data, 0)
    dist.broadcast(model.extra.bias.data, 0)
    dp = dist.new_group([mpu.rank], use_local_synchronization=True)
    engine = nn.parallel.DistributedDataParallel(model, process_group=dp)
    engine.module.save_parallelized(tmp_path / "ckpt")
    other.from_parallelized(tmp_path / "ckpt")
    assert same(local(other), local(model))
    assert "extra.weight" in Manifest.read(tmp_path / "ckpt").tensors
    model.save_parallelized(tmp_path / "merged", merge_checkpoints=True)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert set(merged) == set(plain(0)), "the user's own weights are no part of the Hugging Face checkpoint"
    assert Manifest.read(tmp_path / "ckpt").total_parameters() == TinyModel(TinyConfig()).num_parameters()


@pooled(world_size=1)
def test_a_deep_copy_saves_itself(tmp_path):
    model = tiny(MPU())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.gate.zero_()
    twin.save_parallelized(tmp_path / "twin")
    model.save_parallelized(tmp_path / "model")
    files = [load_file(tmp_path / name / "model-tp0-pp0.safetensors")["gate"] for name in ("twin", "model")]
    assert not files[0].any() and torch.equal(files[1], model.gate)
    assert twin.from_parallelized(tmp_path / "model") is twin
    assert torch.equal(twin.gate, model.gate) and twin.gate is not model.gate
    detach(model)
    assert not hasattr(model, "save_parallelized") and not hasattr(model, "_autopar_checkpoint")
    twin.save_parallelized(tmp_path / "twin")


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
