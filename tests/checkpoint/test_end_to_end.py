"""Real models are initialized, saved, merged and read back; save_pretrained of the plain model is the oracle."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2ForSequenceClassification,
)

import autopar
from autopar.checkpoint import merge_checkpoint
from tests.checkpoint.tiny import assert_same_files
from tests.harness.worlds import pooled
from tests.small import gpt2, llama, parallel


def bert() -> BertForMaskedLM:
    torch.manual_seed(0)
    return BertForMaskedLM(
        BertConfig(
            vocab_size=17, hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=11,
            max_position_embeddings=8,
        )
    )  # fmt: skip


def classifier() -> GPT2ForSequenceClassification:
    torch.manual_seed(0)
    return GPT2ForSequenceClassification(
        GPT2Config(vocab_size=17, n_embd=12, n_layer=1, n_head=3, n_positions=8, num_labels=3, pad_token_id=0)
    )


def half() -> Any:
    return llama().to(torch.bfloat16)


def generating() -> Any:
    model = gpt2()
    model.generation_config.update(do_sample=True, temperature=0.7)
    return model


def check(folder: Path, build: Callable[[], Any], tp: int) -> None:
    """The merged folder, made by the ranks and made offline, is byte for byte what ``save_pretrained`` writes."""
    plain = build()
    if dist.get_rank() == 0:
        plain.save_pretrained(folder / "plain")
        build().save_pretrained(folder / "split", max_shard_size=6000)
    model = parallel(build(), tp)
    config = dict(vars(model.config))
    model.save_parallelized(folder / "ckpt")
    model.save_parallelized(folder / "merged", merge_checkpoints=True)
    assert dict(vars(model.config)) == config, "saving must not touch the user's config"
    model.save_parallelized(folder / "merged_split", merge_checkpoints=True, max_shard_size=6000)
    if dist.get_rank() == 0:
        merge_checkpoint(folder / "ckpt", folder / "offline")
        assert_same_files(folder / "merged", folder / "plain")
        assert_same_files(folder / "offline", folder / "plain")
        assert_same_files(folder / "merged_split", folder / "split")
        assert len(os.listdir(folder / "split")) > 3
    dist.barrier()
    other = build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    parallel(other, tp).from_parallelized(folder / "ckpt")
    for (name, one), (_, two) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(one, two), name


@pooled(world_size=2)
def test_files_are_those_of_save_pretrained_at_tp_2(tmp_path):
    for build in (gpt2, bert, classifier, half, generating):
        check(tmp_path / build.__name__, build, 2)


@pooled(world_size=4)
def test_files_are_those_of_save_pretrained_at_tp_4_with_replicated_kv_heads(tmp_path):
    check(tmp_path / "llama", llama, 4)


@pooled(world_size=1)
def test_files_are_those_of_save_pretrained_in_one_process(tmp_path):
    check(tmp_path / "gpt2", gpt2, 1)


@pytest.mark.tier("test")
@pytest.mark.filterwarnings("error")
@pooled(world_size=4)
def test_train_save_merge_and_read_with_plain_transformers(tmp_path):
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model = parallel(model, 2)
    engine = DistributedDataParallel(model, process_group=model.mpu.get_data_parallel_group())
    ids = torch.randint(131, (2, 8), generator=torch.Generator().manual_seed(model.mpu.dp.rank))
    for _ in range(2):
        engine(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.module.save_parallelized(tmp_path / "ckpt")
    for name, options in {"safe": {}, "split": {"max_shard_size": "9KB"}, "bin": {"format": "bin"},
                          "bins": {"format": "bin", "max_shard_size": "9KB"}}.items():  # fmt: skip
        model.save_parallelized(tmp_path / name, merge_checkpoints=True, **options)
        assert all("module." not in key for key in model.state_dict())
        plain, report = AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(report.values()), report
        ids = ids % 100
        with torch.no_grad():
            expected, actual = model.eval()(input_ids=ids).logits, plain.eval()(input_ids=ids).logits
        assert (expected - actual).abs().max() < 1e-5
        assert (actual - gpt2().eval()(input_ids=ids).logits).abs().max() > 0.1, "training must have changed something"
    assert "pytorch_model.bin" in os.listdir(tmp_path / "bin")
    assert "pytorch_model.bin.index.json" in os.listdir(tmp_path / "bins")
    resumed = parallel(gpt2(), 2).from_parallelized(tmp_path / "ckpt").eval()
    with torch.no_grad():
        assert torch.equal(resumed(input_ids=ids).logits, expected)
    dist.barrier()
    whole = autopar.deparallelize(resumed)
    assert all(torch.equal(one, two) for one, two in zip(whole.parameters(), plain.parameters(), strict=True))
    assert not hasattr(whole, "save_parallelized")


class Scored(torch.nn.Module):
    """A user's own module with a Hugging Face model inside."""

    def __init__(self) -> None:
        super().__init__()
        self.language = gpt2()
        self.score = torch.nn.Linear(131, 5)


@pooled(world_size=2)
def test_a_module_around_the_model_merges_into_a_folder_that_from_pretrained_reads(tmp_path):
    from safetensors.torch import load_file

    plain = Scored()
    model = parallel(Scored(), 2)
    with torch.no_grad():
        model.score.weight.copy_(plain.score.weight)
    model.save_parallelized(tmp_path / "merged", merge_checkpoints=True)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for name, tensor in plain.language.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor), name
    outside = load_file(tmp_path / "merged" / "wrapper.safetensors")
    assert sorted(outside) == ["score.bias", "score.weight"]
    assert torch.equal(outside["score.weight"], plain.score.weight)
    model.save_parallelized(tmp_path / "shards")
    with torch.no_grad():
        model.score.weight.zero_()
    model.from_parallelized(tmp_path / "shards")
    assert torch.equal(model.score.weight, plain.score.weight)
