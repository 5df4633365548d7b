"""Layers that take a seed for each forward: the same one on all tensor-parallel ranks, and another one each time."""

from typing import Any

import torch

import autopar
from autopar.swap import unbind
from autopar.tensor_parallel import apply
from autopar.tensor_parallel.apply import draw_seeds_alike
from tests.parity import close
from tests.pool import pooled
from tests.random_models import Case, batches, build

CASE = Case("reformer", "ReformerForMaskedLM")


def _hashing(model: Any) -> Any:
    for module in model.modules():
        if hasattr(module, "hash_seed"):
            module.hash_seed = None  # other buckets at each forward
    return model.train()


@pooled(world_size=2)
def test_hashes_and_gradients_are_the_plain_models_for_the_same_seed() -> None:
    plain = _hashing(build(CASE, 4, 2))
    batch = batches(CASE, plain.config, 1)[0]
    model = autopar.initialize(_hashing(build(CASE, 4, 2)), {"model_parallelism": {"tensor_parallel_size": 2}})
    draw_seeds_alike(plain)
    losses = []
    for each in (plain, model):
        torch.manual_seed(3)
        losses.append(each(**batch).loss)
        losses[-1].backward()
    close(losses[1].detach(), losses[0].detach(), "loss")
    theirs = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        expected = theirs[name].grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None and parameter.shape == expected.shape:
            close(parameter.grad, expected, name)
    unbind(plain, apply._OWNER)
    assert not any("_init_attention_seed" in vars(module) for module in plain.modules())
    model.mpu.destroy()
