"""Adapters on sharded layers, stages, replicas and sequence shards: training equals one process with PEFT."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import autopar
from autopar.errors import ConfigError
from autopar.integrations import add_adapter, get_peft_model
from tests.exchange import raises_everywhere
from tests.features.experts.mixtures import compare
from tests.features.peft.adapted import batch, peft, phi3, randomise_adapters, same_training, whole_of, with_lora
from tests.harness.worlds import pooled
from tests.parity import all_close, close
from tests.random_models import build, cases, kind
from tests.small import gpt2, llama

CONV1D = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
MODELS: dict[str, Callable[[], Any]] = {
    "llama, queries and values": lambda: with_lora(llama(), target_modules=["q_proj", "v_proj"]),
    "llama, all linear": lambda: with_lora(llama(), target_modules="all-linear", use_rslora=True, lora_bias=False),
    "gpt2, Conv1D": lambda: with_lora(gpt2(), **CONV1D),
    "llama, DoRA": lambda: with_lora(llama(attention_bias=True), target_modules="all-linear", use_dora=True),
    "gpt2, DoRA": lambda: with_lora(gpt2(), **CONV1D, use_dora=True),
    "phi3, DoRA": lambda: with_lora(phi3(), target_modules="all-linear", use_dora=True),
    "phi3, fused": lambda: with_lora(phi3(), target_modules="all-linear"),
}


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
    model = build(case, 6, 3)
    model.set_experts_implementation("eager")  # the others have no fp64
    return with_lora(model, **settings)


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


_FIRST = ("llama, all linear", "gpt2, Conv1D", "llama, DoRA", "modules to save, embedding, two adapters", "experts")


@pytest.mark.tier("test", only=_FIRST)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
@pooled(world_size=2)
def test_lora_trains_as_on_one_process(name: str):
    same_training((MODELS | OTHERS)[name](), {"tp": 2})


@pooled(world_size=4)
def test_kv_heads_on_several_ranks():
    model = with_lora(llama(), target_modules="all-linear")  # 3 KV heads
    same_training(model, {"tp": 4})
    scaled = _ia3(llama(), ["k_proj", "down_proj"], ["down_proj"])
    words = r"adapters at .*k_proj are not supported with the rule 'column' of kv_heads .*\n.*modules_to"
    with pytest.raises(ConfigError, match=words):
        autopar.initialize(scaled, {"tp": 4})


TWO = {"pipeline": {"num_microbatches": 2}}
DORA: dict[str, Any] = {"target_modules": "all-linear", "use_dora": True}


@pooled(world_size=2)
@pytest.mark.parametrize("sequence", [False, True])
def test_dora_over_sequence_shards_and_recomputed(sequence: bool) -> None:
    config = {"model_parallelism": {"tensor_parallel_size": 2, "sequence_parallel": sequence}}
    same_training(with_lora(llama(), **DORA), {**config, "activation_checkpointing": {"enable": not sequence}})


@pooled(world_size=2)
def test_dora_is_saved_merged_and_made_later(tmp_path: Path) -> None:
    plain, model = with_lora(llama(), **DORA), autopar.initialize(with_lora(llama(), **DORA), {"tp": 2})
    model.save_parallelized(str(tmp_path / "adapters"), adapter_only=True)
    dist.barrier()
    loaded = dict(peft.PeftModel.from_pretrained(llama(), tmp_path / "adapters").named_parameters())
    names = [name for name in loaded if "lora_" in name]
    assert len(names) == 3 * 14
    assert all(torch.equal(loaded[name], plain.get_parameter(name)) for name in names)
    due = plain(**batch()).logits
    for change in (list, model.merge_adapter, model.unmerge_adapter):
        change()
        close(model(**batch()).logits[:], due, f"logits after {change}")
    torch.manual_seed(3)
    later = get_peft_model(autopar.initialize(llama(), {"tp": 2}), peft.LoraConfig(**DORA, task_type="CAUSAL_LM"))
    close(later(**batch()).logits[:], llama()(**batch()).logits, "logits of adapters that begin with nothing")

    config = llama().config
    with autopar.lazy_init():
        model = LlamaForCausalLM(config)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**DORA, task_type="CAUSAL_LM"))
    with raises_everywhere(ConfigError, "lora_magnitude_vector"):
        autopar.initialize(adapted, {"tp": 2})


@pytest.mark.parametrize("zero", [0, 1, 3])
@pooled(world_size=4)
def test_two_ranks_by_two_stages_or_replicas(tmp_path: Path, zero: int):
    def adapted() -> Any:
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
        return with_lora(llama(), target_modules=targets, modules_to_save=["lm_head"]).double()

    recomputed = {"activation_checkpointing": {"enable": True}}
    config = {"tp": 2, "zero": {"stage": zero}, **recomputed} if zero else {"tp": 2, "pp": 2, **TWO}
    model, _, plain = compare(adapted, config, even=not zero)
    if zero:
        model.save_pretrained(tmp_path)  # with ZeRO-3 rows are gathered
        if model.mpu.rank == 0:
            due, found = peft.get_peft_model_state_dict(plain), load_file(tmp_path / "adapter_model.safetensors")
            assert found.keys() == due.keys()
            all_close(found, due, "{} after three steps")


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


def to_two(model: Any) -> None:
    model.set_adapter("two")


LATER: dict[str, tuple[str, dict[str, Any], Callable[[Any], None]]] = {  # a method of before, and what is done later
    "second": ("", {}, to_two),
    "disabled": ("disable_adapter_layers", {}, enable),
    "merged": ("merge_adapter", {}, unmerge),
    "added": ("", {}, add),
    "dora": ("", {"use_dora": True}, to_two),
    "saved copies": ("", {"modules_to_save": ["input_layernorm", "o_proj"]}, to_two),
    "saved copies disabled": ("disable_adapter_layers", {"modules_to_save": ["input_layernorm"]}, enable),
}


@pytest.mark.tier("test", only=("second", "disabled"))
@pytest.mark.parametrize("case", LATER)
@pooled(world_size=2)
def test_an_adapter_that_did_not_run_at_initialize_has_the_gradients_of_one_process(case: str) -> None:
    before, settings, switch = LATER[case]
    plain = two(**settings).train()
    if before:
        getattr(plain.base_model, before)()
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
    model = same_training(plain, SP)
    lengths: list[int] = []
    for path, module in model.named_modules():
        if path.endswith("self_attn.o_proj"):
            autopar.local_hooks(module)
            module.register_forward_hook(lambda _, args, out: lengths.append(out.shape[1]))
    model(**batch(length=8))
    assert lengths == [4, 4]
    entries = model._autopar.features["sequence_parallel"].entries
    assert all(entry.endswith(("self_attn", "self_attention", "mlp")) for entry in entries)
