"""Damaged checkpoints: each damage is refused by name, and ``check_checkpoint`` lists all of them."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.checkpoint import Manifest, merge_checkpoint
from autopar.checkpoint.offline import reshard_checkpoint
from autopar.checkpoint.shards import check_checkpoint
from autopar.distributed.mesh import MPU
from autopar.errors import CheckpointError
from autopar.storage.safetensors_io import SafetensorsReader
from tests.checkpoint.tiny import (
    flip,
    local,
    moment,
    rewrite_manifest,
    same,
    save_alone,
    state_tensors,
    tiny,
    with_moments,
)

SHARD = "model-tp1-pp0.safetensors"
TP = ("tensor_parallel_size", "expert_parallel_size")


def swap(folder):
    for one, other in (("0", "x"), ("1", "0"), ("x", "1")):
        os.rename(folder / f"model-tp{one}-pp0.safetensors", folder / f"model-tp{other}-pp0.safetensors")


def mix(folder):
    save_alone(folder.parent / "other", 2, seed=1, pp=2, save_id="another")
    shutil.copy(folder.parent / "other" / SHARD, folder)


def change_the_header(path):
    """A change that the rest of the header does not contradict."""
    path.write_bytes(path.read_bytes().replace(b'"format":"pt"', b'"format":"pT"'))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: os.remove(f / "model-tp1-pp1.safetensors"),
            "ckpt is incomplete: 3 of 4 shards found, model-tp1-pp1.safetensors is missing",
        ),
        (lambda f: os.truncate(f / SHARD, 200), f"{SHARD} is truncated or overwritten: expected \\d+ bytes, got 200"),
        (lambda f: os.truncate(f / SHARD, (f / SHARD).stat().st_size - 1), f"{SHARD} is truncated or overwritten"),
        (swap, f"model-tp0-pp0.safetensors was saved as {SHARD}"),
        (
            lambda f: shutil.copy(f / "model-tp0-pp1.safetensors", f / "model-tp1-pp1.safetensors"),
            "model-tp1-pp1.safetensors was saved as model-tp0-pp1.safetensors",
        ),
        (mix, f"{SHARD} belongs to another save"),
        (lambda f: flip(f / SHARD, -3), f"{SHARD} is damaged"),
        (lambda f: change_the_header(f / SHARD), f"{SHARD} is damaged: the checksum of its header differs"),
        (lambda f: os.remove(f / "config.json"), "config.json is missing"),
    ],
)
def test_broken_checkpoints_are_refused_and_nothing_is_written(tmp_path, damage, message):
    save_alone(tmp_path / "ckpt", 2, pp=2)
    merge_checkpoint(tmp_path / "ckpt", tmp_path / "good")  # the undamaged one works
    damage(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match=message):
        merge_checkpoint(tmp_path / "ckpt", tmp_path / "merged")
    assert {name for name in os.listdir(tmp_path) if "merged" in name} == set()


def model(data):
    return data["parts"]["model"]


def shard(data, tp=0):
    return model(data)["files"][f"model-tp{tp}-pp0.safetensors"]


def renamed(data, name, **record):
    model(data)["files"][name] = {**model(data)["files"].pop(SHARD), **record}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format_version=1), r"format_version 1; this .* reads 9\n  Load it with the version"),
        (lambda d: d.pop("format_version"), "'format_version' is missing"),
        (lambda d: d.pop("parts"), "damaged: 'parts' is missing"),
        (lambda d: d["parts"].pop("model"), "damaged: 'model' is missing"),
        (lambda d: d["parts"].update(models=model(d)), "got 'models'"),
        (lambda d: d.pop("save_id"), "damaged: 'save_id' is missing"),
        (lambda d: model(d)["tensors"]["gate"].update(saved_as="proj.weight"), "two tensors are saved as proj.weight"),
        (lambda d: d["along"].update({"../config.json": "0" * 16}), r"names the file '\.\./config\.json'"),
        (lambda d: renamed(d, "../x.safetensors"), r"the file name '\.\./x\.safetensors' does not match its record"),
        (lambda d: shard(d)["xxh3"].pop("gate"), "no file holds row 0 of gate on"),
        (lambda d: shard(d, 1)["xxh3"].update(step="0" * 16), "several files hold row 0 of step on tensor-parallel"),
        (lambda d: shard(d)["rows"].update(gate=(0, 3)), "no file holds row 3 of gate on tensor-parallel rank 0"),
    ],
)
def test_a_manifest_that_contradicts_itself(tmp_path, change, message):
    save_alone(tmp_path, 2)
    rewrite_manifest(tmp_path, lambda data: (change(data), data)[1])
    for read in (lambda: merge_checkpoint(tmp_path, tmp_path / "merged"), lambda: check_checkpoint(tmp_path)):
        with pytest.raises(CheckpointError, match=message):
            read()


def test_a_manifest_that_was_changed(tmp_path):
    """Its own checksum is that of other bytes, even if the JSON is the same."""
    changed = r"autopar\.json was changed after the save: its checksum"

    def refused(message=changed):
        for read in (Manifest.read, check_checkpoint):
            with pytest.raises(CheckpointError, match=message):
                read(tmp_path)

    save_alone(tmp_path, 2)
    (tmp_path / "autopar.json").write_bytes((tmp_path / "autopar.json").read_bytes().replace(b'"tiny"', b'"tiny" '))
    refused()
    for policy in ("tiny.yaml", "other.yaml"):
        rewrite_manifest(tmp_path, lambda data, policy=policy: {**data, "policy": policy})
        Manifest.read(tmp_path)
    rewrite_manifest(tmp_path, lambda data: {**data, "hf_prefix": "x."}, checksum_too=False)
    refused()
    text = (tmp_path / "autopar.json").read_bytes()
    (tmp_path / "autopar.json").write_bytes(text[: text.rindex(b",\n")] + b"\n}\n")  # no checksum at all
    refused()
    for text in (b"[]", b"null"):
        (tmp_path / "autopar.json").write_bytes(text)
        refused("autopar.json is not a manifest")
    for text in (b"", b"{", b"\xff\xfe", b"[" * 100_000):
        (tmp_path / "autopar.json").write_bytes(text)
        refused(r"autopar\.json")


def test_folders_that_are_no_checkpoint(tmp_path):
    save_alone(tmp_path / "checkpoint", 1)
    with pytest.raises(CheckpointError, match=r"does not exist\. Did you mean 'checkpoint'"):
        Manifest.read(tmp_path / "chekpoint")
    (tmp_path / "empty").mkdir()
    for read in (Manifest.read, check_checkpoint):
        with pytest.raises(CheckpointError, match=r"it has no autopar\.json"):
            read(tmp_path / "empty")
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
    shards = [*tmp_path.glob("*.safetensors")]
    assert result["problems"] == [] and result["directory"] == str(tmp_path)
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


COUNT = 75
BYTES = ["flip", "flip", "truncate", "append", "scramble"]


def damage_bytes(draw: random.Random, path: Path) -> str | None:
    """Change a file; return the tensor of which bytes were changed, and nothing else."""
    way, data, entries = draw.choice(BYTES), bytearray(path.read_bytes()), {}
    if way == "flip" and path.suffix == ".safetensors":
        with SafetensorsReader(path) as reader:
            entries = reader.entries
    at = draw.randrange(len(data))
    if way == "flip":
        data[at] ^= 1 << draw.randrange(8)
    elif way == "truncate":
        del data[draw.choice([0, 4, len(data) - 1, at]) :]
    elif way == "append":
        data += draw.randbytes(draw.choice([1, 8, 1000]))
    else:
        data = bytearray(draw.randbytes(len(data)))
    path.write_bytes(data)
    return next((name for name, entry in entries.items() if entry.start <= at < entry.stop), None)


def training(seed: int) -> dict[str, Any]:
    scheduler = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.zeros(1)], 0.1), lambda step: 1.0)
    return {"lr_scheduler": scheduler, "extra": {"epoch": seed, "ema": [torch.arange(50.0) + seed, ("x", {"y": 1.5})]}}


def load(mpu: MPU, folder: Path) -> Any:
    """Load everything into something new; whatever is refused leaves the model as it was."""
    model = tiny(mpu, seed=7)
    optimizer, extra = with_moments(model, seed=7), {}
    before = (local(model), state_tensors(optimizer))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    try:
        model.from_parallelized(folder, optimizer=optimizer, lr_scheduler=scheduler, extra=extra)
    except CheckpointError as error:
        if "rand" not in str(error):
            assert same(local(model), before[0]), f"it was refused after it had been loaded: {error}"
            assert all(torch.equal(*pair) for pair in zip(state_tensors(optimizer), before[1], strict=True))
        raise
    return model, optimizer


def is_what_was_saved(loaded: Any, plain: Any) -> None:
    model, optimizer = loaded
    assert same(local(model), local(plain)), "other weights were loaded"
    plan = model._autopar_checkpoint.plan
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            due = moment(name, key, 0, plan.tensors[name])
            assert torch.equal(optimizer.state[parameter][key], due), f"another {key} of {name} was loaded"


def refused(action: Callable[[], Any]) -> str | None:
    """The message of the CheckpointError, or what the check lists; any other exception goes through."""
    try:
        done = action()
    except CheckpointError as error:
        return str(error)
    return "\n".join(done.get("problems", ())) or None if isinstance(done, dict) else None


@pytest.mark.tier("all")
def test_every_damage_is_found(tmp_path: Path, alone: MPU) -> None:
    plain = save_alone(tmp_path / "good", 2, pp=2, optimizer=True, **training(0))
    folder, merged = tmp_path / "ckpt", tmp_path / "merged"
    is_what_was_saved(load(alone, tmp_path / "good"), plain)
    named = 0
    for number in range(COUNT):
        draw = random.Random(number)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(merged, ignore_errors=True)
        shutil.copytree(tmp_path / "good", folder)
        name = draw.choice(sorted(name for name in os.listdir(folder) if name.endswith((".safetensors", ".json"))))
        tensor = damage_bytes(draw, folder / name)
        loaded: list[Any] = []
        said = {
            "check": refused(lambda: check_checkpoint(folder)),
            "load": refused(lambda loaded=loaded: loaded.append(load(alone, folder))),
            "merge": refused(lambda: merge_checkpoint(folder, merged)),
        }
        if loaded:
            is_what_was_saved(loaded[0], plain)
        others = {"merge"} if name.startswith(("optimizer", "extra")) else set()
        unconcerned = {"load"} if name == "config.json" else others
        for who, text in said.items():
            case = f"{who}, damage {number} of {name}: {text}"
            assert (text is None) == (who in unconcerned), case
            assert text is None or (name in text and (tensor is None or tensor in text)), case
        named += tensor is not None
        assert merged.exists() == (said["merge"] is None), number
    assert named > COUNT / 10
