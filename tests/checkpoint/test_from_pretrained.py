"""autopar.from_pretrained against transformers' from_pretrained followed by initialize: equal bit for bit."""

from __future__ import annotations

import json
import logging
import re
import shutil
import warnings
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
    T5Config,
    T5ForConditionalGeneration,
)

import autopar
from autopar.checkpoint.lazy import RangeFile
from autopar.errors import CheckpointError, ConfigError
from autopar.split import split_checkpoint
from tests.pool import pooled
from tests.random_models import build, cases
from tests.small import gpt2, llama
from tests.worlds import raises_everywhere

TYPES = ["gpt2", "llama", "mixtral", "qwen2_moe", "bert", "t5", "bart", "dinov2", "gpt_neox", "phi3", "mllama"]
TYPES += ["deepseek_v3", "qwen2_vl", "mamba2", "clip"]


def tp(size: int) -> dict[str, Any]:
    return {"model_parallelism": {"tensor_parallel_size": size}}


def shared(path: Path | str, model: Any = None, **options: Any) -> str:
    """A folder that rank 0 has written the model to."""
    if model is not None and dist.get_rank() == 0:
        model.save_pretrained(path, **options)
    dist.barrier()
    return str(path)


def same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    """Parameters, buffers, what is tied to what, and where all of it lies."""
    ours, theirs = (dict(m.named_parameters(remove_duplicate=False)) for m in (one, other))
    assert list(ours) == list(theirs)
    for names in (ours, theirs):
        for name, parameter in names.items():
            assert type(parameter) is torch.nn.Parameter, name
            assert "_autopar_sources" not in str(vars(parameter)), name
    assert _ties(ours) == _ties(theirs)
    for kind, left, right in (
        ("parameter", ours, theirs),
        ("buffer", dict(one.named_buffers()), dict(other.named_buffers())),
    ):
        assert list(left) == list(right)
        for name, tensor in left.items():
            expected = right[name]
            assert (tensor.dtype, tensor.device, tensor.requires_grad) == (
                *(expected.dtype, expected.device, expected.requires_grad),
            ), f"{kind} {name}"
            assert torch.equal(tensor, expected), f"{kind} {name}"


def _ties(named: dict[str, Any]) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, parameter in named.items():
        groups.setdefault(id(parameter), []).append(name)
    return sorted(groups.values())


