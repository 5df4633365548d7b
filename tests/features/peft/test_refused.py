"""What of PEFT is refused, by its name, before anything is changed. In one process: plans are made of any model."""

from typing import Any

import pytest

from autopar.errors import ConfigError
from autopar.plan.make_plan import make_plan
from autopar.plan.stages import make_stages
from autopar.policy.match import find_policy
from tests.features.peft.adapted import peft, with_lora
from tests.small import llama

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # PEFT reads it

_LINEAR = ["q_proj", "o_proj"]
METHODS = {
    "DoRA and dropout": (
        lambda: peft.LoraConfig(target_modules=_LINEAR, use_dora=True, lora_dropout=0.1),
        r"lora_dropout of the DoRA adapter 'default' \(at .*q_proj\)",
    ),
    "aLoRA": (
        lambda: peft.LoraConfig(target_modules=_LINEAR, alora_invocation_tokens=[1], task_type="CAUSAL_LM"),
        r"PEFT's ALoraLinear of adapter 'default' \(at .*q_proj\), a variant of LoRA",
    ),
    "AdaLoRA": (
        lambda: peft.AdaLoraConfig(target_modules=_LINEAR, total_step=9),
        r"PEFT's ADALORA \(adapter 'default'",
    ),
    "LoHa": (lambda: peft.LoHaConfig(target_modules=_LINEAR), r"PEFT's LOHA"),
    "VeRA": (lambda: peft.VeraConfig(target_modules=_LINEAR), r"PEFT's VERA"),
    "LayerNorm": (lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]), r"PEFT's LN_TUNING"),
    "tokens": (
        lambda: peft.LoraConfig(target_modules=_LINEAR, trainable_token_indices=[1, 2]),
        r"PEFT's trainable_tokens layer TrainableTokensLayer on a Embedding",
    ),
    "tied": (
        lambda: peft.LoraConfig(target_modules=["embed_tokens"], ensure_weight_tying=True),
        r"ensure_weight_tying=True of PEFT's LORA",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", METHODS)
def test_other_methods_are_refused_by_name_over_tensor_parallel_ranks(name: str):
    config, text = METHODS[name]
    model = peft.get_peft_model(llama(), config())
    names = list(model.state_dict())
    policy = find_policy(model)
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size=2 is not supported with {text}(.|\n)*LoRA"):
        make_plan(model, policy, 2)
    make_plan(model, policy, 1)  # one rank computes what PEFT has
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("config", [peft.PromptTuningConfig, peft.PrefixTuningConfig])
def test_prompts_are_refused_through_stages(config: Any):
    model = peft.get_peft_model(llama(), config(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=2 is not supported with PEFT's P"):
        make_stages(model, find_policy(model), 2)


def test_quantized_base_layers_of_other_libraries_are_refused_by_name():
    model = with_lora(llama(), target_modules=_LINEAR)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    layer.__class__ = type("HqqLoraLinear", (type(layer),), {"__module__": "peft.tuners.lora.hqq"})
    with pytest.raises(
        ConfigError, match=r"PEFT's lora layer HqqLoraLinear on a Linear \(at .*layers.0.self_attn.q_proj"
    ):
        make_plan(model, find_policy(model), 2)
