"""Experts of several replicas in files: checkpoints of any mesh, Hugging Face's folder, torch's own checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from safetensors.torch import load_file
from transformers import MixtralForCausalLM

import autopar
from tests.features.experts.mixtures import batches, close, compare, mixtral, reference, train
from tests.pool import pooled


@pooled(world_size=4)
def test_checkpoints_of_any_mesh(tmp_path: Path) -> None:
    """Save ep 4 = tp 2 x dp 2, go on at ep 2 and at ep 1, each beside the run that goes on without a break."""
    first, own, plain = compare(mixtral, {"tp": 2, "ep": 4, "zero": {"stage": 1}})
    first.save_parallelized(tmp_path / "ep4", optimizer=own)
    first.save_parallelized(tmp_path / "merged", merge_checkpoints=True)
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path / "plain")
        merged, due = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "plain"))
        assert merged.keys() == due.keys() and all(close(merged[name], due[name]) for name in due)
    one = copy.deepcopy(plain)
    alone, resumed = autopar.initialize(one, {}, optimizer=torch.optim.AdamW(one.parameters(), lr=1e-2))
    alone.from_parallelized(tmp_path / "ep4", optimizer=resumed)
    for name, parameter in alone.named_parameters():
        for key, value in resumed.state[parameter].items():
            other.state.setdefault(dict(plain.named_parameters())[name], {})[key] = value.clone()
    config: dict[str, Any]
    for config in ({"ep": 2}, {"ep": 2, "pp": 2, "pipeline": {"num_microbatches": 2}}, {"tp": 4, "ep": 4}, {"tp": 2}):
        model = mixtral()
        model, steps = autopar.initialize(model, config, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))
        model.from_parallelized(tmp_path / "ep4", optimizer=steps)
        with autopar.whole(model):
            assert all(torch.equal(p, dict(alone.named_parameters())[n]) for n, p in model.named_parameters())
        going_on = copy.deepcopy(plain)
        its = torch.optim.AdamW(going_on.parameters(), lr=1e-2)
        its.load_state_dict(copy.deepcopy(other.state_dict()))
        data = batches(7, model.mpu.dp.size, even=True)
        reference(going_on, its, data)
        train(model, data[model.mpu.dp.rank])
        its.step()
        steps.step()
        with autopar.whole(model):
            assert all(close(p, dict(going_on.named_parameters())[n], 1e-5) for n, p in model.named_parameters())
        model.save_parallelized(tmp_path / "again", optimizer=steps)
        autopar.deparallelize(model)


@pooled(world_size=4)
def test_a_model_that_no_process_holds_whole(tmp_path: Path) -> None:
    """Shards are read from the folder of Hugging Face, and what is not there is drawn."""
    plain = mixtral()
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path / "plain")
    dist.barrier()
    model = autopar.from_pretrained(MixtralForCausalLM, tmp_path / "plain", {"tp": 2, "ep": 4})
    assert model.model.layers[0].mlp.experts.down_proj.shape[0] < 6
    with autopar.whole(model):
        assert all(torch.equal(p, dict(plain.named_parameters())[n]) for n, p in model.named_parameters())
    names = {name: tensor.shape for name, tensor in autopar.hf_weights(model)}
    assert len(names) == len(plain.state_dict()) + 2 * (3 * 6 - 2)  # each expert of two layers by itself
    model.mpu.destroy()
    torch.manual_seed(0)
    with autopar.lazy_init():
        deferred = MixtralForCausalLM(plain.config)
    drawn = autopar.initialize(deferred, {"ep": 4})
    torch.manual_seed(0)
    with autopar.lazy_init():
        deferred = MixtralForCausalLM(plain.config)
    due = dict(autopar.initialize(deferred, {}).named_parameters())
    with autopar.whole(drawn):
        assert all(torch.equal(p, due[n]) for n, p in drawn.named_parameters())


@pooled(world_size=4)
def test_torchs_distributed_checkpoint(tmp_path: Path) -> None:
    def made(config: dict[str, Any], seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = mixtral()
        with torch.no_grad():
            model.lm_head.weight.add_(seed)
        return autopar.initialize(model, config, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))

    model, optimizer = made({"tp": 2, "ep": 4}, 0)
    train(model, batches(0, 2)[model.mpu.dp.rank])
    optimizer.step()
    state = autopar.checkpoint.to_dtensor_training_state(model, optimizer)
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "dcp")
    for config in ({"ep": 2}, {"tp": 4}, {}):
        other, its = made(config, 5)
        state = autopar.checkpoint.to_dtensor_training_state(other, its)
        torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path / "dcp")
        with autopar.whole(model), autopar.whole(other):
            assert all(map(torch.equal, model.parameters(), other.parameters())), config
        other.mpu.destroy()
    model.mpu.destroy()
