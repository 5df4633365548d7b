"""Damaged checkpoints: each damage is refused by name, and ``check_checkpoint`` lists all of them."""

import os
import shutil

import pytest
import torch

from autopar.checkpoint import Manifest, merge_checkpoint
from autopar.checkpoint.offline import reshard_checkpoint
from autopar.checkpoint.rotation import latest, next_order
from autopar.checkpoint.shards import check_checkpoint
from autopar.errors import CheckpointError
from tests.checkpoint.tiny import rewrite_manifest, save_alone


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


def break_mixed(folder, pp=2):
    save_alone(folder.parent / "other", 2, seed=1, pp=pp, save_id="another")
    shutil.copy(folder.parent / "other" / "model-tp1-pp0.safetensors", folder)


def flip(path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def break_bit(folder):
    flip(folder / "model-tp1-pp0.safetensors", -3)


def break_header(folder):
    """A change that the rest of the header does not contradict."""
    path = folder / "model-tp1-pp0.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"format":"pt"', b'"format":"pT"'))


def break_config(folder):
    os.remove(folder / "config.json")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_missing, "ckpt is incomplete: 3 of 4 shards found, model-tp1-pp1.safetensors is missing"),
        (break_truncated, r"model-tp1-pp0\.safetensors is truncated or overwritten: expected \d+ bytes, got 200"),
        (break_inside, r"model-tp1-pp0\.safetensors is truncated or overwritten"),
        (break_swapped, r"model-tp0-pp0\.safetensors was saved as model-tp1-pp0\.safetensors"),
        (break_copied, r"model-tp1-pp1\.safetensors was saved as model-tp0-pp1\.safetensors"),
        (break_mixed, r"model-tp1-pp0\.safetensors belongs to another save"),
        (break_bit, r"model-tp1-pp0\.safetensors is damaged"),
        (break_header, r"model-tp1-pp0\.safetensors is damaged: the checksum of its header differs"),
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


def edited(change):
    """An edit in place as one that returns what it edited."""

    def apply(data):
        change(data)
        return data

    return apply


def drop(key):
    return edited(lambda data: data.pop(key))


def tensors(data):
    return data["parts"]["model"]["tensors"]


def files(data):
    return data["parts"]["model"]["files"]


def escape(data):
    files(data)["../secret.safetensors"] = files(data).pop("model-tp1-pp0.safetensors")


def another_rank(data):
    files(data)["model-tp7-pp0.safetensors"] = {**files(data).pop("model-tp1-pp0.safetensors"), "tp": 7}


def replica(data):
    files(data)["model-tp1-pp0-dp3.safetensors"] = {**files(data).pop("model-tp1-pp0.safetensors"), "dp": 3}


def uncovered(data):
    tensors(data)["gate"]["layout"]["blocks"][0]["shares"] = [[0, 3], [4, 7]]


def three_ranks(data):
    tensors(data)["gate"]["layout"]["blocks"][0]["shares"] = [[0, 3], [3, 5], [5, 7]]


def unheld(data):
    for record in files(data).values():
        record["xxh3"].pop("gate", None)


def rows(name, *ends):
    return edited(lambda data: files(data)["model-tp0-pp0.safetensors"]["rows"].update({name: ends}))


def stranger(data):
    files(data)["model-tp0-pp0.safetensors"]["xxh3"]["stranger"] = "0" * 16


TP = ("tensor_parallel_size", "expert_parallel_size")


def held_twice(data):
    files(data)["model-tp1-pp0.safetensors"]["xxh3"]["step"] = "0" * 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: [], "autopar.json is not a manifest"),
        (lambda data: None, "autopar.json is not a manifest"),
        (
            edited(lambda d: d.update(format_version=1)),
            r"format_version 1; this .* reads 9\n  Load it with the version",
        ),
        (drop("format_version"), "'format_version' is missing"),
        (drop("parts"), "damaged: 'parts' is missing"),
        (edited(lambda d: d["parts"].pop("model")), "damaged: 'model' is missing"),
        (edited(lambda d: d["parts"].update(models=d["parts"]["model"])), "got 'models'"),
        (drop("save_id"), "damaged: 'save_id' is missing"),
        (edited(lambda d: d.update(mesh=3)), "damaged"),
        (edited(lambda d: d["mesh"].update(tensor_parallel_size=0)), "damaged: the sizes of the mesh"),
        (edited(lambda d: d["mesh"].update(data_parallel_size=10**9)), "damaged: the sizes of the mesh"),
        (edited(lambda d: d["mesh"].update(dict.fromkeys(TP, 3))), "a layout is for 2 ranks in a mesh of 3"),
        (edited(lambda d: d["mesh"].update(dict.fromkeys(TP, 1))), "is outside of the mesh"),
        (edited(lambda d: d["parts"]["model"].update(tensors=[])), "damaged"),
        (edited(lambda d: tensors(d)["gate"].update(dtype="object")), "damaged: 'object' is not a dtype"),
        (edited(lambda d: tensors(d)["gate"].update(shape=[8, 3])), "damaged: the layout of gate"),
        (edited(lambda d: tensors(d)["gate"].update(saved_as="proj.weight")), "two tensors are saved as proj.weight"),
        (edited(lambda d: d["along"].update({"../config.json": "0" * 16})), r"names the file '\.\./config\.json'"),
        (edited(lambda d: d["along"].update({"/etc/passwd": "0" * 16})), "names the file '/etc/passwd'"),
        (edited(lambda d: files(d)["model-tp0-pp0.safetensors"].update(header_xxh3="..")), "got '..'"),
        (edited(escape), r"the file name '\.\./secret\.safetensors' does not match its record"),
        (edited(another_rank), r"model-tp7-pp0\.safetensors is outside of the mesh \(2, 1, 1\)"),
        (edited(replica), r"model-tp1-pp0-dp3\.safetensors is outside of the mesh"),
        (edited(uncovered), "no rank holds unit 3 of 7 ffn"),
        (edited(three_ranks), "a layout is for 3 ranks in a mesh of 2"),
        (edited(unheld), "no file holds row 0 of gate on tensor-parallel rank 0"),
        (edited(lambda d: files(d)["model-tp0-pp0.safetensors"]["xxh3"].pop("gate")), "no file holds row 0 of gate on"),
        (edited(held_twice), "several files hold row 0 of step on tensor-parallel rank 0"),
        (rows("gate", 0, 3), "no file holds row 3 of gate on tensor-parallel rank 0"),
        (rows("gate", 1, 4), "no file holds row 0 of gate on tensor-parallel rank 0"),
        (rows("gate", 0, 5), "several files hold row 4 of gate on tensor-parallel rank 0"),
        (rows("gate", -1, 4), "several files hold row -1 of gate"),
        (rows("gate", 0), "damaged: not enough values"),
        (edited(stranger), "holds stranger, which is not a tensor of the model"),
    ],
)
def test_a_manifest_that_contradicts_itself(tmp_path, change, message):
    """Even if its own checksum is right."""
    save_alone(tmp_path, 2)
    Manifest.read(tmp_path)
    rewrite_manifest(tmp_path, change)
    for read in (lambda: merge_checkpoint(tmp_path, tmp_path / "merged"), lambda: check_checkpoint(tmp_path)):
        with pytest.raises(CheckpointError, match=message):
            read()


