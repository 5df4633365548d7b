"""Planned bytes of weights, gradients and optimizer state against real ranks, for policies of every structure."""

from pathlib import Path

import pytest
import torch
import transformers
import yaml

import autopar
from autopar.config import ParallelConfig
from autopar.errors import AutoparError, ConfigError
from autopar.features.context_parallel import plan as context_plan
from autopar.features.sequence_parallel import plan as sequence_plan
from autopar.tools.planner.model_states import ModelStates
from autopar.tools.planner.planned_model import PlannedModel
from tests.harness.worlds import pooled
from tests.planner.saved_bytes import held_bytes
from tests.random_models import Case, build, cases, kind
from tests.representatives import REPRESENTATIVES, first_types

CONFIGS = yaml.safe_load(Path(__file__).with_name("meshes.yaml").read_text())["every structure over two ranks"]
IN_EVERY_RUN = ("phi3", "t5", "mixtral", "zamba2", "bloom", "deepseek_v3", "bart", "whisper", "llava", "mamba2")


def _main_case(model_type: str) -> Case:
    order = ("seq2seq", "causal", "masked", "ctc")
    listed = cases(model_type)
    words = [case for case in listed if kind(case.head) in order and not case.variant]
    return (words or listed)[0]


def _compare(case: Case, name: str) -> None:
    model = build(case, 6, 3)
    try:
        planned = PlannedModel(model, sequence=8)
        parsed = ParallelConfig.parse(CONFIGS[name])
        plan = planned.plans.tensors(parsed.tensor_parallel_size, experts=parsed.expert_parallel_size)
        states = ModelStates(model, planned.inner, plan)
        stages = planned.stages(parsed)
        if parsed.context_parallel_size > 1:
            context_plan.rows(planned.plans, parsed.context_parallel_size)
        if parsed.sequence_parallel:
            sequence_plan.sequence(planned.plans, parsed.tensor_parallel_size, planned.plans.stages(1))
    except AutoparError as refused:  # then initialize refuses it too
        with pytest.raises(type(refused)):
            autopar.initialize(model, CONFIGS[name])
        return
    world = torch.distributed.get_world_size()
    if parsed.zero_stage == 3 and any(parameter.ndim == 0 for parameter in model.parameters()):
        with pytest.raises(ConfigError, match="FSDP2 does not support the scalar parameter"):
            states.of_rank(stages, parsed, 0, 0, 0, world)
        return
    replicas = parsed.data_parallel_size(world) * parsed.context_parallel_size
    planned_here = {
        (p, d, t): states.of_rank(stages, parsed, t, p, d, replicas)
        for p in range(parsed.pipeline_parallel_size)
        for d in range(replicas)
        for t in range(parsed.tensor_parallel_size)
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = autopar.initialize(model, CONFIGS[name], optimizer=optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if parsed.context_parallel_size > 1:
        autopar.average_gradients(model)
    if parsed.precision == "fp16":
        optimizer.scale_loss(torch.zeros(()))
    optimizer.step()
    mpu = model.mpu
    planned_bytes = planned_here[mpu.pp.rank, mpu.dp_cp.rank, mpu.tp.rank]
    both = list(zip(planned_bytes, held_bytes(model, optimizer), strict=False))
    if parsed.precision != "fp32":
        del both[1]  # gradients, which only execute_pipeline sums in fp32
    assert all(one == other for one, other in both), f"{case}, {name}: {both}"
    mpu.destroy()


@pytest.mark.parametrize("model_type", first_types(IN_EVERY_RUN, list(REPRESENTATIVES), later="sweep"))
@pooled(world_size=2, timeout=300)
def test_states_of(model_type: str) -> None:
    transformers.logging.set_verbosity_error()
    for name in CONFIGS:
        _compare(_main_case(model_type), name)
