"""torch's Muon with its momentum sharded, and with fused matrices in parts: the weights are those of one process."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Muon, Optimizer
from transformers import Phi3Config, Phi3ForCausalLM

import autopar
from autopar.errors import ConfigError
from tests.compare import same_weights
from tests.data_parallel.whole_optimizers import (
    MATRICES,
    MODELS,
    Own,
    equal_bits,
    from_equal_gradients,
    goes_on,
    lamb,
    precise_muon,
    set_gradients,
    train,
)
from tests.exchange import raises_everywhere
from tests.features.experts.module_mixtures import nllb
from tests.harness.worlds import pooled
from tests.parity import randomise
from tests.small import gpt2, llama

SHARDED = {"optimizer": {"full_matrix": "sharded"}}


def muon(parameters: Any, **settings: Any) -> Muon:
    return Muon([p for p in parameters if p.ndim == 2], **{"lr": 0.02, **settings})


def phi3(seed: int = 0) -> Any:
    """4 query heads, 2 KV heads, ffn 21: q | k | v and gate | up of other widths."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 21}
    config = Phi3Config(num_hidden_layers=1, vocab_size=31, pad_token_id=0, initializer_range=0.1, **sizes)
    return randomise(Phi3ForCausalLM(config))


def only_shards(optimizer: Any) -> None:
    assert optimizer._autopar.muon and not optimizer._autopar.whole
    for parameter, state in optimizer.state.items():
        assert list(state) == ["momentum_buffer"] and state["momentum_buffer"].shape == parameter.shape
    assert optimizer.state.keys() == {p for group in optimizer.param_groups for p in group["params"]}


def sharded(build: Any, make: Any, what: str) -> None:
    model, plain, optimizer = from_equal_gradients(build, make, "Muon", **SHARDED)
    only_shards(optimizer)
    equal_bits(model, plain, what)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_from_equal_gradients_the_bits_are_those_of_one_process() -> None:
    for kind in ("Muon", "Muon like Adam"):
        for name, build in MODELS.items():
            sharded(build, MATRICES[kind], f"{kind} of {name}")


@pooled(world_size=3)
def test_uneven_shards() -> None:
    rate = partial(Muon, lr=torch.tensor(0.02), weight_decay=0.3, momentum=0.8, ns_steps=3)
    for make in (MATRICES["Muon"], MATRICES["Muon like Adam"], rate):
        for name, build in {**MODELS, "phi3": phi3}.items():
            sharded(build, make, name)


@pooled(world_size=2)
def test_matrices_of_experts_each_by_itself() -> None:
    def build() -> Any:
        return nllb(3, expert_capacity=9).float()

    model, plain, optimizer = from_equal_gradients(build, MATRICES["Muon"], "Muon", **SHARDED)
    names = {optimizer._autopar.names[p] for p in optimizer._autopar.muon.axes}
    assert {f"model.decoder.layers.1.ffn.experts.expert_{n}.fc1.weight" for n in range(3)} <= names
    equal_bits(model, plain, "experts")


@pytest.mark.tier("test", only=("stages",))
@pytest.mark.parametrize("mesh", ["zero", "stages", "rows", "sequence", "clipped", "one rank"])
@pooled(world_size=4)
def test_training(mesh: str) -> None:
    config: dict[str, Any] = {
        "zero": {"tp": 2, "zero": {"stage": 1}},
        "stages": {"tp": 2, "pp": 2},
        "rows": {"tp": 2, "cp": 2},
        "sequence": {"model_parallelism": {"tensor_parallel_size": 4, "sequence_parallel": True}},
        "clipped": {"tp": 2, "zero": {"stage": 1}, "gradient_clipping": 0.5},
        "one rank": {"pp": 2, "zero": {"stage": 1}},  # torch's own step
    }[mesh]
    with precise_muon():
        model, plain, optimizer = train(lambda: llama().double(), muon, {**config, **SHARDED})
    assert bool(optimizer._autopar.muon) is (mesh != "one rank")  # type: ignore[attr-defined]
    same_weights(model, plain, 1e-6, when=mesh)
    assert mesh != "clipped" or optimizer.gradient_norm > 0.5  # type: ignore[attr-defined]


