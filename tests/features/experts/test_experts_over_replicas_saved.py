"""Experts of several replicas in files of all kinds, and what is refused with them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import autopar
from autopar.checkpoint import ShardedDict
from autopar.errors import CheckpointError, ConfigError, ConsistencyError, PipelineError
from autopar.integrations.deepspeed import _check_mesh
from tests.checkpoint.test_balanced import shared_out
from tests.exchange import by_rank_0, raises_everywhere
from tests.features.experts.mixtures import batches, close, mixtral, reference, train, wholes
from tests.features.experts.module_mixtures import LISTED, listed, switch
from tests.harness.worlds import distributed, pooled
from tests.timeouts import hurry, say, wait_for

ZERO_3 = {"zero": {"stage": 3}}
_STAGES = {"ep": 2, "pp": 2, "pipeline": {"num_microbatches": 2}}
_CASES: dict[str, tuple[Any, Any, float, dict[str, Any]]] = {
    "mixtral": (mixtral, None, 1e-5, {"tp": 2, "ep": 4, "zero": {"stage": 1}}),
    "mixtral, ZeRO-3": (mixtral, None, 1e-5, {"tp": 2, "ep": 4, **ZERO_3}),
    "switch": (switch, None, 1e-6, {"tp": 2, "ep": 4, "zero": {"stage": 1}}),
    "listed": (lambda: listed(reachable=4), LISTED, 1e-6, {"tp": 2, "ep": 4, "zero": {"stage": 1}}),
    "mixtral, ZeRO-3, ep 2": (mixtral, None, 1e-5, {"ep": 2, **ZERO_3}),
}
_RESUMED: list[dict[str, Any]] = [{"ep": 2}, _STAGES, {"tp": 4, "ep": 4}, {"tp": 2}]
_RESUMED_OF_ZERO_3: list[dict[str, Any]] = [{**sizes, **ZERO_3} for sizes in ({"ep": 2}, {"tp": 2, "ep": 4}, {"tp": 2})]
_RESUMED_OF_ZERO_3 += [{"ep": 4, "zero": {"stage": 1}}, _STAGES]


@pytest.mark.every_case
@pytest.mark.tier("sweep", only=("listed", "switch", "mixtral, ZeRO-3, ep 2"))
@pytest.mark.parametrize("name", _CASES)
@pooled(world_size=4)
def test_checkpoints_of_any_mesh(name: str, tmp_path: Path) -> None:
    """Each run that resumes, and the first one that resumes it again, equal one process that has no break."""
    make, policy, tolerance, saved = _CASES[name]

    def made(config: dict[str, Any]) -> tuple[Any, Any]:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return autopar.initialize(model, config, policy=policy, optimizer=optimizer)

    def step_of_both(plain: Any, optimizer: Any, model: Any, own: Any, step: int) -> None:
        data = batches(step, model.mpu.dp.size, even=True)
        reference(plain, optimizer, data)
        own.zero_grad()
        train(model, data[model.mpu.dp.rank])
        optimizer.step()
        own.step()
        weights = dict(plain.named_parameters())
        assert all(close(weight, weights[key], tolerance) for key, weight in wholes(model).items())

    plain = make()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    first, own = made(saved)
    for step in range(2):
        step_of_both(plain, optimizer, first, own, step)
    ema = dict(first.named_parameters())
    if "ZeRO-3" in name:
        words = r"extra.ema is a dict with shards(.|\n)*'ema': autopar.checkpoint.Shard"
        with pytest.raises(CheckpointError, match=words):
            first.save_parallelized(tmp_path / "first", extra={"ema": ema})
    with shared_out():
        first.save_parallelized(tmp_path / "first", optimizer=own, extra={"ema": ShardedDict(ema)})
    first.save_parallelized(tmp_path / "merged", merge_checkpoints=True)
    exported = dict(autopar.hf_weights(first))
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path / "plain")
        merged, due = (load_file(tmp_path / folder / "model.safetensors") for folder in ("merged", "plain"))
        assert merged.keys() == due.keys() <= exported.keys()
        assert all(close(merged[key], due[key], tolerance) and torch.equal(merged[key], exported[key]) for key in due)
    dist.barrier()
    for config in _RESUMED_OF_ZERO_3 if "ZeRO-3" in name else _RESUMED:
        model, steps = made(config)
        extra: dict[str, Any] = {}
        model.from_parallelized(tmp_path / "first", optimizer=steps, extra=extra)
        for key, parameter in model.named_parameters():
            mine, kept = (x.to_local() if isinstance(x, DTensor) else x for x in (parameter.data, extra["ema"][key]))
            assert parameter.is_meta or torch.equal(mine, kept), key
        going_on = copy.deepcopy(plain)
        its = torch.optim.AdamW(going_on.parameters(), lr=1e-2)
        its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step_of_both(going_on, its, model, steps, 7)
        with shared_out():
            model.save_parallelized(tmp_path / "again", optimizer=steps)
        back, its_own = made(saved)
        back.from_parallelized(tmp_path / "again", optimizer=its_own)
        step_of_both(going_on, its, back, its_own, 8)
        model.mpu.destroy()
        back.mpu.destroy()


@pytest.mark.every_case
@pytest.mark.parametrize("make", [mixtral, switch])
@pooled(world_size=4)
def test_a_model_that_no_process_holds_whole(make: Any, tmp_path: Path) -> None:
    """Shards are read from the folder of Hugging Face, and what is not there is drawn."""
    plain = make()
    by_rank_0(plain.save_pretrained)(tmp_path / "plain")
    model = autopar.from_pretrained(type(plain), tmp_path / "plain", {"tp": 2, "ep": 4})
    held = [p.shape[0] for name, p in model.named_parameters() if ".experts." in name]
    assert max(held) < 6 if make is mixtral else 0 in held and any(held)
    with autopar.full_params(model):
        assert all(torch.equal(p, dict(plain.named_parameters())[n]) for n, p in model.named_parameters())
    found = {name: tensor.shape for name, tensor in autopar.hf_weights(model)}
    if make is mixtral:  # each expert of two layers by itself
        assert len(found) == len(plain.state_dict()) + 2 * (3 * 6 - 2)
    else:
        assert all(found[name] == p.shape for name, p in plain.named_parameters())
    drawn = []
    for config in ({"ep": 4}, {}):
        torch.manual_seed(0)
        with autopar.lazy_init():
            deferred = type(plain)(plain.config)
        drawn.append(autopar.initialize(deferred, config))
    due = dict(drawn[1].named_parameters())
    with autopar.full_params(drawn[0]):
        assert all(torch.equal(p, due[n]) for n, p in drawn[0].named_parameters())


@pooled(world_size=4)
def test_torchs_distributed_checkpoint(tmp_path: Path) -> None:
    def made(config: dict[str, Any], seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = mixtral()
        with torch.no_grad():
            model.lm_head.weight.add_(seed)
        return autopar.initialize(model, config, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))

    model, optimizer = made({"tp": 2, "ep": 4}, 0)
    train(model, batches(0, 2)[model.mpu.dp.rank])
    optimizer.step()
    state = autopar.checkpoint.to_dtensor_training_state(model, optimizer)
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "dcp")
    for config in ({"ep": 2}, {"tp": 4}, {}):
        other, its = made(config, 5)
        state = autopar.checkpoint.to_dtensor_training_state(other, its)
        torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path / "dcp")
        with autopar.full_params(model), autopar.full_params(other):
            assert all(map(torch.equal, model.parameters(), other.parameters())), config
        other.mpu.destroy()


@pytest.mark.parametrize("stage", [0, 3])
@distributed(world_size=2)  # its time-out breaks the connections of the world
def test_replicas_that_do_different_things_are_named(stage: int) -> None:
    """With ZeRO-3, too, before FSDP2 waits for a rank that does not come."""
    model = autopar.initialize(mixtral(), {"ep": 2, "zero": {"stage": stage}})
    ids, first = torch.ones(1, 4, dtype=torch.long), dist.get_rank() == 0
    with pytest.raises(ConsistencyError) as different, torch.set_grad_enabled(first):
        model.train(first)(input_ids=ids)
    assert str(different.value) == (
        f"replicas share the experts of {type(model).__name__} and must run in the same mode: rank 0 trains with "
        "gradients, rank 1 evaluates without gradients\n  Train and evaluate on all of the ranks [0, 1] at the same "
        "time, with equally many batches."
    )
    hurry(model)
    if first:
        with pytest.raises(PipelineError, match=r"(?s)the forward of replicas that share experts.*rank 1"):
            model.train()(input_ids=ids)
        say("told")
    wait_for("told", [0])  # rank 1 has no batch left


@pooled(world_size=2)
def test_hooks_on_experts_see_own_tokens_and_those_inside_are_refused() -> None:
    plain = mixtral()
    model = autopar.initialize(copy.deepcopy(plain), {"ep": 2})
    ids, seen = batches(0, 2)[model.mpu.dp.rank][0], []
    for each in (plain, model):
        experts = each.model.layers[1].mlp.experts
        handle = experts.register_forward_hook(lambda _, __, out: seen.append(out.detach()))
        each(input_ids=ids)
        handle.remove()
    assert close(seen[1], seen[0])

    def look(*_: Any) -> None: ...

    experts.act_fn.register_forward_hook(look)
    with pytest.raises(ConfigError) as info:
        model(input_ids=ids)
    assert "look (" in str(info.value) and str(info.value).endswith(
        "on model.layers.1.mlp.experts.act_fn is inside distributed experts: it would see tokens in "
        "another order\n  They are the tokens of ranks [0, 1]. "
        "Put the hook on the experts, where it sees the tokens of this rank. "
        "autopar.local_hooks(module) allows hooks\n  that support sharded tokens."
    )
    autopar.local_hooks(experts.act_fn)
    model(input_ids=ids)


@pytest.mark.parametrize("sizes", [{"ep": 4}, {"tp": 2, "ep": 4}, {"ep": 2}])
@pooled(world_size=4)
def test_an_average_of_ones_own_is_that_of_megatron(sizes: dict[str, int]) -> None:
    experts = 8 if sizes["ep"] == 4 else 6
    plain = mixtral(experts)
    model = autopar.initialize(copy.deepcopy(plain), sizes)
    mpu = model.mpu

    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for step in range(2):
        data = [own[0] for own in batches(step, mpu.dp.size, even=True)]
        model(input_ids=data[mpu.dp.rank], labels=data[mpu.dp.rank]).loss.backward()
        for parameter in model.parameters():
            axis = mpu.dp if getattr(parameter, "allreduce", True) else mpu.edp
            if axis.size > 1:
                dist.all_reduce(parameter.grad, group=axis.group)
                parameter.grad /= axis.size
        for ids in data:
            (plain(input_ids=ids, labels=ids).loss / mpu.dp.size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert all(close(weight, plain.get_parameter(name)) for name, weight in wholes(model).items())


def penalized(model: Any, ids: torch.Tensor) -> None:
    """Leave the gradients of a penalty on the gradient of a router."""
    loss = model(input_ids=ids, labels=ids).loss
    (gradient,) = torch.autograd.grad(loss, model.model.layers[0].mlp.gate.weight, create_graph=True)
    gradient.square().sum().backward()


@pooled(world_size=4)
def test_second_derivatives_go_through_experts_of_one_replica_alone() -> None:
    plain = mixtral(attn_implementation="eager")
    ids = torch.randint(0, 31, (2, 6), generator=torch.Generator().manual_seed(0))
    penalized(plain, ids)
    model = autopar.initialize(copy.deepcopy(plain), {"tp": 2, "ep": 2})
    model.zero_grad()
    penalized(model, ids)
    with autopar.full_params(model):
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        assert all(close(mine.grad, other.grad) for mine, other in pairs if other.grad is not None)
    model = autopar.initialize(copy.deepcopy(plain), {"ep": 4})
    with pytest.raises(ConfigError, match="create_graph=True is not supported with experts that several replicas"):
        penalized(model, ids)


class Noisy(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(torch.randn_like(parameter), alpha=1e-3)


def backward(model: Any) -> None:
    ids = torch.ones(1, 4, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()


@pooled(world_size=4)
def test_what_does_not_fit_experts_of_several_replicas() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

    model = mixtral()
    with raises_everywhere(
        ConfigError,
        "expert_load: the experts of MixtralForCausalLM are not distributed over ranks, so no tokens are counted\n"
        "  Set expert_parallel_size above 1.",
    ):
        autopar.expert_load(model)
    with raises_everywhere(
        ConfigError,
        "Noisy draws random numbers, which differ between replicas, and is not supported with expert_parallel_size=2, "
        "where replicas share experts.\n  Use an optimizer without random numbers.",
    ):
        autopar.initialize(model, {"ep": 2}, optimizer=Noisy(model.parameters(), lr=0.1))
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.down_proj = first.down_proj
    with raises_everywhere(
        ConfigError,
        "zero.stage=3 is not supported with expert_parallel_size=2 above tensor_parallel_size=1 and tied experts "
        "(model.layers.0.mlp.experts.down_proj and model.layers.1.mlp.experts.down_proj)\n  Use zero.stage 1; torch's "
        "FSDP2 would untie the weight.",
    ):
        autopar.initialize(model, {"ep": 2, "zero": {"stage": 3}})
    model = autopar.initialize(mixtral(), {"ep": 2})
    fully_shard(model, mesh=model.mpu.mesh["dp"])
    backward(model)
    with raises_everywhere(
        ConfigError,
        "fully_shard is not supported with expert_parallel_size=2 above tensor_parallel_size=1: replicas hold\n  "
        "different experts. Use DistributedDataParallel, autopar.average_gradients, or zero: {stage: 3}.",
    ):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    model = autopar.initialize(mixtral(), {"tp": 2, "ep": 4})
    group = model.mpu.get_data_parallel_group()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=group, lr=0.1)
    backward(model)
    with raises_everywhere(
        ConfigError,
        "ZeroRedundancyOptimizer is not supported with expert_parallel_size=4 above tensor_parallel_size=2: replicas\n"
        "  hold different experts. Use zero: {stage: 1} in autopar's config.",
    ):
        optimizer.step()
    with pytest.raises(ConfigError, match="expert_parallel_size=4 above tensor_parallel_size=2: DeepSpeed averages"):
        _check_mesh(model, model.mpu)
