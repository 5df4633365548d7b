import copy

import torch

import autopar
from autopar.distributed.process import Accelerator
from autopar.features.activation_checkpointing import setup as activations
from tests.compare import same_gradients
from tests.harness.worlds import pooled
from tests.parity import language_batches
from tests.small import gpt2

CONFIG = {"model_parallelism": {"tensor_parallel_size": 2}, "activation_checkpointing": {"cpu_checkpointing": True}}


def compare(model, plain):
    for m in (model, plain):
        m.train()
        for batch in language_batches(131):
            m(**batch).loss.backward()
    same_gradients(model, plain)


@pooled(world_size=2)
def test_on_the_cpu_gradients_are_the_plain_models_and_generating_keeps_the_cache():
    plain = gpt2()
    model = autopar.initialize(copy.deepcopy(plain), CONFIG)
    functions = [block._gradient_checkpointing_func for block in model.transformer.h]
    assert all(function.func is activations.offloaded for function in functions)
    compare(model, plain)
    copied = copy.deepcopy(model)
    assert copied.transformer.h[0]._gradient_checkpointing_func.func is activations.offloaded
    # In training mode, blocks that recompute forget the cache, and go on from the last token alone.
    ids = torch.arange(10).view(2, 5)
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.train().generate(ids, **settings), plain.generate(ids, **settings))
    compare(model, plain)  # and it recomputes again
    assert model.transformer.gradient_checkpointing


@pooled(world_size=2)
def test_only_the_inputs_of_blocks_are_moved():
    """As on a GPU, with a place to save to that only counts."""
    moved = []
    activations.save_on_cpu = lambda **_: torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: moved.append(tuple(tensor.shape)) or tensor.clone(), lambda tensor: tensor
    )
    plain = gpt2()
    model = autopar.initialize(copy.deepcopy(plain), CONFIG)
    activations.accelerator = lambda: Accelerator("cuda", "nccl")
    compare(model, plain)
    inputs = [shape for shape in moved if shape == (2, 7, 36)]
    assert len(inputs) == 4  # two blocks, two micro-batches
    weights = {tuple(parameter.shape) for parameter in model.parameters()}
    assert not weights & set(moved)
