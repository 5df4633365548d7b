"""A token that is decoded costs few calls in Python beside those of the plain model, and is the same one."""

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.parity import close
from tests.pool import pooled
from tests.small import gpt2, llama, parallel

BUILD: dict[str, Callable[..., Any]] = {"llama": llama, "gpt2": gpt2}
IDS = torch.arange(5, 9)[None]


def calls_of_a_token(model: Any) -> Counter[str]:
    """Python functions that run while one token is decoded after a cache, by their files; those that wait left out."""
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and not frame.f_code.co_filename.endswith("/transport.py"):
            found[frame.f_code.co_filename] += 1

    with torch.no_grad():
        cache = model(IDS, use_cache=True).past_key_values
        for _ in range(2):
            found.clear()
            sys.setprofile(count)
            try:
                model(IDS[:, -1:], past_key_values=cache, use_cache=True)
            finally:
                sys.setprofile(None)
    return found


@pooled(world_size=2)
@pytest.mark.parametrize("kind", BUILD)
def test_a_parallel_layer_costs_few_calls_where_nothing_needs_a_gradient(kind: str) -> None:
    def build(number: int) -> Any:
        blocks = {"n_layer": number, "attn_pdrop": 0.1} if kind == "gpt2" else {"num_hidden_layers": number}
        return BUILD[kind](**blocks).eval()

    two, six = (calls_of_a_token(build(number)) for number in (2, 6))
    two_of_rank, six_of_rank = (calls_of_a_token(parallel(build(number), 2)) for number in (2, 6))
    of_four_blocks = (six_of_rank.total() - two_of_rank.total()) - (six.total() - two.total())
    more = (six_of_rank - two_of_rank - six + two).most_common(12)
    assert 0 < of_four_blocks / 4 < (60 if kind == "llama" else 75), (of_four_blocks, more)  # measured: 44 and 60


@pooled(world_size=2)
@torch.no_grad()
def test_without_gradients_too_a_layer_does_all_that_is_not_a_product() -> None:
    model, plain = (make(gpt2(attn_pdrop=0.5), 2) for make in (parallel, lambda model, _: model))
    torch.manual_seed(3)
    masks = [model.train()(IDS).logits for _ in range(2)]
    assert not torch.equal(*masks)
    layer = model.transformer.h[0].attn.c_attn
    assert layer._plain() is None and model.eval()(IDS).logits.isfinite().all() and layer._plain() is not None
    close(model(IDS).logits, plain.eval()(IDS).logits, "logits")
    layer.skip_bias_add = True
    assert layer._plain() is None
    layer.skip_bias_add = False
    parametrizations.weight_norm(layer)
    assert layer._plain() is None
    assert isinstance(layer, nn.Module)
