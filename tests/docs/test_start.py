"""docs/start.md: what the planner finds is what its table says, and the answer for 7 B on 4 x 24 GB.

UPDATE_DOCS=1 python -m pytest tests/docs/test_start.py      writes the rows of the table that are run
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import autopar
from autopar.tools.planner.estimate import Estimator
from autopar.tools.planner.hardware import find_node
from autopar.tools.planner.planned_model import PlannedModel
from autopar.tools.planner.search import Space, rehearsed, search
from tests.docs.pages import DOCS, same
from tests.tiers import in_tier

PAGE = DOCS / "start.md"
SIZES: dict[str, dict[str, Any]] = {
    "1 B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_key_value_heads": 8}
    | {"vocab_size": 128256, "tie_word_embeddings": True},
    "7 B": {},
    "13 B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
    "70 B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    | {"num_key_value_heads": 8},
}
CARDS = [("rtx4090", 4), ("rtx4090", 8), ("h100", 8)]
ROWS = ["7 B", *in_tier("sweep", ["1 B", "13 B", "70 B"])]


def llama(size: str, *, lora: bool, dtype: torch.dtype = torch.float32) -> Any:
    with autopar.lazy_init():
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES[size]), dtype=dtype)
    if not lora:
        return model
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(
        model, peft.LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
    )


def cells(row: str) -> Iterator[str]:
    """What the planner finds for one row: the mesh, GB of the fullest card, tokens a second and card."""
    plain = llama(row, lora=False)
    planned = PlannedModel(plain, None, sequence=2048, precision="bf16", optimizer="adamw", dry_run=False)
    for gpu, count in CARDS:
        estimator = Estimator(planned, find_node(gpu))
        found = search(estimator, Space(count, 8, 16), 1)
        rehearsed(estimator, found)
        if not found.best:
            least = min(memory.total for _, memory in found.too_large)
            yield f"no: {least / 1e9:.0f} GB at least"
            continue
        best, chosen = found.best[0], found.best[0].candidate
        mesh = " x ".join(
            f"{axis} {n}" for axis, n in (("tp", chosen.tp), ("pp", chosen.pp), ("dp", chosen.dp)) if n > 1
        )
        zero = f", ZeRO {chosen.zero}" if chosen.zero else ""
        again = ", recomputed" if chosen.checkpointing else ""
        speed = best.tokens_per_second / count
        yield f"{mesh}{zero}{again}: {best.peak.total / 1e9:.0f} GB, {float(f'{speed:.2g}'):,.0f} tokens/s"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # PEFT asks for it
@pytest.mark.tier("all")
def test_seven_billion_parameters_on_small_cards() -> None:
    text, again = PAGE.read_text(), {"activation_checkpointing": {"enable": True}}
    config = {"tp": 2, "precision": {"dtype": "bf16"}, **again}
    assert f"`{json.dumps(config)}`" in text
    adapters = autopar.plan_memory(llama("7 B", lora=True), config, sequence=2048, gpus=4).peak.total
    assert f"{adapters / 1e9:.0f} GB a card, with" in text
    config = {"tp": 4, **again}
    assert f"`{json.dumps(config)}`" in text
    half = llama("7 B", lora=False, dtype=torch.bfloat16)
    assert f", {autopar.plan_memory(half, config, sequence=2048).peak.total / 1e9:.0f} GB a card" in text


@pytest.mark.tier("all")
@pytest.mark.parametrize("row", ROWS)
def test_the_table(row: str) -> None:
    line = f"| {row} | {' | '.join(cells(row))} |"
    same(PAGE, re.sub(rf"^\| {re.escape(row)} \|.*$", line, PAGE.read_text(), flags=re.MULTILINE))
    assert line in PAGE.read_text().splitlines()
