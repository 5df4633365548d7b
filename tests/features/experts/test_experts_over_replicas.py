"""Experts of several replicas, also with ZeRO-3: equal to one process with the whole batch."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.errors import ConfigError
from tests.data_parallel.whole_optimizers import MATRICES
from tests.features.experts import mixtures
from tests.features.experts.mixtures import batches, close, compare, mixtral, qwen3, reference, train, wholes
from tests.features.experts.module_mixtures import switch
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


RECOMPUTED, ZERO_3 = {"activation_checkpointing": {"enable": True}}, {"zero": {"stage": 3}}
ALL_REDUCE = {"model_parallelism": {"expert_dispatch": "all_reduce"}}
_FOUR: dict[str, dict[str, Any]] = {
    "tp 2 x dp 2": {"tp": 2, "ep": 4},
    "six experts on four replicas": {"ep": 4},
    "edp 2": {"ep": 2},
    "pp 2": {"ep": 2, "pp": 2, "pipeline": {"num_microbatches": 2}},
    "cp 2": {"ep": 2, "cp": 2},
    "all_reduce, tp 2 x dp 2": {"tp": 2, "ep": 4, **ALL_REDUCE},
    "whole experts on tp": {"tp": 2, "ep": 2, **ALL_REDUCE},
    "sequence": {"tp": 2, "ep": 4, "model_parallelism": {"sequence_parallel": True}},
    "ZeRO-1, clipping": {"ep": 2, "zero": {"stage": 1}, "gradient_clipping": 1e9},
    "ZeRO-1, tp 2": {"tp": 2, "ep": 4, "zero": {"stage": 1}},
    "ZeRO-2, pp 2": {"ep": 2, "pp": 2, "zero": {"stage": 2}, "pipeline": {"num_microbatches": 2}},
    "ZeRO-3, pp 2": {"ep": 2, "pp": 2, "zero": {"stage": 3}, "pipeline": {"num_microbatches": 2}},
    "recomputed": {"ep": 2, **RECOMPUTED},
}
_OF_ZERO_3 = ("edp 2", "six experts on four replicas", "tp 2 x dp 2", "cp 2", "sequence", "recomputed")
_FOUR |= {f"ZeRO-3, {name}": {**_FOUR[name], **ZERO_3} for name in _OF_ZERO_3}
_FOUR["ZeRO-3, clipping, all_reduce"] = {"ep": 2, **ZERO_3, "gradient_clipping": 1e9, **ALL_REDUCE}


@pytest.mark.tier("test", only=("ZeRO-2, pp 2",))
@pytest.mark.parametrize("mesh", _FOUR)
@pooled(world_size=4)
def test_meshes_of_four(mesh: str) -> None:
    compare(mixtral, _FOUR[mesh], even="pp" in mesh or "cp" in mesh)


@pytest.mark.tier("test", only=("Adafactor",))
@pytest.mark.parametrize("name", ["Adafactor", "shampoo", "galore"])
@pooled(world_size=2)
def test_statistics_of_whole_matrices_are_saved_and_resumed_on_any_mesh(name: str, tmp_path: Path) -> None:
    experts = {"ep": 2}
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
    assert all(close(weight, plain.get_parameter(name)) for name, weight in wholes(model).items())
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


_OF_TWO = ({"ep": 2}, {"tp": 2, "ep": 2})


@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        *((mixtral, sizes) for sizes in ({"ep": 4}, {"tp": 2, "ep": 4}, {"ep": 2, "pp": 2})),
        *((switch, sizes) for sizes in _OF_TWO),
    ],
)
@pooled(world_size=4)
def test_generate_goes_on_until_the_last_replica_has_ended(make: Any, sizes: dict[str, int]) -> None:
    plain = make().eval()
    model = autopar.initialize(copy.deepcopy(plain), sizes).eval()
    replica = model.mpu.dp.rank
    ids = torch.randint(2, 31, (2, 4 + replica), generator=torch.Generator().manual_seed(replica))
    for settings in ({"max_new_tokens": 2 + 3 * replica}, {"max_new_tokens": 6, "eos_token_id": 3 + replica}):
        expected = plain.generate(ids, do_sample=False, pad_token_id=0, **settings)
        found = model.generate(ids, do_sample=False, pad_token_id=0, **settings)
        assert torch.equal(found, expected), settings


@pytest.mark.parametrize(
    ("make", "config"),
    [*((make, sizes) for make in (mixtral, switch) for sizes in _OF_TWO), (mixtral, {"ep": 2, **RECOMPUTED})],
)
@pooled(world_size=4)
def test_the_load_of_experts(make: Any, config: dict[str, Any]) -> None:
    plain = make()
    model = autopar.initialize(copy.deepcopy(plain), config)
    due: dict[str, Any] = {}
    for path, module in plain.named_modules():

        def count(_: Any, args: Any, path: str = path) -> None:
            chosen = args[1].flatten().bincount(minlength=6) if make is mixtral else args[1].sum((0, 1))
            due[path] = due.get(path, 0) + chosen

        if path.endswith("mlp.experts"):
            module.register_forward_pre_hook(count)
    data = [own[0] for own in batches(0, model.mpu.dp.size)]
    for ids in data:
        plain(input_ids=ids, labels=ids)
    ids = data[model.mpu.dp.rank]
    model.train()(input_ids=ids, labels=ids).loss.backward()
    load = autopar.expert_load(model)
    assert load.keys() == due.keys() and all(torch.equal(load[path], due[path]) for path in load)
    assert all(not tokens.any() for tokens in autopar.expert_load(model).values())


def adapted(*weights: str, experts: int = 8) -> Any:
    """A mixture with LoRA on attention and on weights of its experts."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    names = {"target_modules": ["q_proj", "o_proj"], "target_parameters": [f"experts.{name}" for name in weights]}
    return peft.get_peft_model(mixtral(experts), peft.LoraConfig(r=2, init_lora_weights=False, **names)).double()


