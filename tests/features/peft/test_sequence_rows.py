"""Adapters under sequence parallelism: gradients of those that run later, and rows around their layers."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import autopar
from autopar.integrations import add_adapter
from tests.features.peft.adapted import batch, peft, randomise_adapters, same_training, whole_of, with_lora
from tests.harness.worlds import pooled
from tests.parity import close
from tests.small import llama

SP = {"model_parallelism": {"tensor_parallel_size": 2, "sequence_parallel": True}}
ROWS = {"target_modules": ["o_proj", "down_proj"]}


def two(**settings: Any) -> Any:
    """Two adapters, of which the first is active."""
    model = with_lora(llama(), **ROWS, **settings)
    model.add_adapter("two", peft.LoraConfig(r=3, lora_alpha=8, **ROWS, **settings))
    model.set_adapter("two")
    randomise_adapters(model, 3)
    model.set_adapter("default")
    return model


def disabled(**settings: Any) -> Any:
    model = two(**settings)
    model.base_model.disable_adapter_layers()
    return model


def merged(**settings: Any) -> Any:
    model = two(**settings)
    model.merge_adapter()
    return model


def enable(model: Any) -> None:
    model.base_model.enable_adapter_layers()
    model.set_adapter("two")


def unmerge(model: Any) -> None:
    model.unmerge_adapter()
    model.set_adapter("two")


def add(model: Any) -> None:
    torch.manual_seed(7)
    change = add_adapter if hasattr(model, "mpu") else type(model).add_adapter
    change(model, "three", peft.LoraConfig(r=3, init_lora_weights=False, **ROWS))
    model.set_adapter("three")


LATER: dict[str, tuple[Callable[..., Any], dict[str, Any], Callable[[Any], None]]] = {
    "second": (two, {}, lambda model: model.set_adapter("two")),
    "disabled": (disabled, {}, enable),
    "merged": (merged, {}, unmerge),
    "added": (two, {}, add),
    "dora": (two, {"use_dora": True}, lambda model: model.set_adapter("two")),
    "saved copies": (two, {"modules_to_save": ["input_layernorm", "o_proj"]}, lambda model: model.set_adapter("two")),
    "saved copies disabled": (disabled, {"modules_to_save": ["input_layernorm"]}, enable),
}


@pytest.mark.tier("test", only=("second", "disabled"))
@pytest.mark.parametrize("case", LATER)
@pooled(world_size=2)
def test_an_adapter_that_did_not_run_at_initialize_has_the_gradients_of_one_process(case: str) -> None:
    build, settings, switch = LATER[case]
    plain = build(**settings).train()
    model = autopar.initialize(copy.deepcopy(plain), SP)
    for turn in range(2):  # to the other adapter, and back
        for each in (plain, model):
            switch(each) if turn == 0 else each.set_adapter("default")
            for number in range(2):
                (each(**batch(number, length=6 + number)).loss / 2).backward()
        expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert gradients.keys() == expected.keys()
        for name, gradient in whole_of(model, gradients).items():
            close(gradient, expected[name], f"gradient of {name}")


@pytest.mark.tier("test", only=("llama",))
@pytest.mark.parametrize("name", ["llama", "saved"])
@pooled(world_size=2)
def test_adapters_on_all_column_layers_leave_rows_between_regions(name: str) -> None:
    """The attention's input is gathered, and its output is summed into rows, as without adapters."""
    attention = ["q_proj", "k_proj", "v_proj"]
    saved = {"modules_to_save": ["k_proj"]} if name == "saved" else {}
    targets = [each for each in attention if each not in saved.get("modules_to_save", ())]
    plain = with_lora(llama(), target_modules=targets, **saved)
    model = same_training(plain, SP, steps=1)
    lengths: list[int] = []
    for path, module in model.named_modules():
        if path.endswith("self_attn.o_proj"):
            autopar.local_hooks(module)
            module.register_forward_hook(lambda _, args, out: lengths.append(out.shape[1]))
    model(**batch(length=8))
    assert lengths == [4, 4]
    entries = model._autopar.features["sequence_parallel"].entries
    assert all(entry.endswith(("self_attn", "self_attention", "mlp")) for entry in entries)
