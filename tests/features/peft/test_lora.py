"""LoRA in front of, behind and around sharded layers: training equals one process with PEFT."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import ConfigError
from tests.features.peft.adapted import peft, phi3, randomise_adapters, same_training, with_lora
from tests.harness.worlds import pooled
from tests.random_models import build, cases, kind
from tests.small import gpt2, llama

MODELS: dict[str, Callable[[], Any]] = {
    "llama, queries and values": lambda: with_lora(llama(), target_modules=["q_proj", "v_proj"]),
    "llama, all linear": lambda: with_lora(llama(), target_modules="all-linear", use_rslora=True, lora_bias=False),
    "gpt2, Conv1D": lambda: with_lora(gpt2(), target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True),
    "llama, DoRA": lambda: with_lora(llama(attention_bias=True), target_modules="all-linear", use_dora=True),
    "gpt2, DoRA": lambda: with_lora(
        gpt2(), target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True, use_dora=True
    ),
    "phi3, DoRA": lambda: with_lora(phi3(), target_modules="all-linear", use_dora=True),
    "phi3, fused": lambda: with_lora(phi3(), target_modules="all-linear"),
}


@pytest.mark.tier("test", only=("llama, all linear", "gpt2, Conv1D", "llama, DoRA"))
@pytest.mark.parametrize("name", MODELS)
@pooled(world_size=2)
def test_lora_trains_as_on_one_process(name: str):
    same_training(MODELS[name](), {"model_parallelism": {"tensor_parallel_size": 2}})


def _everything() -> Any:
    model = with_lora(
        llama(attention_bias=True, mlp_bias=True),
        target_modules=["q_proj", "k_proj", "o_proj", "down_proj", "up_proj", "embed_tokens"],
        modules_to_save=["lm_head"],
        rank_pattern={"q_proj": 3},
        use_rslora=True,
    )
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["v_proj", "gate_proj"]))
    model.base_model.set_adapter(["default", "second"])
    return randomise_adapters(model, 7)


def _of_type(model_type: str, **settings: Any) -> Any:
    case = next(case for case in cases(model_type) if kind(case.head) == "causal")
    return with_lora(build(case, 6, 3), **settings)


def _ia3(model: Any, modules: list[str], feedforward: list[str]) -> Any:
    config = peft.IA3Config(target_modules=modules, feedforward_modules=feedforward, task_type="CAUSAL_LM")
    return randomise_adapters(peft.get_peft_model(model, config))


def _prompt(config: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(llama(), config(task_type="CAUSAL_LM", num_virtual_tokens=3, **settings))


OTHERS: dict[str, Callable[[], Any]] = {
    "modules to save, embedding, two adapters": _everything,
    "lora_bias": lambda: with_lora(
        llama(attention_bias=True), target_modules=["q_proj", "o_proj", "k_proj"], lora_bias=True
    ),
    "head and tied embedding": lambda: with_lora(gpt2(), target_modules=["wte", "c_proj"], fan_in_fan_out=True),
    "latent attention": lambda: _of_type("deepseek_v3", target_modules="all-linear"),
    "experts": lambda: _of_type("mixtral", target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
    "prompt tuning": lambda: _prompt(peft.PromptTuningConfig),
    "p-tuning": lambda: _prompt(peft.PromptEncoderConfig, encoder_hidden_size=8),
    "prefix tuning": lambda: _prompt(peft.PrefixTuningConfig),
    "IA3": lambda: _ia3(llama(), ["q_proj", "v_proj", "down_proj", "o_proj"], ["down_proj"]),
    "IA3, Conv1D": lambda: _ia3(gpt2(), ["c_attn", "c_proj", "c_fc"], ["c_proj"]),
}


@pytest.mark.tier("test", only=("modules to save, embedding, two adapters", "experts"))
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)
@pooled(world_size=2)
def test_other_adapters_train_as_on_one_process(name: str):
    same_training(OTHERS[name](), {"model_parallelism": {"tensor_parallel_size": 2}}, steps=1)


@pooled(world_size=4)
def test_kv_heads_on_several_ranks():
    model = with_lora(llama(), target_modules="all-linear")  # 3 KV heads
    same_training(model, {"model_parallelism": {"tensor_parallel_size": 4}}, steps=1)
    scaled = _ia3(llama(), ["k_proj", "down_proj"], ["down_proj"])
    with pytest.raises(
        ConfigError, match=r"adapters at .*k_proj are not supported with the rule 'column' of kv_heads .*\n.*modules_to"
    ):
        autopar.initialize(scaled, {"model_parallelism": {"tensor_parallel_size": 4}})
