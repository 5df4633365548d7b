"""DoRA: magnitudes of whole outputs, over norms that no rank has alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

import autopar
from autopar.errors import ConfigError
from autopar.integrations import get_peft_model
from tests.exchange import raises_everywhere
from tests.features.peft.adapted import batch, peft, same_training, with_lora
from tests.harness.worlds import pooled
from tests.parity import close
from tests.small import llama

DORA: dict[str, Any] = {"target_modules": "all-linear", "use_dora": True}


@pooled(world_size=2)
@pytest.mark.parametrize("sequence", [False, True])
def test_rows_of_the_sequence_and_recomputation(sequence: bool) -> None:
    config = {"model_parallelism": {"tensor_parallel_size": 2, "sequence_parallel": sequence}}
    same_training(with_lora(llama(), **DORA), {**config, "activation_checkpointing": {"enable": not sequence}})


@pooled(world_size=2)
def test_saved_merged_and_made_later(tmp_path: Path) -> None:
    plain, model = with_lora(llama(), **DORA), autopar.initialize(with_lora(llama(), **DORA), {"tp": 2})
    model.save_parallelized(str(tmp_path / "adapters"), adapter_only=True)
    dist.barrier()
    loaded = dict(peft.PeftModel.from_pretrained(llama(), tmp_path / "adapters").named_parameters())
    names = [name for name in loaded if "lora_" in name]
    assert len(names) == 3 * 14
    for name, parameter in plain.named_parameters():
        if name in names:
            assert torch.equal(loaded[name], parameter), name
    due = plain(**batch()).logits
    close(model(**batch()).logits[:], due, "logits")
    model.merge_adapter()
    close(model(**batch()).logits[:], due, "logits of merged weights")
    model.unmerge_adapter()
    close(model(**batch()).logits[:], due, "logits of weights that were merged")
    torch.manual_seed(3)
    later = get_peft_model(autopar.initialize(llama(), {"tp": 2}), peft.LoraConfig(**DORA, task_type="CAUSAL_LM"))
    close(later(**batch()).logits[:], llama()(**batch()).logits, "logits of adapters that begin with nothing")


@pooled(world_size=2)
def test_without_memory_there_are_no_norms() -> None:
    config = llama().config
    with autopar.lazy_init():
        model = LlamaForCausalLM(config)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**DORA, task_type="CAUSAL_LM"))
    with raises_everywhere(ConfigError, "lora_magnitude_vector"):
        autopar.initialize(adapted, {"tp": 2})
