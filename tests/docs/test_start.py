"""docs/start.md: the answer for 7 B on 4 x 24 GB is what the planner counts."""

import json

import pytest
import torch

import autopar
from tests.docs.pages import DOCS
from tests.docs.test_planner import llama

PAGE = DOCS / "start.md"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # PEFT asks for it
@pytest.mark.tier("all")
def test_seven_billion_parameters_on_small_cards() -> None:
    text, again = " ".join(PAGE.read_text().split()), {"activation_checkpointing": {"enable": True}}
    config = {"tp": 2, "precision": {"dtype": "bf16"}, **again}
    assert f"`{json.dumps(config)}`" in text
    adapters = autopar.plan_memory(llama("7 B", lora=True), config, sequence=2048, gpus=4).peak.total
    assert f"{adapters / 1e9:.0f} GB a card, with" in text
    config = {"tp": 4, **again}
    assert f"`{json.dumps(config)}`" in text
    half = llama("7 B", lora=False, dtype=torch.bfloat16)
    assert f", {autopar.plan_memory(half, config, sequence=2048).peak.total / 1e9:.0f} GB a card" in text
