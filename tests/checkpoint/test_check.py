"""``check_checkpoint`` lists everything that is wrong with a folder, and finds nothing in one that is right."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from autopar.checkpoint.offline import reshard_checkpoint
from autopar.checkpoint.shards import check_checkpoint
from autopar.errors import CheckpointError
from tests.checkpoint.tiny import save_alone

EXTRA = {"ema": torch.arange(100.0)}


def flip(path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_whole_checkpoint(tmp_path):
    save_alone(tmp_path, 2, pp=2, optimizer=True, extra=EXTRA)
    (tmp_path / "tokenizer.json").write_text("mine")
    result = check_checkpoint(tmp_path, progress=False)
    shards = [path for path in tmp_path.iterdir() if path.suffix == ".safetensors"]
    assert result["problems"] == []
    assert result["directory"] == str(tmp_path)
    assert result["files"] == len(shards) == 9
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in shards)
    assert result["bytes"] == sum(path.stat().st_size for path in shards) - headers
    assert result["tensors"] == 11 + 3 * 8 + 1  # 11 of the model, 3 of each of its 8 parameters, 1 of the user


def test_every_problem_is_listed_with_file_and_tensor(tmp_path):
    save_alone(tmp_path, 2, pp=2, optimizer=True, extra=EXTRA)
    save_alone(tmp_path.parent / "wide", 3, save_id="f" * 16)
    os.remove(tmp_path / "optimizer-tp0-pp1.safetensors")
    flip(tmp_path / "model-tp1-pp0.safetensors")
    flip(tmp_path / "extra-tp0-pp0.safetensors")
    os.truncate(tmp_path / "model-tp0-pp1.safetensors", 500)
    flip(tmp_path / "config.json")
    flip(tmp_path / "optimizer-tp1-pp0.safetensors", 30)
    shutil.copy(tmp_path.parent / "wide" / "model-tp2-pp0.safetensors", tmp_path)
    problems = check_checkpoint(tmp_path)["problems"]
    for start, part in [
        ("optimizer-tp0-pp1.safetensors", "is missing"),
        ("model-tp1-pp0.safetensors", "is damaged: the bytes of"),
        ("extra-tp0-pp0.safetensors", "is damaged: the bytes of extra.ema"),
        ("model-tp0-pp1.safetensors", "is truncated or overwritten: it has 500 bytes"),
        ("config.json", "is not the file that was saved"),
        ("optimizer-tp1-pp0.safetensors", ""),
        ("model-tp2-pp0.safetensors", "does not belong to this checkpoint"),
    ]:
        found = [text for text in problems if text.startswith(f"{tmp_path / start} ") and part in text]
        assert len(found) == 1, (start, problems)
    assert len(problems) == 7


def test_every_damaged_tensor_of_a_file_is_named(tmp_path):
    save_alone(tmp_path, 1)
    path = tmp_path / "model-tp0-pp0.safetensors"
    begin = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    flip(path, begin)  # the first tensor of the file
    flip(path, -1)  # the last one
    problems = check_checkpoint(tmp_path)["problems"]
    assert len(problems) == 2
    assert "the bytes of step " in problems[0] + problems[1] and "the bytes of mask " in problems[0] + problems[1]


def test_a_file_without_tensors_is_looked_at_too(tmp_path):
    save_alone(tmp_path / "few", 1)
    reshard_checkpoint(tmp_path / "few", tmp_path / "many", tp=1, pp=40)  # more stages than tensors
    empty = [p for p in (tmp_path / "many").glob("model-*") if p.stat().st_size < 200]
    assert empty and check_checkpoint(tmp_path / "many")["problems"] == []
    flip(empty[0], 20)
    problems = check_checkpoint(tmp_path / "many")["problems"]
    assert len(problems) == 1 and empty[0].name in problems[0]
    os.remove(empty[1])
    assert len(check_checkpoint(tmp_path / "many")["problems"]) == 2


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"it has no autopar\.json"):
        check_checkpoint(tmp_path)
    save_alone(tmp_path, 1)
    flip(tmp_path / "autopar.json", 200)
    with pytest.raises(CheckpointError, match=r"autopar\.json"):
        check_checkpoint(tmp_path)
