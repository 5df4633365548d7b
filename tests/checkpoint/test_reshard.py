"""Shards of another mesh, written by one process from the shards that are there."""

import os

import pytest
import torch

from autopar.checkpoint import Manifest, merge_checkpoint
from autopar.checkpoint.offline import check_sizes, reshard_checkpoint
from autopar.checkpoint.shards import ShardReader, check_checkpoint
from autopar.errors import CheckpointError
from autopar.storage.safetensors_io import SafetensorsWriter
from tests.checkpoint.tiny import moment, same, save_alone, saved_state

MESHES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (3, 1), (3, 3)]
EXTRA = {"epoch": 3, "ema": [torch.arange(5.0), (torch.tensor(2), "x")]}


def contents(folder) -> dict[str, torch.Tensor]:
    with ShardReader(folder, ("model", "optimizer", "extra")) as shards:
        return {
            f"{part}/{name}": shards.lazy(name, part).read()
            for part, entry in shards.manifest.parts.items()
            for name in entry.tensors
        }


@pytest.mark.parametrize("old", [(1, 1), (2, 2), (4, 1), (5, 1)], ids=str)
def test_to_every_mesh_and_what_is_merged_then_is_byte_for_byte_the_same(tmp_path, old):
    plain = save_alone(tmp_path / "old", old[0], pp=old[1], optimizer=True, extra=EXTRA)
    merge_checkpoint(tmp_path / "old", tmp_path / "merged")
    before = contents(tmp_path / "old")
    due = {name: moment(name, key, 0, entry) for name, entry in Manifest.read(tmp_path / "old").tensors.items()
           for key in ["exp_avg"] if isinstance(plain.state_dict()[name], torch.Tensor)}  # fmt: skip
    for tp, pp in MESHES:
        new = tmp_path / f"{tp}-{pp}"
        result = reshard_checkpoint(tmp_path / "old", new, tp=tp, pp=pp)
        manifest = Manifest.read(new)
        assert tuple(manifest.sizes) == (tp, pp, 1, 1)
        assert result["files"] == {name: (new / name).stat().st_size for name in manifest.files}
        assert result["tensors"] == len(manifest.tensors)
        assert set(os.listdir(new)) == {"autopar.json", "config.json", *manifest.files}
        assert len(manifest.parts["model"].files) == len(manifest.parts["optimizer"].files) == tp * pp
        assert check_checkpoint(new)["problems"] == []
        assert same(contents(new), before)
        assert same({k: v for k, v in contents(new).items() if k.startswith("model/") and k[6:] in saved_state(plain)},
                    {f"model/{k}": v for k, v in saved_state(plain).items()})  # fmt: skip
        assert torch.equal(contents(new)["optimizer/gate::exp_avg"], due["gate"])
        merge_checkpoint(new, tmp_path / "again", force=True)
        for name in ("config.json", "model.safetensors"):
            assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "merged" / name).read_bytes()


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 5])
def test_shards_are_those_that_ranks_of_that_mesh_would_have_saved(tmp_path, tp):
    save_alone(tmp_path / "old", 2, optimizer=True)
    save_alone(tmp_path / "due", tp, optimizer=True)
    reshard_checkpoint(tmp_path / "old", tmp_path / "new", tp=tp)
    due, new = Manifest.read(tmp_path / "due"), Manifest.read(tmp_path / "new")
    assert new.parameters == due.parameters and list(new.tensors) == list(due.tensors)
    for name in due.files:
        assert _without_heads(new.files[name], tp) == _without_heads(due.files[name], tp), name
    assert same(contents(tmp_path / "new"), contents(tmp_path / "due"))


def _without_heads(record, tp: int) -> dict[str, str]:
    """Checksums; on an uneven mesh the ranks would share query heads out after their KV heads, and a file need not."""
    return {key: value for key, value in record.checksums.items() if tp < 3 or not key.startswith(("qkv", "proj.w"))}


def test_without_the_optimizer_and_with_what_lies_beside(tmp_path):
    save_alone(tmp_path / "old", 2, optimizer=True, extra=EXTRA)
    for name in ("tokenizer.json", "generation_config.json", "notes.md"):
        (tmp_path / "old" / name).write_text(name)
    reshard_checkpoint(tmp_path / "old", tmp_path / "new", tp=3, optimizer=False)
    manifest = Manifest.read(tmp_path / "new")
    assert set(manifest.parts) == {"model", "extra"} and "optimizer" not in manifest.training
    assert "extra" in manifest.training
    assert set(manifest.along) == {"config.json", "generation_config.json"}
    assert (tmp_path / "new" / "tokenizer.json").read_text() == "tokenizer.json"
    assert (tmp_path / "new" / "notes.md").exists()


def test_what_is_refused_writes_nothing(tmp_path):
    save_alone(tmp_path / "old", 2)
    for sizes in ({"tp": 0}, {"tp": 2, "pp": 0}, {"tp": 5000}, {"tp": 100, "pp": 100}):
        with pytest.raises(CheckpointError, match=r"--tp|--pp"):
            reshard_checkpoint(tmp_path / "old", tmp_path / "new", **sizes)
    check_sizes(64, 64)
    for target in (tmp_path / "old", tmp_path):
        with pytest.raises(CheckpointError, match="would replace its source"):
            reshard_checkpoint(tmp_path / "old", target, tp=3, force=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "cat.jpg").write_text("x")
    with pytest.raises(CheckpointError, match="full is not empty\n  Pass force=True"):
        reshard_checkpoint(tmp_path / "old", tmp_path / "full", tp=3)
    assert sorted(os.listdir(tmp_path)) == ["full", "old"]
    data = bytearray((tmp_path / "old" / "model-tp1-pp0.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "old" / "model-tp1-pp0.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model-tp1-pp0\.safetensors is damaged: the bytes of \w+"):
        reshard_checkpoint(tmp_path / "old", tmp_path / "new", tp=3)
    assert sorted(os.listdir(tmp_path)) == ["full", "old"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError(28, "No space left on device")], ids=["ctrl-c", "disk"])
def test_an_interrupted_one_leaves_nothing_and_can_be_run_again(tmp_path, monkeypatch, stop):
    save_alone(tmp_path / "old", 2, optimizer=True)
    save_alone(tmp_path / "new", 1, seed=1)
    before = contents(tmp_path / "new")
    write = SafetensorsWriter.write
    calls = []

    def interrupted(self, name, tensor):
        calls.append(name)
        if len(calls) == 9:
            raise stop
        write(self, name, tensor)

    monkeypatch.setattr(SafetensorsWriter, "write", interrupted)
    with pytest.raises(KeyboardInterrupt if stop is KeyboardInterrupt else CheckpointError, match=r"No space|^$"):
        reshard_checkpoint(tmp_path / "old", tmp_path / "new", tp=3, force=True)
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]
    assert same(contents(tmp_path / "new"), before)
    monkeypatch.undo()
    reshard_checkpoint(tmp_path / "old", tmp_path / "new", tp=3, force=True)
    assert same(contents(tmp_path / "new"), contents(tmp_path / "old"))
