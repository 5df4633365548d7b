"""autopar.from_pretrained of a folder of shards: any mesh, each rank reads its share."""

import copy
import io
import itertools
import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import AutoModel, AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM, T5ForConditionalGeneration

import autopar
import autopar.integrations
from autopar.deferred_init import materialize
from autopar.deferred_init.context import lazy_init
from autopar.deferred_init.materialize import InitSteps, reading_threads
from autopar.errors import CheckpointError
from autopar.storage.files import RangeFile
from autopar.storage.progress import hidden_bars
from tests.checkpoint.hybrid import batch_of, same as same_tensor
from tests.checkpoint.loading import counted_bytes, logged, same, saved, shared, tp
from tests.checkpoint.tiny import flip
from tests.exchange import raises_everywhere
from tests.harness.tiers import mainly
from tests.harness.worlds import pooled
from tests.parity import close
from tests.pipeline_parallel.deep import deep
from tests.random_models import build, cases
from tests.small import gpt2, lazily, llama


@pooled(world_size=2)
def test_a_folder_of_shards_on_any_mesh(tmp_path):
    for number, model in enumerate((build(cases("mamba2")[0], 6, 3), llama())):
        plain = shared(tmp_path / f"{number}-plain", model)
        for size_before in (1, 2):
            folder = str(tmp_path / f"{number}-{size_before}")
            before = autopar.from_pretrained(type(model), plain, tp(size_before))
            before.save_parallelized(folder)
            for now in (1, 2):
                lazy = autopar.from_pretrained(type(model), folder, tp(now))
                same(lazy, autopar.initialize(type(model).from_pretrained(plain), tp(now)))
                assert not lazy.training
    lazy = autopar.from_pretrained(AutoModelForCausalLM, str(tmp_path / "1-2"), tp(2), dtype=torch.bfloat16)
    same(lazy, autopar.initialize(LlamaForCausalLM.from_pretrained(tmp_path / "1-plain", dtype=torch.bfloat16), tp(2)))
    with raises_everywhere(CheckpointError, "1 unexpected", "lm_head.weight", "autopar merge"):
        autopar.from_pretrained(AutoModel, str(tmp_path / "1-2"), tp(2))
    with raises_everywhere(CheckpointError, "2 tensors do not have the shapes"):
        autopar.from_pretrained(AutoModelForCausalLM, str(tmp_path / "1-2"), tp(2), vocab_size=140)
    if dist.get_rank() == 0:
        flip(tmp_path / "1-2" / "model-tp1-pp0.safetensors", -5)
    dist.barrier()
    with pytest.raises(CheckpointError, match="checksum"):
        autopar.from_pretrained(AutoModelForCausalLM, str(tmp_path / "1-2"), tp(2))


@pooled(world_size=2)
def test_a_rank_reads_its_share_and_no_more(tmp_path):
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1024}
    path = shared(tmp_path / "m", llama(**sizes, vocab_size=1000))
    with counted_bytes() as read:
        lazy = autopar.from_pretrained(LlamaForCausalLM, path, tp(2))
    share = sum(parameter.numel() * parameter.element_size() for parameter in lazy.parameters())
    assert share < 0.55 * sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    assert share < sum(read.values()) < 1.01 * share


@pooled(world_size=2)
def test_going_on_with_an_optimizer_draws_nothing(tmp_path):
    config = {**tp(1), "zero": {"stage": 1}, "gradient_clipping": 1.0}
    ids = torch.arange(24).view(2, 12) + 3 * dist.get_rank()

    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.train()
        model(input_ids=ids, labels=ids).loss.backward()
        autopar.average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()

    plain = shared(tmp_path / "m", llama())
    model, optimizer = autopar.from_pretrained(LlamaForCausalLM, plain, config, optimizer=make, dtype=torch.float32)
    for _ in range(2):
        step(model, optimizer)
    model.save_parallelized(str(tmp_path / "step-2"), optimizer=optimizer)
    step(model, optimizer)

    with mock.patch.object(InitSteps, "run", lambda *_: pytest.fail("weights are drawn that files have")):
        again, other, info = autopar.from_pretrained(
            LlamaForCausalLM, str(tmp_path / "step-2"), config, optimizer=make, output_loading_info=True
        )
    assert isinstance(other, torch.optim.AdamW) and info == {}
    again.from_parallelized(str(tmp_path / "step-2"), optimizer=other)
    step(again, other)
    same(again, model)


