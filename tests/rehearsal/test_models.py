"""Models and configurations of users: what they rehearse, and what is counted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel, ViTConfig, ViTForImageClassification

import autopar
from autopar.errors import ConfigError
from autopar.tools.commands.models import add_lora
from tests.harness.tiers import mainly
from tests.rehearsal.programs import llama, mixtral
from tests.rehearsal.test_rehearse import on_meta

SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8}
WITHOUT_LABELS: dict[str, Callable[[], Any]] = {
    "encoder": lambda: BertModel(BertConfig(**SMALL, vocab_size=256)),
    "classes of samples": lambda: BertForSequenceClassification(BertConfig(**SMALL, vocab_size=256)),
    "images": lambda: ViTForImageClassification(ViTConfig(**SMALL, image_size=32, patch_size=8)),
}


@pytest.mark.tier("test")
@pytest.mark.parametrize("name", mainly("images", *sorted(set(WITHOUT_LABELS) - {"images"})))
@pytest.mark.parametrize("config", [{"tp": 2}, {"tp": 2, "pp": 2}], ids=["tp", "tp x pp"])
def test_a_model_without_labels_of_tokens_learns_its_mean(name: str, config: dict[str, Any]) -> None:
    found = autopar.rehearse(on_meta(WITHOUT_LABELS[name]), config, 4, sequence=16)
    assert found.problems == []
    assert any(part == "step" and "backward" in call.where for part, call in found.traces[0])


def frozen_blocks() -> Any:
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    for block in model.model.layers[:2]:
        block.requires_grad_(False)
    return model


@pytest.mark.tier("all")
@pytest.mark.parametrize("gpu", [None, "h100"])
def test_frozen_blocks_of_fsdp2(gpu: str | None) -> None:
    found = autopar.rehearse(on_meta(frozen_blocks), {"zero": {"stage": 3}}, 4, sequence=16, gpu=gpu)
    assert found.problems == []
    assert [call.kind for part, call in found.traces[0] if part == "step"].count("reduce_scatter") == 3


@pytest.mark.tier("all")
def test_shards_on_the_cpu_send_what_others_do() -> None:
    both = [
        autopar.rehearse(on_meta(llama), {"zero": {"stage": 2, "cpu_offload": offload}}, 4, sequence=16)
        for offload in (False, True)
    ]
    assert both[0].problems == both[1].problems == [] and both[0].traffic == both[1].traffic


@pytest.mark.tier("test")
def test_tensors_that_travel_as_bytes_are_counted() -> None:
    def mixed() -> Any:
        model = llama().to(torch.bfloat16).requires_grad_(False)
        for block in model.model.layers:
            block.input_layernorm.float().requires_grad_(True)
        return model

    found = autopar.rehearse(on_meta(mixed), {"zero": {"stage": 3}}, 4, sequence=16)
    gathered = [call for part, call in found.traces[0] if (part, call.kind) == ("step", "all_gather")]
    as_bytes = [call for call in gathered if call.dtype == "uint8"]
    assert as_bytes, "torch gathers two dtypes of a block as bytes"
    assert found.traffic["dp"].calls >= len(gathered)
    assert found.traffic["dp"].bytes > sum(3 * call.bytes for call in as_bytes)


@pytest.mark.tier("test")
def test_options_of_muon_need_muon() -> None:
    config = {"tp": 2, "optimizer": {"full_matrix": "sharded"}}
    found = autopar.rehearse(on_meta(llama), config, 4, sequence=16, optimizer="muon")
    whole = autopar.rehearse(on_meta(llama), {"tp": 2}, 4, sequence=16, optimizer="muon")
    exchanged = [call for part, call in whole.traces[0] if (part, call.kind) == ("step", "all_to_all")]
    assert found.problems == whole.problems == []
    assert exchanged and found.calls("step") != whole.calls("step")


@pytest.mark.tier("test")
def test_an_optimizer_of_your_own() -> None:
    def own(parameters: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    found = autopar.rehearse(on_meta(llama), {"tp": 2}, 4, sequence=16, gpu="h100", optimizer=own)
    assert found.problems == []
    assert found.held[0].optimizer < found.held[0].weights / 4, "SGD keeps no state, AdamW twice the weights"


@pytest.mark.tier("all")
def test_adapters_of_experts() -> None:
    config = {"tp": 2, "precision": {"dtype": "bf16"}}
    found = autopar.rehearse(add_lora(on_meta(mixtral), 4), config, 4, sequence=16, gpu="h100")
    assert found.problems == []
    assert 0 < found.held[0].gradients < found.held[0].weights / 4, "the base is frozen"


_ATTENTION_ALONE = """
extends: [fragments/decoder, fragments/decoder_heads, fragments/attention_qkvo, fragments/norms_before]
match: {model_type: llama}
blocks:
  modules: {mlp.gate_proj: replicated, mlp.up_proj: replicated, mlp.down_proj: replicated}
"""


@pytest.mark.tier("test")
def test_the_policy_of_a_config_is_the_one_that_is_rehearsed(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(_ATTENTION_ALONE)
    own = autopar.rehearse(on_meta(llama), {"tp": 2, "policy": str(tmp_path / "policy.yaml")}, 2, sequence=16)
    usual = autopar.rehearse(on_meta(llama), {"tp": 2}, 2, sequence=16)
    assert own.problems == usual.problems == []
    assert usual.calls("step") - own.calls("step") == 2 * 4 * 2, "a sum in each MLP, forward and backward, of two ranks"


@pytest.mark.parametrize("sizes", [{"world": 0}, {"batch": -1}, {"sequence": 0}, {"gpus_per_node": 0}])
def test_sizes_that_do_not_fit(sizes: dict[str, int], tmp_path: Path) -> None:
    given = {"world": 4, **sizes}
    ((name, size),) = sizes.items()
    with pytest.raises(ConfigError, match=f"rehearse: {name} must be at least [01]; got {size}"):
        autopar.rehearse(on_meta(llama), {"tp": 2}, given.pop("world"), **given)
