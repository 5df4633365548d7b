"""Transforms of torch.func and dual tensors on a sharded model: one error in words, and the model works afterwards."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap
from transformers import MixtralConfig, MixtralForCausalLM

import autopar
from autopar.errors import ConfigError
from tests.pool import pooled
from tests.small import llama, parallel
from tests.worlds import raises_everywhere

IDS = torch.randint(0, 131, (3, 8), generator=torch.Generator().manual_seed(3))
WORDS = ("torch.func (grad, vmap, jvp, ...) and dual tensors are not supported on a sharded model", "loss.backward()")
MESHES: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "sp": {"model_parallelism": {"tensor_parallel_size": 2, "sequence_parallel": True}},
    "cp": {"cp": 2},
    "pp": {"pp": 2},
    "ep": {"ep": 2},
    "zero": {"zero": {"stage": 3}},
}


def mixtral() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 131, "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "num_local_experts": 4}
    return MixtralForCausalLM(
        MixtralConfig(**sizes, **heads, attn_implementation="eager", experts_implementation="eager")
    )


@pytest.mark.parametrize("mesh", MESHES)
@pooled(world_size=2)
def test_they_are_refused(mesh: str) -> None:
    plain = mixtral() if mesh == "ep" else llama(attn_implementation="eager")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model: Any = autopar.initialize(plain.eval(), MESHES[mesh], optimizer=optimizer)[0]
    before = model(input_ids=IDS, use_cache=False).logits.detach().clone()

    def loss(weights: Any) -> Any:
        return functional_call(model, weights, kwargs={"input_ids": IDS, "labels": IDS, "use_cache": False}).loss

    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with raises_everywhere(ConfigError, *WORDS):
        grad(loss)(weights)
    with raises_everywhere(ConfigError, *WORDS):
        vmap(lambda ids: model(input_ids=ids[None], use_cache=False).logits)(IDS)
    embeds = torch.randn(3, 8, 24, generator=torch.Generator().manual_seed(3))
    with forward_ad.dual_level():
        assert torch.equal(model(input_ids=IDS, use_cache=False).logits, before), "nothing is dual"
        with raises_everywhere(ConfigError, *WORDS):
            model(inputs_embeds=forward_ad.make_dual(embeds, embeds))
    assert torch.equal(model(input_ids=IDS, use_cache=False).logits, before)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_batched_and_dual_gradients_and_layers_by_themselves_are_refused() -> None:
    model: Any = parallel(llama(attn_implementation="eager"), 2)
    gradients = torch.eye(2)
    losses = torch.stack([model(input_ids=ids[None], labels=ids[None]).loss for ids in IDS[:2]])
    with raises_everywhere(ConfigError, *WORDS):
        vmap(lambda g: torch.autograd.grad(losses, list(model.parameters()), g, retain_graph=True))(gradients)
    with forward_ad.dual_level(), raises_everywhere(ConfigError, *WORDS):
        torch.autograd.grad(losses, list(model.parameters()), forward_ad.make_dual(gradients[0], gradients[1]))
    layer: nn.Module = model.model.layers[0].mlp.down_proj
    with raises_everywhere(ConfigError, *WORDS):
        vmap(layer)(torch.ones(3, 2, layer.in_features))  # type: ignore[arg-type]
    for ids in IDS:  # one sample at a time
        gradients = torch.autograd.grad(model(input_ids=ids[None], labels=ids[None]).loss, list(model.parameters()))
        assert all(gradient.isfinite().all() for gradient in gradients)
