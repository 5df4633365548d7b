"""Selective checkpointing, by transformers' own switch: what the policy saves is used again, and reduced once."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import autopar
from tests.parity import all_close, language_batches, whole
from tests.pool import pooled
from tests.small import gpt2, llama

_BUILD = {"llama": llama, "gpt2": gpt2}
_SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.embedding.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.tier("test", only=("llama-plain",))
@pytest.mark.parametrize("how", ["plain", "sequence_parallel", "process_group"])
@pytest.mark.parametrize("kind", list(_BUILD))
@pooled(world_size=2)
def test_gradients_are_those_of_the_plain_model(kind: str, how: str) -> None:
    plain, batches = _BUILD[kind](), language_batches(131)
    sizes: dict[str, Any] = {"tensor_parallel_size": 2, "sequence_parallel": how == "sequence_parallel"}
    model = autopar.initialize(copy.deepcopy(plain), {"model_parallelism": sizes})
    if how == "process_group":  # whose all-reduce overlaps with the gradient of a weight
        model.mpu.tp.transport = None
    context = functools.partial(create_selective_checkpoint_contexts, _policy)
    for each in (plain, model):
        each.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": context})
        for batch in batches:
            each.train()(**batch).loss.backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
    all_close(whole(model, lambda parameter: parameter.grad), expected, "gradient of {}")
