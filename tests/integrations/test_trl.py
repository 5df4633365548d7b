"""Trainers of TRL that learn from a data set, with a parallelized model, against themselves on one process."""

import pytest
import torch
from transformers import BitsAndBytesConfig, LlamaForCausalLM

from autopar.errors import ConfigError
from tests.exchange import raises_everywhere
from tests.fetched_packages import with_package
from tests.integrations.runs import launched
from tests.integrations.trl_runs import compare, config, judge, lora, save_model, trainer_of
from tests.small import llama

pytest.importorskip("accelerate")


def run(folder, name, kind, parallel=None, **changes):
    compare(trainer_of(kind, folder, parallel, **changes), folder / f"{name}.json")


def all_of_them(folder, tp):
    """The reference of DPO and KTO is sharded as the model is; with adapters it is the model without them."""
    parallel = None if tp is None else config(tp)
    with launched():
        run(folder, "SFT", "SFT", parallel)
        run(folder, "DPO", "DPO", parallel, ref_model=llama(1))
        run(folder, "following", "DPO", parallel, sync_ref_model=True, ref_model_sync_steps=2)
        run(folder, "KTO", "KTO", parallel)
        run(folder, "Reward", "Reward", parallel, model=judge())
        run(folder, "SFT-adapters", "SFT", parallel, peft_config=lora(modules_to_save=["lm_head"]))
        run(folder, "DPO-adapters", "DPO", parallel, peft_config=lora(modules_to_save=["lm_head"]))


@with_package("trl", world_size=1)
def on_one_process(folder):
    all_of_them(folder, None)


@with_package("trl", world_size=2)
def on_two_ranks(folder):
    all_of_them(folder, 2)


@with_package("trl", world_size=4)
def on_four_ranks(folder):
    """Two replicas; also the metrics that TRL gathers by itself."""
    with launched():
        run(folder, "SFT", "SFT", config(2))
        run(folder, "DPO", "DPO", config(2), ref_model=llama(1))
        run(folder, "DPO-adapters", "DPO", config(2), peft_config=lora(modules_to_save=["lm_head"]))
        stages = {"model_parallelism": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}}
        with raises_everywhere(ConfigError, "ParallelSFTTrainer.compute_loss with pipeline_parallel_size=2"):
            run(folder, "SFT", "SFT", stages)


@pytest.mark.tier("all")
@pytest.mark.parametrize("ranks", [on_two_ranks, on_four_ranks], ids=["tensor-parallel", "replicas"])
def test_trainers(tmp_path, ranks):
    save_model(tmp_path)
    on_one_process(tmp_path)
    ranks(tmp_path)


def on_quantized_bases(folder, parallel=None):
    """TRL makes adapters of a quantized model bf16, whose rounding differs between ranks: here they are fp32."""
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    for kind, changes in {"SFT": {}, "GRPO": {"beta": 0.1}}.items():
        with launched():
            model = LlamaForCausalLM.from_pretrained(folder / "model", quantization_config=how)
            for module in model.modules():
                if hasattr(module, "support_avx512bf16_for_cpu"):
                    module.support_avx512bf16_for_cpu = False  # or an evaluation computes in bf16
            adapters = lora(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
            trainer = trainer_of(kind, folder, parallel, model=model, peft_config=adapters, **changes)
            for parameter in trainer.model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
            compare(trainer, folder / f"{kind}.json")


@with_package("trl", world_size=1)
def quantized_on_one_process(folder):
    on_quantized_bases(folder)


@with_package("trl", world_size=2)
def quantized_on_two_ranks(folder):
    on_quantized_bases(folder, config(2))


@pytest.mark.tier("all")
def test_adapters_on_quantized_bases(tmp_path):
    pytest.importorskip("bitsandbytes")
    save_model(tmp_path, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, intermediate_size=256)
    quantized_on_one_process(tmp_path)
    quantized_on_two_ranks(tmp_path)
