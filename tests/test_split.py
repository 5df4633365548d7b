"""A Hugging Face checkpoint cut into shards beforehand: merged again it is the same, and what cannot be cut is said."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2LMHeadModel
from typer.testing import CliRunner

from autopar.checkpoint.offline import merge_checkpoint, reshard_checkpoint
from autopar.checkpoint.shards import check_checkpoint
from autopar.cli import app
from autopar.cli.split import split_checkpoint
from autopar.errors import AutoparError
from tests.random_models import Case, build
from tests.small import gpt2, llama

MODELS = {
    "gpt2": lambda: gpt2(n_embd=32, n_head=4),
    "uneven llama": lambda: llama(
        hidden_size=72, num_attention_heads=9, intermediate_size=50, vocab_size=100, tie_word_embeddings=True
    ),
    "mixtral": lambda: build(Case("mixtral", "MixtralForCausalLM"), 4, 2),
    "t5": lambda: build(Case("t5", "T5ForConditionalGeneration"), 4, 2),
    "bert": lambda: build(Case("bert", "BertForMaskedLM"), 4, 2),
}


@pytest.mark.parametrize("kind", MODELS)
def test_split_resharded_and_merged_is_the_original(tmp_path, kind):
    MODELS[kind]().save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    split_checkpoint(tmp_path / "hf", tmp_path / "split", tp=3 if "llama" in kind else 4, pp=2)
    reshard_checkpoint(tmp_path / "split", tmp_path / "other", tp=2)
    merge_checkpoint(tmp_path / "other", tmp_path / "merged")
    for folder in ("split", "other"):
        assert check_checkpoint(tmp_path / folder)["problems"] == []
        assert (tmp_path / folder / "tokenizer.json").is_file()
    one, two = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "merged"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert (tmp_path / "merged" / "tokenizer.json").read_text() == "{}"


def test_sizes_that_the_model_cannot_run_with_are_refused(tmp_path):
    for kind, fits in (("uneven llama", 9), ("gpt2", 4), ("t5", 4)):  # 3 KV heads, which several ranks may hold
        hf, split = tmp_path / f"{kind} hf", tmp_path / kind
        MODELS[kind]().save_pretrained(hf)
        split_checkpoint(hf, split, tp=2)
        reshard_checkpoint(split, tmp_path / "largest", tp=fits, pp=2, force=True)
        message = f"{fits} heads cannot be sharded over {fits + 1} ranks.\n(.|\n)*fits this model: {fits}"
        with pytest.raises(AutoparError, match=message):
            split_checkpoint(hf, tmp_path / "other", tp=fits + 1)
    assert not (tmp_path / "other").exists()


def test_from_bin_files_and_into_another_dtype(tmp_path):
    model = MODELS["gpt2"]()
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "hf" / "pytorch_model.bin")
    split_checkpoint(tmp_path / "hf", tmp_path / "split", tp=2, dtype="bfloat16")
    merge_checkpoint(tmp_path / "split", tmp_path / "merged")
    merged = GPT2LMHeadModel.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.bfloat16
    for name, tensor in model.state_dict().items():
        assert torch.equal(merged.state_dict()[name], tensor.bfloat16()), name


def _without(folder, name):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path, {"format": "pt"})


def _index(folder, text):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)


def _config(**changes):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "hf is not a Hugging Face checkpoint: config.json is"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read: Expecting property"),
        (lambda folder: (folder / "model.safetensors").unlink(), "hf cannot be loaded: "),
        (lambda folder: _without(folder, "transformer.h.1.mlp.c_fc.bias"),
         "must hold exactly the weights of a GPT2LMHeadModel: it lacks transformer.h.1.mlp.c_fc.bias"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100), "is not a complete safetensors file"),
        (_config(architectures=["GPT2LMHeadMode"]),
         "must be a model of transformers, got ['GPT2LMHeadMode']. Did you mean 'GPT2LMHeadModel'"),
        (_config(auto_map={"AutoModel": "code.Model"}), "contains custom code, which split does not run"),
        (_config(n_embd=64), "tensors do not have the shapes of GPT2LMHeadModel"),
        (_config(n_head=3), "hf cannot be loaded: `embed_dim` must be divisible by num_heads"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json cannot be read: "),
        (lambda folder: _index(folder, "{}"), "model.safetensors.index.json must have a weight_map"),
    ],
)  # fmt: skip
def test_what_cannot_be_split(tmp_path, damage, message):
    MODELS["gpt2"]().save_pretrained(tmp_path / "hf")
    damage(tmp_path / "hf")
    result = CliRunner().invoke(app, ["split", str(tmp_path / "hf"), str(tmp_path / "split"), "--tp", "2"])
    assert result.exit_code == 1
    assert message in result.stderr and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_command_line(tmp_path):
    MODELS["gpt2"]().save_pretrained(tmp_path / "hf")

    def run(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    result = run("split", tmp_path / "hf", tmp_path / "split", "--tp", 2, "--json")
    assert result.exit_code == 0, result.output
    assert sorted(json.loads(result.stdout)["files"]) == ["model-tp0-pp0.safetensors", "model-tp1-pp0.safetensors"]
    result = run("reshard", tmp_path / "split", tmp_path / "other", "--tp", 4, "--pp", 2)
    assert result.exit_code == 0, result.output
    assert "resharded 28 tensors" in result.stdout and "model-tp3-pp1.safetensors" in result.stdout
    result = run("reshard", tmp_path / "split", tmp_path / "other", "--tp", 0)
    assert "error: --tp and --pp must be at least 1" in result.stderr
    result = run("reshard", tmp_path / "split", tmp_path / "other", "--tp", 2)
    assert result.exit_code == 1 and "--force" in result.stderr
    result = run("split", tmp_path / "hf", tmp_path / "five", "--tp", 5)
    assert "tensor_parallel_size=5 does not fit GPT2LMHeadModel: 4 heads" in result.stderr
    result = run("check", tmp_path / "other")
    assert result.exit_code == 0 and "is complete: 8 files, 28 tensors" in result.stdout
    path = tmp_path / "other" / "model-tp3-pp1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    result = run("check", tmp_path / "other")
    assert result.exit_code == 1 and "model-tp3-pp1.safetensors is damaged: the bytes of " in result.stderr
    result = run("inspect", tmp_path / "split", "--json")
    held = {entry["name"]: entry["held_by"] for entry in json.loads(result.stdout)["tensors"]}
    assert held["transformer.wte.weight"] == [
        {"file": "model-tp0-pp0.safetensors", "tp": 0, "rows": None, "shape": [66, 32]},
        {"file": "model-tp1-pp0.safetensors", "tp": 1, "rows": None, "shape": [65, 32]},
    ]
