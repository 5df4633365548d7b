"""ZeRO stage 3 with experts of several replicas: FSDP2 over two meshes; one process with the whole batch."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import autopar
from autopar.checkpoint import ShardedDict
from autopar.errors import CheckpointError
from tests.features.experts.mixtures import (
    batches,
    close,
    compare,
    deepseek,
    mixtral,
    qwen2,
    qwen3,
    reference,
    train,
    wholes,
)
from tests.harness.tiers import in_tier, mainly
from tests.harness.worlds import pooled

ZERO_3 = {"zero": {"stage": 3}}


def expert_parameters(model: Any) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if ".experts." in name}


@pytest.mark.tier("test", only=("mixtral",))
@pytest.mark.parametrize("make", [mixtral, qwen3])
@pooled(world_size=2)
def test_each_replica_holds_half_of_the_experts_and_of_the_rest(make: Any) -> None:
    model, optimizer, _ = compare(make, {"ep": 2, **ZERO_3})
    mpu, experts = model.mpu, 6 if make is mixtral else 5
    assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    for name, parameter in expert_parameters(model).items():
        assert parameter.device_mesh.size() == 1 and parameter.allreduce is False, name
        assert len(parameter.to_local()) == (experts + 1 - mpu.ep.rank) // 2
    assert model.lm_head.weight.device_mesh.size() == 2
    assert [len(model.lm_head.weight.to_local()), mpu.edp.size] == [16 - mpu.dp.rank, 1]


_FOUR: dict[str, dict[str, Any]] = {
    "edp 2": {"ep": 2},
    "six experts on four replicas": {"ep": 4},
    "tp 2 x dp 2": {"tp": 2, "ep": 4},
    "cp 2": {"ep": 2, "cp": 2},
    "all_reduce": {"ep": 2, "model_parallelism": {"expert_dispatch": "all_reduce"}},
    "sequence": {"tp": 2, "ep": 4, "model_parallelism": {"sequence_parallel": True}},
    "recomputed": {"ep": 2, "activation_checkpointing": {"enable": True}},
    "clipping": {"ep": 2, "gradient_clipping": 1e9},
}
_FIRST = ("edp 2", "tp 2 x dp 2", "cp 2", "recomputed")


@pytest.mark.parametrize("mesh", [*_FIRST, *in_tier("sweep", [mesh for mesh in _FOUR if mesh not in _FIRST])])
@pooled(world_size=4)
def test_meshes_of_four(mesh: str) -> None:
    compare(mixtral, {**_FOUR[mesh], **ZERO_3}, even="cp" in mesh)


@pytest.mark.parametrize("make", [qwen2, deepseek])
@pooled(world_size=4)
def test_experts_that_all_tokens_go_to_lie_on_all_replicas(make: Any) -> None:
    model, _, _ = compare(make, {"ep": 2, **ZERO_3})
    shared = {name: p for name, p in model.named_parameters() if "shared_expert" in name}
    assert shared and all(p.device_mesh.size() == 4 for p in shared.values())
    assert all(p.device_mesh.size() == 2 for p in expert_parameters(model).values())


def made(config: dict[str, Any], model: Any = None) -> tuple[Any, Any]:
    model = mixtral() if model is None else copy.deepcopy(model)
    return autopar.initialize(model, config, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))


def step_beside(plain: Any, optimizer: Any, model: Any, own: Any, step: int) -> None:
    data = batches(step, model.mpu.dp.size, even=True)
    reference(plain, optimizer, data)
    own.zero_grad()
    train(model, data[model.mpu.dp.rank])
    for each in (optimizer, own):
        each.step()
    weights = dict(plain.named_parameters())
    assert all(close(weight, weights[name]) for name, weight in wholes(model).items())


_OTHERS: list[dict[str, Any]] = [
    {"ep": 2, **ZERO_3},
    {"tp": 2, "ep": 4, **ZERO_3},
    {"tp": 2, **ZERO_3},
    {"ep": 4, "zero": {"stage": 1}},
    {"ep": 2, "pp": 2, "pipeline": {"num_microbatches": 2}},
]


@pytest.mark.parametrize("saved", mainly({"tp": 2, "ep": 4}, {"ep": 2}, later="sweep"))
@pooled(world_size=4)
def test_checkpoints_of_any_mesh(saved: dict[str, int], tmp_path: Path) -> None:
    """Save with ZeRO-3 and go on with it and without, and the other way round."""
    plain = mixtral()
    first, own = made({**saved, **ZERO_3}, plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(2):
        step_beside(plain, optimizer, first, own, step)
    with pytest.raises(CheckpointError, match=r"extra.ema is a dict with shards(.|\n)*'ema': autopar.checkpoint.Shard"):
        first.save_parallelized(tmp_path / "zero3", extra={"ema": dict(first.named_parameters())})
    ema = ShardedDict(first.named_parameters())
    first.save_parallelized(tmp_path / "zero3", optimizer=own, extra={"ema": ema})
    first.save_parallelized(tmp_path / "merged", merge_checkpoints=True)
    exported = dict(autopar.hf_weights(first))
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path / "plain")
        merged, due = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "plain"))
        assert merged.keys() == due.keys() == exported.keys()
        assert all(close(merged[name], due[name]) and torch.equal(merged[name], exported[name]) for name in due)
    dist.barrier()
    for config in _OTHERS:
        model, steps = made(config)
        extra: dict[str, Any] = {}
        model.from_parallelized(tmp_path / "zero3", optimizer=steps, extra=extra)
        for name, parameter in model.named_parameters():
            mine, kept = (t.to_local() if isinstance(t, DTensor) else t for t in (parameter.data, extra["ema"][name]))
            assert parameter.is_meta or torch.equal(mine, kept), name
        going_on = copy.deepcopy(plain)
        its = torch.optim.AdamW(going_on.parameters(), lr=1e-2)
        its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step_beside(going_on, its, model, steps, 7)
        model.save_parallelized(tmp_path / "again", optimizer=steps)
        back, its_own = made({**saved, **ZERO_3})
        back.from_parallelized(tmp_path / "again", optimizer=its_own)
        step_beside(going_on, its, back, its_own, 8)
        model.mpu.destroy()
        back.mpu.destroy()


@pooled(world_size=4)
def test_norms_of_any_order_and_of_one_parameter() -> None:
    plain = mixtral()
    model = autopar.initialize(copy.deepcopy(plain), {"tp": 2, "ep": 4, **ZERO_3})
    data = batches(0, 2)
    _, gradients = reference(plain, torch.optim.SGD(plain.parameters()), data)
    train(model, data[model.mpu.dp.rank])
    for order in (1.0, 2.0, float("inf")):
        due = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9, order)
        for norm in (
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, order),
            autopar.clip_grad_norm_(model, 1e9, order),
        ):
            assert abs(norm - due) < 1e-6 * due, order
    for name, parameter in model.named_parameters():
        norm = torch.nn.utils.get_total_norm([parameter.grad])
        assert abs(norm - gradients[name].norm()) < 1e-6 * gradients[name].norm(), name
    model.mpu.destroy()


@pooled(world_size=4)
def test_a_rank_that_no_token_goes_to() -> None:
    """All choose experts of the first rank; the other one takes part in FSDP2's collectives all the same."""
    plain = mixtral(8)
    for layer in plain.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, out: (*out[:2], out[2] % 4))
    model = autopar.initialize(copy.deepcopy(plain), {"ep": 2, **ZERO_3})
    data = batches(0, 4)
    _, gradients = reference(plain, torch.optim.SGD(plain.parameters()), data)
    train(model, data[model.mpu.dp.rank])
    assert int(sum(tokens[4:].sum() for tokens in autopar.expert_load(model).values())) == 0
    for name, gradient in wholes(model, gradients=True).items():
        assert close(gradient, gradients[name]), name
    model.mpu.destroy()
