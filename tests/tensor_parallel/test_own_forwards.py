"""A forward that is set on a layer's object would take the place of the sharded one: it is refused by name."""

from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

import autopar
from autopar.errors import ConfigError
from autopar.plan.make_plan import make_plan
from autopar.plan.matching import check_forwards
from autopar.policy.match import find_policy
from tests.pool import pooled
from tests.small import gpt2, llama, parallel
from tests.worlds import raises_everywhere


def _check(model: Any, tp: int = 2) -> None:
    check_forwards(model, make_plan(model, find_policy(model), tp))


def test_a_patched_layer_is_named_and_another_module_may_be_patched() -> None:
    model = llama()
    patched = model.model.layers[1].self_attn.o_proj
    plain = patched.forward
    patched.forward = lambda x: plain(x) * 0.5
    with pytest.raises(ConfigError) as info:
        _check(model)
    assert str(info.value) == (
        "model.layers.1.self_attn.o_proj (row, tensor_parallel_size=2) must not have a forward set on the object: it "
        "would replace the\n  sharded forward, and results would be wrong.\n"
        "  Use register_forward_hook or register_forward_pre_hook, or replace the layer by a subclass."
    )
    _check(model, tp=1)
    del patched.forward
    model.model.norm.forward = model.model.norm.forward  # replicated
    _check(model)


def test_hooks_of_accelerate_are_named_with_what_takes_them_off() -> None:
    model = gpt2()
    add_hook_to_module(model.transformer.wte, ModelHook())
    for block in model.transformer.h:
        add_hook_to_module(block.mlp.c_proj, ModelHook())
    with pytest.raises(
        ConfigError, match=r"(?s)^transformer\.wte, and 2 more .*remove_hook_from_module\(model, recurse=True"
    ):
        _check(model)
    remove_hook_from_module(model, recurse=True)
    _check(model)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_what_hooks_of_accelerate_leave_behind_is_not_called() -> None:
    plain, model = gpt2(), gpt2()
    for block in model.transformer.h:
        add_hook_to_module(block.mlp.c_proj, ModelHook())
    remove_hook_from_module(model, recurse=True)
    assert "forward" in vars(model.transformer.h[0].mlp.c_proj)
    ids = torch.arange(8).view(2, 4)
    sharded = parallel(model, 2)(ids).logits + 0
    torch.testing.assert_close(sharded, plain(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_initialize_refuses_it_and_changes_nothing() -> None:
    model = llama()
    ids = torch.arange(6).view(1, 6)
    layer = model.model.layers[0].mlp.down_proj
    plain = layer.forward
    layer.forward = lambda x: plain(x) + 1
    expected = model(ids).logits
    with raises_everywhere(ConfigError, "layers.0.mlp.down_proj (row, tensor_parallel_size=2) must not have a forward"):
        parallel(model, 2)
    assert torch.equal(model(ids).logits, expected) and not hasattr(model, "mpu")
    piped = autopar.initialize(model, {"model_parallelism": {"pipeline_parallel_size": 2}})
    with torch.no_grad():
        assert torch.equal(piped.eval()(ids).logits, expected), "stages hold whole layers"