def both(model_class: Any, path: str, size: int, **kwargs: Any) -> tuple[Any, Any]:
    torch.manual_seed(5 + dist.get_rank())  # rank 0's counts
    plain = autopar.initialize(model_class.from_pretrained(path, **kwargs), tp(size))
    torch.manual_seed(5 + dist.get_rank())
    lazy = autopar.from_pretrained(model_class, path, tp(size), **kwargs)
    same(lazy, plain)
    return plain, lazy


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("model_type", TYPES)
@pooled(world_size=2)
def test_a_family_is_equal(model_type, size, tmp_path):
    case = cases(model_type)[0]
    model = build(case, 6, 3)
    path = shared(tmp_path / "m", model)
    _, lazy = both(type(model), path, size)
    assert not lazy.training
    assert not any(parameter.is_meta for parameter in lazy.parameters())


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
    pickled = tmp_path / "bin"
    if dist.get_rank() == 0:
        pickled.mkdir()
        model.config.save_pretrained(pickled)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        state["lm_head.weight"] = state["lm_head.weight"].t().contiguous().t()  # other strides
        torch.save(state, pickled / "pytorch_model.bin")
    dist.barrier()
    both(LlamaForCausalLM, str(pickled), 2)
    several = tmp_path / "bins"
    if dist.get_rank() == 0:
        several.mkdir()
        model.config.save_pretrained(several)
        names = list(model.state_dict())
        index: dict[str, Any] = {"metadata": {}, "weight_map": {}}
        for number, part in enumerate((names[:7], names[7:])):
            file = f"pytorch_model-0000{number}.bin"
            torch.save({name: model.state_dict()[name] for name in part}, several / file)
            index["weight_map"] |= dict.fromkeys(part, file)
        (several / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    dist.barrier()
    both(LlamaForCausalLM, str(several), 2)
    old = tmp_path / "old"
    if dist.get_rank() == 0:
        old.mkdir()
        model.config.save_pretrained(old)
        torch.save(model.state_dict(), old / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    dist.barrier()
    both(LlamaForCausalLM, str(old), 2)
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


@pooled(world_size=2)
def test_other_shapes_are_an_error_with_a_list(tmp_path):
    path = shared(tmp_path / "m", llama())
    with raises_everywhere(
        CheckpointError, "2 tensors do not have the shapes", "lm_head.weight: [131, 24] in the files"
    ):
        autopar.from_pretrained(LlamaForCausalLM, path, tp(2), vocab_size=140)
    both(LlamaForCausalLM, path, 2, vocab_size=140, ignore_mismatched_sizes=True)


@pooled(world_size=2)
def test_damaged_files(tmp_path):
    model = llama()
    rank = dist.get_rank()

    def damaged(name: str, damage: Any, **options: Any) -> str:
        path = shared(tmp_path / name, model, **options)
        if rank == 0:
            damage(Path(path))
        dist.barrier()
        return path

    def rename(path: Path) -> None:
        index = json.loads((path / "model.safetensors.index.json").read_text())
        names = sorted(set(index["weight_map"].values()))
        index["weight_map"] = {k: "../" + v if v == names[0] else v for k, v in index["weight_map"].items()}
        (path / names[0]).rename(path.parent / names[0])
        (path / "model.safetensors.index.json").write_text(json.dumps(index))

    for name, damage, part, options in [
        ("gone", lambda p: (p / "model.safetensors").unlink(), "model.safetensors", {}),
        ("cut", lambda p: _cut(p / "model.safetensors"), "model.safetensors", {}),
        ("one", lambda p: next(p.glob("*-00002*")).unlink(), "-00002", {"max_shard_size": "20KB"}),
        ("out", rename, "outside of the folder", {"max_shard_size": "20KB"}),
    ]:
        with raises_everywhere(CheckpointError, part):
            autopar.from_pretrained(LlamaForCausalLM, damaged(name, damage, **options), tp(2))
    for name, data in (("zip", None), ("text", b"no checkpoint")):
        folder = tmp_path / name
        if rank == 0:
            folder.mkdir()
            model.config.save_pretrained(folder)
            torch.save(model.state_dict(), folder / "pytorch_model.bin")
            if data is None:
                _cut(folder / "pytorch_model.bin")
            else:
                (folder / "pytorch_model.bin").write_bytes(data)
        dist.barrier()
        with raises_everywhere(CheckpointError, "pytorch_model.bin"):
            autopar.from_pretrained(LlamaForCausalLM, str(folder), tp(2))


def _cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])


@pooled(world_size=2)
def test_a_file_that_one_rank_does_not_see(tmp_path):
    path = shared(tmp_path / "m", llama())
    mine = path if dist.get_rank() == 0 else str(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"elsewhere") as info:
        autopar.from_pretrained(LlamaForCausalLM, mine, tp(2))
    assert dist.get_rank() == 1 or "rank 1 cannot load the model" in str(info.value)


@pooled(world_size=2)
def test_what_is_refused(tmp_path):
    path = shared(tmp_path / "m", llama())
    for argument, value in (("device_map", "auto"), ("gguf_file", "x.gguf"), ("state_dict", {}), ("tp_plan", "auto")):
        with raises_everywhere(ConfigError, argument):
            autopar.from_pretrained(LlamaForCausalLM, path, tp(2), **{argument: value})
    with autopar.lazy_init(), pytest.raises(TypeError):
        LlamaForCausalLM.from_pretrained(path, no_such_argument=1)
    assert PreTrainedModel._load_pretrained_model.__module__ == PreTrainedModel.__module__
    both(AutoModelForSequenceClassification, shared(tmp_path / "g", gpt2()), 2)  # and works again


@pooled(world_size=2)
def test_a_folder_of_shards_on_any_mesh(tmp_path):
    for number, model in enumerate((gpt2(), llama(), build(cases("mamba2")[0], 6, 3))):
        plain = shared(tmp_path / f"{number}-plain", model)
        for saved in (1, 2):
            folder = str(tmp_path / f"{number}-{saved}")
            before = autopar.from_pretrained(type(model), plain, tp(saved))
            before.save_parallelized(folder)
            for now in (1, 2):
                expected = autopar.initialize(type(model).from_pretrained(plain), tp(now))
                lazy = autopar.from_pretrained(type(model), folder, tp(now))
                same(lazy, expected)
                assert not lazy.training
    lazy = autopar.from_pretrained(AutoModelForCausalLM, str(tmp_path / "1-2"), tp(2), dtype=torch.bfloat16)
    same(lazy, autopar.initialize(LlamaForCausalLM.from_pretrained(tmp_path / "1-plain", dtype=torch.bfloat16), tp(2)))
    with raises_everywhere(CheckpointError, "1 unexpected", "lm_head.weight", "autopar merge"):
        autopar.from_pretrained(AutoModel, str(tmp_path / "1-2"), tp(2))
    with raises_everywhere(CheckpointError, "2 tensors do not have the shapes"):
        autopar.from_pretrained(AutoModelForCausalLM, str(tmp_path / "1-2"), tp(2), vocab_size=140)
    file = tmp_path / "1-2" / "model-tp1-pp0.safetensors"
    if dist.get_rank() == 0:
        data = bytearray(file.read_bytes())
        data[-5] ^= 4
        file.write_bytes(data)
    dist.barrier()
    with pytest.raises(CheckpointError, match="checksum"):
        autopar.from_pretrained(AutoModelForCausalLM, str(tmp_path / "1-2"), tp(2))


