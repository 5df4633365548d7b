"""autopar.from_pretrained against transformers' from_pretrained followed by initialize: equal bit for bit."""

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    GenerationConfig,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
)

import autopar
from autopar.errors import CheckpointError, ConfigError
from tests.checkpoint.loading import both, same, shared, tp
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


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_it_trains_generates_and_saves(tmp_path):
    path = shared(tmp_path / "m", llama())
    plain, lazy = both(AutoModelForCausalLM, path, 2)
    ids = torch.arange(12).view(2, 6)
    expected, found = plain(ids, labels=ids), lazy(ids, labels=ids)
    assert torch.equal(found.loss, expected.loss)
    found.loss.backward()
    assert all(parameter.grad is not None for parameter in lazy.parameters())
    assert torch.equal(lazy.generate(ids, max_new_tokens=3), plain.generate(ids, max_new_tokens=3))
    lazy.save_parallelized(str(tmp_path / "merged"), merge_checkpoints=True)
    again = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    original = LlamaForCausalLM.from_pretrained(path)
    for (name, one), other in zip(original.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name
    whole = autopar.deparallelize(lazy)
    for (name, one), other in zip(whole.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name


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
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    _, lazy = both(GPT2LMHeadModel, str(different), 2)
    logging.getLogger("transformers").removeHandler(handler)
    assert lazy.lm_head.weight is not lazy.transformer.wte.weight
    assert any("they stay untied" in text for text in records)


@pooled(world_size=2)
def test_a_new_head_is_initialized_equally(tmp_path):
    body = BertModel(build(cases("bert")[0], 6, 3).config)
    path = shared(tmp_path / "bert", body)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    _, lazy = both(BertForSequenceClassification, path, 2, num_labels=5)
    logging.getLogger("transformers").removeHandler(handler)
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


@pooled(world_size=2)
def test_a_body_out_of_a_task_model(tmp_path):
    path = shared(tmp_path / "m", llama())
    both(AutoModel, path, 2)
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
