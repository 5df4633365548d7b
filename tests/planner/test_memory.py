"""Planned memory against what ranks hold, and one of several equal blocks counted for all."""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import autopar
from autopar.errors import ConfigError
from autopar.features.activation_checkpointing import setup as activation_checkpoint
from autopar.plan.make_plan import make_plan
from autopar.policy.match import find_policy
from autopar.tools.planner import planned_model
from autopar.tools.planner.candidate import Rows
from autopar.tools.planner.equal_blocks import equal_blocks
from autopar.tools.planner.planned_model import PlannedModel
from tests.harness.worlds import pooled
from tests.own_modules import GPT_POLICY, gpt
from tests.pipeline_parallel.deep import deep
from tests.planner.saved_bytes import states_are_as_planned
from tests.small import gpt2, llama

BATCH, SEQUENCE = 4, 16


MESHES = yaml.safe_load(Path(__file__).with_name("meshes.yaml").read_text())


def _states_are_as_planned(build: Any, mesh: dict[str, Any]) -> None:
    config = {**mesh, "pipeline": {"microbatch_size": 1}}
    states_are_as_planned(build, config, SEQUENCE, BATCH)[1].mpu.destroy()


@pytest.mark.parametrize("mesh", MESHES["two ranks"])
@pytest.mark.parametrize("build", [gpt2, llama], ids=["gpt2", "llama"])
@pooled(world_size=2)
def test_states_are_those_that_ranks_hold(build: Any, mesh: str) -> None:
    _states_are_as_planned(build, MESHES["two ranks"][mesh])


@pytest.mark.parametrize("mesh", MESHES["four ranks"])
@pytest.mark.parametrize("build", [gpt2, llama], ids=["gpt2", "llama"])
@pooled(world_size=4)
def test_fully_sharded_states_are_those_that_ranks_hold(build: Any, mesh: str) -> None:
    _states_are_as_planned(build, MESHES["four ranks"][mesh])


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that are made inside and live at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given | self.known:
                storage = tensor.untyped_storage()
                self.known.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._end, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.live)
        return out

    def _end(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


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
    tracker = LiveBytes()
    with tracker:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    memory = plan.peak
    planned = memory.activations + memory.logits + memory.work
    assert abs(tracker.most / planned - 1) < 0.05, (tracker.most, planned, memory)


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not divide the world of 3"):
        autopar.plan_memory(llama(), {"model_parallelism": {"tensor_parallel_size": 2}}, sequence=SEQUENCE, gpus=3)
    with pytest.raises(ConfigError, match=r"optimizer must be one of .*; got 'adan'\. Did you mean"):
        autopar.plan_memory(llama(), sequence=SEQUENCE, optimizer="adan")
    with pytest.raises(ConfigError, match="batch must be at least 1, not 0"):
        autopar.plan_memory(llama(), sequence=SEQUENCE, batch=0)
    with pytest.raises(ConfigError, match="model must be a Hugging Face PreTrainedModel; got"):
        autopar.plan_memory(gpt(), sequence=SEQUENCE, policy=GPT_POLICY)


KINDS = ("gpt2", "llama", "bert", "t5", "bart", "mixtral")


def _model(kind: str) -> Any:
    own = {"gpt2": lambda: gpt2(n_layer=5), "llama": lambda: llama(num_hidden_layers=5)}
    return own.get(kind, lambda: deep(kind, 5))()


def groups(model: Any) -> list[tuple[str, ...]]:
    return equal_blocks(model, make_plan(model, find_policy(model), 2))


def blocks(*numbers: int) -> list[tuple[str, ...]]:
    return [tuple(f"model.layers.{number}" for number in numbers)]


@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_those_of_every_block(kind: str, monkeypatch: pytest.MonkeyPatch):
    replayed = PlannedModel(_model(kind), sequence=7).count(Rows(2), 2)
    monkeypatch.setattr(planned_model, "equal_blocks", lambda model, plan: [])
    every = PlannedModel(_model(kind), sequence=7).count(Rows(2), 2)
    for place, unit in every.elements.items():
        assert sorted(replayed.elements[place].saved.values()) == sorted(unit.saved.values())
        assert replayed.elements[place].operations == unit.operations


def test_a_number_that_counts_the_blocks_makes_no_difference_and_another_attribute_does():
    model = llama(num_hidden_layers=6)
    assert groups(model) == blocks(*range(6))
    model.model.layers[3].self_attn.scaling *= 2
    assert groups(model) == blocks(0, 1, 2, 4, 5)
    model.model.layers[5].self_attn.layer_idx = 7
    assert groups(model) == []
    model = llama(num_hidden_layers=6)
    model.config.output_hidden_states = True  # collected from the blocks
    assert groups(model) == []


@pytest.mark.parametrize("layer", [1, 3, 5])
def test_another_module_rule_or_attribute_of_a_plan_makes_a_difference(layer: int):
    model = llama(num_hidden_layers=6)
    plan = make_plan(model, find_policy(model), 2)
    others = blocks(*(number for number in range(6) if number != layer))
    path = f"model.layers.{layer}.mlp.up_proj"
    modules = {name: rule for name, rule in plan.modules.items() if name != path}
    assert equal_blocks(model, replace(plan, modules=modules)) == others
    values = [
        replace(a, values=tuple(v + 1 for v in a.values)) if a.path.startswith(f"model.layers.{layer}.") else a
        for a in plan.attributes
    ]
    assert values and equal_blocks(model, replace(plan, attributes=tuple(values))) == others
    model.model.layers[layer].mlp.act_fn = nn.GELU()
    assert equal_blocks(model, plan) == others
