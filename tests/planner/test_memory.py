"""Planned memory against what ranks hold."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed._tools.mem_tracker import MemTracker

import autopar
from autopar.errors import ConfigError
from autopar.features.activation_checkpointing import setup as activation_checkpoint
from tests.harness.worlds import pooled
from tests.own_modules import GPT_POLICY, gpt
from tests.planner.saved_bytes import states_are_as_planned
from tests.small import gpt2, llama

BATCH, SEQUENCE = 4, 16


ONE_BY_ONE = {"pipeline": {"microbatch_size": 1}}
MESHES = yaml.safe_load(Path(__file__).with_name("meshes.yaml").read_text())


@pytest.mark.parametrize("mesh", MESHES["two ranks"])
@pytest.mark.parametrize("build", [gpt2, llama], ids=["gpt2", "llama"])
@pooled(world_size=2)
def test_states_are_those_that_ranks_hold(build: Any, mesh: str) -> None:
    states_are_as_planned(build, MESHES["two ranks"][mesh] | ONE_BY_ONE, SEQUENCE, BATCH)


@pytest.mark.parametrize("mesh", MESHES["four ranks"])
@pytest.mark.parametrize("build", [gpt2, llama], ids=["gpt2", "llama"])
@pooled(world_size=4)
def test_fully_sharded_states_are_those_that_ranks_hold(build: Any, mesh: str) -> None:
    states_are_as_planned(build, MESHES["four ranks"][mesh] | ONE_BY_ONE, SEQUENCE, BATCH)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("build", [gpt2, llama], ids=["gpt2", "llama"])
def test_peak_of_a_step(build: Any, checkpointing: bool) -> None:
    changes = {"num_hidden_layers": 6} if build is llama else {"n_layer": 6}
    config = {"activation_checkpointing": {"enable": checkpointing}}
    plan = autopar.plan_memory(build(**changes), config, sequence=32, batch=8, device="cpu")
    model = build(**changes).train()
    if checkpointing:
        activation_checkpoint.apply(model, (), on_cpu=False)
    ids = torch.zeros((8, 32), dtype=torch.long)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()  # gradients are there
    tracker = MemTracker()
    with tracker:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    most = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    most -= sum(2 * parameter.nbytes for parameter in model.parameters())  # and gradients
    memory = plan.peak
    planned = memory.activations + memory.logits + memory.work
    assert abs(most / planned - 1) < 0.05, (most, planned, memory)


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not divide the world of 3"):
        autopar.plan_memory(llama(), {"model_parallelism": {"tensor_parallel_size": 2}}, sequence=SEQUENCE, gpus=3)
    with pytest.raises(ConfigError, match=r"optimizer must be one of .*; got 'adan'\. Did you mean"):
        autopar.plan_memory(llama(), sequence=SEQUENCE, optimizer="adan")
    with pytest.raises(ConfigError, match="batch must be at least 1, not 0"):
        autopar.plan_memory(llama(), sequence=SEQUENCE, batch=0)
    with pytest.raises(ConfigError, match="model must be a Hugging Face PreTrainedModel; got"):
        autopar.plan_memory(gpt(), sequence=SEQUENCE, policy=GPT_POLICY)
