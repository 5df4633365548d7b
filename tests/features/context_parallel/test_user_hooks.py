"""User hooks where ranks share sequences: refused, unless they are local."""

import copy
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

import autopar
from autopar.errors import ConfigError, ConsistencyError
from tests.exchange import raises_everywhere
from tests.features.context_parallel.test_exactness import sizes
from tests.harness.worlds import pooled
from tests.parity import close, language_batches
from tests.small import llama

KINDS = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")


def look(*_: Any) -> None:
    """Change nothing."""


@pytest.mark.parametrize("kind", KINDS)
@pooled(world_size=2)
def test_hooks_below_the_model_raise_until_they_are_local_or_removed(kind: str) -> None:
    model: Any = autopar.initialize(llama(), sizes(2))
    (batch,) = language_batches(131, count=1)
    for path in ("model", "model.embed_tokens", "model.layers.0", "model.layers.1.mlp.up_proj", "lm_head"):
        module = model.get_submodule(path)
        handle = getattr(module, f"register_{kind}")(look)
        words = (f"the hook look ({__file__}:", f"on {path} would get this rank's part", "autopar.local_hooks(module)")
        with raises_everywhere(ConfigError, "context_parallel_size=2", *words):
            model(**batch)
        handle.remove()
        model(**batch)
        autopar.local_hooks(module)
        getattr(module, f"register_{kind}")(look)
        model(**batch)


@pooled(world_size=4)
def test_with_tensor_parallelism() -> None:
    for sp in (False, True):
        model: Any = autopar.initialize(llama(), sizes(2, tensor_parallel_size=2, sequence_parallel=sp))
        (batch,) = language_batches(131, count=1)
        handle = model.model.layers[0].mlp.up_proj.register_forward_hook(look)
        with raises_everywhere(ConfigError, "the hook look", "on model.layers.0.mlp.up_proj"):
            model(**batch)
        handle.remove()
        model(**batch)
        model.mpu.destroy()


@pooled(world_size=2)
def test_hooks_that_are_there_before_are_refused_by_initialize() -> None:
    model: Any = llama()
    model.model.layers[0].register_forward_hook(look)
    with raises_everywhere(ConfigError, "the hook look", "on model.layers.0 would get"):
        autopar.initialize(model, sizes(2))
    autopar.local_hooks(model.model.layers[0])
    autopar.initialize(model, sizes(2))(**language_batches(131, count=1)[0])


@pooled(world_size=2)
def test_hooks_on_all_modules() -> None:
    model: Any = autopar.initialize(llama(), sizes(2))
    (batch,) = language_batches(131, count=1)
    handle = register_module_forward_hook(look)
    with raises_everywhere(ConfigError, "the hook look", "on all modules"):
        model(**batch)
    handle.remove()
    model(**batch)


@pooled(world_size=2)
def test_hooks_of_the_model_itself_see_full_tensors() -> None:
    plain: Any = llama().eval()
    model: Any = autopar.initialize(copy.deepcopy(plain), sizes(2)).eval()
    ids, seen = language_batches(131, count=1)[0]["input_ids"], []
    for each in (plain, model):
        each.register_forward_hook(lambda module, args, output: seen.append(output.logits.detach() + 0))
        each(ids)
    close(seen[1], seen[0], "logits")


@pooled(world_size=2)
def test_forwards_that_are_not_cut_call_hooks() -> None:
    """With a cache each rank has the full sequence."""
    plain: Any = llama().eval()
    model: Any = autopar.initialize(copy.deepcopy(plain), sizes(2)).eval()
    results = []
    for each in (plain, model):
        each.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * (out > out.mean()))
        results.append(each.generate(torch.arange(5).view(1, 5), max_new_tokens=6, do_sample=False))
    assert torch.equal(results[0], results[1])


@pooled(world_size=2)
def test_ranks_with_other_hooks_are_named() -> None:
    model: Any = autopar.initialize(llama(), sizes(2))
    (batch,) = language_batches(131, count=1)
    if model.mpu.cp.rank:
        handle = model.model.layers[0].mlp.up_proj.register_forward_hook(look)
    with raises_everywhere(ConsistencyError, "over local sequences on model.layers.0.mlp.up_proj"):
        model(**batch)
    if model.mpu.cp.rank:
        handle.remove()
    model(**batch)


@pooled(world_size=2)
def test_local_hooks_see_local_sequences() -> None:
    model: Any = autopar.initialize(llama(), sizes(2))
    (batch,) = language_batches(131, count=1)
    layer, lengths = model.model.layers[0].mlp, []
    autopar.local_hooks(layer)
    layer.register_forward_hook(lambda module, args, output: lengths.append(output.shape[1]))
    model(**batch)
    assert lengths == [3 + model.mpu.cp.rank]
    copied: Any = copy.deepcopy(model)
    copied(**batch)
    assert len(lengths) == 2
