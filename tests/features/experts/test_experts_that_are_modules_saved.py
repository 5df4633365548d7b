"""Experts that are modules in a list, in files: checkpoints of any mesh, Hugging Face's folder, torch's checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from safetensors.torch import load_file
from transformers import SwitchTransformersForConditionalGeneration

import autopar
from tests.features.experts.mixtures import batches, close, compare, reference, train
from tests.features.experts.module_mixtures import LISTED, listed, switch
from tests.pool import pooled
from tests.tiers import mainly

_MODELS: dict[str, Any] = {"switch": (switch, None), "listed": (lambda: listed(reachable=4), LISTED)}


@pytest.mark.tier("all")
@pytest.mark.parametrize("name", mainly(*_MODELS, later="sweep"))
@pooled(world_size=4)
def test_checkpoints_of_any_mesh(name: str, tmp_path: Path) -> None:
    """Save ep 4 = tp 2 x dp 2, go on at other sizes, each beside the run that goes on without a break."""
    make, policy = _MODELS[name]
    first, own, plain = compare(make, {"tp": 2, "ep": 4, "zero": {"stage": 1}}, policy=policy, tolerance=1e-6)
    first.save_parallelized(tmp_path / "ep4", optimizer=own)
    first.save_parallelized(tmp_path / "merged", merge_checkpoints=True)
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path / "plain")
        merged, due = (load_file(tmp_path / folder / "model.safetensors") for folder in ("merged", "plain"))
        assert merged.keys() == due.keys() and all(close(merged[key], due[key], 1e-6) for key in due)
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
            assert all(close(p, dict(going_on.named_parameters())[n], 1e-6) for n, p in model.named_parameters())
        model.save_parallelized(tmp_path / "again", optimizer=steps)
        autopar.deparallelize(model)


@pytest.mark.tier("all")
@pooled(world_size=4)
def test_a_model_that_no_process_holds_whole(tmp_path: Path) -> None:
    """Shards are read from the folder of Hugging Face, and what is not there is drawn."""
    plain = switch()
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path / "plain")
    dist.barrier()
    kind = SwitchTransformersForConditionalGeneration
    model = autopar.from_pretrained(kind, tmp_path / "plain", {"tp": 2, "ep": 4})
    held = [p.shape[0] for name, p in model.named_parameters() if ".experts." in name]
    assert 0 in held and any(held)
    with autopar.whole(model):
        assert all(torch.equal(p, dict(plain.named_parameters())[n]) for n, p in model.named_parameters())
    found = {name: tensor.shape for name, tensor in autopar.hf_weights(model)}
    assert all(found[name] == p.shape for name, p in plain.named_parameters())
    model.mpu.destroy()
    torch.manual_seed(0)
    with autopar.lazy_init():
        deferred = kind(plain.config)
    drawn = autopar.initialize(deferred, {"ep": 4})
    torch.manual_seed(0)
    with autopar.lazy_init():
        deferred = kind(plain.config)
    due = dict(autopar.initialize(deferred, {}).named_parameters())
    with autopar.whole(drawn):
        assert all(torch.equal(p, due[n]) for n, p in drawn.named_parameters())
