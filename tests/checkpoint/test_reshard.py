"""Checkpoints that one process makes of others: shards of another mesh, and merged folders."""

import json
import os
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from autopar.checkpoint import Manifest, merge_checkpoint
from autopar.checkpoint.format import parse_size
from autopar.checkpoint.offline import check_sizes, reshard_checkpoint
from autopar.checkpoint.shards import check_checkpoint
from autopar.errors import CheckpointError
from autopar.storage.lazy_tensor import LazyTensor
from tests.checkpoint.tiny import (
    FULL_DISK,
    before_each_write,
    contents,
    flip,
    raising,
    same,
    save_alone,
    saved_state,
    stored_is,
)

MESHES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (3, 1), (3, 3)]
EXTRA = {"epoch": 3, "ema": [torch.arange(5.0), (torch.tensor(2), "x")]}


@pytest.mark.parametrize("old", [(1, 1), (2, 2), (4, 1), (5, 1)], ids=str)
def test_to_every_mesh_and_what_is_merged_then_is_byte_for_byte_the_same(tmp_path, old):
    plain = save_alone(tmp_path / "old", old[0], pp=old[1], optimizer=True, extra=EXTRA)
    merged = merge_checkpoint(tmp_path / "old", tmp_path / "merged")
    save_file(saved_state(plain), tmp_path / "whole", metadata={"format": "pt"})
    assert (tmp_path / "merged" / "model.safetensors").read_bytes() == (tmp_path / "whole").read_bytes()
    assert sorted(os.listdir(tmp_path / "merged")) == ["config.json", "model.safetensors"]
    assert merged["files"] == {"model.safetensors": (tmp_path / "whole").stat().st_size}
    assert (merged["parameters"], merged["tensors"]) == (plain.num_parameters(), len(saved_state(plain)))
    before = contents(tmp_path / "old")
    stored_is(tmp_path / "old", plain.state_dict())
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
    flip(tmp_path / "old" / "model-tp1-pp0.safetensors")
    with pytest.raises(CheckpointError, match=r"model-tp1-pp0\.safetensors is damaged: the bytes of \w+"):
        reshard_checkpoint(tmp_path / "old", tmp_path / "new", tp=3)
    assert sorted(os.listdir(tmp_path)) == ["full", "old"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), FULL_DISK], ids=["ctrl-c", "disk"])
def test_an_interrupted_one_leaves_nothing_and_can_be_run_again(tmp_path, stop):
    save_alone(tmp_path / "old", 2, optimizer=True)
    save_alone(tmp_path / "new", 1, seed=1)
    before = contents(tmp_path / "new")
    error = CheckpointError if stop is FULL_DISK else KeyboardInterrupt
    with before_each_write(raising(stop, "gate::exp_avg")), pytest.raises(error, match=r"No space|^$"):
        reshard_checkpoint(tmp_path / "old", tmp_path / "new", tp=3, force=True)
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]
    assert same(contents(tmp_path / "new"), before)
    reshard_checkpoint(tmp_path / "old", tmp_path / "new", tp=3, force=True)
    assert same(contents(tmp_path / "new"), contents(tmp_path / "old"))


def test_only_numbers_with_a_point_become_another_dtype(tmp_path):
    plain = save_alone(tmp_path / "ckpt", 2)
    merge_checkpoint(tmp_path / "ckpt", tmp_path / "merged", dtype="bfloat16")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    due = {name: t.bfloat16() if t.is_floating_point() else t for name, t in saved_state(plain).items()}
    assert {torch.int64, torch.bool} < {tensor.dtype for tensor in due.values()}
    assert same(dict(sorted(merged.items())), dict(sorted(due.items())))