@pytest.mark.parametrize("nesterov", [True, False])
@pooled(world_size=2)
def test_fp32_weights_of_half_precision(nesterov: bool) -> None:
    for dtype in ("bf16", "fp16"):
        results = []
        for tp in (2, 1):
            model = gpt2()
            precision = {"dtype": dtype, "initial_scale": 4.0}
            config = {"tp": tp, "precision": precision, "gradient_clipping": 1e9, **SHARDED}
            model, optimizer = autopar.initialize(model, config, optimizer=muon(model.parameters(), nesterov=nesterov))
            for step in range(4):
                set_gradients(model, step)
                if step == 1 and dtype == "fp16":
                    model.transformer.h[0].mlp.c_fc.weight.grad[0, 0] = torch.inf
                optimizer.scale_loss(torch.ones(()))
                optimizer.step()
                assert optimizer.step_was_skipped is (step == 1 and dtype == "fp16")
            assert {state["momentum_buffer"].dtype for state in optimizer.state.values()} == {torch.float32}
            results.append({name: p.detach() for name, p in autopar.deparallelize(model).named_parameters()})
        for name, weight in results[1].items():
            assert torch.equal(results[0][name], weight), name


@pooled(world_size=4)
def test_checkpoints_of_all_ways_go_on_in_each(tmp_path: Path) -> None:
    meshes: tuple[dict[str, Any], ...] = (
        {"tp": 2, "zero": {"stage": 1}, **SHARDED},
        {"tp": 4, "optimizer": {"full_matrix": "owned"}},
        {"tp": 2, "pp": 2, **SHARDED},
        {"tp": 2, "optimizer": {"full_matrix": "duplicated"}},
        {"tp": 4, **SHARDED},
        {"tp": 1, **SHARDED},
    )
    goes_on(meshes, muon, tmp_path)
    ways = {"tp": 2, **SHARDED}, {"tp": 4, "optimizer": {"full_matrix": "duplicated"}}, {"tp": 2, "pp": 2, **SHARDED}
    goes_on(ways, muon, tmp_path / "dcp", dcp=True)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_one_that_has_stepped_before_goes_on() -> None:
    plain, model = gpt2(), gpt2()
    reference, optimizer = muon(plain.parameters()), muon(model.parameters())
    for step in range(4):
        if step == 2:
            model, optimizer = autopar.initialize(model, {"tp": 2, **SHARDED}, optimizer=optimizer)
        for each, stepping in ((plain, reference), (model, optimizer)):
            set_gradients(each, step)
            if step == 3:  # a gradient that one rank lacks is zero there, one that all lack is none
                c_fc, c_proj = each.transformer.h[0].mlp.c_fc.weight, each.transformer.h[0].mlp.c_proj.weight
                c_proj.grad = None
                if each is model:
                    c_fc.grad = None if model.mpu.tp.rank else c_fc.grad
                else:
                    c_fc.grad[:, c_fc.shape[1] // 2 :] = 0
            stepping.step()
    only_shards(optimizer)
    equal_bits(model, plain, "after two steps")


class Mine(Muon):
    pass


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_other_optimizers_are_refused_with_what_works() -> None:
    split = {"optimizer": {"split_fused": True}}
    itself = "supports only torch.optim.Muon, got"
    instead = "Write optimizer: {full_matrix: owned}, which steps full matrices."
    mine = f"tests.data_parallel.test_sharded_muon.Mine.\n  {instead}"
    none = "optimizer.split_fused=true needs a fused matrix (q | k | v, gate | up); none of the 16 matrices"
    for config, make, text in (
        (SHARDED, Mine, f"optimizer.full_matrix=sharded {itself} {mine}"),
        (SHARDED, partial(Own, update=lamb), instead),
        (split, Mine, f"optimizer.split_fused=true {itself}"),
        (split, torch.optim.AdamW, "got torch.optim.adamw.AdamW.\n  Leave it out."),
        (split, Muon, none),
        ({**split, "zero": {"stage": 3}}, Muon, "zero.stage=3 is not supported with optimizer.split_fused"),
        ({**SHARDED, "zero": {"stage": 3}}, Muon, "Use zero.stage 1, where a rank steps full matrices"),
    ):
        model = llama()
        optimizer = make([p for p in model.parameters() if p.ndim == 2])
        with raises_everywhere(ConfigError, text):
            autopar.initialize(model, {"tp": 2, **config}, optimizer=optimizer)
        assert not hasattr(model, "mpu")
    with raises_everywhere(ConfigError, "optimizer.split_fused=true needs an optimizer, and initialize got none"):
        autopar.initialize(gpt2(), {"tp": 2, **split})
    model = gpt2()
    model, optimizer = autopar.initialize(model, {"tp": 2, **SHARDED}, optimizer=torch.optim.AdamW(model.parameters()))
    assert not optimizer._autopar.muon and not optimizer._autopar.whole


class Normed(Optimizer):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(0.1 * p.grad / (p.grad.norm() if group["normed"] else 1))


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_a_group_that_is_added_is_checked_too() -> None:
    model = gpt2(n_layer=1)
    block = model.transformer.h[0]
    made = Normed([block.attn.c_attn.weight], {"normed": False})
    model, optimizer = autopar.initialize(model, {"tp": 2, **SHARDED}, optimizer=made)
    set_gradients(model, 0)
    optimizer.step()
    optimizer.add_param_group({"params": [block.mlp.c_fc.weight], "normed": True})
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for _ in range(2):
        with raises_everywhere(ConfigError, "optimizer.full_matrix=sharded supports only torch.optim.Muon"):
            optimizer.step()
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    optimizer.param_groups[1]["normed"] = False
    optimizer.step()
    changed = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])]
    assert changed == ["transformer.h.0.attn.c_attn.weight", "transformer.h.0.mlp.c_fc.weight"]


