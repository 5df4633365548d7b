"""autopar.from_pretrained of what does not fit or is damaged: the same error on every rank."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    PreTrainedModel,
)

import autopar
from autopar.errors import CheckpointError, ConfigError
from tests.checkpoint.loading import both, shared, tp
from tests.pool import pooled
from tests.small import gpt2, llama
from tests.worlds import raises_everywhere


@pooled(world_size=2)
def test_other_shapes_are_an_error_with_a_list(tmp_path):
    path = shared(tmp_path / "m", llama())
    with raises_everywhere(
        CheckpointError, "2 tensors do not have the shapes", "lm_head.weight: [131, 24] in the files"
    ):
        autopar.from_pretrained(LlamaForCausalLM, path, tp(2), vocab_size=140)
    both(LlamaForCausalLM, path, 2, vocab_size=140, ignore_mismatched_sizes=True)


@pooled(world_size=2)
def test_damaged_files(tmp_path):
    model = llama()
    rank = dist.get_rank()

    def damaged(name: str, damage: Any, **options: Any) -> str:
        path = shared(tmp_path / name, model, **options)
        if rank == 0:
            damage(Path(path))
        dist.barrier()
        return path

    def rename(path: Path) -> None:
        index = json.loads((path / "model.safetensors.index.json").read_text())
        names = sorted(set(index["weight_map"].values()))
        index["weight_map"] = {k: "../" + v if v == names[0] else v for k, v in index["weight_map"].items()}
        (path / names[0]).rename(path.parent / names[0])
        (path / "model.safetensors.index.json").write_text(json.dumps(index))

    for name, damage, part, options in [
        ("gone", lambda p: (p / "model.safetensors").unlink(), "model.safetensors", {}),
        ("cut", lambda p: _cut(p / "model.safetensors"), "model.safetensors", {}),
        ("one", lambda p: next(p.glob("*-00002*")).unlink(), "-00002", {"max_shard_size": "20KB"}),
        ("out", rename, "outside of the folder", {"max_shard_size": "20KB"}),
    ]:
        with raises_everywhere(CheckpointError, part):
            autopar.from_pretrained(LlamaForCausalLM, damaged(name, damage, **options), tp(2))
    for name, data in (("zip", None), ("text", b"no checkpoint")):
        folder = tmp_path / name
        if rank == 0:
            folder.mkdir()
            model.config.save_pretrained(folder)
            torch.save(model.state_dict(), folder / "pytorch_model.bin")
            if data is None:
                _cut(folder / "pytorch_model.bin")
            else:
                (folder / "pytorch_model.bin").write_bytes(data)
        dist.barrier()
        with raises_everywhere(CheckpointError, "pytorch_model.bin"):
            autopar.from_pretrained(LlamaForCausalLM, str(folder), tp(2))


def _cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])


@pooled(world_size=2)
def test_a_file_that_one_rank_does_not_see(tmp_path):
    path = shared(tmp_path / "m", llama())
    mine = path if dist.get_rank() == 0 else str(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"elsewhere") as info:
        autopar.from_pretrained(LlamaForCausalLM, mine, tp(2))
    assert dist.get_rank() == 1 or "rank 1 cannot load the model" in str(info.value)


@pooled(world_size=2)
def test_what_is_refused(tmp_path):
    path = shared(tmp_path / "m", llama())
    for argument, value in (("device_map", "auto"), ("gguf_file", "x.gguf"), ("state_dict", {}), ("tp_plan", "auto")):
        with raises_everywhere(ConfigError, argument):
            autopar.from_pretrained(LlamaForCausalLM, path, tp(2), **{argument: value})
    with autopar.lazy_init(), pytest.raises(TypeError):
        LlamaForCausalLM.from_pretrained(path, no_such_argument=1)
    assert PreTrainedModel._load_pretrained_model.__module__ == PreTrainedModel.__module__
    both(AutoModelForSequenceClassification, shared(tmp_path / "g", gpt2()), 2)  # and works again


@pytest.mark.parametrize("kind", ["files", "shards"])
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "{", "config.json"),
        ("config.json", "[]", "config.json holds a list, not an object"),
        ("config.json", {"n_embd": "x"}, "n_embd"),
        ("config.json", {"n_head": 5}, "divisible by num_heads"),
        ("config.json", {"dtype": "bogus"}, "bogus"),
        ("config.json", {"model_type": "nope"}, "nope"),
        ("model.safetensors.index.json", "{", "model.safetensors.index.json cannot be read: Expecting property name"),
        ("model.safetensors.index.json", "{}", "has no weight_map"),
        ("model.safetensors.index.json", '{"metadata": {}, "weight_map": []}', "has no weight_map"),
        ("model.safetensors.index.json", '{"metadata": {}, "weight_map": {"a": 3}}', "has no weight_map"),
    ],
)
def test_damaged_small_files(tmp_path, kind, name, text, message):
    if kind == "files":
        gpt2().save_pretrained(tmp_path / "m", max_shard_size="20KB")
    elif name == "config.json":
        autopar.initialize(gpt2()).save_parallelized(tmp_path / "m")
    else:
        return
    path = tmp_path / "m" / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **text}) if isinstance(text, dict) else text)
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "m"))) as info:
        autopar.from_pretrained(AutoModelForCausalLM, tmp_path / "m", verify=False)
    assert message in str(info.value)


@pooled(world_size=2)
def test_small_files_that_are_damaged_for_one_rank(tmp_path):
    path = shared(tmp_path / "m", gpt2())
    mine = shared(tmp_path / f"rank{dist.get_rank()}")
    shutil.copytree(path, mine)
    if dist.get_rank() == 1:
        (Path(mine) / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"rank1/config\.json holds a list"):
        autopar.from_pretrained(AutoModelForCausalLM, mine, tp(2))


@pooled(world_size=2)
def test_an_optimizer_is_made_by_a_function(tmp_path):
    path = shared(tmp_path / "m", llama())
    parameter = torch.nn.Parameter(torch.zeros(1))
    with raises_everywhere(ConfigError, "must be a function of the model, not AdamW", "optimizer=lambda model: torch"):
        autopar.from_pretrained(LlamaForCausalLM, path, tp(2), optimizer=torch.optim.AdamW([parameter]))
    with raises_everywhere(ConfigError, "optimizer= returned [0.1]: it must return a torch.optim.Optimizer"):
        autopar.from_pretrained(LlamaForCausalLM, path, tp(2), optimizer=lambda model: [0.1])
    with raises_everywhere(ConfigError, "optimizer"):  # of another model
        autopar.from_pretrained(LlamaForCausalLM, path, tp(2), optimizer=lambda model: torch.optim.SGD([parameter]))
