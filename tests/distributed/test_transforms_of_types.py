"""Transforms of torch.func through models of many types, experts and adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, jvp, vmap

from autopar.errors import ConfigError
from tests.distributed.transforms import (
    Loss,
    Tensors,
    directions_of,
    gradients_of,
    parallel_with,
    same,
    second_of,
    small_mixtral,
    weights_of,
    whole_of,
)
from tests.pool import pooled
from tests.random_models import batches, build, cases, kind
from tests.representatives import REPRESENTATIVES
from tests.small import llama
from tests.worlds import raises_everywhere


@pooled(world_size=2)
def test_experts() -> None:
    plain = small_mixtral("batched_mm")
    configs: list[dict[str, Any]] = [{}, {"expert_parallel_size": 2}]
    for config in (*configs, {"expert_parallel_size": 2, "expert_dispatch": "all_reduce"}):
        model = parallel_with(plain, tensor_parallel_size=2, **config)
        loss, weights = Loss(model), weights_of(model)
        gradients = gradients_of(Loss(plain)(dict(plain.named_parameters())), plain)
        same(whole_of(model, grad(loss)(weights)), gradients, "grad", 1e-5)
        product = jvp(grad(loss), (weights,), (directions_of(model),))[1]
        same(whole_of(model, product), second_of(Loss(plain), plain), "Hessian times a vector", 1e-4)
        if not config:
            same(whole_of(model, loss.samples(), samples=True), Loss(plain).samples(), "samples", 1e-5)
            continue
        with raises_everywhere(ConfigError, "vmap: experts that ranks hold whole", "expert_parallel_size: 1"):
            loss.samples()


@pooled(world_size=2)
def test_samples_train_adapters_alone() -> None:
    """DP-SGD of LoRA: embeddings, rows and columns."""
    pytest.importorskip("peft")
    from tests.adapters.adapted import with_lora

    plain = with_lora(
        llama(attn_implementation="eager"), target_modules=["embed_tokens", "q_proj", "o_proj", "up_proj"]
    )
    found = []
    for each in (plain, parallel_with(plain)):
        trained = {name: p.detach() for name, p in each.named_parameters() if p.requires_grad}
        assert 0 < len(trained) < len(list(each.parameters()))
        found.append(whole_of(each, Loss(each).samples(trained), samples=True))
    same(found[1], found[0], "adapters", 1e-5)


_NONE = ("bloom", "rwkv")  # have autograd functions of transformers, which torch.func does not go through


def _transforms(loss: Any, batch: Tensors) -> dict[str, Callable[[Any], Tensors]]:
    def samples(model: Any) -> Tensors:
        one = grad(lambda weights, row: loss(model, weights, {name: x[None] for name, x in row.items()}))
        found: Tensors = vmap(one, in_dims=(None, 0))(weights_of(model), batch)
        return found

    def product(model: Any) -> Tensors:
        slope = grad(lambda weights: loss(model, weights, batch))
        found: Tensors = jvp(slope, (weights_of(model),), (directions_of(model),))[1]
        return found

    return {
        "grad": lambda model: grad(lambda w: loss(model, w, batch))(weights_of(model)),
        "hvp": product,
        "vmap": samples,
    }


@pytest.mark.tier("sweep")
@pytest.mark.parametrize("model_type", REPRESENTATIVES)
@pooled(world_size=2)
def test_what_the_plain_model_can_do(model_type: str) -> None:
    words = [case for case in cases(model_type) if kind(case.head) in ("causal", "seq2seq", "masked")]
    case = (words or cases(model_type))[0]
    plain: Any = build(case, 6, 3).eval()
    plain.set_attn_implementation("eager")
    batch = {name: x for name, x in batches(case, plain.config)[0].items() if isinstance(x, torch.Tensor)}

    def loss(model: Any, weights: Tensors, given: Tensors) -> torch.Tensor:
        outputs = functional_call(model, weights, kwargs=given)
        own: torch.Tensor | None = getattr(outputs, "loss", None)
        return next(iter(outputs.values())).float().square().mean() if own is None else own

    model, compared = parallel_with(plain).eval(), 0
    for name, transform in _transforms(loss, batch).items():
        try:
            expected = transform(plain)
        except Exception:
            continue  # transformers cannot
        compared += 1
        same(whole_of(model, transform(model), samples=name == "vmap"), expected, f"{case} {name}", 1e-4)
    assert bool(compared) == (model_type not in _NONE)
