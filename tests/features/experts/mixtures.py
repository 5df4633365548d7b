"""Small mixtures of experts, ragged batches for their replicas, and one process that reads all of them."""

import copy
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

import autopar
from autopar.checkpoint.hf_weights import FullWeights
from autopar.checkpoint.state import state_of

_SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
_MORE = {"vocab_size": 31, "initializer_range": 0.2, "intermediate_size": 24, "num_experts_per_tok": 2}


def precise(model: PreTrainedModel) -> PreTrainedModel:
    """In fp64, so that rounding is no matter of steps; of the implementations only ``eager`` has it."""
    model.set_experts_implementation("eager")
    return model.double()


def mixtral(experts: int = 6, **fields: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(num_local_experts=experts, **{**_SIZES, **_MORE, **fields})
    return precise(transformers.MixtralForCausalLM(config))


def qwen3(experts: int = 5, **fields: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"head_dim": 8, "moe_intermediate_size": 8, "decoder_sparse_step": 1}
    config = transformers.Qwen3MoeConfig(num_experts=experts, **sizes, **_SIZES, **_MORE, **fields)
    return transformers.Qwen3MoeForCausalLM(config)


def qwen2() -> PreTrainedModel:
    """Every token also goes to an expert that is no part of the others, behind a gate."""
    torch.manual_seed(0)
    sizes = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 12, "decoder_sparse_step": 1}
    config = transformers.Qwen2MoeConfig(num_experts=5, **sizes, **_SIZES, **_MORE)
    return precise(transformers.Qwen2MoeForCausalLM(config))


def deepseek() -> PreTrainedModel:
    """As :func:`qwen2`, without a gate; the first layer has no experts."""
    torch.manual_seed(0)
    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    routed = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
    sizes = {**_SIZES, **_MORE, **heads, **routed, "num_key_value_heads": 4, "moe_intermediate_size": 8}
    return precise(transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes)))


def batches(step: int, replicas: int, *, even: bool = False) -> list[list[torch.Tensor]]:
    """Two micro-batches for each replica; each replica's have another length."""
    drawn = torch.Generator().manual_seed(step)
    lengths = [(8, 8) if even else (7 + 2 * replica, 5 + replica) for replica in range(replicas)]
    return [[torch.randint(0, 31, (2, length), generator=drawn) for length in both] for both in lengths]


def reference(plain: Any, optimizer: Any, data: list[list[torch.Tensor]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of all replicas' batches on one process, and leave its gradients."""
    optimizer.zero_grad()
    total = 0.0
    for own in data:
        for ids in own:
            loss = plain(input_ids=ids, labels=ids).loss / (2 * len(data))
            loss.backward()
            total += loss.item()
    return total, {name: p.grad for name, p in plain.named_parameters()}


def train(model: Any, own: list[torch.Tensor]) -> float:
    """Run this replica's two micro-batches as a user does; return the mean loss."""
    if model.mpu.pp.size > 1:
        loss = model.execute_pipeline({"input_ids": torch.cat(own), "labels": torch.cat(own)}).loss
        return 0.0 if loss is None else float(loss)
    total = 0.0
    for ids in own:
        loss = model(input_ids=ids, labels=ids).loss / 2
        loss.backward()
        total += loss.item()
    autopar.average_gradients(model)
    return total


def close(mine: torch.Tensor, other: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return bool((mine - other).norm() <= tolerance * other.norm().clamp(min=1e-6))


def wholes(model: Any, *, gradients: bool = False) -> dict[str, torch.Tensor]:
    """Return the whole weights or gradients of a parallelized model, which FSDP2 may have sharded, by name."""

    fsdp = any(isinstance(parameter, DTensor) for parameter in model.parameters())

    def held() -> dict[str, torch.Tensor]:
        named = ((name, p.grad if gradients else p) for name, p in model.named_parameters())
        if fsdp and gradients:  # of an expert on another rank there is none here
            trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
            named = ((name, torch.zeros_like(p) if p.grad is None else p.grad) for name, p in trained)
        return {name: tensor for name, tensor in named if tensor is not None}

    if not fsdp:
        with autopar.full_params(model):
            return {name: tensor.detach().clone() for name, tensor in held().items()}
    gathered = FullWeights(state_of(model), held())
    names = state_of(model).plan.tensors if model.mpu.pp.size > 1 else held()  # a collective of all stages for each
    return {name: gathered.gather(name) for name in names}


def compare(
    make: Any,
    config: dict[str, Any],
    *,
    optimizer: Any = torch.optim.AdamW,
    even: bool = False,
    policy: Any = None,
    tolerance: float = 1e-5,
) -> Any:
    """Train three steps here and on one process; compare losses, norms, every gradient, and weights at the end."""
    plain = make()
    model, steps = copy.deepcopy(plain), {"lr": 1e-2}
    other = optimizer(plain.parameters(), **steps)
    model, own = autopar.initialize(model, config, policy=policy, optimizer=optimizer(model.parameters(), **steps))
    mpu = model.mpu
    for step in range(3):
        data = batches(step, mpu.dp.size, even=even)
        expected, gradients = reference(plain, other, data)
        own.zero_grad()
        loss = torch.tensor(train(model, data[mpu.dp.rank]), dtype=torch.float64)
        if mpu.dp.size > 1:
            dist.all_reduce(loss, group=mpu.dp.group)
        assert mpu.pp.size > 1 or abs(loss.item() / mpu.dp.size - expected) < tolerance
        norm, due = autopar.clip_grad_norm_(model, 1e9), torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
        assert abs(norm - due) < tolerance * due
        found = wholes(model, gradients=True)
        if mpu.pp.size == 1 and not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            assert found.keys() == {name for name, each in gradients.items() if each is not None}
        for name, gradient in found.items():
            whole = torch.zeros_like(gradient) if gradients[name] is None else gradients[name]
            assert close(gradient, whole, tolerance), (step, name)
        own.step()
        other.step()
    weights = dict(plain.named_parameters())
    assert all(close(weight, weights[name], tolerance) for name, weight in wholes(model).items())
    return model, own, plain
