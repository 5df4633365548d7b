"""Ranks that share one GPU over nccl: three training steps on every kind of mesh are the plain model's.

nccl runs as between machines, by sockets of the loopback device. Without a GPU the same bodies run over gloo.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM

import autopar
from autopar.config.pipeline import SCHEDULES
from tests.gpu.device_ranks import sharing_a_gpu
from tests.gpu.places import on_each
from tests.parity import close, randomise
from tests.small import gpt2, llama

IDS = torch.randint(0, 131, (4, 9), generator=torch.Generator().manual_seed(3))
TOLERANCE = 1e-4  # fp32 of two devices' kernels, after three steps


def mixtral(experts: str = "grouped_mm") -> Any:
    """2 layers, 4 experts, 2 of them for each token."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 36}
    config = MixtralConfig(
        **sizes, num_hidden_layers=2, vocab_size=131, num_local_experts=4, max_position_embeddings=64
    )
    model = randomise(MixtralForCausalLM(config))
    model.set_experts_implementation(experts)
    return model


Case = tuple[Callable[[], Any], dict[str, Any]]


def case(build: Callable[[], Any] = llama, extra: dict[str, Any] | None = None, **sizes: Any) -> Case:
    return build, {"model_parallelism": sizes, **(extra or {})}


ZERO_1: dict[str, Any] = {"zero": {"stage": 1}, "gradient_clipping": 1.0}
STAGES = {
    schedule: case(
        lambda: llama(num_hidden_layers=4),
        {"pipeline": {"schedule": schedule, "microbatch_size": 1}},
        pipeline_parallel_size=2,
    )
    for schedule in SCHEDULES
}
ON_TWO: dict[str, Case] = {
    "tp": case(tensor_parallel_size=2),
    "tp of GPT-2": case(gpt2, tensor_parallel_size=2),
    "sequence": case(tensor_parallel_size=2, sequence_parallel=True),
    "dp, zero 1": case(extra=ZERO_1),
    "dp, zero 3": case(extra={"zero": {"stage": 3}}),
    "cp": case(context_parallel_size=2),
    "recomputed": case(extra={"activation_checkpointing": {"enable": True}}, tensor_parallel_size=2),
    "experts of replicas": case(mixtral, expert_parallel_size=2),
    **STAGES,
}
ON_FOUR: dict[str, Case] = {
    "tp x dp, zero 1": case(extra=ZERO_1, tensor_parallel_size=2),
    "tp x pp": case(tensor_parallel_size=2, pipeline_parallel_size=2),
    "tp x cp": case(tensor_parallel_size=2, context_parallel_size=2),
    "tp x ep": case(mixtral, tensor_parallel_size=2, expert_parallel_size=4),
}


def trained(place: str, build: Callable[[], Any], config: dict[str, Any], *, moved: bool) -> None:
    """Compare three steps with the plain model on the same device: losses, and all weights.

    Args:
        moved: the model lies on the device when ``initialize`` gets it; there, rank 1 has drawn other weights.
    """
    plain = build().train()
    model = copy.deepcopy(plain)
    if moved:
        model = model.to(place)
        if dist.get_rank() == 1:
            model.get_input_embeddings().weight.data.normal_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
    plain = plain.to(place)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-3)
    mpu, zero_3 = model.mpu, config.get("zero", {}).get("stage") == 3
    assert mpu.device.type == place
    share = IDS.chunk(mpu.dp.size)[mpu.dp.rank].to(place)
    for _ in range(3):
        expected = plain(IDS.to(place), labels=IDS.to(place)).loss
        expected.backward()
        if "gradient_clipping" in config:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        reference.step(), reference.zero_grad()
        if mpu.pp.size > 1:
            loss = model.execute_pipeline({"input_ids": share, "labels": share}).loss
        else:
            loss = model(share, labels=share).loss
            loss.backward()
        if mpu.dp_cp.size > 1 and not zero_3:
            autopar.average_gradients(model)
        optimizer.step(), optimizer.zero_grad()
        if loss is not None and mpu.dp.size == 1:
            close(loss.detach(), expected.detach(), "loss", TOLERANCE)
    if zero_3:
        found = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    else:
        found = {name: parameter.data for name, parameter in autopar.deparallelize(model).named_parameters()}
    for name, parameter in plain.named_parameters():
        close(found[name].cpu(), parameter.data.cpu(), f"{name} after the steps", TOLERANCE)
    mpu.destroy()


def all_of(place: str, cases: dict[str, Case]) -> None:
    """Run all, then fail with every case that did."""
    failed = []
    for number, (name, (build, config)) in enumerate(cases.items()):
        try:
            trained(place, build, config, moved=number % 2 == 0)
        except Exception:
            failed.append(f"{name}: {traceback.format_exc()[-1500:]}")
    assert not failed, "\n".join(failed)


@pytest.mark.tier("all")
@on_each
@sharing_a_gpu(world_size=2)
def test_three_steps_on_two_ranks(place: str) -> None:
    all_of(place, ON_TWO)


@pytest.mark.tier("all")
@on_each
@sharing_a_gpu(world_size=4)
def test_three_steps_on_four_ranks(place: str) -> None:
    all_of(place, ON_FOUR)


@on_each
@sharing_a_gpu(world_size=2)
def test_tokens_of_a_sharded_model_are_the_plain_models(place: str) -> None:
    plain = llama().eval()
    model = autopar.initialize(copy.deepcopy(plain), {"tp": 2}).eval()
    plain, ids = plain.to(place), IDS[:2].to(place)
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **settings), plain.generate(ids, **settings))
