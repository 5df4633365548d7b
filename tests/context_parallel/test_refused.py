"""What does not go with context parallelism raises, with what to use instead: docs/long-sequences.md."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.config import ParallelConfig
from autopar.context_parallel import row_logits
from autopar.errors import ConfigError, ConsistencyError
from tests.pool import pooled
from tests.small import llama
from tests.worlds import raises_everywhere


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"compile": {"enable": True}}, "context_parallel_size=2 does not go with compile"),
        ({"sequence_parallel": True, "tensor_parallel_size": 2}, "context_parallel_size=2 cuts the sequence already"),
    ],
)
def test_contradictions_of_the_config(more: dict[str, object], words: str) -> None:
    sizes = {"context_parallel_size": 2, **{k: v for k, v in more.items() if k != "compile"}}
    config = {"model_parallelism": sizes, **{k: v for k, v in more.items() if k == "compile"}}
    with pytest.raises(ConfigError, match=words):
        ParallelConfig.parse(config)


@pooled(world_size=2)
def test_what_no_rank_could_compute_is_refused_and_the_next_forward_holds() -> None:
    sizes = {"context_parallel_size": 2, "context_parallel_method": "gather"}
    model = autopar.initialize(llama(), {"model_parallelism": sizes})
    ids = torch.arange(14).view(2, 7)
    with torch.no_grad():
        expected = llama()(ids).logits
        with raises_everywhere(ConfigError, "output_attentions=True", "context_parallel_size=2"):
            model(ids, output_attentions=True, use_cache=False)
        flags = torch.ones(2, 7, dtype=torch.int64)
        model.config._attn_implementation = "flash_attention_2"  # takes no mask with rows
        with raises_everywhere(ConfigError, "context_parallel_method=gather does not go with 'flash_attention_2'"):
            model(ids, attention_mask=flags, use_cache=False)
        model.config._attn_implementation = "sdpa"
        logits = model(ids, use_cache=False).logits
        assert (logits - expected).abs().max() <= 1e-5


@pooled(world_size=2)
def test_logits_that_one_rank_reads_alone_raise() -> None:
    model = autopar.initialize(llama(), {"model_parallelism": {"context_parallel_size": 2}})
    with torch.no_grad():
        logits = model(torch.arange(8).view(1, 8), use_cache=False).logits
    assert "has rows" in repr(logits), "printing them gathers nothing"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_logits, "PATIENCE", 1.0)
        if dist.get_rank() == 0:
            with pytest.raises(ConsistencyError, match="which takes every context-parallel rank: read them on all of"):
                logits.argmax()
    dist.barrier()
