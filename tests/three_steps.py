"""Three training steps of a small model on any mesh and device, against the plain model there: one table row a case."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM

import autopar
from tests.parity import close, randomise
from tests.small import llama

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


def trained(place: str, build: Callable[[], Any], config: dict[str, Any], *, moved: bool) -> None:
    """Compare three steps with the plain model on the same device: losses, and all weights."""
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
    mpu, sharded = model.mpu, config.get("zero", {}).get("stage") in (2, 3)
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
        if mpu.dp_cp.size > 1 and not sharded:
            autopar.average_gradients(model)
        optimizer.step(), optimizer.zero_grad()
        if loss is not None and mpu.dp.size == 1:
            close(loss.detach(), expected.detach(), "loss", TOLERANCE)
    if sharded:
        found = dict(autopar.hf_weights(model))
    else:
        found = {name: parameter.data for name, parameter in autopar.deparallelize(model).named_parameters()}
    for name, parameter in plain.named_parameters():
        close(found[name].cpu(), parameter.data.cpu(), f"{name} after the steps", TOLERANCE)
    mpu.destroy()
