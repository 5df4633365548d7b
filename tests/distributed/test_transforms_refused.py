"""What is checked where transforms of torch.func run, and what they do not go through."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap

import autopar
from autopar.errors import ConfigError, ConsistencyError
from tests.distributed.transforms import (
    IDS,
    Loss,
    parallel_with,
    small_mixtral,
    weights_of,
)
from tests.pool import pooled
from tests.small import gpt2, llama
from tests.worlds import raises_everywhere


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_inputs_are_checked_inside_of_transforms() -> None:
    model: Any = parallel_with(gpt2(attn_implementation="eager"))
    samples = vmap(lambda ids: model(input_ids=ids[None]).logits)
    before = samples(IDS)
    with raises_everywhere(IndexError, "index out of range in an embedding of 131 rows: ids run from 125 to"):
        samples(IDS - IDS.min() + 125)
    other = IDS.roll(dist.get_rank(), 0)
    with raises_everywhere(ConsistencyError, "input_ids"):
        samples(other)
    with raises_everywhere(ConsistencyError, "input_ids"):
        grad(lambda w: functional_call(model, w, kwargs={"input_ids": other, "labels": IDS}).loss)(weights_of(model))
    weights = weights_of(model)
    weights["transformer.ln_f.weight"] = weights["transformer.ln_f.weight"] + dist.get_rank()
    with raises_everywhere(ConsistencyError, "transformer.ln_f.weight"):
        for _ in range(20):  # some weights in each forward
            grad(Loss(model))(weights)
    assert torch.equal(samples(IDS), before)


def _refused(model: Any, cause: str) -> None:
    def loss(weights: Any) -> Any:
        return functional_call(model, weights, kwargs={"input_ids": IDS, "labels": IDS, "use_cache": False}).loss

    text = f"torch.func (grad, vmap, jvp and the like) and dual tensors do not go through {cause}"
    before = model(input_ids=IDS).logits.detach()
    with raises_everywhere(ConfigError, text, "tensor_parallel_size, with sequence_parallel too"):
        grad(loss)(weights_of(model))
    with raises_everywhere(ConfigError, text):
        vmap(lambda ids: model(input_ids=ids[None], use_cache=False).logits)(IDS)
    embeds = torch.randn(3, 7, 24, generator=torch.Generator().manual_seed(3))
    with forward_ad.dual_level():
        assert torch.equal(model(input_ids=IDS).logits, before), "nothing is dual"
        with raises_everywhere(ConfigError, text):
            model(inputs_embeds=forward_ad.make_dual(embeds, embeds))
        if cause[0] != "z":
            dual = {name: forward_ad.make_dual(weight, weight) for name, weight in weights_of(model).items()}
            with raises_everywhere(ConfigError, text):
                loss(dual)
    assert torch.equal(model(input_ids=IDS).logits, before)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_what_transforms_do_not_go_through_says_so() -> None:
    plain = llama(attn_implementation="eager")
    _refused(parallel_with(plain, context_parallel_size=2), "context_parallel_size: its ranks exchange rows and states")
    _refused(parallel_with(plain, pipeline_parallel_size=2).eval(), "pipeline stages")
    _refused(
        parallel_with(small_mixtral("eager").float(), expert_parallel_size=2), "experts that several replicas share"
    )
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded: Any = autopar.initialize(model, {"zero": {"stage": 3}}, optimizer=optimizer)
    _refused(sharded[0], "zero.stage 3")
