"""autopar.from_pretrained against transformers' from_pretrained followed by initialize: bit for bit, or refused."""

import functools
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    GenerationConfig,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedModel,
    T5ForConditionalGeneration,
)

import autopar
from autopar.cli.split import split_checkpoint
from autopar.errors import CheckpointError, ConfigError
from tests.checkpoint.loading import both, logged, same, shared, tp
from tests.checkpoint.refusals import refusals
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.random_models import build, cases
from tests.small import gpt2, llama

TYPES = ["gpt2", "llama", "mixtral", "qwen2_moe", "bert", "t5", "bart", "dinov2", "gpt_neox", "phi3", "mllama"]
TYPES += ["deepseek_v3", "qwen2_vl", "mamba2", "clip"]


@pytest.mark.tier("test", only=("llama", "deepseek_v3", "t5"))
@pytest.mark.parametrize("model_type", TYPES)
@pooled(world_size=2)
def test_a_family_is_equal(model_type, tmp_path):
    case = cases(model_type)[0]
    model = build(case, 6, 3)
    path = shared(tmp_path / "m", model)
    _, lazy = both(type(model), path, 2)
    assert not lazy.training
    assert not any(parameter.is_meta for parameter in lazy.parameters())


@pooled(world_size=2)
def test_files_in_all_their_forms(tmp_path):
    model = llama()
    sharded = shared(tmp_path / "sharded", model, max_shard_size="20KB")
    assert len(list(Path(sharded).glob("*.safetensors"))) > 2
    both(LlamaForCausalLM, sharded, 2)

    def pickled(folder: Path) -> None:
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        state["lm_head.weight"] = state["lm_head.weight"].t().contiguous().t()  # other strides
        torch.save(state, folder / "pytorch_model.bin")

    def in_several_files(folder: Path) -> None:
        names = list(model.state_dict())
        index: dict[str, Any] = {"metadata": {}, "weight_map": {}}
        for number, part in enumerate((names[:7], names[7:])):
            file = f"pytorch_model-0000{number}.bin"
            torch.save({name: model.state_dict()[name] for name in part}, folder / file)
            index["weight_map"] |= dict.fromkeys(part, file)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))

    def as_torch_1_5_did(folder: Path) -> None:
        torch.save(model.state_dict(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)

    for write in (pickled, in_several_files, as_torch_1_5_did):
        folder = tmp_path / write.__name__
        if dist.get_rank() == 0:
            folder.mkdir()
            model.config.save_pretrained(folder)
            write(folder)
        dist.barrier()
        both(LlamaForCausalLM, str(folder), 2)
    both(LlamaForCausalLM, shared(tmp_path / "hub" / "inner", model, variant="x"), 2, variant="x")
    both(LlamaForCausalLM, str(tmp_path / "hub"), 2, variant="x", subfolder="inner")


@pooled(world_size=2)
def test_other_dtypes(tmp_path):
    path = shared(tmp_path / "m", gpt2())
    for dtype in (torch.bfloat16, "float16", torch.float64):
        both(GPT2LMHeadModel, path, 2, dtype=dtype)
    half = shared(tmp_path / "half", gpt2().to(torch.bfloat16))
    _, lazy = both(AutoModelForCausalLM, half, 2, dtype="auto")
    assert lazy.dtype == torch.bfloat16
    case = cases("t5")[0]
    both(T5ForConditionalGeneration, shared(tmp_path / "t5", build(case, 6, 3)), 2, dtype=torch.float16)  # keeps some


@pooled(world_size=2)
def test_tied_weights_that_are_both_in_the_files(tmp_path):
    model = gpt2()
    equal, different = tmp_path / "equal", tmp_path / "different"
    if dist.get_rank() == 0:
        for folder, extra in ((equal, 0.0), (different, 1.0)):
            folder.mkdir()
            model.config.save_pretrained(folder)
            state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            state["lm_head.weight"] += extra
            torch.save(state, folder / "pytorch_model.bin")
    dist.barrier()
    _, lazy = both(GPT2LMHeadModel, str(equal), 2)
    assert lazy.lm_head.weight is lazy.transformer.wte.weight
    with logged("transformers") as records:
        _, lazy = both(GPT2LMHeadModel, str(different), 2)
    assert lazy.lm_head.weight is not lazy.transformer.wte.weight
    assert any("they stay untied" in text for text in records)


@pooled(world_size=2)
def test_new_heads_are_initialized_equally_and_others_left_out(tmp_path):
    body = BertModel(build(cases("bert")[0], 6, 3).config)
    path = shared(tmp_path / "bert", body)
    with logged("transformers") as records:
        _, lazy = both(BertForSequenceClassification, path, 2, num_labels=5)
    assert any("classifier.weight" in text and "MISSING" in text for text in records)
    weights = [torch.empty_like(lazy.classifier.weight) for _ in range(2)]
    dist.all_gather(weights, lazy.classifier.weight.detach())
    assert torch.equal(*weights) and weights[0].std() > 0.01
    both(BertForMaskedLM, path, 2)
    both(AutoModelForTokenClassification, shared(tmp_path / "gpt2", gpt2()), 2, num_labels=3)
    with raises_everywhere(CheckpointError, "2 missing", "classifier.bias, classifier.weight"):
        autopar.from_pretrained(BertForSequenceClassification, path, tp(2), num_labels=5, strict=True)
    _, info = autopar.from_pretrained(BertForSequenceClassification, path, tp(2), output_loading_info=True)
    assert info["missing_keys"] == {"classifier.bias", "classifier.weight"}
    path = shared(tmp_path / "llama", llama())
    both(AutoModel, path, 2)  # a body out of a task model
    with raises_everywhere(CheckpointError, "0 missing, 1 unexpected", "lm_head.weight"):
        autopar.from_pretrained(AutoModel, path, tp(2), strict=True)


@pytest.mark.parametrize("kind", ["files", "shards"])
def test_arguments_of_transformers(tmp_path, kind):
    if kind == "files":
        gpt2().save_pretrained(tmp_path / "in" / "m")
    else:
        autopar.initialize(gpt2()).save_parallelized(tmp_path / "in" / "m")

    def load(**arguments: Any) -> Any:
        return autopar.from_pretrained(AutoModelForCausalLM, tmp_path / "in" / "m", **arguments)

    for good in (
        {"use_safetensors": True, "low_cpu_mem_usage": True, "weights_only": True, "local_files_only": True},
        {"token": None, "revision": "main", "cache_dir": "x", "ignore_mismatched_sizes": True, "device_map": None},
        {"trust_remote_code": True, "key_mapping": None, "use_kernels": False, "torch_dtype": "float32"},
    ):
        same(load(**good), gpt2())
    assert load(attn_implementation="eager").config._attn_implementation == "eager"
    assert load(embd_pdrop=0.25).transformer.drop.p == 0.25
    assert load(generation_config=GenerationConfig(temperature=0.3)).generation_config.temperature == 0.3
    config = gpt2(embd_pdrop=0.5).config
    lazy = load(model_config=config)
    assert lazy.transformer.drop.p == 0.5 and lazy.config is not config
    inner = autopar.from_pretrained(AutoModelForCausalLM, tmp_path / "in", subfolder="m")
    same(inner, gpt2())
    for bad, message in (
        ({"bogus": 1}, "bogus=1"),
        ({"n_layer": "x"}, "n_layer='x'"),
        ({"dtype": "bogus"}, "dtype='bogus' must be"),
        ({"dtype": torch.int64}, "must be 'auto' or a floating-point dtype"),
        ({"torch_dtype": "nn"}, "dtype='nn' must be"),
        ({"config": config}, "config= must be autopar's config"),
        ({"model_config": 3}, "model_config= a config of"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(**bad)
    with pytest.raises(ConfigError, match="must be a model class"):
        autopar.from_pretrained("gpt2", tmp_path)
    with pytest.raises(ConfigError, match="path=None"):
        autopar.from_pretrained(AutoModelForCausalLM, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["files", "shards"])
def test_the_default_device_does_not_matter(tmp_path, kind):
    llama().bfloat16().save_pretrained(tmp_path / "files")
    autopar.initialize(llama().bfloat16()).save_parallelized(tmp_path / "shards")
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the conversion
        lazy = autopar.from_pretrained(AutoModelForCausalLM, tmp_path / kind, dtype=torch.float32)
    same(lazy, autopar.initialize(LlamaForCausalLM.from_pretrained(tmp_path / "files", dtype=torch.float32)))


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
def test_files_that_one_rank_does_not_see_or_sees_damaged(tmp_path):
    path = shared(tmp_path / "m", llama())
    mine = path if dist.get_rank() == 0 else str(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"elsewhere") as info:
        autopar.from_pretrained(LlamaForCausalLM, mine, tp(2))
    assert dist.get_rank() == 1 or "rank 1 cannot load the model" in str(info.value)
    mine = tmp_path / f"rank{dist.get_rank()}"
    shutil.copytree(path, mine)
    if dist.get_rank() == 1:
        (mine / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"rank1/config\.json must hold a JSON object"):
        autopar.from_pretrained(AutoModelForCausalLM, mine, tp(2))


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
