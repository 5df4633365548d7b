"""Gradients of what the model is given (saliency, soft prompts, GCG): the whole ones, on every rank."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.errors import ConsistencyError
from tests.compare import same_gradients
from tests.features.context_parallel.test_exactness import sizes
from tests.harness.worlds import pooled
from tests.parity import close, language_batches
from tests.small import gpt2, llama


def one_step(of: Any, embed: nn.Module, prompt: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """Train soft prompts before embeddings of a one-hot matrix, as GCG makes it. Returns the gradient of that."""
    ids, labels = batch["input_ids"], batch["labels"]
    hot = nn.functional.one_hot(ids, 131).float().requires_grad_()
    given = torch.cat([prompt.expand(len(ids), -1, -1), hot @ embed.weight], 1)
    seen = torch.ones(given.shape[:2], dtype=torch.long)
    counted = torch.cat([labels.new_full((len(ids), prompt.shape[0]), -100), labels], 1)
    of(inputs_embeds=given, attention_mask=seen, labels=counted).loss.backward()
    return hot.grad


def alike(build: Any, **more: int) -> None:
    plain = build().train()
    model = autopar.initialize(copy.deepcopy(plain), sizes(2, **more))
    table = copy.deepcopy(plain.get_input_embeddings())  # the user's own, whole
    prompts = [nn.Parameter(torch.linspace(-1, 1, 2 * table.weight.shape[1]).view(2, -1)) for _ in range(2)]
    for batch in language_batches(131, count=2, seq=9):
        mine, expected = (one_step(*each, batch) for each in ((model, table, prompts[0]), (plain, table, prompts[1])))
        close(mine, expected, "gradient of the one-hot matrix")
    close(prompts[0].grad, prompts[1].grad, "gradient of the prompt")
    plain.zero_grad()
    model.zero_grad()
    for each in (plain, model):  # through the model's own embedding
        each(inputs_embeds=each.get_input_embeddings()(batch["input_ids"]), labels=batch["labels"]).loss.backward()
    autopar.average_gradients(model)
    same_gradients(model, plain, 2e-5)
    model.mpu.destroy()


@pytest.mark.tier("test", only=("llama",))
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pooled(world_size=2)
def test_they_are_those_of_the_plain_model(name: str) -> None:
    alike({"llama": llama, "gpt2": gpt2}[name])


@pooled(world_size=4)
def test_beside_tensor_parallelism() -> None:
    alike(llama, tensor_parallel_size=2)
    alike(llama, tensor_parallel_size=2, sequence_parallel=True)


@pooled(world_size=2)
def test_one_that_is_wanted_on_one_rank_only_is_refused() -> None:
    model = autopar.initialize(llama().train(), sizes(2))
    given = torch.randn(1, 8, 24, generator=torch.Generator().manual_seed(0)).requires_grad_(dist.get_rank() == 0)
    with pytest.raises(ConsistencyError, match=r"inputs_embeds: rank 0: \[1, 8, 24\] \w+, requires a gradient"):
        model(inputs_embeds=given)
    model.mpu.destroy()
