"""Several towers with units of their own, models inside models, attributes and inputs beside the blocks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2Model, PretrainedConfig, PreTrainedModel

import autopar
from autopar.errors import ConfigError, PolicyError, UnsupportedModelError
from tests.harness.worlds import pooled
from tests.parity import check
from tests.tensor_parallel.toys import MLP, MLP_RULES, REFUSED, ToyConfig, batches, checked_plan, filled, toy_policy


class Heads(nn.Module):
    """A product of two halves per head."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.heads = config.heads
        self.up = nn.Linear(config.hidden_size, self.heads * 4)
        self.down = nn.Linear(self.heads * 2, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.up(x).unflatten(-1, (self.heads, 4)).chunk(2, -1)
        return self.down((left * right.sigmoid()).flatten(-2))


class Pair(PreTrainedModel):
    """Reads, then writes: two towers with other numbers of heads, the second's in a config of its own."""

    config_class = ToyConfig
    main_input_name = "inputs_embeds"

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.reads = nn.ModuleDict({"layers": nn.ModuleList(Heads(config) for _ in range(2))})
        self.writes = nn.ModuleList([nn.ModuleList([Heads(config.writer)]), nn.ModuleList([Heads(config.writer)])])
        self.norm = nn.LayerNorm(config.hidden_size)
        self.factor = config.heads
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, inputs_embeds: torch.Tensor) -> Any:
        for layer in self.reads["layers"]:
            inputs_embeds = inputs_embeds + layer(inputs_embeds)
        inputs_embeds = self.norm(inputs_embeds) * self.scale
        for stage in self.writes:
            inputs_embeds = inputs_embeds + stage[0](inputs_embeds)
        return {"last_hidden_state": inputs_embeds}


def pair() -> Any:
    return filled(Pair(ToyConfig(heads=3, writer=ToyConfig(heads=5))))


TOWERS = """
match: {model_type: toy}
units: {heads: heads}
every_stage: {scale: replicated}
towers:
  reader:
    extends: %s
    blocks: {path: reads.layers}
    suffix: {norm: replicated}
  writer:
    extends: %s
    config: writer
    units: {heads: heads}
    blocks: {path: writes.*}
"""
LAYER = "blocks:\n  modules: {up: {column: heads}, down: {row: heads}}\n  attributes: {heads: heads}\n"


def towers(folder: Path) -> str:
    (folder / "layer.yaml").write_text(LAYER)
    (folder / "towers.yaml").write_text(TOWERS % ("layer", "layer"))
    return str(folder / "towers.yaml")


@pooled(world_size=3)
def test_towers_count_their_own_heads(tmp_path: Path) -> None:
    (folder := tmp_path / str(dist.get_rank())).mkdir()
    model = check(pair, batches(), 3, policy=towers(folder))
    assert model.reads["layers"][1].heads == 1  # of 3
    assert model.writes[1][0].heads == (2, 2, 1)[model.mpu.tp.rank]  # of 5


def test_a_size_that_one_tower_does_not_fit_says_which(tmp_path: Path) -> None:
    policy = towers(tmp_path)
    assert checked_plan(pair(), policy, 2)
    with pytest.raises(ConfigError, match=r"=4 does not fit Pair: 3 heads cannot be sharded over 4 ranks"):
        checked_plan(pair(), policy, 4)


@pytest.mark.parametrize(("old", "new", "message"), REFUSED["towers"])
def test_a_tower_that_does_not_fit_the_model(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = Path(towers(tmp_path))
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(PolicyError) as info:
        checked_plan(pair(), str(path))
    assert message in str(info.value)
    assert str(info.value).startswith(f"{path}:")


class TwoConfig(PretrainedConfig):
    model_type = "two"

    def __init__(self, inner: Any = None, **more: Any) -> None:
        super().__init__(**more)
        self.inner, self.hidden_size, self.ffn, self.heads = inner, 6, 5, 4


class Two(PreTrainedModel):
    """A Hugging Face model of another type inside, and an MLP of its own behind."""

    config_class = TwoConfig
    main_input_name = "inputs_embeds"

    def __init__(self, config: TwoConfig, inner: PreTrainedModel) -> None:
        super().__init__(config)
        self.inner = inner
        self.layers = nn.ModuleList([MLP(config)])

    def forward(self, inputs_embeds: torch.Tensor) -> Any:
        x = self.inner(inputs_embeds=inputs_embeds).last_hidden_state
        return {"last_hidden_state": x + self.layers[0](x)}


def two(model_type: str = "gpt2") -> Any:
    class Config(GPT2Config):
        pass

    Config.model_type = model_type
    sizes = {"n_layer": 1, "n_embd": 6, "n_head": 3, "vocab_size": 7, "n_positions": 9}
    off = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    config = (GPT2Config if model_type == "gpt2" else Config)(**sizes, **off)
    return filled(Two(TwoConfig(), GPT2Model(config)))


INSIDE = {**toy_policy({"ffn": "ffn"}, MLP_RULES), "match": {"model_type": "two"}, "models": ["inner", "absent?"]}


@pooled(world_size=2)
def test_a_model_inside_is_sharded_by_its_own_policy() -> None:
    model = check(two, batches(), 2, policy=INSIDE)
    assert model.inner.h[0].attn.c_attn.weight.shape == (6, 3 * 2 * (2 if model.mpu.tp.rank == 0 else 1))
    assert model.layers[0].up.weight.shape[0] == (3 if model.mpu.tp.rank == 0 else 2)
    autopar.deparallelize(model)
    assert model.inner.h[0].attn.c_attn.weight.shape == (6, 18)


def test_a_model_inside_without_a_policy_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match=r"^no policy lists model_type 'nobodys_inner' of GPT2Model\."):
        checked_plan(two("nobodys_inner"), INSIDE)
    with pytest.raises(PolicyError, match=r"^policy dict:models: layers.0 is a MLP, for which there is no policy$"):
        checked_plan(two(), {**INSIDE, "models": ["inner", "layers.*"]})
    with pytest.raises(PolicyError, match=r"^policy dict:models: Two has no module 'iner'. Did you mean 'inner'\?"):
        checked_plan(two(), {**INSIDE, "models": ["iner"]})
    with pytest.raises(PolicyError, match=r"no rule covers 16 parameters of Two: inner.wte.weight"):
        checked_plan(two(), {key: value for key, value in INSIDE.items() if key != "models"})
