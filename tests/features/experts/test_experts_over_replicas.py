"""expert_parallel_size above tensor_parallel_size: experts of several replicas; one process with the whole batch."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.errors import ConfigError
from tests.data_parallel.whole_optimizers import MATRICES
from tests.features.experts.mixtures import batches, close, compare, mixtral, qwen3, reference, wholes
from tests.harness.worlds import pooled


@pytest.mark.tier("test", only=("all_to_all",))
@pytest.mark.parametrize("dispatch", ["all_to_all", "all_reduce"])
@pooled(world_size=2)
def test_two_replicas_hold_half_of_the_experts_each(dispatch: str) -> None:
    model, _, plain = compare(lambda: mixtral(5), {"ep": 2, "model_parallelism": {"expert_dispatch": dispatch}})
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
    "ZeRO-2, pp 2": {"ep": 2, "pp": 2, "zero": {"stage": 2}, "pipeline": {"num_microbatches": 2}},
    "ZeRO-3, pp 2": {"ep": 2, "pp": 2, "zero": {"stage": 3}, "pipeline": {"num_microbatches": 2}},
    "recomputed": {"ep": 2, "activation_checkpointing": {"enable": True}},
}


@pytest.mark.tier("test", only=("ZeRO-2, pp 2",))
@pytest.mark.parametrize("mesh", _FOUR)
@pooled(world_size=4)
def test_meshes_of_four(mesh: str) -> None:
    compare(mixtral, _FOUR[mesh], even="pp" in mesh or "cp" in mesh)


@pytest.mark.tier("test", only=("Adafactor",))
@pytest.mark.parametrize("name", ["Adafactor", "shampoo", "galore"])
@pooled(world_size=2)
def test_statistics_of_whole_matrices_are_saved_and_resumed_on_any_mesh(name: str, tmp_path: Path) -> None:
    experts: dict[str, Any] = {"ep": 2}
    data = torch.cat([own[0] for own in batches(0, 2, even=True)])
    plain = mixtral()
    other = MATRICES[name](plain.parameters())
    for _ in range(2):
        other.zero_grad()
        plain(input_ids=data, labels=data).loss.backward()
        other.step()
    due = dict(plain.named_parameters())

    def stepped(config: dict[str, Any], resumed: str = "") -> tuple[Any, Any]:
        model = mixtral()
        model, own = autopar.initialize(model, config, optimizer=MATRICES[name](model.parameters()))
        if resumed:
            model.from_parallelized(tmp_path / resumed, optimizer=own)
        mine = data.chunk(model.mpu.dp.size)[model.mpu.dp.rank]
        model(input_ids=mine, labels=mine).loss.backward()
        autopar.average_gradients(model)
        own.step()
        return model, own

    for saved, first, others in (
        ("ep", experts, [{**experts, "zero": {"stage": 1}}, {"tp": 2}]),
        ("tp", {"tp": 2}, [experts]),
    ):
        model, own = stepped(first)
        model.save_parallelized(tmp_path / saved, optimizer=own)
        for config in others:
            model, _ = stepped(config, saved)
            assert all(close(weight, due[key]) for key, weight in wholes(model).items()), (first, config)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pooled(world_size=4)
def test_each_implementation_of_experts(implementation: str) -> None:
    def make() -> Any:
        model = qwen3()
        model.set_experts_implementation(implementation)
        return model

    compare(make, {"tp": 2, "ep": 4}, optimizer=torch.optim.SGD)


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
    with autopar.full_params(model):
        assert all(close(p, dict(plain.named_parameters())[n]) for n, p in model.named_parameters())
    outer = torch.nn.ModuleDict({"inside": model})
    with pytest.raises(ConfigError) as info:
        DistributedDataParallel(outer, process_group=model.mpu.get_data_parallel_group())
    ep, tp = model.mpu.ep.size, model.mpu.tp.size
    assert str(info.value) == (
        "DistributedDataParallel would average experts over all replicas, which hold different ones with "
        f"expert_parallel_size={ep} above tensor_parallel_size={tp}\n"
        "  One of them is inside.model.layers.0.mlp.experts.down_proj. "
        "Wrap the model that autopar.initialize returned in\n  DistributedDataParallel, which then ignores experts."
    )


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


@pytest.mark.parametrize(
    "config",
    [
        {"ep": 2},
        {"tp": 2, "ep": 4},
        {"tp": 2, "ep": 2},
        {"ep": 2, "zero": {"stage": 3}},
        {"tp": 2, "ep": 4, "zero": {"stage": 3}},
    ],
)
@pooled(world_size=4)
def test_adapters_of_experts(config: dict[str, Any]) -> None:
    plain = with_adapters()
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW((p for p in m.parameters() if p.requires_grad), lr=1e-2) for m in (plain, model)]
    model, optimizers[1] = autopar.initialize(model, config, optimizer=optimizers[1])
    for step in range(2):
        data = batches(step, model.mpu.dp.size)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for own in data:
            (plain(input_ids=own[0], labels=own[0]).loss / len(data)).backward()
        own = data[model.mpu.dp.rank]
        model(input_ids=own[0], labels=own[0]).loss.backward()
        autopar.average_gradients(model)
        found = wholes(model, gradients=True)
        gradients = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
        assert found.keys() == gradients.keys() and all(close(found[name], gradients[name]) for name in found)
        for optimizer in optimizers:
            optimizer.step()
    weights = dict(plain.named_parameters())
    assert all(close(weight, weights[name]) for name, weight in wholes(model).items())
    model.mpu.destroy()


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 2, "ep": 2}, {"tp": 2, "ep": 2, "zero": {"stage": 3}}])
@pooled(world_size=2)
def test_adapters_of_one_of_two_weights_of_experts(sizes: dict[str, Any]) -> None:
    """PEFT takes the weight out for a forward, and puts it back behind the other one."""
    peft = pytest.importorskip("peft")
    own = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]}

    def make() -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(mixtral(), peft.LoraConfig(r=2, init_lora_weights=False, **own)).double()

    model, _, _ = compare(make, sizes)
    assert sum(".experts." in name for name, p in model.named_parameters() if p.requires_grad) == 4
    model.mpu.destroy()


@pooled(world_size=4)
def test_adapters_of_one_expert_a_rank_are_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["experts.down_proj"])
    for sizes, most in (({"ep": 4}, 3), ({"tp": 2, "ep": 4}, 2)):
        with pytest.raises(ConfigError, match=rf"6 experts over 4 ranks leave one on rank 2\n.* at most {most}\."):
            autopar.initialize(peft.get_peft_model(mixtral(), config), sizes)
