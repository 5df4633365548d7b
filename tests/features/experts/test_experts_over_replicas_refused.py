"""What does not go with experts of several replicas and is refused, and what looks like that and is right."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import autopar
from autopar.errors import ConfigError, ConsistencyError, PipelineError
from autopar.integrations.deepspeed import _check_mesh
from tests.features.experts.mixtures import batches, close, mixtral
from tests.harness.worlds import distributed, pooled
from tests.timeouts import hurry, say, wait_for


@pooled(world_size=4)
def test_an_optimizer_that_draws_random_numbers_is_refused() -> None:
    class Noisy(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(torch.randn_like(parameter), alpha=1e-3)

    model = mixtral()
    with pytest.raises(ConfigError) as info:
        autopar.initialize(model, {"ep": 2}, optimizer=Noisy(model.parameters(), lr=0.1))
    assert str(info.value) == (
        "Noisy draws random numbers, which differ between replicas, and is not supported with expert_parallel_size=2, "
        "where replicas share experts.\n  Use an optimizer without random numbers."
    )


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


def test_the_load_of_experts_that_nobody_holds_whole() -> None:
    with pytest.raises(ConfigError) as info:
        autopar.expert_load(mixtral())
    assert str(info.value) == (
        "expert_load: the experts of MixtralForCausalLM are not distributed over ranks, so no tokens are counted\n"
        "  Set expert_parallel_size above 1."
    )


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
    model.mpu.destroy()


def step_of_ones_own(model: Any, average: Any) -> None:
    """A loop without autopar's averaging."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        ids = batches(step, model.mpu.dp.size, even=True)[model.mpu.dp.rank][0]
        model(input_ids=ids, labels=ids).loss.backward()
        average()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("sizes", [{"ep": 4}, {"tp": 2, "ep": 4}, {"ep": 2}])
@pooled(world_size=4)
def test_an_average_of_ones_own_is_that_of_megatron(sizes: dict[str, int]) -> None:
    experts = 8 if sizes["ep"] == 4 else 6
    plain = mixtral(experts)
    model = autopar.initialize(copy.deepcopy(plain), sizes)
    mpu = model.mpu

    def as_megatron_does() -> None:
        for parameter in model.parameters():
            axis = mpu.dp if getattr(parameter, "allreduce", True) else mpu.edp
            if axis.size > 1:
                dist.all_reduce(parameter.grad, group=axis.group)
                parameter.grad /= axis.size

    step_of_ones_own(model, as_megatron_does)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        other.zero_grad()
        for own in batches(step, mpu.dp.size, even=True):
            (plain(input_ids=own[0], labels=own[0]).loss / mpu.dp.size).backward()
        other.step()
    with autopar.full_params(model):
        assert all(close(p, dict(plain.named_parameters())[n]) for n, p in model.named_parameters())
    mpu.destroy()


@pooled(world_size=2)
def test_fully_shard_over_all_replicas_is_refused() -> None:
    model = autopar.initialize(mixtral(), {"ep": 2})
    fully_shard(model, mesh=model.mpu.mesh["dp"])
    ids = torch.ones(1, 4, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    with pytest.raises(ConfigError) as info:
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert str(info.value) == (
        "fully_shard is not supported with expert_parallel_size=2 above tensor_parallel_size=1: replicas hold\n  "
        "different experts. Use DistributedDataParallel, autopar.average_gradients, or zero: {stage: 3}."
    )
    model.mpu.destroy()


@pooled(world_size=2)
def test_experts_that_share_a_weight_are_refused_with_zero_3() -> None:
    model = mixtral()
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.down_proj = first.down_proj
    with pytest.raises(ConfigError) as info:
        autopar.initialize(model, {"ep": 2, "zero": {"stage": 3}})
    assert str(info.value) == (
        "zero.stage=3 is not supported with expert_parallel_size=2 above tensor_parallel_size=1 and tied experts "
        "(model.layers.0.mlp.experts.down_proj and model.layers.1.mlp.experts.down_proj)\n  Use zero.stage 1; torch's "
        "FSDP2 would untie the weight."
    )


@pooled(world_size=4)
def test_what_shares_out_all_parameters_is_refused() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

    model = autopar.initialize(mixtral(), {"tp": 2, "ep": 4})
    group = model.mpu.get_data_parallel_group()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=group, lr=0.1)
    ids = torch.ones(1, 4, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    with pytest.raises(ConfigError) as info:
        optimizer.step()
    assert str(info.value) == (
        "ZeroRedundancyOptimizer is not supported with expert_parallel_size=4 above tensor_parallel_size=2: replicas\n"
        "  hold different experts. Use zero: {stage: 1} in autopar's config."
    )
    with pytest.raises(ConfigError, match="expert_parallel_size=4 above tensor_parallel_size=2: DeepSpeed averages"):
        _check_mesh(model, model.mpu)
    model.mpu.destroy()


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
    model.mpu.destroy()
    model = autopar.initialize(copy.deepcopy(plain), {"ep": 4})
    with pytest.raises(ConfigError, match="create_graph=True is not supported with experts that several replicas"):
        penalized(model, ids)
    model.mpu.destroy()
