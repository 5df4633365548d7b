"""Experts that are modules in a list, and every model type with experts: equal to one process, in fp64."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import ConfigError
from autopar.plan.make_plan import make_plan
from autopar.policy.load import own_policies, read_user_policy
from autopar.policy.match import find_policy
from autopar.policy.schema import Policy
from tests.exchange import everyones
from tests.features.experts.mixtures import batches, close, compare, wholes
from tests.features.experts.module_mixtures import LISTED, listed, nllb, switch
from tests.harness.tiers import in_tier
from tests.harness.worlds import pooled
from tests.random_models import batches as random_batches, build, cases, kind, of_type

_ALL_REDUCE = {"model_parallelism": {"expert_dispatch": "all_reduce"}}
_TWO: dict[str, dict[str, Any]] = {
    "dp 2": {"ep": 2},
    "dp 2, all_reduce": {"ep": 2, **_ALL_REDUCE},
    "tp 2": {"tp": 2, "ep": 2},
    "tp 2, all_reduce": {"tp": 2, "ep": 2, **_ALL_REDUCE},
}
_FOUR: dict[str, dict[str, Any]] = {
    "tp 2 x dp 2": {"tp": 2, "ep": 4},
    "tp 2 x dp 2, all_reduce": {"tp": 2, "ep": 4, **_ALL_REDUCE},
    "dp 4": {"ep": 4},
    "edp 2": {"ep": 2},
    "edp 2, all_reduce": {"ep": 2, **_ALL_REDUCE},
    "tp 2, edp 2": {"tp": 2, "ep": 2},
    "pp 2": {"ep": 2, "pp": 2, "pipeline": {"num_microbatches": 2}},
    "ZeRO-1, tp 2": {"tp": 2, "ep": 4, "zero": {"stage": 1}},
    "recomputed": {"ep": 2, "activation_checkpointing": {"enable": True}},
}
_ROWS: dict[str, dict[str, Any]] = {
    "sequence": {"tp": 2, "ep": 4, "model_parallelism": {"sequence_parallel": True}},
    "cp 2": {"ep": 2, "cp": 2},
}
_FSDP: dict[str, dict[str, Any]] = {
    "ZeRO-3, edp 2": {"ep": 2, "zero": {"stage": 3}},
    "ZeRO-3, dp 4": {"ep": 4, "zero": {"stage": 3}},
    "ZeRO-2, tp 2": {"tp": 2, "ep": 2, "zero": {"stage": 2}},
}
_MODELS: dict[str, Any] = {
    "switch": switch,
    "switch, one expert is never chosen": lambda: never(switch(router_bias=True)),
    "switch, few fit into an expert": lambda: switch(expert_capacity=1),
    "nllb": nllb,
    "hit": listed,
    "hit, two of five": lambda: listed(reachable=2),  # the last ranks have no rows
    "all, two of five": lambda: listed(style="all", reachable=2),
    "dense": lambda: listed(style="dense"),
    "sometimes": lambda: listed(style="sometimes"),  # some ranks give no rows
}


def never(model: Any) -> Any:
    """Let no token choose expert 1."""
    for name, parameter in model.named_parameters():
        if name.endswith("classifier.bias"):
            parameter.data[1] = -1e9
    return model


def matches(name: str, config: dict[str, Any], **settings: Any) -> Any:
    policy = LISTED if name != "nllb" and "switch" not in name else None
    if name == "nllb":  # the bias of keys has no gradient but rounding, of which Adam makes steps
        settings["optimizer"] = torch.optim.SGD
    return compare(_MODELS[name], config, policy=policy, tolerance=1e-6, **settings)


@pytest.mark.tier("all")
@pytest.mark.parametrize("mesh", _TWO)
@pytest.mark.parametrize("name", _MODELS)
@pooled(world_size=2)
def test_two_ranks(name: str, mesh: str) -> None:
    model, _, plain = matches(name, _TWO[mesh])
    own = dict(plain.named_parameters())
    sizes = {path: p.numel() for path, p in model.named_parameters() if ".experts." in path}
    assert sizes and all(size in (0, own[path].numel()) for path, size in sizes.items())
    assert 0 < sum(sizes.values()) < sum(own[path].numel() for path in sizes)
    kinds = [type(module) for module in plain.modules()]
    autopar.deparallelize(model)
    assert [type(module) for module in model.modules()] == kinds
    assert all(close(p, own[path], 1e-6) for path, p in model.named_parameters())


_NAMES = ("switch", "nllb", "hit", "hit, two of five", "all, two of five", "sometimes")
_SHARDED = ("switch, one expert is never chosen", "nllb", "hit, two of five")
_IN_ALL = ["switch-tp 2 x dp 2", "hit-sequence", "switch, one expert is never chosen-ZeRO-3, edp 2"]
_CASES = [
    *((name, mesh) for name in _NAMES for mesh in _FOUR),
    *(("hit", mesh) for mesh in _ROWS),
    *((name, mesh) for name in _SHARDED for mesh in _FSDP),
]


@pytest.mark.every_case
@pytest.mark.tier("all")
@pytest.mark.tier("sweep", only=[f"{name}-{mesh}" for name, mesh in _CASES if f"{name}-{mesh}" not in _IN_ALL])
@pytest.mark.parametrize(("name", "mesh"), _CASES)
@pooled(world_size=4)
def test_four_ranks(name: str, mesh: str) -> None:
    settings: dict[str, Any] = {"optimizer": torch.optim.SGD} if mesh in _FSDP else {}
    matches(name, (_FOUR | _ROWS | _FSDP)[mesh], even=mesh in ("pp 2", "cp 2"), **settings)


def with_adapters() -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=3, init_lora_weights=False, target_modules=["q", "wi", "wo"])
    return peft.get_peft_model(switch(), settings).double()


@pytest.mark.tier("all")
@pytest.mark.parametrize("sizes", [{"ep": 2}, {"tp": 2, "ep": 2}])
@pooled(world_size=2)
def test_adapters_lie_with_their_expert(sizes: dict[str, int]) -> None:
    model, *_ = compare(with_adapters, sizes, tolerance=1e-6)
    held = [p.shape[0] for name, p in model.named_parameters() if ".experts." in name and "lora_A" in name]
    assert set(held) == {0, 3}


@pytest.mark.tier("all")
@pooled(world_size=2)
def test_a_router_runs_once_and_its_hooks_too() -> None:
    plain = listed()
    model = autopar.initialize(copy.deepcopy(plain), {"ep": 2}, policy=LISTED)
    calls = list[tuple[int, ...]]()
    mixture = model.model.blocks[0].mlp
    mixture.gate.register_forward_hook(lambda _, args, out: calls.append(tuple(out.shape)))
    ids = batches(0, 2)[model.mpu.dp.rank][0]
    model(input_ids=ids, labels=ids).loss.backward()
    assert calls == [(2, ids.shape[1], 5)] and mixture.seen == 1
    mixture.experts[model.mpu.ep.rank * 3].register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="is inside distributed experts: it would see"):
        model(input_ids=ids)


@pytest.mark.tier("all")
@pooled(world_size=2)
def test_dropout_of_experts_draws_by_rank_and_leaves_other_draws_alone() -> None:
    model = autopar.initialize(switch(dropout_rate=0.5), {"tp": 2, "ep": 2}).train()
    ids = batches(0, 1)[0][0]
    losses = [model(input_ids=ids, labels=ids).loss for _ in range(2)]
    assert losses[0] != losses[1]
    losses[1].backward()
    one, other = everyones((float(losses[1]), torch.rand(3).tolist()))
    assert one == other


@pytest.mark.tier("all")
@pytest.mark.parametrize("name", ["switch", "nllb"])
@pooled(world_size=2)
def test_auxiliary_losses_of_routers_are_those_of_replicas_with_all_experts(name: str) -> None:
    found = []
    for config in ({}, {"ep": 2}):
        model = autopar.initialize(_MODELS[name](), config)
        ids = batches(0, 2)[model.mpu.dp.rank][0]
        out = model(input_ids=ids, labels=ids, output_router_logits=True)
        bare = model(input_ids=ids, labels=ids)
        assert abs(out.loss - bare.loss) > 1e-6  # it has another term
        out.loss.backward()
        autopar.average_gradients(model)
        autopar.deparallelize(model)
        found.append((out.loss, {path: p.grad for path, p in model.named_parameters()}))
    (loss, due), (own, gradients) = found
    assert abs(own - loss) < 1e-12
    for path, gradient in gradients.items():
        assert (gradient is None) == (due[path] is None), path
        assert gradient is None or close(gradient, due[path], 1e-9), path


def _refused(make: Any, policy: Any, experts: int = 2) -> str:
    model = make()
    with pytest.raises(ConfigError) as info:
        make_plan(model, find_policy(model) if policy is None else read_user_policy(policy), 1, experts=experts)
    return str(info.value)


def test_more_ranks_than_experts_and_what_cannot_lie_on_one_rank() -> None:
    assert _refused(switch, None, 6).startswith(
        "expert_parallel_size=6 does not fit SwitchTransformersForConditionalGeneration: 5 experts cannot be sharded "
        "over 6 ranks."
    )

    def changed(change: Any) -> Any:
        model = listed()
        change(model.model.blocks[0].mlp)
        return model

    rules = {**LISTED["blocks"]["modules"], "mlp.experts.*.gain?": "replicated", "mlp.experts.*.norm?": "replicated"}
    rules["mlp.experts.gain?"] = "replicated"
    policy = {**LISTED, "blocks": {**LISTED["blocks"], "modules": rules}}
    single = nn.Parameter(torch.zeros(()))
    assert "experts.2.gain must be a floating-point weight of at least one dim, got a single number" in _refused(
        lambda: changed(lambda mlp: mlp.experts[2].register_parameter("gain", single)), policy
    )
    assert "model.blocks.0.mlp.experts.2.norm, which normalizes over the tokens of an expert" in _refused(
        lambda: changed(lambda mlp: mlp.experts[2].register_module("norm", nn.BatchNorm1d(4))), policy
    )
    assert "it has the parameter gain next to 5 experts" in _refused(
        lambda: changed(lambda mlp: mlp.experts.register_parameter("gain", nn.Parameter(torch.zeros(2)))), policy
    )


class Wide(nn.Module):
    """A mixture that calls its experts in a way that cannot travel."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.runs = way, 0
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        if self.way == "narrow":
            return self.experts[0](x[..., :4])
        if self.way == "writes":
            y = self.experts[1](x)
            x += y
            return y
        if self.way == "keyword":
            return self.experts[1](input=x)
        return self.experts[self.runs % 4](x)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("narrow", r"with 0: expected 8 features, as in its input, for its experts, got 4"),
        ("writes", r"with 0: it changes the input \[3, 8\] of expert 1 in place"),
        ("keyword", r"with 0: it must call its experts with one positional tensor"),
        ("turns", r"with 0: it must call its experts the same way when its forward runs twice"),
    ],
)
@pooled(world_size=2)
def test_calls_that_cannot_travel(way: str, words: str) -> None:
    policy = {
        "units": {"experts": "4", "ffn": "inferred"},
        "prefix": {"0.experts": {"by_expert": "experts"}, "0.experts.*": {"column": "ffn", "gather_output": True}},
    }
    model = autopar.initialize(nn.Sequential(Wide(way)), {"ep": 2}, policy=policy)
    with pytest.raises(ConfigError, match=words):
        model(torch.ones(3, 8))


