import json
import os
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from autopar.checkpoint import merge_checkpoint
from autopar.checkpoint.format import parse_size
from autopar.checkpoint.offline import reshard_checkpoint
from autopar.errors import CheckpointError
from autopar.storage.lazy_tensor import LazyTensor
from tests.checkpoint.tiny import same, save_alone, saved_state


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 5])
def test_merged_file_is_what_one_process_would_write(tmp_path, tp):
    plain = save_alone(tmp_path / "ckpt", tp)
    result = merge_checkpoint(tmp_path / "ckpt", tmp_path / "merged")
    save_file(saved_state(plain), tmp_path / "whole", metadata={"format": "pt"})
    assert (tmp_path / "merged" / "model.safetensors").read_bytes() == (tmp_path / "whole").read_bytes()
    assert sorted(os.listdir(tmp_path / "merged")) == ["config.json", "model.safetensors"]
    assert result["files"] == {"model.safetensors": (tmp_path / "whole").stat().st_size}
    assert result["parameters"] == plain.num_parameters()
    assert result["tensors"] == len(saved_state(plain))


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
    save_alone(tmp_path / "ckpt", 2)
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "merges.txt",
        "generation_config.json",
        "spm.model",
        "notes.md",
    ):
        (tmp_path / "ckpt" / name).write_text(name)
    (tmp_path / "ckpt" / "other.safetensors").write_text("weights of something else")
    for name in ("additional_chat_templates/tool.jinja", "decoder_tokenizer/tokenizer.json", ".git/config",
                 "checkpoint-7/config.json", "checkpoint-7/deep/model.safetensors"):  # fmt: skip
        (tmp_path / "ckpt" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "ckpt" / name).write_text(name)
    os.symlink("additional_chat_templates", tmp_path / "ckpt" / "linked")
    merge_checkpoint(tmp_path / "ckpt", tmp_path / "merged")
    reshard_checkpoint(tmp_path / "ckpt", tmp_path / "resharded", tp=1)
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


@pytest.mark.parametrize(
    ("size", "count"), [("5GB", 5 * 10**9), ("1.5 kb", 1500), (7, 7), ("7", 7), ("2TB", 2 * 10**12), ("3MB", 3 * 10**6)]
)
def test_sizes(size, count):
    assert parse_size(size) == count


@pytest.mark.parametrize("size", ["", "GB", "-1GB", "5GiB", 0, -3, True, None, 1.5, "nan"])
def test_sizes_that_are_none(size):
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