@pytest.mark.parametrize("change", [edited(lambda d: d.update(policy="other.yaml")), edited(lambda d: None)])
def test_a_manifest_that_was_changed(tmp_path, change):
    """Its own checksum is that of other bytes, even if the JSON is the same."""
    save_alone(tmp_path, 2)
    (tmp_path / "autopar.json").write_bytes((tmp_path / "autopar.json").read_bytes().replace(b'"tiny"', b'"tiny" '))
    with pytest.raises(CheckpointError, match=r"autopar\.json was changed after the save: its checksum"):
        Manifest.read(tmp_path)
    rewrite_manifest(tmp_path, change)
    Manifest.read(tmp_path)
    rewrite_manifest(tmp_path, edited(lambda d: d.update(hf_prefix="x.")), checksum_too=False)
    with pytest.raises(CheckpointError, match="was changed after the save"):
        Manifest.read(tmp_path)
    text = (tmp_path / "autopar.json").read_bytes()
    (tmp_path / "autopar.json").write_bytes(text[: text.rindex(b",\n")] + b"\n}\n")  # no checksum at all
    with pytest.raises(CheckpointError, match="was changed after the save"):
        Manifest.read(tmp_path)


def test_a_manifest_that_is_a_named_pipe_keeps_nobody_waiting(tmp_path):
    save_alone(tmp_path / "step-1", 2)
    os.remove(tmp_path / "step-1" / "autopar.json")
    os.mkfifo(tmp_path / "step-1" / "autopar.json")
    assert latest(tmp_path) is None and next_order(tmp_path / "step-2") == 1
    for read in (Manifest.read, check_checkpoint, lambda folder: merge_checkpoint(folder, tmp_path / "merged")):
        with pytest.raises(CheckpointError, match=r"autopar\.json cannot be read: it must be a regular file"):
            read(tmp_path / "step-1")


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_manifest_that_is_no_json(tmp_path, text):
    (tmp_path / "autopar.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"autopar\.json"):
        Manifest.read(tmp_path)


def test_a_header_that_contradicts_the_manifest(tmp_path):
    save_alone(tmp_path, 2)
    as_wide = edited(lambda d: tensors(d)["norm.weight"].update(dtype="float16"))
    rewrite_manifest(tmp_path, as_wide)
    with pytest.raises(CheckpointError, match=r"expected float16 \[4\] \(autopar.json\), got bfloat16 \[4\]"):
        merge_checkpoint(tmp_path, tmp_path / "merged")


def test_folders_that_are_no_checkpoint(tmp_path):
    save_alone(tmp_path / "checkpoint", 1)
    with pytest.raises(CheckpointError, match=r"does not exist\. Did you mean 'checkpoint'"):
        Manifest.read(tmp_path / "chekpoint")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"it has no autopar\.json"):
        Manifest.read(tmp_path / "empty")
    merge_checkpoint(tmp_path / "checkpoint", tmp_path / "merged")
    with pytest.raises(CheckpointError, match="use from_pretrained"):
        Manifest.read(tmp_path / "merged")
    os.rename(tmp_path / "checkpoint", tmp_path / ".gone.old-0123456789abcdef")
    with pytest.raises(CheckpointError, match=r"Rename .*\.gone\.old-0123456789abcdef to gone"):
        Manifest.read(tmp_path / "gone")


EXTRA = {"ema": torch.arange(100.0)}


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
        ("model-tp0-pp1.safetensors", "is truncated or overwritten: expected"),
        ("config.json", "was changed after the save"),
        ("optimizer-tp1-pp0.safetensors", ""),
        ("model-tp2-pp0.safetensors", "does not belong to this checkpoint"),
    ]:
        found = [text for text in problems if text.startswith(f"{tmp_path / start} ") and part in text]
        assert len(found) == 1, (start, problems)
    assert len(problems) == 7


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
