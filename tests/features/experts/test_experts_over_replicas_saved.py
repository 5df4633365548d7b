"""Experts of several replicas in files: checkpoints of any mesh, Hugging Face's folder, torch's own checkpoints."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from safetensors.torch import load_file

import autopar
from tests.features.experts.mixtures import batches, close, compare, mixtral, reference, train
from tests.features.experts.module_mixtures import LISTED, listed, switch
from tests.harness.tiers import in_tier
from tests.harness.worlds import pooled

_MODELS: dict[str, tuple[Any, Any, float]] = {
    "mixtral": (mixtral, None, 1e-5),
    "switch": (switch, None, 1e-6),
    "listed": (lambda: listed(reachable=4), LISTED, 1e-6),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["mixtral", "switch", *in_tier("sweep", ["listed"])])
@pooled(world_size=4)
def test_checkpoints_of_any_mesh(name: str, tmp_path: Path) -> None:
    """Save ep 4 = tp 2 x dp 2, go on at other sizes, each beside the run that goes on without a break."""
    make, policy, tolerance = _MODELS[name]
    first, own, plain = compare(make, {"tp": 2, "ep": 4, "zero": {"stage": 1}}, policy=policy, tolerance=tolerance)
    first.save_parallelized(tmp_path / "ep4", optimizer=own)
    first.save_parallelized(tmp_path / "merged", merge_checkpoints=True)
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path / "plain")
        merged, due = (load_file(tmp_path / folder / "model.safetensors") for folder in ("merged", "plain"))
        assert merged.keys() == due.keys() and all(close(merged[key], due[key], tolerance) for key in due)
    one = copy.deepcopy(plain)
    steps = torch.optim.AdamW(one.parameters(), lr=1e-2)
    alone, resumed = autopar.initialize(one, {}, policy=policy, optimizer=steps)
    alone.from_parallelized(tmp_path / "ep4", optimizer=resumed)
    for key, parameter in alone.named_parameters():
        for field, value in resumed.state[parameter].items():
            other.state.setdefault(dict(plain.named_parameters())[key], {})[field] = value.clone()
    config: dict[str, Any]
    for config in ({"ep": 2}, {"ep": 2, "pp": 2, "pipeline": {"num_microbatches": 2}}, {"tp": 4, "ep": 4}, {"tp": 2}):
        model = make()
        steps = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, steps = autopar.initialize(model, config, policy=policy, optimizer=steps)
        model.from_parallelized(tmp_path / "ep4", optimizer=steps)
        with autopar.full_params(model):
            assert all(torch.equal(p, dict(alone.named_parameters())[n]) for n, p in model.named_parameters())
        going_on = copy.deepcopy(plain)
        its = torch.optim.AdamW(going_on.parameters(), lr=1e-2)
        its.load_state_dict(copy.deepcopy(other.state_dict()))
        data = batches(7, model.mpu.dp.size, even=True)
        reference(going_on, its, data)
        train(model, data[model.mpu.dp.rank])
        its.step()
        steps.step()
        with autopar.full_params(model):
            assert all(close(p, dict(going_on.named_parameters())[n], tolerance) for n, p in model.named_parameters())
        model.save_parallelized(tmp_path / "again", optimizer=steps)
        autopar.deparallelize(model)


@pytest.mark.every_case
@pytest.mark.parametrize("make", [mixtral, switch])
@pooled(world_size=4)
def test_a_model_that_no_process_holds_whole(make: Any, tmp_path: Path) -> None:
    """Shards are read from the folder of Hugging Face, and what is not there is drawn."""
    plain = make()
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path / "plain")
    dist.barrier()
    model = autopar.from_pretrained(type(plain), tmp_path / "plain", {"tp": 2, "ep": 4})
    held = [p.shape[0] for name, p in model.named_parameters() if ".experts." in name]
    assert max(held) < 6 if make is mixtral else 0 in held and any(held)
    with autopar.full_params(model):
        assert all(torch.equal(p, dict(plain.named_parameters())[n]) for n, p in model.named_parameters())
    found = {name: tensor.shape for name, tensor in autopar.hf_weights(model)}
    if make is mixtral:  # each expert of two layers by itself
        assert len(found) == len(plain.state_dict()) + 2 * (3 * 6 - 2)
    else:
        assert all(found[name] == p.shape for name, p in plain.named_parameters())
    model.mpu.destroy()
    drawn = []
    for config in ({"ep": 4}, {}):
        torch.manual_seed(0)
        with autopar.lazy_init():
            deferred = type(plain)(plain.config)
        drawn.append(autopar.initialize(deferred, config))
    due = dict(drawn[1].named_parameters())
    with autopar.full_params(drawn[0]):
        assert all(torch.equal(p, due[n]) for n, p in drawn[0].named_parameters())


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
        with autopar.full_params(model), autopar.full_params(other):
            assert all(map(torch.equal, model.parameters(), other.parameters())), config
        other.mpu.destroy()
    model.mpu.destroy()
