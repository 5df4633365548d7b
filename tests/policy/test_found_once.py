"""The policy of a model, and of each model inside it, is found once in an ``initialize``."""

import sys
from collections import Counter
from types import FrameType
from typing import Any

from transformers import BertConfig, BertLMHeadModel, BertModel, EncoderDecoderModel

import autopar
from autopar.policy.match import find_policy, model_inside
from tests.pool import pooled
from tests.small import gpt2

COUNTED = {function.__code__ for function in (find_policy, model_inside)}


def composite() -> Any:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    encoder = BertConfig(**sizes, vocab_size=24)
    decoder = BertConfig(**sizes, vocab_size=24, is_decoder=True, add_cross_attention=True)
    return EncoderDecoderModel(encoder=BertModel(encoder), decoder=BertLMHeadModel(decoder))


def calls_in(model: Any, mesh: dict[str, int]) -> Counter[str]:
    calls = Counter[str]()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in COUNTED:
            calls[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        autopar.initialize(model, {"model_parallelism": mesh})
    finally:
        sys.setprofile(None)
    return calls


@pooled(world_size=2)
def test_policies_are_found_once() -> None:
    for mesh in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"):
        assert calls_in(gpt2(), {mesh: 2}) == {"find_policy": 1, "model_inside": 1}, mesh
    assert calls_in(composite(), {"tensor_parallel_size": 2}) == {"find_policy": 3, "model_inside": 1}