class Apart:
    """A plain model, of whose fused matrices Muon steps the parts as matrices of their own."""

    def __init__(self, model: nn.Module, cuts: dict[str, tuple[int, list[int]]], **settings: Any) -> None:
        self.model, self.parts = model, dict[nn.Parameter, tuple[int, list[nn.Parameter]]]()
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                dim, sizes = next((cut for end, cut in cuts.items() if name.endswith(end)), (0, [len(parameter)]))
                pieces = [nn.Parameter(part.clone()) for part in parameter.detach().split(sizes, dim)]
                self.parts[parameter] = dim, pieces
        self.optimizer = muon([part for _, parts in self.parts.values() for part in parts], **settings)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, (dim, parts) in self.parts.items():
            assert parameter.grad is not None
            sizes = [part.shape[dim] for part in parts]
            for part, gradient in zip(parts, parameter.grad.split(sizes, dim), strict=True):
                part.grad = gradient.clone()
        self.optimizer.step()
        for parameter, (dim, parts) in self.parts.items():
            parameter.copy_(torch.cat(list(parts), dim))


FUSED: dict[str, tuple[Any, dict[str, tuple[int, list[int]]]]] = {
    "gpt2": (partial(gpt2, n_layer=1), {"attn.c_attn.weight": (1, [36, 36, 36])}),
    "phi3": (phi3, {"qkv_proj.weight": (0, [16, 8, 8]), "gate_up_proj.weight": (0, [21, 21])}),
}


def ways(world: int) -> Iterator[dict[str, Any]]:
    for whole in ("owned", "duplicated", "sharded"):
        yield {"tp": world, "optimizer": {"full_matrix": whole, "split_fused": True}}
    yield {"tp": 1, "zero": {"stage": 1}, "optimizer": {"split_fused": True}}


def in_parts(kind: str, world: int) -> None:
    build, cuts = FUSED[kind]
    for config in ways(world):
        for settings in ({}, {"adjust_lr_fn": "match_rms_adamw", "nesterov": False}):
            plain, model = build(), build()
            reference = Apart(plain, cuts, **settings)
            model, optimizer = autopar.initialize(model, config, optimizer=muon(model.parameters(), **settings))
            for step in range(3):
                set_gradients(plain, step)
                reference.step()
                set_gradients(model, step)
                optimizer.step()
            for parameter, state in optimizer.state.items():
                assert state["momentum_buffer"].ndim == 2, parameter.shape
            equal_bits(model, plain, f"{kind}, {config}, {settings}")


@pytest.mark.tier("test", only=("phi3",))
@pytest.mark.parametrize("kind", FUSED)
@pooled(world_size=2)
def test_parts_of_fused_matrices_are_stepped_as_matrices_of_their_own(kind: str) -> None:
    in_parts(kind, 2)


@pytest.mark.parametrize("kind", FUSED)
@pooled(world_size=3)
def test_parts_on_uneven_shards(kind: str) -> None:
    in_parts(kind, 3)
