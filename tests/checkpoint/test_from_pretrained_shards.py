"""autopar.from_pretrained of a folder of shards: any mesh, each rank reads its share."""

import json
import logging
import os
import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import autopar
from autopar.deferred_init import materialize
from autopar.deferred_init.context import lazy_init
from autopar.deferred_init.materialize import InitSteps, reading_threads
from autopar.errors import CheckpointError
from autopar.storage.files import RangeFile
from tests.checkpoint.loading import same, saved, shared, tp
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.random_models import build, cases
from tests.small import gpt2, llama


@pooled(world_size=2)
def test_a_folder_of_shards_on_any_mesh(tmp_path):
    for number, model in enumerate((build(cases("mamba2")[0], 6, 3), llama())):
        plain = shared(tmp_path / f"{number}-plain", model)
        for size_before in (1, 2):
            folder = str(tmp_path / f"{number}-{size_before}")
            before = autopar.from_pretrained(type(model), plain, tp(size_before))
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
    real = RangeFile.read_runs

    def counting(self: RangeFile, target: memoryview, places: Iterable[tuple[int, int]], length: int) -> None:
        places = list(places)
        real(self, target, places, length)
        read.append(len(places) * length)

    RangeFile.read_runs = counting  # type: ignore[method-assign]
    try:
        lazy = autopar.from_pretrained(LlamaForCausalLM, path, tp(2))
    finally:
        RangeFile.read_runs = real  # type: ignore[method-assign]
    share = sum(parameter.numel() * parameter.element_size() for parameter in lazy.parameters())
    assert share < 0.55 * sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    assert share < sum(read) < 1.01 * share


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

    model, optimizer = autopar.from_pretrained(
        LlamaForCausalLM, shared(tmp_path / "m", llama()), config, optimizer=make, dtype=torch.float32
    )
    for _ in range(2):
        step(model, optimizer)
    model.save_parallelized(str(tmp_path / "step-2"), optimizer=optimizer)
    step(model, optimizer)

    drawn = InitSteps.run
    InitSteps.run = lambda *_: pytest.fail("weights are drawn that files have")  # type: ignore[method-assign]
    try:
        again, other, info = autopar.from_pretrained(
            LlamaForCausalLM, str(tmp_path / "step-2"), config, optimizer=make, output_loading_info=True
        )
    finally:
        InitSteps.run = drawn  # type: ignore[method-assign]
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
    counted, read = materialize.reading_threads, RangeFile.read_runs

    def failing(self, target, places, length):
        if self.path == last and length > 50:
            raise CheckpointError(f"{self.path} cannot be read: Input/output error")
        read(self, target, places, length)

    materialize.reading_threads = lambda ranks: 5
    try:
        for dtype in (torch.float32, torch.bfloat16):
            expected = autopar.initialize(LlamaForCausalLM.from_pretrained(folder, dtype=dtype), tp(2))
            same(autopar.from_pretrained(LlamaForCausalLM, folder, tp(2), dtype=dtype), expected)
        with lazy_init():
            model = LlamaForCausalLM.from_pretrained(folder)
        RangeFile.read_runs = failing
        with pytest.raises(CheckpointError, match="Input/output error"):
            autopar.initialize(model, tp(2))
    finally:
        materialize.reading_threads, RangeFile.read_runs = counted, read