FIRST = (  # one of each structure
    *("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "jamba", "qwen3_next"),
    *("dbrx", "jetmoe", "llama4_text", "longcat_flash"),
)
DOUBLE = ("deepseek_v4", "hy_v4")  # in float32 rounding alone takes gradients behind hyper-connections 2e-5 apart
ROUNDED = {
    "deepseek_v4": 2e-5,  # its head sums in float32 whatever the weights are: tp 2 alone is 7.3e-6 apart
    "nllb-moe": 2e-5,  # biases of keys, whose gradient is rounding, are 1.1e-5 apart
}
BALANCED = ("nllb-moe",)  # each batch by itself in one process, unless replicas are told so
DENSE = ("gemma4_text", "gemma4_unified_text")  # what is small of them has no experts


def _by_expert(policy: Policy) -> bool:
    sections = [policy.head]
    for tower in policy.towers:
        sections += [tower.prefix, tower.every_stage, tower.suffix, tower.blocks]
    return any(rule.by_expert for section in sections for rule in section.values())


def _types() -> list[Any]:
    found = {name for policy in own_policies().values() if _by_expert(policy) for name in policy.model_types}
    whole = sorted(name for name in found if not of_type(name).inside and name not in DENSE)
    assert set(FIRST) <= set(whole)
    return [*in_tier("all", FIRST), *in_tier("sweep", [name for name in whole if name not in FIRST])]


def _loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    out = model(**batch)
    loss: torch.Tensor | None = getattr(out, "loss", None)
    return out[0].float().pow(2).mean() if loss is None else loss


def _compare(model_type: str, config: dict[str, Any]) -> None:
    listed = cases(model_type)
    case = next((each for each in listed if kind(each.head) == "causal"), listed[0])
    plain = build(case, 6, 3, vocab=131).train()
    plain = plain.double() if model_type in DOUBLE else plain
    for module in plain.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if model_type in BALANCED:
        config = {**config, "loss": {"router_aux": "replica"}}
    model = autopar.initialize(copy.deepcopy(plain), config)
    data = random_batches(case, plain.config, 2)
    for batch in data:
        (_loss(plain, batch) / 2).backward()
    _loss(model, data[model.mpu.dp.rank]).backward()
    autopar.average_gradients(model)
    due = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    largest = max(float(gradient.norm()) for gradient in due.values())
    found = wholes(model, gradients=True)
    for name, gradient in due.items():
        apart = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-4 * largest)
        assert apart < ROUNDED.get(model_type, 1e-5), (name, float(apart))
    if "zero" in config:  # FSDP2 cannot be undone
        model.mpu.destroy()
    else:
        autopar.deparallelize(model)


@pytest.mark.parametrize("model_type", _types())
@pooled(world_size=2)
def test_two_replicas(model_type: str) -> None:
    _compare(model_type, {"ep": 2})


@pytest.mark.parametrize("model_type", _types())
@pooled(world_size=4)
def test_two_replicas_of_two_ranks(model_type: str) -> None:
    _compare(model_type, {"tp": 2, "ep": 4})


@pytest.mark.parametrize("model_type", _types())
@pooled(world_size=2)
def test_two_replicas_with_zero_3(model_type: str) -> None:
    _compare(model_type, {"ep": 2, "zero": {"stage": 3}})
