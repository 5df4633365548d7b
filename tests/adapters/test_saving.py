"""Adapters of a parallelized model in PEFT's own files, read by plain PEFT; checkpoints that hold them, on any mesh."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import autopar
from autopar.errors import CheckpointError, ConfigError
from tests.adapters.adapted import batch, peft, phi3, randomise_adapters, whole_of, with_lora
from tests.parity import close
from tests.pool import pooled
from tests.small import gpt2, llama


def _adapted() -> Any:
    model = with_lora(llama(), target_modules=["q_proj", "v_proj", "o_proj", "embed_tokens"], modules_to_save=["lm_head"])
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["down_proj", "k_proj"], task_type="CAUSAL_LM"))
    model.set_adapter("second")
    randomise_adapters(model, 5)
    model.set_adapter("default")
    return model


def _files(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".safetensors":
            found[str(path.relative_to(folder))] = load_file(path)
        elif path.suffix == ".json":
            values = json.loads(path.read_text())  # sets are written in any order
            found[str(path.relative_to(folder))] = {k: sorted(v) if isinstance(v, list) else v for k, v in values.items()}
    return found


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pooled(world_size=2)
def test_files_are_those_of_peft(tmp_path: Path):
    plain = _adapted()
    model = autopar.initialize(copy.deepcopy(plain), {"model_parallelism": {"tensor_parallel_size": 2}})
    model.save_pretrained(tmp_path / "through peft")
    model.save_parallelized(tmp_path / "ours", adapter_only=True)
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path / "plain")
        expected = _files(tmp_path / "plain")
        assert {"adapter_config.json", "adapter_model.safetensors", "second/adapter_config.json"} <= expected.keys()
        for folder in ("ours", "through peft"):
            found = _files(tmp_path / folder)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                if name.endswith(".json"):
                    assert found[name] == value, name
                else:
                    assert found[name].keys() == value.keys()
                    assert all(torch.equal(found[name][key], tensor) for key, tensor in value.items())
        again = peft.PeftModel.from_pretrained(llama(), tmp_path / "ours")
        close(again(**batch()).logits, plain(**batch()).logits, "logits of the adapters that were read")
    dist.barrier()