@pooled(world_size=2)
def test_a_rank_reads_its_share_and_no_more(tmp_path):
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1024}
    path = shared(tmp_path / "m", llama(**sizes, vocab_size=1000))
    read: list[int] = []
    real = RangeFile.read_into

    def counting(self: RangeFile, target: memoryview, offset: int) -> None:
        real(self, target, offset)
        read.append(len(target))

    RangeFile.read_into = counting  # type: ignore[method-assign]
    try:
        lazy = autopar.from_pretrained(LlamaForCausalLM, path, tp(2))
    finally:
        RangeFile.read_into = real  # type: ignore[method-assign]
    share = sum(parameter.numel() * parameter.element_size() for parameter in lazy.parameters())
    assert share < 0.55 * sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    assert share < sum(read) < 1.01 * share


def saved(folder: Path | str, model: Any, size: int) -> str:
    """A folder of shards that the ranks have written."""
    autopar.initialize(model, tp(size)).save_parallelized(str(folder))
    return str(folder)


@pooled(world_size=2)
def test_untied_weights_of_a_config_that_ties(tmp_path):
    for name, extra in (("different", 1.0), ("equal", 0.0)):
        for size in (1, 2):
            model = gpt2()
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + extra)
            folder = saved(tmp_path / f"{name}{size}", model, size)
            records: list[str] = []
            handler = logging.Handler()
            handler.emit = lambda record, to=records: to.append(record.getMessage())  # type: ignore[misc]
            logging.getLogger("transformers").addHandler(handler)
            lazy = autopar.from_pretrained(GPT2LMHeadModel, folder, tp(2))
            logging.getLogger("transformers").removeHandler(handler)
            head, table = lazy.lm_head.weight, lazy.transformer.wte.weight
            assert (head is not table) == bool(extra)
            assert torch.equal(head, table + extra)
            assert any("they stay untied" in text for text in records) == bool(extra)
            assert ("lm_head.weight" in lazy.all_tied_weights_keys) == (not extra)
            lazy.save_parallelized(str(tmp_path / f"{name}{size}m"), merge_checkpoints=True)
            merged = GPT2LMHeadModel.from_pretrained(tmp_path / f"{name}{size}m")
            ids = torch.arange(12).view(2, 6)
            assert torch.allclose(merged(ids).logits, lazy(ids).logits, atol=1e-5)


@pooled(world_size=2)
def test_dtypes_of_shards(tmp_path):
    mixed = gpt2().bfloat16()
    mixed.transformer.ln_f.float()
    folder = saved(tmp_path / "mixed", mixed, 2)
    expected = {name: tensor.dtype for name, tensor in mixed.state_dict().items()}
    for auto in ("auto", None):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            lazy = autopar.from_pretrained(AutoModelForCausalLM, folder, tp(2), dtype=auto)
        assert {name: tensor.dtype for name, tensor in lazy.state_dict().items()} == expected
        assert not [one for one in caught if "converted" in str(one.message)]
    for dtype in ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}, {"torch_dtype": torch.bfloat16}):
        with pytest.warns(UserWarning, match=r"2 tensors were converted on loading, transformer\.ln_f\.weight from fl"):
            lazy = autopar.from_pretrained(AutoModelForCausalLM, folder, tp(2), **dtype)
        assert {tensor.dtype for tensor in lazy.parameters()} == {torch.bfloat16}
    config = T5Config(d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4, vocab_size=31)
    plain = shared(tmp_path / "t5", T5ForConditionalGeneration(config))
    keeps = autopar.from_pretrained(T5ForConditionalGeneration, plain, tp(2), dtype=torch.float16)
    keeps.save_parallelized(str(tmp_path / "t5s"))
    assert {tensor.dtype for tensor in keeps.parameters()} == {torch.float16, torch.float32}
    for wanted in ("auto", torch.float16):
        same(autopar.from_pretrained(T5ForConditionalGeneration, str(tmp_path / "t5s"), tp(2), dtype=wanted), keeps)
    full = saved(tmp_path / "t5f", T5ForConditionalGeneration.from_pretrained(plain), 2)
    with pytest.warns(UserWarning, match="converted on loading"):
        same(autopar.from_pretrained(T5ForConditionalGeneration, full, tp(2), dtype=torch.float16), keeps)


