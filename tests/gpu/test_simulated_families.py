"""Models of each kind on the simulated device: no tensor is made on the host, and no layer waits for the device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils._pytree import tree_map

import autopar
import autopar.dry_run.plan_model
from autopar.errors import ConfigError
from autopar.tools.verification.outputs import named, reseed, total_loss
from tests.gpu import simulated
from tests.gpu.device_ranks import needs_compiler, on_device
from tests.gpu.host_waits import Wait, waits
from tests.parity import all_close, close, whole
from tests.random_models import batches, build, cases
from tests.representatives import REPRESENTATIVES

pytestmark = needs_compiler

MESHES: dict[str, dict[str, Any]] = {
    "tp": {"tensor_parallel_size": 2},
    "sequence": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "cp": {"context_parallel_size": 2},
}
REFUSED = {  # by this combination anywhere, not by the device
    "sequence": {"swin", "whisper", "wav2vec2"},
    "cp": {"vit", "swin", "whisper", "wav2vec2", "mllama"},
}


@pytest.mark.tier("sweep")
@pytest.mark.parametrize("mesh", MESHES)
@on_device(world_size=2, timeout=180)
def test_a_forward_and_backward_are_the_plain_models_and_wait_no_more(mesh: str) -> None:
    transformers.logging.set_verbosity_error()
    autopar.dry_run.plan_model.check_plan = lambda *_: True  # the tests of rehearsals have it
    refused = set[str]()
    for model_type in REPRESENTATIVES:
        model, batch = _small(model_type)
        config = {"model_parallelism": MESHES[mesh], "consistency_check": {"enable": False}}
        plain, there = copy.deepcopy(model), copy.deepcopy(model).to(simulated.start())
        expected, _ = _step(plain, batch)
        try:
            parallel = autopar.initialize(model, config)
            found, _ = _step(parallel, batch)
        except ConfigError:
            refused.add(model_type)
            continue
        for key, value in expected.items():
            close(found[key].cpu(), value, f"{model_type}: {key}")
        if mesh == "cp":
            autopar.average_gradients(parallel)
        gradients = _gradients(parallel)
        all_close(gradients, _gradients(plain), f"{model_type}: gradient of {{}}")
        _, ours = _step(parallel, batch)
        theirs = {wait.place for wait in _step(there, batch)[1]}
        more = {wait.place for wait in ours if wait.own} | {wait.place for wait in ours} - theirs
        assert not more, f"{model_type}: {more}"
        parallel.mpu.destroy()
    assert refused <= REFUSED.get(mesh, set()), sorted(refused)


def _small(model_type: str) -> tuple[nn.Module, dict[str, Any]]:
    case = cases(model_type)[0]
    model = build(case, 6, 3, vocab=131).train()
    return model, batches(case, model.config, 1)[0]


def _step(model: nn.Module, batch: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[Wait]]:
    """Forward and backward where the model lies; outputs that are numbers, and where the host has waited."""
    device = next(model.parameters()).device
    given = tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, copy.deepcopy(batch))
    reseed(0)
    with waits() as found:
        outputs = named(model(**given))
        total_loss(outputs).backward()
    numbers = {k: v.detach() for k, v in outputs.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    return numbers, found


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients on the CPU; zeros where there is none."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if hasattr(model, "mpu"):
        return whole(model, lambda parameter: parameter.grad)
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
