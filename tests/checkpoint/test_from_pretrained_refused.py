"""autopar.from_pretrained of what does not fit or is damaged: the same error on every rank."""

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaForCausalLM, PreTrainedModel

import autopar
from autopar.cli.split import split_checkpoint
from autopar.errors import CheckpointError, ConfigError
from tests.checkpoint.loading import both, shared, tp
from tests.checkpoint.refusals import refusals
from tests.harness.worlds import pooled
from tests.small import gpt2, llama


def _load(path: Path | str, model_class: Any = LlamaForCausalLM, **options: Any) -> Any:
    return autopar.from_pretrained(model_class, path, tp(2), **options)


def _cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])


def _move_out(folder: Path) -> None:
    """Let the index name a file outside of the folder, which is there."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    index["weight_map"] = {k: "../" + v if v == names[0] else v for k, v in index["weight_map"].items()}
    (folder / names[0]).rename(folder.parent / names[0])
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


DAMAGES: list[tuple[str, str, Callable[[Path], object], str]] = [  # name, what is saved, what is done, what is said
    ("gone", "whole", lambda p: (p / "model.safetensors").unlink(), "model.safetensors"),
    ("cut", "whole", lambda p: _cut(p / "model.safetensors"), "model.safetensors"),
    ("one", "in parts", lambda p: next(p.glob("*-00002*")).unlink(), "-00002"),
    ("out", "in parts", _move_out, "must be inside the folder"),
    ("zip", "bin", lambda p: _cut(p / "pytorch_model.bin"), "pytorch_model.bin"),
    ("text", "bin", lambda p: (p / "pytorch_model.bin").write_bytes(b"no checkpoint"), "pytorch_model.bin"),
]


@pooled(world_size=2)
def test_damaged_files(tmp_path):
    model = llama()
    if dist.get_rank() == 0:
        model.save_pretrained(tmp_path / "whole")
        model.save_pretrained(tmp_path / "in parts", max_shard_size="20KB")
        model.config.save_pretrained(tmp_path / "bin")
        torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
        for name, kind, damage, _ in DAMAGES:
            damage(Path(shutil.copytree(tmp_path / kind, tmp_path / name)))
    dist.barrier()
    with refusals() as refuse:
        for name, _, _, message in DAMAGES:
            refuse(name, message, _load, tmp_path / name)


PARAMETER = torch.nn.Parameter(torch.zeros(1))
ARGUMENTS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"device_map": "auto"}, ("device_map",)),
    ({"gguf_file": "x.gguf"}, ("gguf_file",)),
    ({"state_dict": {}}, ("state_dict",)),
    ({"tp_plan": "auto"}, ("tp_plan",)),
    (
        {"optimizer": torch.optim.AdamW([PARAMETER])},
        ("must be a function of the model, got AdamW", "optimizer=lambda model: torch"),
    ),
    ({"optimizer": lambda _: [0.1]}, ("optimizer= must return a torch.optim.Optimizer, got [0.1]",)),
    ({"optimizer": lambda _: torch.optim.SGD([PARAMETER])}, ("optimizer",)),  # of another model
]


@pooled(world_size=2)
def test_arguments_and_sizes_that_are_refused(tmp_path):
    path = shared(tmp_path / "m", llama())
    with refusals(error=ConfigError) as refuse:
        for arguments, messages in ARGUMENTS:
            refuse(arguments, messages, _load, path, **arguments)
    with refusals() as refuse:
        parts = "2 tensors do not have the shapes", "lm_head.weight: [131, 24] in the files"
        refuse("shapes", parts, _load, path, vocab_size=140)
    both(LlamaForCausalLM, path, 2, vocab_size=140, ignore_mismatched_sizes=True)
    with autopar.lazy_init(), pytest.raises(TypeError):
        LlamaForCausalLM.from_pretrained(path, no_such_argument=1)
    assert PreTrainedModel._load_pretrained_model.__module__ == PreTrainedModel.__module__
    both(AutoModelForSequenceClassification, shared(tmp_path / "g", gpt2()), 2)  # and works again


@pooled(world_size=2)
def test_a_file_that_one_rank_does_not_see(tmp_path):
    path = shared(tmp_path / "m", llama())
    mine = path if dist.get_rank() == 0 else str(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"elsewhere") as info:
        autopar.from_pretrained(LlamaForCausalLM, mine, tp(2))
    assert dist.get_rank() == 1 or "rank 1 cannot load the model" in str(info.value)


CONFIG, INDEX = "config.json", "model.safetensors.index.json"
SMALL: list[tuple[str, str | dict[str, Any], str]] = [  # a file, its text or keys that are changed, what is said
    (CONFIG, "{", "config.json"),
    (CONFIG, "[]", "config.json must hold a JSON object, got list"),
    (CONFIG, {"n_embd": "x"}, "n_embd"),
    (CONFIG, {"n_head": 5}, "divisible by num_heads"),
    (CONFIG, {"dtype": "bogus"}, "bogus"),
    (CONFIG, {"model_type": "nope"}, "nope"),
    (INDEX, "{", "model.safetensors.index.json cannot be read: Expecting property name"),
    (INDEX, "{}", "must have a weight_map"),
    (INDEX, '{"metadata": {}, "weight_map": []}', "must have a weight_map"),
    (INDEX, '{"metadata": {}, "weight_map": {"a": 3}}', "must have a weight_map"),
]


@pytest.mark.parametrize("kind", ["files", "shards"])
def test_damaged_small_files(tmp_path, kind):
    path = tmp_path / "m"
    if kind == "files":
        gpt2().save_pretrained(path, max_shard_size="20KB")
    else:
        autopar.initialize(gpt2()).save_parallelized(path)
    with refusals() as refuse:
        for name, text, message in SMALL if kind == "files" else SMALL[:6]:
            right = (path / name).read_text()
            (path / name).write_text(json.dumps({**json.loads(right), **text}) if isinstance(text, dict) else text)
            load = functools.partial(autopar.from_pretrained, AutoModelForCausalLM, path, verify=False)
            refuse((name, text), (message, str(path)), load)
            (path / name).write_text(right)
        for name in (CONFIG, INDEX) if kind == "files" else (CONFIG, "autopar.json"):
            (path / name).rename(tmp_path / name)
            os.mkfifo(path / name)
            load = functools.partial(autopar.from_pretrained, AutoModelForCausalLM, path, verify=False)
            refuse((name, "a named pipe"), f"{name} cannot be read: it must be a regular file", load)
            if kind == "files":
                load = functools.partial(split_checkpoint, path, tmp_path / "split", tp=2)
                refuse((name, "split"), f"{name} cannot be read: it must be a regular file", load)
            os.replace(tmp_path / name, path / name)
    autopar.from_pretrained(AutoModelForCausalLM, path, verify=False)  # it was nothing else


@pooled(world_size=2)
def test_small_files_that_are_damaged_for_one_rank(tmp_path):
    path = shared(tmp_path / "m", gpt2())
    mine = shared(tmp_path / f"rank{dist.get_rank()}")
    shutil.copytree(path, mine)
    if dist.get_rank() == 1:
        (Path(mine) / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"rank1/config\.json must hold a JSON object"):
        autopar.from_pretrained(AutoModelForCausalLM, mine, tp(2))
