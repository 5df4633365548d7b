"""expert_parallel_size above tensor_parallel_size: experts of several replicas; one process with the whole batch."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

import autopar
from autopar.errors import ConfigError, ConsistencyError, PipelineError
from autopar.integrations.deepspeed import _check_mesh
from tests.pool import pooled
from tests.timeouts import hurry, say, wait_for
from tests.worlds import distributed, spawn

_SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
_MORE = {"vocab_size": 31, "initializer_range": 0.2, "intermediate_size": 24, "num_experts_per_tok": 2}


def precise(model: PreTrainedModel) -> PreTrainedModel:
    """In fp64, so that rounding is no matter of steps; of the implementations only ``eager`` has it."""
    model.set_experts_implementation("eager")
    return model.double()


def mixtral(experts: int = 6, **fields: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return precise(MixtralForCausalLM(MixtralConfig(num_local_experts=experts, **_SIZES, **_MORE, **fields)))


def qwen3(experts: int = 5, **fields: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"head_dim": 8, "moe_intermediate_size": 8, "decoder_sparse_step": 1}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(num_experts=experts, **sizes, **_SIZES, **_MORE, **fields))


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


def compare(make: Any, config: dict[str, Any], *, optimizer: Any = torch.optim.AdamW, even: bool = False) -> Any:
    """Train three steps here and on one process; compare losses, norms, every gradient, and weights at the end."""
    plain = make()
    model, steps = copy.deepcopy(plain), {"lr": 1e-2}
    other = optimizer(plain.parameters(), **steps)
    model, own = autopar.initialize(model, config, optimizer=optimizer(model.parameters(), **steps))
    mpu = model.mpu
    for step in range(3):
        data = batches(step, mpu.dp.size, even=even)
        expected, gradients = reference(plain, other, data)
        own.zero_grad()
        loss = torch.tensor(train(model, data[mpu.dp.rank]))
        if mpu.dp.size > 1 and mpu.pp.size == 1:
            dist.all_reduce(loss, group=mpu.dp.group)
            assert abs(loss.item() / mpu.dp.size - expected) < 1e-5
        norm, due = autopar.clip_grad_norm_(model, 1e9), torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
        assert abs(norm - due) < 1e-5 * due
        with autopar.whole(model):
            for name, parameter in model.named_parameters():
                assert close(parameter.grad, gradients[name]), (step, name)
        own.step()
        other.step()
    with autopar.whole(model):
        assert all(close(p, dict(plain.named_parameters())[n], 1e-5) for n, p in model.named_parameters())
    return model, own, plain


@pytest.mark.tier("test", only=("all_to_all",))
@pytest.mark.parametrize("dispatch", ["all_to_all", "all_reduce"])
@pooled(world_size=2)
def test_two_replicas_hold_half_of_the_experts_each(dispatch: str) -> None:
    config = {"ep": 2, "model_parallelism": {"expert_dispatch": dispatch}}
    model, _, plain = compare(lambda: mixtral(5), config)
    experts = model.model.layers[0].mlp.experts
    own = 3 if model.mpu.ep.rank == 0 else 2
    assert experts.num_experts == own and experts.gate_up_proj.shape[0] == own
    assert experts.down_proj.allreduce is False and not hasattr(model.lm_head.weight, "allreduce")
    assert "ep 0/2" in repr(experts) or "ep 1/2" in repr(experts)
    assert type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear  # tp is 1
    autopar.deparallelize(model)
    assert all(close(p, dict(plain.named_parameters())[n]) for n, p in model.named_parameters())
    assert experts.num_experts == 5 and type(experts).__name__ == "MixtralExperts"


_FOUR = {
    "tp 2 x dp 2": {"tp": 2, "ep": 4},
    "six experts on four replicas": {"ep": 4},
    "edp 2": {"ep": 2},
    "pp 2": {"ep": 2, "pp": 2, "pipeline": {"num_microbatches": 2}},
    "cp 2": {"ep": 2, "cp": 2},
    "all_reduce, tp 2 x dp 2": {"tp": 2, "ep": 4, "model_parallelism": {"expert_dispatch": "all_reduce"}},
    "whole experts on tp": {"tp": 2, "ep": 2, "model_parallelism": {"expert_dispatch": "all_reduce"}},
    "sequence": {"tp": 2, "ep": 4, "model_parallelism": {"sequence_parallel": True}},
    "ZeRO-1, clipping": {"ep": 2, "zero": {"stage": 1}, "gradient_clipping": 1e9},
    "ZeRO-1, tp 2": {"tp": 2, "ep": 4, "zero": {"stage": 1}},
    "recomputed": {"ep": 2, "activation_checkpointing": {"enable": True}},
}


@pytest.mark.parametrize("mesh", _FOUR)
@pooled(world_size=4)
def test_meshes_of_four(mesh: str) -> None:
    compare(mixtral, _FOUR[mesh], even="pp" in mesh or "cp" in mesh)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pooled(world_size=4)
def test_each_implementation_of_experts(implementation: str) -> None:
    def make() -> Any:
        model = qwen3()
        model.set_experts_implementation(implementation)
        return model

    compare(make, {"tp": 2, "ep": 4}, optimizer=torch.optim.SGD)


@pytest.mark.parametrize("whole", ["owned", "duplicated"])
@pooled(world_size=4)
def test_an_optimizer_of_whole_matrices(whole: str) -> None:
    config = {"tp": 2, "ep": 4, "optimizer": {"whole": whole}, "zero": {"stage": 1}}
    compare(mixtral, config, optimizer=torch.optim.Adafactor)


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
        "Noisy draws random numbers, others on each replica, and with expert_parallel_size=2 the ranks of several "
        "replicas step one model's experts.\n  Use an optimizer that draws none."
    )


@pytest.mark.tier("test", only=("sizes0",))
@pytest.mark.parametrize("sizes", [{"ep": 2}, {"tp": 2, "ep": 4}])
@pooled(world_size=4)
def test_distributed_data_parallel_leaves_experts_to_us(sizes: dict[str, int]) -> None:
    plain = mixtral()
    model = autopar.initialize(copy.deepcopy(plain), sizes)
    wrapped = DistributedDataParallel(model, process_group=model.mpu.get_data_parallel_group())
    own, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (wrapped, plain))
    for step in range(3):
        data = batches(step, model.mpu.dp.size)
        reference(plain, other, data)
        first, second = data[model.mpu.dp.rank]
        own.zero_grad()
        with wrapped.no_sync():
            (wrapped(input_ids=first, labels=first).loss / 2).backward()
        (wrapped(input_ids=second, labels=second).loss / 2).backward()
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (wrapped, plain)]
        assert abs(norms[0] - norms[1]) < 1e-5
        own.step()
        other.step()
    with autopar.whole(model):
        assert all(close(p, dict(plain.named_parameters())[n]) for n, p in model.named_parameters())
    outer = torch.nn.ModuleDict({"inside": model})
    with pytest.raises(ConfigError) as info:
        DistributedDataParallel(outer, process_group=model.mpu.get_data_parallel_group())
    ep, tp = model.mpu.ep.size, model.mpu.tp.size
    assert str(info.value) == (
        "DistributedDataParallel would average experts over all replicas: with expert_parallel_size="
        f"{ep} above tensor_parallel_size={tp}\n  replicas hold different ones, inside.model.layers.0.mlp.experts."
        "down_proj for instance. Wrap DistributedDataParallel around what\n  autopar.initialize returned itself, which "
        "has told it to leave them out."
    )


@pooled(world_size=4)
def test_checkpoints_of_any_mesh(tmp_path: Path) -> None:
    """Save ep 4 = tp 2 x dp 2, go on at ep 2 and at ep 1, each beside the run that goes on without a break."""
    first, own, plain = compare(mixtral, {"tp": 2, "ep": 4, "zero": {"stage": 1}})
    first.save_parallelized(tmp_path / "ep4", optimizer=own)
    first.save_parallelized(tmp_path / "merged", merge_checkpoints=True)
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path / "plain")
        merged, due = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "plain"))
        assert merged.keys() == due.keys() and all(close(merged[name], due[name]) for name in due)
    one = copy.deepcopy(plain)
    alone, resumed = autopar.initialize(one, {}, optimizer=torch.optim.AdamW(one.parameters(), lr=1e-2))
    alone.from_parallelized(tmp_path / "ep4", optimizer=resumed)
    for name, parameter in alone.named_parameters():
        for key, value in resumed.state[parameter].items():
            other.state.setdefault(dict(plain.named_parameters())[name], {})[key] = value.clone()
    config: dict[str, Any]
    for config in ({"ep": 2}, {"ep": 2, "pp": 2, "pipeline": {"num_microbatches": 2}}, {"tp": 4, "ep": 4}, {"tp": 2}):
        model = mixtral()
        model, steps = autopar.initialize(model, config, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))
        model.from_parallelized(tmp_path / "ep4", optimizer=steps)
        with autopar.whole(model):
            assert all(torch.equal(p, dict(alone.named_parameters())[n]) for n, p in model.named_parameters())
        going_on = copy.deepcopy(plain)
        its = torch.optim.AdamW(going_on.parameters(), lr=1e-2)
        its.load_state_dict(copy.deepcopy(other.state_dict()))
        data = batches(7, model.mpu.dp.size, even=True)
        reference(going_on, its, data)
        train(model, data[model.mpu.dp.rank])
        its.step()
        steps.step()
        with autopar.whole(model):
            assert all(close(p, dict(going_on.named_parameters())[n], 1e-5) for n, p in model.named_parameters())
        model.save_parallelized(tmp_path / "again", optimizer=steps)
        autopar.deparallelize(model)


@pytest.mark.parametrize("sizes", [{"ep": 4}, {"tp": 2, "ep": 4}, {"ep": 2, "pp": 2}])
@pooled(world_size=4)
def test_generate_goes_on_until_the_last_replica_has_ended(sizes: dict[str, int]) -> None:
    plain = mixtral().eval()
    model = autopar.initialize(copy.deepcopy(plain), sizes).eval()
    replica = model.mpu.dp.rank
    ids = torch.randint(0, 31, (2, 4 + replica), generator=torch.Generator().manual_seed(replica))
    for settings in ({"max_new_tokens": 2 + 3 * replica}, {"max_new_tokens": 6, "eos_token_id": 3 + replica}):
        expected = plain.generate(ids, do_sample=False, pad_token_id=0, **settings)
        found = model.generate(ids, do_sample=False, pad_token_id=0, **settings)
        assert torch.equal(found, expected), settings
    model.mpu.destroy()


@distributed(world_size=2)  # its time-out breaks the connections of the world
def test_replicas_that_do_different_things_are_named() -> None:
    model = autopar.initialize(mixtral(), {"ep": 2})
    ids, first = torch.ones(1, 4, dtype=torch.long), dist.get_rank() == 0
    with pytest.raises(ConsistencyError) as different, torch.set_grad_enabled(first):
        model.train(first)(input_ids=ids)
    assert str(different.value) == (
        "replicas share the experts of MixtralForCausalLM, and do different things with it: rank 0 trains with "
        "gradients,\n  rank 1 evaluates without gradients. Tokens of all of ranks [0, 1] meet in each layer: train and "
        "evaluate\n  on all of them at the same time, with as many batches each."
    )
    hurry(model)
    if first:
        with pytest.raises(PipelineError, match=r"(?s)the forward of replicas that share experts.*rank 1"):
            model.train()(input_ids=ids)
        say("told")
    wait_for("told", [0])  # rank 1 has no batch left


@pooled(world_size=4)
def test_a_model_that_no_process_holds_whole(tmp_path: Path) -> None:
    """Shards are read from the folder of Hugging Face, and what is not there is drawn."""
    plain = mixtral()
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path / "plain")
    dist.barrier()
    model = autopar.from_pretrained(MixtralForCausalLM, tmp_path / "plain", {"tp": 2, "ep": 4})
    assert model.model.layers[0].mlp.experts.down_proj.shape[0] < 6
    with autopar.whole(model):
        assert all(torch.equal(p, dict(plain.named_parameters())[n]) for n, p in model.named_parameters())
    names = {name: tensor.shape for name, tensor in autopar.hf_weights(model)}
    assert len(names) == len(plain.state_dict()) + 2 * (3 * 6 - 2)  # each expert of two layers by itself
    model.mpu.destroy()
    torch.manual_seed(0)
    with autopar.lazy_init():
        deferred = MixtralForCausalLM(plain.config)
    drawn = autopar.initialize(deferred, {"ep": 4})
    torch.manual_seed(0)
    with autopar.lazy_init():
        deferred = MixtralForCausalLM(plain.config)
    due = dict(autopar.initialize(deferred, {}).named_parameters())
    with autopar.whole(drawn):
        assert all(torch.equal(p, due[n]) for n, p in drawn.named_parameters())


@pytest.mark.parametrize(
    "config", [{"ep": 2}, {"tp": 2, "ep": 2}, {"ep": 2, "activation_checkpointing": {"enable": True}}]
)
@pooled(world_size=4)
def test_the_load_of_experts(config: dict[str, Any]) -> None:
    plain = mixtral()
    model = autopar.initialize(copy.deepcopy(plain), config)
    data = batches(0, model.mpu.dp.size)
    chosen: dict[str, list[torch.Tensor]] = {}
    for path, module in plain.named_modules():
        if path.endswith("mlp.experts"):
            seen = chosen.setdefault(path, [])
            module.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[1].flatten()))
    for own in data:
        plain(input_ids=own[0])
    ids = data[model.mpu.dp.rank][0]
    model.train()(input_ids=ids, labels=ids).loss.backward()
    load = autopar.expert_load(model)
    assert load.keys() == chosen.keys()
    assert all(torch.equal(load[path], torch.cat(ids).bincount(minlength=6)) for path, ids in chosen.items())
    assert all(not tokens.any() for tokens in autopar.expert_load(model).values())
    model.mpu.destroy()


def test_the_load_of_experts_that_nobody_holds_whole() -> None:
    with pytest.raises(ConfigError) as info:
        autopar.expert_load(mixtral())
    assert str(info.value) == (
        "expert_load: ranks do not hold whole experts of MixtralForCausalLM, so that no tokens are counted; "
        "expert_parallel_size above 1 does that"
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
        "on model.layers.1.mlp.experts.act_fn is inside of experts that ranks hold whole: it would see the tokens of "
        "all of\n  ranks [0, 1] that chose this rank's, in another order. A hook on the experts sees this rank's "
        "tokens;\n  autopar.local_hooks(module) is for what is here."
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
def test_an_average_of_ones_own_over_all_replicas_is_told(sizes: dict[str, int]) -> None:
    experts = 8 if sizes["ep"] == 4 else 6
    model = autopar.initialize(mixtral(experts), sizes)
    mpu, plain = model.mpu, mixtral(experts)

    def over_all() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=mpu.get_data_parallel_group())
            parameter.grad /= mpu.dp.size

    with pytest.raises(ConsistencyError) as info:
        step_of_ones_own(model, over_all)
    assert f"ranks {list(mpu.ep.ranks)} have the same numbers for model.layers." in str(info.value)
    assert "of which each holds other experts. Something averaged or copied all parameters over the replicas:" in str(
        info.value
    )
    mpu.destroy()
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
    with autopar.whole(model):
        assert all(close(p, dict(plain.named_parameters())[n]) for n, p in model.named_parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            dist.broadcast(parameter, mpu.dp.ranks[0], group=mpu.dp.group)
    with pytest.raises(ConsistencyError, match="have the same numbers for model"):
        for _ in range(4):  # another weight each time
            model(input_ids=torch.ones(1, 4, dtype=torch.long))
    mpu.destroy()


@pooled(world_size=2)
def test_experts_that_are_copies_of_one_are_right() -> None:
    """Also where they become so: a checkpoint of such a model is loaded."""
    upcycled = mixtral(4)
    with torch.no_grad():
        for layer in upcycled.model.layers:
            for weight in layer.mlp.experts.parameters():
                weight.copy_(weight[:1].expand_as(weight))
    model = autopar.initialize(mixtral(4), {"ep": 2})
    ids = torch.ones(1, 4, dtype=torch.long)
    model(input_ids=ids)
    with torch.no_grad():
        for mine, other in zip(model.parameters(), upcycled.parameters(), strict=True):
            mine.copy_(other[: len(mine)])
    for _ in range(5):
        assert torch.allclose(model(input_ids=ids).logits, upcycled(input_ids=ids).logits)
    model.mpu.destroy()


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
        "ZeroRedundancyOptimizer would give one replica's experts to all: with expert_parallel_size=4 above\n  "
        "tensor_parallel_size=2 replicas hold different ones. Use zero: {stage: 1} in autopar's config."
    )
    with pytest.raises(ConfigError, match="expert_parallel_size=4 above tensor_parallel_size=2: DeepSpeed averages"):
        _check_mesh(model, model.mpu)
    model.mpu.destroy()


@pooled(world_size=4)
def test_a_copied_model_inside_ddp() -> None:
    """Ranks that hold the same experts average those of the copy, too."""
    plain = mixtral()
    model = copy.deepcopy(autopar.initialize(copy.deepcopy(plain), {"ep": 2}))
    wrapped = DistributedDataParallel(model, process_group=model.mpu.get_data_parallel_group())
    data = batches(0, 4)
    for own in data:
        (plain(input_ids=own[0], labels=own[0]).loss / 4).backward()
    own = data[model.mpu.dp.rank][0]
    wrapped(input_ids=own, labels=own).loss.backward()
    with autopar.whole(model):
        gradients = {name: p.grad for name, p in plain.named_parameters()}
        assert all(close(p.grad, gradients[name]) for name, p in model.named_parameters())


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
    with autopar.whole(model):
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        assert all(close(mine.grad, other.grad) for mine, other in pairs if other.grad is not None)
    model.mpu.destroy()
    model = autopar.initialize(copy.deepcopy(plain), {"ep": 4})
    with pytest.raises(ConfigError, match="create_graph=True with experts that several replicas share"):
        penalized(model, ids)
    model.mpu.destroy()


def with_adapters(**fields: Any) -> Any:
    """A mixture with LoRA on attention and on the weights of its experts."""
    peft = pytest.importorskip("peft")
    names = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "o_proj"], target_parameters=names, **fields)
    model = peft.get_peft_model(mixtral(8), config)
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=drawn, dtype=torch.float64))
    return model


@pytest.mark.parametrize("sizes", [{"ep": 2}, {"tp": 2, "ep": 4}, {"tp": 2, "ep": 2}])
@pooled(world_size=4)
def test_adapters_of_experts(sizes: dict[str, int]) -> None:
    plain = with_adapters()
    model = autopar.initialize(copy.deepcopy(plain), sizes)
    optimizers = [torch.optim.AdamW((p for p in m.parameters() if p.requires_grad), lr=1e-2) for m in (plain, model)]
    for step in range(2):
        data = batches(step, model.mpu.dp.size)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for own in data:
            (plain(input_ids=own[0], labels=own[0]).loss / len(data)).backward()
        own = data[model.mpu.dp.rank]
        model(input_ids=own[0], labels=own[0]).loss.backward()
        autopar.average_gradients(model)
        with autopar.whole(model):
            gradients = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
            assert all(close(p.grad, gradients[n]) for n, p in model.named_parameters() if p.requires_grad)
        for optimizer in optimizers:
            optimizer.step()
    with autopar.whole(model):
        assert all(close(p, dict(plain.named_parameters())[n]) for n, p in model.named_parameters())
    model.mpu.destroy()


@pooled(world_size=4)
def test_adapters_of_one_expert_a_rank_are_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["experts.down_proj"])
    with pytest.raises(ConfigError, match=r"(?s)6 experts over 4 ranks leave one on rank 2, .* at most 3\."):
        autopar.initialize(peft.get_peft_model(mixtral(), config), {"ep": 4})


def _die_before_an_all_to_all(doomed: int) -> None:
    model = autopar.initialize(mixtral(), {"ep": 4})
    ids = torch.ones(1, 4, dtype=torch.long)
    model(input_ids=ids)
    if dist.get_rank() == doomed:
        model.model.layers[1].mlp.experts.register_forward_pre_hook(lambda *_: os._exit(1))
    with pytest.raises(PipelineError, match="an expert-parallel collective") as info:
        model(input_ids=ids)
    assert f"rank {doomed}" in str(info.value)


@pytest.mark.tier("all")
def test_a_rank_that_dies_between_replicas_is_named() -> None:
    spawn(__name__, "_die_before_an_all_to_all", 4, 90.0, (2,), expect_dead=(2,))


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
        with autopar.whole(model), autopar.whole(other):
            assert all(map(torch.equal, model.parameters(), other.parameters())), config
        other.mpu.destroy()
    model.mpu.destroy()
