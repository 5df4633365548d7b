"""Reading in several threads: the same bytes, an error, no more threads than a rank's share of the cores."""

from __future__ import annotations

import os

import pytest
import torch
from transformers import LlamaForCausalLM

import autopar
from autopar.deferred_init import materialize
from autopar.deferred_init.context import lazy_init
from autopar.deferred_init.materialize import reading_threads
from autopar.errors import CheckpointError
from autopar.storage.files import RangeFile
from tests.checkpoint.loading import same, shared, tp
from tests.pool import pooled
from tests.small import llama


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