@pooled(world_size=2)
def test_untied_weights_of_a_config_that_ties(tmp_path):
    for name, extra in (("different", 1.0), ("equal", 0.0)):
        for size in (1, 2):
            model = gpt2()
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + extra)
            folder = saved(tmp_path / f"{name}{size}", model, size)
            with logged("transformers") as records:
                lazy = autopar.from_pretrained(GPT2LMHeadModel, folder, tp(2))
            head, table = lazy.lm_head.weight, lazy.transformer.wte.weight
            assert (head is not table) == bool(extra)
            assert torch.equal(head, table + extra)
            assert any("they stay untied" in text for text in records) == bool(extra)
            assert ("lm_head.weight" in lazy.all_tied_weights_keys) == (not extra)
            lazy.save_parallelized(str(tmp_path / f"{name}{size}m"), merge_checkpoints=True)
            merged = GPT2LMHeadModel.from_pretrained(tmp_path / f"{name}{size}m")
            ids = torch.arange(12).view(2, 6)
            assert torch.allclose(merged(ids).logits, lazy(ids).logits, atol=1e-5)


@pytest.mark.tier("all")
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
    plain = shared(tmp_path / "t5", deep("t5", 1))
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
    with raises_everywhere(CheckpointError, "config.json was changed after the save", "verify=False"):
        autopar.from_pretrained(AutoModelForCausalLM, folder, tp(2))
    lazy = autopar.from_pretrained(AutoModelForCausalLM, folder, tp(2), verify=False)
    assert lazy.config.activation_function == "relu"