@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_splitting_is_hugging_faces(tmp_path, format):
    from huggingface_hub import split_torch_state_dict_into_shards

    plain = save_alone(tmp_path / "ckpt", 2)
    merge_checkpoint(tmp_path / "ckpt", tmp_path / "merged", max_shard_size=300, format=format)
    pattern = "model{suffix}.safetensors" if format == "safetensors" else "pytorch_model{suffix}.bin"
    index = f"{pattern.replace('{suffix}', '')}.index.json"
    split = split_torch_state_dict_into_shards(saved_state(plain), filename_pattern=pattern, max_shard_size=300)
    assert len(split.filename_to_tensors) > 2
    assert sorted(os.listdir(tmp_path / "merged")) == sorted(["config.json", index, *split.filename_to_tensors])
    written = json.loads((tmp_path / "merged" / index).read_text())
    assert written["weight_map"] == split.tensor_to_filename
    assert written["metadata"] == {"total_parameters": plain.num_parameters(), **split.metadata}
    for file, names in split.filename_to_tensors.items():
        path = tmp_path / "merged" / file
        held = load_file(path) if format == "safetensors" else torch.load(path, weights_only=True)
        assert same(dict(sorted(held.items())), {name: saved_state(plain)[name] for name in sorted(names)})


def test_companions_come_along_and_force_replaces(tmp_path):
    save_alone(tmp_path / "ckpt", 2, optimizer=True, extra=EXTRA)
    (tmp_path / "ckpt" / "other.safetensors").write_text("weights of something else")
    for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "generation_config.json", "spm.model",
                 "notes.md", "additional_chat_templates/tool.jinja", "decoder_tokenizer/tokenizer.json", ".git/config",
                 "checkpoint-7/config.json", "checkpoint-7/deep/model.safetensors"):  # fmt: skip
        (tmp_path / "ckpt" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "ckpt" / name).write_text(name)
    os.symlink("additional_chat_templates", tmp_path / "ckpt" / "linked")
    merge_checkpoint(tmp_path / "ckpt", tmp_path / "merged")
    reshard_checkpoint(tmp_path / "ckpt", tmp_path / "resharded", tp=3, optimizer=False)
    manifest = Manifest.read(tmp_path / "resharded")
    assert set(manifest.parts) == {"model", "extra"}
    assert "extra" in manifest.training and "optimizer" not in manifest.training
    assert set(manifest.along) == {"config.json", "generation_config.json"}
    companions = {"config.json", "generation_config.json", "merges.txt", "tokenizer.json", "tokenizer_config.json"}
    companions |= {"spm.model", "notes.md", "additional_chat_templates", "decoder_tokenizer"}
    assert set(os.listdir(tmp_path / "merged")) == {*companions, "model.safetensors"}
    for folder in ("merged", "resharded"):  # and no other checkpoint
        assert {str(path.relative_to(tmp_path / folder)) for path in (tmp_path / folder).rglob("*/**/*")} == {
            "additional_chat_templates/tool.jinja", "decoder_tokenizer/tokenizer.json"
        }  # fmt: skip
    with pytest.raises(CheckpointError, match="--force"):
        merge_checkpoint(tmp_path / "ckpt", tmp_path / "merged")
    merge_checkpoint(tmp_path / "ckpt", tmp_path / "merged", force=True, format="bin")
    assert set(os.listdir(tmp_path / "merged")) == {*companions, "pytorch_model.bin"}


def test_sizes():
    sizes = {"5GB": 5 * 10**9, "1.5 kb": 1500, 7: 7, "7": 7, "2TB": 2 * 10**12, "3MB": 3 * 10**6}
    assert {size: parse_size(size) for size in sizes} == sizes
    for size in ("", "GB", "-1GB", "5GiB", 0, -3, True, None, 1.5, "nan"):
        with pytest.raises(CheckpointError, match="max_shard_size"):
            parse_size(size)


@pytest.mark.parametrize(("format", "most"), [("safetensors", 0), ("bin", 10)])
def test_merging_keeps_one_tensor_in_memory(tmp_path, monkeypatch, format, most):
    save_alone(tmp_path / "ckpt", 4)
    made: list[weakref.ref[torch.Tensor]] = []
    alive = []
    read = LazyTensor.read

    def counting(self, *args):
        tensor = read(self, *args)
        made.append(weakref.ref(tensor))
        alive.append(sum(ref() is not None for ref in made))
        return tensor

    monkeypatch.setattr(LazyTensor, "read", counting)
    merge_checkpoint(tmp_path / "ckpt", tmp_path / "merged", format=format)
    assert max(alive, default=0) == most
