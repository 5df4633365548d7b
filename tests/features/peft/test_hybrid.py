"""Adapters under stages, ZeRO, activation checkpointing and replicas: weights after steps as on one process."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import autopar
from tests.compare import same_weights
from tests.features.peft.adapted import batch, peft, with_lora
from tests.harness.worlds import pooled
from tests.parity import close
from tests.small import llama

_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]


def _steps(folder: Path, config: dict[str, Any], steps: int = 2) -> None:
    plain = with_lora(llama(), target_modules=_TARGETS, modules_to_save=["lm_head"]).train()
    model = copy.deepcopy(plain)
    adam = {"lr": 1e-2, "eps": 1e-3}
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **adam)
    expected = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], **adam)
    model, optimizer = autopar.initialize(model, config | {"gradient_clipping": 0.5}, optimizer=optimizer)
    mpu = model.mpu
    for step in range(steps):
        data = batch(step, rows=4)
        rows = {name: value.chunk(mpu.dp.size)[mpu.dp.rank] for name, value in data.items()}
        if mpu.pp.size > 1:
            model.execute_pipeline(rows, optimizer=optimizer)
        else:
            model(**rows).loss.backward()
            autopar.average_gradients(model)
        plain(**data).loss.backward()
        assert torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5) > 0.5
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
    if mpu.dp.size > 1:  # also with ZeRO-3, whose rows are gathered
        folder = folder / str(config["zero"]["stage"])
        model.save_pretrained(folder)
        if mpu.rank == 0:
            expected_weights = peft.get_peft_model_state_dict(plain)
            found = load_file(folder / "adapter_model.safetensors")
            assert found.keys() == expected_weights.keys()
            for name, weight in expected_weights.items():
                close(found[name], weight, f"{name} after {steps} steps")
        return
    same_weights(model, plain, when=f"after {steps} steps")


@pytest.mark.parametrize("zero", [0, 1, 3])
@pooled(world_size=4)
def test_two_ranks_by_two_stages_or_replicas(tmp_path: Path, zero: int):
    size = {"tensor_parallel_size": 2}
    if zero:
        memory = {"zero": {"stage": zero}, "activation_checkpointing": {"enable": True}}
        _steps(tmp_path, {"model_parallelism": size, **memory})
    else:
        sizes = {**size, "pipeline_parallel_size": 2}
        _steps(tmp_path, {"model_parallelism": sizes, "pipeline": {"num_microbatches": 2}})