@pytest.mark.parametrize(
    "config", [{"ep": 2}, {"tp": 2, "ep": 4}, {"tp": 2, "ep": 2}, {"ep": 2, **ZERO_3}, {"tp": 2, "ep": 4, **ZERO_3}]
)
@pooled(world_size=4)
def test_adapters_of_experts(config: dict[str, Any]) -> None:
    compare(lambda: adapted("gate_up_proj", "down_proj"), config)


@pytest.mark.parametrize("config", [{"tp": 2}, {"tp": 2, "ep": 2}, {"tp": 2, "ep": 2, **ZERO_3}])
@pooled(world_size=2)
def test_adapters_of_one_of_two_weights_of_experts(config: dict[str, Any]) -> None:
    """PEFT takes the weight out for a forward, and puts it back behind the other one."""
    model, _, _ = compare(lambda: adapted("gate_up_proj"), config)
    assert sum(".experts." in name for name, p in model.named_parameters() if p.requires_grad) == 4


@pooled(world_size=4)
def test_adapters_of_one_expert_a_rank_are_refused() -> None:
    for sizes, most in (({"ep": 4}, 3), ({"tp": 2, "ep": 4}, 2)):
        with pytest.raises(ConfigError, match=rf"6 experts over 4 ranks leave one on rank 2\n.* at most {most}\."):
            autopar.initialize(adapted("down_proj", experts=6), sizes)


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


@pytest.mark.parametrize("make", [mixtures.qwen2, mixtures.deepseek])
@pooled(world_size=4)
def test_experts_that_all_tokens_go_to_lie_on_all_replicas(make: Any) -> None:
    model, _, _ = compare(make, {"ep": 2, **ZERO_3})
    shared = {name: p for name, p in model.named_parameters() if "shared_expert" in name}
    assert shared and all(p.device_mesh.size() == 4 for p in shared.values())
    assert all(p.device_mesh.size() == 2 for p in expert_parameters(model).values())


@pooled(world_size=4)
def test_norms_of_any_order_and_of_one_parameter() -> None:
    plain = mixtral()
    model = autopar.initialize(copy.deepcopy(plain), {"tp": 2, "ep": 4, **ZERO_3})
    data = batches(0, 2)
    _, gradients = reference(plain, torch.optim.SGD(plain.parameters()), data)
    train(model, data[model.mpu.dp.rank])
    for order in (1.0, 2.0, float("inf")):
        due = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9, order)
        for clip, of in ((torch.nn.utils.clip_grad_norm_, model.parameters()), (autopar.clip_grad_norm_, model)):
            assert abs(clip(of, 1e9, order) - due) < 1e-6 * due, order
    for name, parameter in model.named_parameters():
        norm = torch.nn.utils.get_total_norm([parameter.grad])
        assert abs(norm - gradients[name].norm()) < 1e-6 * gradients[name].norm(), name


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