@pooled(world_size=2)
def test_an_edited_config_of_shards(tmp_path):
    folder = saved(tmp_path / "m", gpt2(), 2)
    if dist.get_rank() == 0:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "activation_function": "relu"}))
    dist.barrier()
    with raises_everywhere(CheckpointError, "config.json is not the file that was saved", "verify=False"):
        autopar.from_pretrained(AutoModelForCausalLM, folder, tp(2))
    lazy = autopar.from_pretrained(AutoModelForCausalLM, folder, tp(2), verify=False)
    assert lazy.config.activation_function == "relu"


@pytest.mark.parametrize("kind", ["files", "shards"])
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "{", "config.json"),
        ("config.json", "[]", "config.json holds a list, not an object"),
        ("config.json", {"n_embd": "x"}, "n_embd"),
        ("config.json", {"n_head": 5}, "divisible by num_heads"),
        ("config.json", {"dtype": "bogus"}, "bogus"),
        ("config.json", {"model_type": "nope"}, "nope"),
        ("model.safetensors.index.json", "{", "model.safetensors.index.json cannot be read: Expecting property name"),
        ("model.safetensors.index.json", "{}", "has no weight_map"),
        ("model.safetensors.index.json", '{"metadata": {}, "weight_map": []}', "has no weight_map"),
        ("model.safetensors.index.json", '{"metadata": {}, "weight_map": {"a": 3}}', "has no weight_map"),
    ],
)
def test_damaged_small_files(tmp_path, kind, name, text, message):
    if kind == "files":
        gpt2().save_pretrained(tmp_path / "m", max_shard_size="20KB")
    elif name == "config.json":
        autopar.initialize(gpt2()).save_parallelized(tmp_path / "m")
    else:
        return
    path = tmp_path / "m" / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **text}) if isinstance(text, dict) else text)
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "m"))) as info:
        autopar.from_pretrained(AutoModelForCausalLM, tmp_path / "m", verify=False)
    assert message in str(info.value)


@pooled(world_size=2)
def test_small_files_that_are_damaged_for_one_rank(tmp_path):
    path = shared(tmp_path / "m", gpt2())
    mine = shared(tmp_path / f"rank{dist.get_rank()}")
    shutil.copytree(path, mine)
    if dist.get_rank() == 1:
        (Path(mine) / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"rank1/config\.json holds a list"):
        autopar.from_pretrained(AutoModelForCausalLM, mine, tp(2))


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
        ({"config": config}, "goes to model_config="),
        ({"model_config": 3}, "model_config must be"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(**bad)
    with pytest.raises(ConfigError, match="must be a model class"):
        autopar.from_pretrained("gpt2", tmp_path)
    with pytest.raises(ConfigError, match="path=None"):
        autopar.from_pretrained(AutoModelForCausalLM, None)  # type: ignore[arg-type]


@pooled(world_size=2)
def test_shards_of_several_stages(tmp_path):
    for model in (gpt2(), llama()):
        plain = shared(tmp_path / type(model).__name__, model)
        for size, stages in ((1, 2), (2, 2), (3, 1)):
            folder = f"{plain}-{size}-{stages}"
            if dist.get_rank() == 0:
                split_checkpoint(plain, folder, tp=size, pp=stages)
            dist.barrier()
            for now in (1, 2):
                expected = autopar.initialize(type(model).from_pretrained(plain), tp(now))
                same(autopar.from_pretrained(AutoModelForCausalLM, folder, tp(now)), expected)


@pytest.mark.parametrize("kind", ["files", "shards"])
def test_the_default_device_does_not_matter(tmp_path, kind):
    llama().bfloat16().save_pretrained(tmp_path / "files")
    autopar.initialize(llama().bfloat16()).save_parallelized(tmp_path / "shards")
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the conversion
        lazy = autopar.from_pretrained(AutoModelForCausalLM, tmp_path / kind, dtype=torch.float32)
    same(lazy, autopar.initialize(LlamaForCausalLM.from_pretrained(tmp_path / "files", dtype=torch.float32)))