def test_a_rank_has_its_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(48)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert [reading_threads(ranks) for ranks in (1, 8, 24, 48, 96)] == [8, 6, 2, 1, 1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")  # of 96 on 12 machines
    assert reading_threads(96) == 6


@pooled(world_size=2)
def test_a_checkpoint_is_the_same_by_threads(tmp_path):
    folder = shared(tmp_path / "plain", llama(num_hidden_layers=3), max_shard_size="20KB")
    last = max(tmp_path.glob("plain/*.safetensors"))
    read = RangeFile.read_runs

    def failing(self, target, places, length):
        if self.path == last and length > 50:
            raise CheckpointError(f"{self.path} cannot be read: Input/output error")
        read(self, target, places, length)

    with mock.patch.object(materialize, "reading_threads", lambda ranks: 5):
        for dtype in (torch.float32, torch.bfloat16):
            expected = autopar.initialize(LlamaForCausalLM.from_pretrained(folder, dtype=dtype), tp(2))
            same(autopar.from_pretrained(LlamaForCausalLM, folder, tp(2), dtype=dtype), expected)
        with lazy_init():
            model = LlamaForCausalLM.from_pretrained(folder)
        error = pytest.raises(CheckpointError, match="Input/output error")
        with mock.patch.object(RangeFile, "read_runs", failing), error:
            autopar.initialize(model, tp(2))


@pooled(world_size=2)
def test_bars_appear_on_rank_0_and_on_a_terminal_only(tmp_path):
    def shown(on_terminal: bool) -> set[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("autopar.storage.progress._DELAY", 0.0)
            patch.setattr(sys, "stderr", printed := io.StringIO())
            patch.setattr(printed, "isatty", lambda: on_terminal)
            model = autopar.from_pretrained(LlamaForCausalLM, plain, tp(2))
            model.save_parallelized(tmp_path / "merged", merge_checkpoints=True)
            model.from_parallelized(folder)
        return set(re.findall(r"([\w ]+): +\d+%", printed.getvalue()))

    plain, folder = shared(tmp_path / "plain", llama()), str(tmp_path / "shards")
    autopar.from_pretrained(LlamaForCausalLM, plain, tp(2)).save_parallelized(folder)
    transformers.logging.enable_progress_bar()
    assert shown(True) == ({"loading", "checking", "saving", "merging"} if dist.get_rank() == 0 else set())
    assert transformers.logging.is_progress_bar_enabled()
    assert shown(False) == set()
    with hidden_bars():
        assert shown(True) == set()


NAMES = mainly("gpt2", "llama", "bert", "t5", later="sweep")


def stages(pp: int, tp: int = 1) -> dict[str, Any]:
    return {"pp": pp, "tp": tp}


def assert_holds(model: Any, whole: dict[str, torch.Tensor]) -> None:
    """What this rank has is its share of the plain state dict, and not more."""
    plan, held = model._autopar.plan, model._autopar.stages
    found = set()
    for name, tensor in model.state_dict().items():
        layout = plan.tensors[plan.canonical(name)].layout
        due = whole[name] if layout is None else layout.shard(whole[name], model.mpu.tp.rank)
        assert same_tensor(tensor, due), name
        found.add(name)
    assert found == {name for name in whole if model.mpu.pp.rank in held.holders(name)}


@pytest.mark.tier("all")
@pytest.mark.parametrize("name", NAMES)
@pooled(world_size=4)
def test_stages_of_a_lazy_model_are_those_of_the_plain_one(tmp_path, name):
    plain = deep(name, 4)
    shared(tmp_path / "plain", plain)
    weights = {key: tensor.clone() for key, tensor in plain.state_dict().items()}
    folders = [str(tmp_path / "plain")]
    for size, pp in ((2, 2), (1, 4), (1, 2)) if name == "gpt2" else ((2, 2),):
        source = autopar.initialize(copy.deepcopy(plain), stages(pp, size))
        source.save_parallelized(tmp_path / f"{size}-{pp}")
        folders.append(str(tmp_path / f"{size}-{pp}"))
    for (size, pp), folder in itertools.product(((2, 2), (1, 4)), folders):
        lazy = autopar.from_pretrained(type(plain), folder, stages(pp, size))
        assert_holds(lazy, weights)
        if folder == folders[0]:
            lazy.train()
            out = lazy.execute_pipeline(batch_of(0), broadcast_loss=True)
            close(out.loss, plain.train()(**batch_of(0)).loss.detach(), f"loss on {size, pp}")
    drawn: dict[str, torch.Tensor] = {}
    for size, pp in ((1, 1), (2, 2), (1, 4)):
        torch.manual_seed(5)
        lazy = autopar.initialize(lazily(plain), stages(pp, size))
        drawn = drawn or lazy.state_dict()  # those of one stage
        assert_holds(lazy, drawn)
    assert not any(torch.equal(drawn[key], weights[key]) for key in drawn if weights[key].ndim > 1)


@pytest.mark.parametrize(("name", "tp"), [("gpt2", 1), ("t5", 2)])
@pooled(world_size=4)
def test_a_model_that_was_loaded_straight_into_stages_becomes_whole(tmp_path, name, tp):
    plain = deep(name, 4)
    shared(tmp_path / "plain", plain)
    for start in ("files", "drawn"):
        if start == "files":
            model = autopar.from_pretrained(type(plain), tmp_path / "plain", stages(2, tp))
            expected = plain
        else:
            torch.manual_seed(5)
            model = autopar.initialize(lazily(plain), stages(2, tp))
            torch.manual_seed(5)
            expected = autopar.initialize(lazily(plain), {})
        identities = {name: id(parameter) for name, parameter in model.named_parameters()}
        model = autopar.deparallelize(model)
        found = model.state_dict()
        assert found.keys() == expected.state_dict().keys()
        for key, tensor in expected.state_dict().items():
            assert same_tensor(found[key], tensor), (start, key)
        assert {key: id(dict(model.named_parameters())[key]) for key in identities} == identities
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        again = autopar.initialize(model, stages(2, tp)).train()
        out = again.execute_pipeline(batch_of(0), broadcast_loss=True)
        close(out.loss, expected.train()(**batch_of(0)).loss.detach(), f"loss of {start}")
