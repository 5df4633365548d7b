"""Loops of users that touch weights of another stage: written, drawn, loaded, frozen, tied, as on one process."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from tests.compare import same_weights
from tests.harness.worlds import pooled
from tests.parity import close, language_batches
from tests.pipeline_parallel.test_steps_of_stages import stages
from tests.small import llama

Change = Callable[[Any], Any]


def train(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in language_batches(131, count=2, batch=4):
        if hasattr(model, "mpu"):
            model.execute_pipeline(batch)
        else:
            model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def head_drawn(model: Any) -> None:
    nn.init.normal_(model.lm_head.weight, std=0.02)


def all_drawn(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.kaiming_uniform_(module.weight)
            module.weight.data.mul_(0.1).add_(0.01)


def merged(model: Any) -> None:
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith("q_proj"):
                rows, columns = module.weight.shape
                module.weight += torch.rand(rows, 2) @ torch.full((2, columns), 0.1)


def rows_written(model: Any) -> None:
    with torch.no_grad():
        model.model.embed_tokens.weight[:10] = 0.1
        model.lm_head.weight[3:5].fill_(0.2)
    model.lm_head.weight.data = torch.full((131, 24), 0.1)


def perturbed(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data += torch.randn_like(layer.mlp.up_proj.weight) * 0.01


WRITTEN: list[Change] = [head_drawn, all_drawn, merged, rows_written, perturbed]


@pooled(world_size=2)
def test_writes_are_those_of_one_process() -> None:
    plain = llama(num_hidden_layers=4).train()
    for change in WRITTEN:
        model, reference = autopar.initialize(copy.deepcopy(plain), stages()), copy.deepcopy(plain)
        after = []
        for each in (model, reference):
            torch.manual_seed(5)
            change(each)
            after.append(torch.rand(()).item())
        assert after[0] == after[1], change  # generators go on alike
        train(model)
        train(reference)
        same_weights(model, reference, 2e-5, when=change.__name__)
        model.mpu.destroy()


def _load_blocks(model: Any, source: Any) -> Any:
    for layer, other in zip(model.model.layers, source.model.layers, strict=True):
        layer.load_state_dict(copy.deepcopy(other.state_dict()))
    model.lm_head.load_state_dict(other_head := source.lm_head.state_dict())
    return other_head


@pytest.mark.parametrize("config", [{"pp": 2}, {"tp": 2}, {"zero": {"stage": 3}}], ids=["pp", "tp", "zero3"])
@pytest.mark.tier("test", only=("pp", "zero3"))
@pooled(world_size=2)
def test_a_block_is_loaded_by_itself(config: dict[str, Any]) -> None:
    plain, source = llama().train(), llama(seed=3)
    model = autopar.initialize(copy.deepcopy(plain), config)
    expected = copy.deepcopy(plain)
    _load_blocks(model, source)
    _load_blocks(expected, source)
    for name, tensor in autopar.hf_weights(model):
        close(tensor, expected.state_dict()[name], name, 0)
    model.model.norm.weight.data.zero_()
    own = {name: tensor.clone() for name, tensor in model.model.layers[0].state_dict().items()}
    model.model.layers[0].load_state_dict(own)  # this rank's own
    with pytest.raises(RuntimeError, match="Missing key"):
        model.model.layers[dist.get_rank()].load_state_dict({})
    if "zero" not in config:
        model = autopar.deparallelize(model)
        assert not any(module._load_state_dict_pre_hooks for module in model.model.layers.modules())


def by_name(model: Any) -> None:
    for name, p in model.named_parameters():
        p.requires_grad = "lm_head" in name or "layers.3" in name or "norm" in name


def first_layers(model: Any) -> None:
    model.model.embed_tokens.requires_grad_(False)
    for layer in model.model.layers[:3]:
        layer.requires_grad_(False)


@pytest.mark.tier("all")
@pooled(world_size=2)
def test_weights_are_frozen_by_name() -> None:
    plain = llama(num_hidden_layers=4).train()
    for change in (by_name, first_layers):
        model, reference = autopar.initialize(copy.deepcopy(plain), stages()), copy.deepcopy(plain)
        change(model)
        change(reference)
        with warnings.catch_warnings():
            warnings.simplefilter("error", autopar.ShardWarning)
            train(model)
        train(reference)
        same_weights(model, reference, 2e-5)
        model.mpu.destroy()
