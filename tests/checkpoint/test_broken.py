from __future__ import annotations

import json
import os
import shutil

import pytest

from autopar.checkpoint import Manifest, merge_checkpoint
from autopar.errors import CheckpointError
from tests.checkpoint.tiny import save_alone


def break_missing(folder):
    os.remove(folder / "model-tp1-pp1.safetensors")


def break_truncated(folder):
    os.truncate(folder / "model-tp1-pp0.safetensors", 200)


def break_inside(folder):
    path = folder / "model-tp1-pp0.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def break_swapped(folder):
    for one, other in (("0", "x"), ("1", "0"), ("x", "1")):
        os.rename(folder / f"model-tp{one}-pp0.safetensors", folder / f"model-tp{other}-pp0.safetensors")


def break_copied(folder):
    shutil.copy(folder / "model-tp0-pp1.safetensors", folder / "model-tp1-pp1.safetensors")


def break_mixed(folder):
    save_alone(folder.parent / "other", 2, seed=1, pp=2, save_id="another")
    shutil.copy(folder.parent / "other" / "model-tp1-pp0.safetensors", folder)


def break_bit(folder):
    data = bytearray((folder / "model-tp1-pp0.safetensors").read_bytes())
    data[-3] ^= 16
    (folder / "model-tp1-pp0.safetensors").write_bytes(data)


def break_config(folder):
    os.remove(folder / "config.json")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_missing, "ckpt is incomplete: 3 of 4 shards found, model-tp1-pp1.safetensors is missing"),
        (break_truncated, r"model-tp1-pp0\.safetensors is truncated or overwritten: it has 200 bytes, it was saved"),
        (break_inside, r"model-tp1-pp0\.safetensors is truncated or overwritten"),
        (break_swapped, r"model-tp0-pp0\.safetensors is the shard of tensor-parallel rank 1, stage 0"),
        (break_copied, r"model-tp1-pp1\.safetensors is the shard of tensor-parallel rank 0, stage 1"),
        (break_mixed, r"model-tp1-pp0\.safetensors belongs to another save"),
        (break_bit, r"model-tp1-pp0\.safetensors is damaged"),
        (break_config, r"config\.json is missing"),
    ],
)
def test_broken_checkpoints_are_refused_and_nothing_is_written(tmp_path, damage, message):
    save_alone(tmp_path / "ckpt", 2, pp=2)
    merge_checkpoint(tmp_path / "ckpt", tmp_path / "good")  # the undamaged one works
    damage(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match=message):
        merge_checkpoint(tmp_path / "ckpt", tmp_path / "merged")
    assert {name for name in os.listdir(tmp_path) if "merged" in name} == set()


def test_the_message_for_a_missing_shard_says_where_it_is(tmp_path):
    save_alone(tmp_path, 2, pp=2)
    break_missing(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        merge_checkpoint(tmp_path, tmp_path / "merged")
    lines = str(caught.value).splitlines()
    assert lines[1].strip().startswith("It was saved with tensor_parallel_size=2, pipeline_parallel_size=2")
    assert "rank 3" in lines[2]


def damaged(change):
    def apply(data):
        change(data)
        return data

    return apply


def drop(key):
    return damaged(lambda data: data.pop(key))


def escape(data):
    data["files"]["../secret.safetensors"] = data["files"].pop("model-tp1-pp0.safetensors")
    return data


def uncovered(data):
    data["tensors"]["gate"]["layout"]["blocks"][0]["shares"] = [[0, 3], [4, 7]]
    return data


def three_ranks(data):
    data["tensors"]["gate"]["layout"]["blocks"][0]["shares"] = [[0, 3], [3, 5], [5, 7]]
    return data


def twice(data):
    data["tensors"]["gate"]["saved_as"] = "proj.weight"
    return data


def unheld(data):
    for record in data["files"].values():
        record["crc32"].pop("gate", None)
    return data


def half_held(data):
    data["files"]["model-tp1-pp0.safetensors"]["crc32"].pop("gate")
    return data


def stranger(data):
    data["files"]["model-tp0-pp0.safetensors"]["crc32"]["stranger"] = 1
    return data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: [], "autopar.json is no manifest"),
        (lambda data: None, "autopar.json is no manifest"),
        (damaged(lambda d: d.update(format_version=2)), "format_version 2; this version of autopar reads 1"),
        (drop("format_version"), "'format_version' is missing"),
        (drop("tensors"), "damaged: 'tensors' is missing"),
        (drop("save_id"), "damaged: 'save_id' is missing"),
        (damaged(lambda d: d.update(mesh=3)), "damaged"),
        (damaged(lambda d: d["mesh"].update(tensor_parallel_size=0)), "damaged: the mesh"),
        (damaged(lambda d: d["mesh"].update(tensor_parallel_size=3)), "lacks the file 'model-tp2-pp0.safetensors'"),
        (damaged(lambda d: d.update(tensors=[])), "damaged"),
        (damaged(lambda d: d["tensors"]["gate"].update(dtype="object")), "damaged: 'object' is no dtype"),
        (damaged(lambda d: d["tensors"]["gate"].update(shape=[8, 3])), "damaged: the layout of gate"),
        (escape, r"names the file '\.\./secret\.safetensors'"),
        (uncovered, "no rank holds unit 3 of 7 ffn"),
        (three_ranks, "shared out over 3 ranks in a mesh of 2"),
        (twice, "two tensors are saved as proj.weight"),
        (unheld, "no file holds gate"),
        (half_held, "should hold 5 tensors"),
        (stranger, "holds stranger, which is no tensor"),
    ],
)
def test_manifest_garbage(tmp_path, change, message):
    save_alone(tmp_path, 2)
    path = tmp_path / "autopar.json"
    Manifest.read(tmp_path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(CheckpointError, match=message):
        merge_checkpoint(tmp_path, tmp_path / "merged")


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_manifest_that_is_no_json(tmp_path, text):
    (tmp_path / "autopar.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"autopar\.json"):
        Manifest.read(tmp_path)


def test_a_header_that_contradicts_the_manifest(tmp_path):
    save_alone(tmp_path, 2)
    path = tmp_path / "autopar.json"
    data = json.loads(path.read_text())
    data["tensors"]["norm.weight"]["dtype"] = "float16"  # as wide as bfloat16
    path.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=r"holds norm\.weight as bfloat16 \[4\], autopar.json says float16 \[4\]"):
        merge_checkpoint(tmp_path, tmp_path / "merged")


def test_folders_that_are_no_checkpoint(tmp_path):
    save_alone(tmp_path / "checkpoint", 1)
    with pytest.raises(CheckpointError, match=r"does not exist\. Did you mean 'checkpoint'"):
        Manifest.read(tmp_path / "chekpoint")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"it has no autopar\.json"):
        Manifest.read(tmp_path / "empty")
    merge_checkpoint(tmp_path / "checkpoint", tmp_path / "merged")
    with pytest.raises(CheckpointError, match="from_pretrained reads it"):
        Manifest.read(tmp_path / "merged")
    os.rename(tmp_path / "checkpoint", tmp_path / ".gone.old-0123456789abcdef")
    with pytest.raises(CheckpointError, match=r"rename .*\.gone\.old-0123456789abcdef to gone"):
        Manifest.read(tmp_path / "gone")
