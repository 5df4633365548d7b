"""What a parallelized model says of itself: one line in the log, and the sizes of its layers."""

import copy
import logging
from typing import Any

import pytest
import torch.distributed as dist

import autopar
from autopar.plan.plan import summarise
from tests.pool import pooled
from tests.scripts import python
from tests.small import gpt2, llama, parallel


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: Any) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def test_context_parallelism_is_named_where_there_is_some() -> None:
    line = summarise(gpt2(), 10, (2, 1, 3, 4), "cpu", "gpt2.yaml:2")
    assert line.startswith("GPT2LMHeadModel by gpt2.yaml:2: tp 2 x cp 4 x pp 1 x dp 3 on cpu; 10 parameters, this rank")


@pooled(world_size=2)
def test_one_line_on_rank_0() -> None:
    lines, log = Lines(), logging.getLogger("autopar")
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    plain = gpt2()
    model = parallel(gpt2(), 2)
    held = sum(parameter.numel() for parameter in model.parameters())
    line = (
        f"INFO GPT2LMHeadModel by gpt2.yaml:2: tp 2 x pp 1 x dp 1 on cpu; {plain.num_parameters():,} parameters, this "
        f"rank holds {held:,} ({4 * held / 1e6:,.1f} MB)"
    )
    assert lines.lines == ([line] if dist.get_rank() == 0 else [])
    assert model.num_parameters() == plain.num_parameters() > held  # the whole model's
    assert model.get_memory_footprint(return_buffers=False) == 4 * held  # this rank's
    assert "whole model" in model.num_parameters.__doc__


@pytest.mark.tier("all")
def test_the_line_is_printed_where_no_logging_is_set_up() -> None:
    done = python("-c", "import autopar; from tests.small import gpt2; autopar.initialize(gpt2(), {})")
    assert done.stderr.startswith("autopar: GPT2LMHeadModel by gpt2.yaml:2: tp 1 x pp 1 x dp 1 on cpu;"), done.stderr


@pooled(world_size=2)
def test_printed_layers_have_local_and_whole_sizes() -> None:
    rank = dist.get_rank()
    plain = gpt2()
    before = repr(plain)
    model = parallel(plain, 2)
    width = 60 if rank == 0 else 48  # 5 of 9 heads, 4 of 9
    for one in (model, copy.deepcopy(model)):
        text = repr(one)
        assert (
            f"(c_attn): ColumnParallelConv1D(tp {rank}/2: weight [36, {width}] of [36, 108], bias [{width}] of [108])"
            in text
        )
        assert f"(c_proj): RowParallelConv1D(tp {rank}/2: weight [{width // 3}, 36] of [36, 36])" in text
        assert f"VocabParallelEmbedding(131, 36; tp {rank}/2: weight [{66 - rank}, 36] of [131, 36])" in text
    assert repr(autopar.deparallelize(model)) == before
    text = repr(parallel(llama(num_attention_heads=4, num_key_value_heads=2), 2))
    shown = "in_features=24, out_features=12, bias=False"
    assert f"(q_proj): ColumnParallelLinear({shown}; tp {rank}/2: weight [12, 24] of [24, 24])" in text
