"""Derivatives through sharded layers: exact in any order, or refused, as transforms and dual tensors are."""

import copy
import importlib
import inspect
import pkgutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.distributed.collectives import all_gather
from autopar.errors import ConfigError
from autopar.tensor_parallel import regions
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.parity import all_close, close, language_batches
from tests.small import gpt2, llama, parallel
from tests.three_steps import mixtral

# Autograd functions that communicate nothing.
_LOCAL = {"autopar.tools.planner.storages._Attention", "autopar.features.experts.module_experts._Present"}


def _functions() -> dict[str, Any]:
    """Return all autograd functions of autopar, by name."""
    for module in pkgutil.walk_packages(autopar.__path__, "autopar."):
        if ".integrations" not in module.name and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found, waiting = {}, list(torch.autograd.Function.__subclasses__())
    while waiting:
        each = waiting.pop()
        waiting += each.__subclasses__()
        is_base = each.__subclasses__() and "backward" not in vars(each)
        if each.__module__.startswith("autopar.") and not is_base:
            found[f"{each.__module__}.{each.__qualname__}"] = each
    return found


def test_every_autograd_function_has_a_second_backward_or_refuses_and_hands_on_that_no_gradient_came() -> None:
    found = _functions()
    assert len(found) > 20 and found.keys() >= _LOCAL
    states = {name for name in found if ".state_passing." in name}  # a message goes to the next rank in any case
    for name, function in found.items():
        backward, forward = inspect.getsource(function.backward), inspect.getsource(function.forward)
        refuses = name.startswith("autopar.features.context_parallel.")
        kinds = [kind for kind in ("@single_backward", "@any_order(") if kind in backward]
        assert kinds == ([] if name in _LOCAL else ["@single_backward" if refuses else "@any_order("]), name
        assert ("keep_none(ctx)" in forward) == (name not in _LOCAL | states), name


def _of_whole(model: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    state = vars(model).get("_autopar")
    layout = None if state is None else state.plan.tensors[state.plan.canonical(name)].layout
    return tensor.detach() if layout is None else all_gather(tensor.detach(), model.mpu.tp, layout)


def _part_of(model: Any, name: str, drawn: torch.Generator, parameter: torch.Tensor) -> torch.Tensor:
    """Draw a direction for a parameter, and return this rank's part of it."""
    state = vars(model).get("_autopar")
    due = None if state is None else state.plan.tensors[state.plan.canonical(name)]
    whole = torch.randn(parameter.shape if due is None else due.shape, generator=drawn)
    return whole if due is None or due.layout is None else due.layout.shard(whole, model.mpu.tp.rank)


def _penalised(model: Any, loss: torch.Tensor, cube: bool) -> dict[str, torch.Tensor]:
    """Return the gradients of a loss with penalties on its gradients: squares, a direction, third derivatives."""
    named, drawn = dict(model.named_parameters()), torch.Generator().manual_seed(5)
    gradients = torch.autograd.grad(loss, list(named.values()), create_graph=True)
    penalty = torch.zeros(())
    for (name, parameter), gradient in zip(named.items(), gradients, strict=True):
        penalty = penalty + gradient.square().sum() + (gradient * _part_of(model, name, drawn, parameter)).sum()
    if cube:
        again = torch.autograd.grad(penalty, list(named.values()), create_graph=True)
        penalty = penalty + sum((x.square().sum() for x in again), torch.zeros(()))
    found = torch.autograd.grad(loss + penalty, list(named.values()))
    return {name: _of_whole(model, name, x) for name, x in zip(named, found, strict=True)}


HOW: dict[str, dict[str, Any]] = {
    "tp": {},
    "sp": {"model_parallelism": {"sequence_parallel": True}},
    "gloo": {"model_parallelism": {"cpu_transport": "gloo"}},  # the sum of input gradients overlaps
    "chunk": {"loss": {"chunk": 3}},
    "always": {"loss": {"gather_logits": "always"}},
}


def _as_plain(kind: str, how: str, cube: bool = False) -> None:
    plain: Any = MODELS[kind]()
    given = HOW[how]
    sizes = {"tensor_parallel_size": dist.get_world_size(), **given.get("model_parallelism", {})}
    model = autopar.initialize(copy.deepcopy(plain), {**given, "model_parallelism": sizes})
    batch = language_batches(131)[0]
    for loss_of in (lambda out: out.loss, lambda out: out.logits.float().square().mean()):
        expected, found = (_penalised(each, loss_of(each(**batch)), cube) for each in (plain, model))
        for name, gradient in expected.items():
            scale = max(1.0, float(gradient.abs().max()))
            close(found[name] / scale, gradient / scale, f"{kind} {how}: {name}")


MODELS = {
    "llama": lambda: llama(attn_implementation="eager", num_key_value_heads=1),
    "gpt2": lambda: gpt2(attn_implementation="eager"),  # biases, tied embeddings, Conv1D
}


@pytest.mark.tier("test", only=("llama-tp",))
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", MODELS)
@pooled(world_size=2)
def test_penalties_on_gradients_are_differentiated_as_in_the_plain_model(kind: str, how: str) -> None:
    least, regions._LEAST = regions._LEAST, 1
    try:
        _as_plain(kind, how)
    finally:
        regions._LEAST = least


@pooled(world_size=3)
def test_third_derivatives_over_uneven_shards() -> None:
    for how in ("tp", "sp"):
        _as_plain("gpt2", how, cube=True)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_an_inner_step_is_differentiated() -> None:
    plain, (support, query) = llama(attn_implementation="eager"), language_batches(131)
    model = autopar.initialize(copy.deepcopy(plain), {"tp": 2})
    results = []
    for each in (plain, model):
        named = dict(each.named_parameters())
        inner = torch.autograd.grad(each(**support).loss, list(named.values()), create_graph=True)
        moved = {name: p - 0.5 * g for (name, p), g in zip(named.items(), inner, strict=True)}
        torch.func.functional_call(each, moved, kwargs=query).loss.backward()
        results.append({name: _of_whole(each, name, p.grad) for name, p in named.items() if p.grad is not None})
    all_close(results[1], results[0], "{}")


@pooled(world_size=2)
def test_transforms_go_through_replicas_of_the_whole_model() -> None:
    plain, (batch, _) = llama(attn_implementation="eager"), language_batches(131)
    model = autopar.initialize(copy.deepcopy(plain), {})
    found = []
    for each in (plain, model):

        def loss(weights: Any, each: Any = each) -> Any:
            return torch.func.functional_call(each, weights, kwargs={**batch, "use_cache": False}).loss

        found.append(torch.func.grad(loss)({name: x.detach() for name, x in each.named_parameters()}))
    all_close(found[1], found[0], "{}")


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_parameters_that_a_loss_does_not_use_have_no_gradient_under_ddp() -> None:
    """With ``find_unused_parameters`` DDP hands gradients that are undefined to every output of its forward."""
    plain, (batch, _) = llama(), language_batches(131)
    model = autopar.initialize(copy.deepcopy(plain), {"tp": 2})
    alone = model.mpu.get_data_parallel_group()
    wrapped = DistributedDataParallel(model, process_group=alone, find_unused_parameters=True)
    for each in (plain, wrapped):
        each(**batch, output_hidden_states=True).hidden_states[1].square().mean().backward()
    unused = {name for name, parameter in plain.named_parameters() if parameter.grad is None}
    assert {"model.norm.weight", "lm_head.weight"} <= unused
    assert {name for name, parameter in model.named_parameters() if parameter.grad is None} == unused
    assert dist.get_world_size(alone) == 1


IDS = torch.randint(0, 131, (3, 8), generator=torch.Generator().manual_seed(3))
WORDS = ("torch.func (grad, vmap, jvp, ...) and dual tensors are not supported on a sharded model", "loss.backward()")
MESHES: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "sp": {"model_parallelism": {"tensor_parallel_size": 2, "sequence_parallel": True}},
    "cp": {"cp": 2},
    "pp": {"pp": 2},
    "ep": {"ep": 2},
    "zero": {"zero": {"stage": 3}},
}


@pytest.mark.parametrize("mesh", MESHES)
@pooled(world_size=2)
def test_they_are_refused(mesh: str) -> None:
    plain = mixtral("eager") if mesh == "ep" else llama()
    plain.set_attn_implementation("eager")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model: Any = autopar.initialize(plain.eval(), MESHES[mesh], optimizer=optimizer)[0]
    before = model(input_ids=IDS, use_cache=False).logits.detach().clone()

    def loss(weights: Any) -> Any:
        return functional_call(model, weights, kwargs={"input_ids": IDS, "labels": IDS, "use_cache": False}).loss

    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with raises_everywhere(ConfigError, *WORDS):
        grad(loss)(weights)
    with raises_everywhere(ConfigError, *WORDS):
        vmap(lambda ids: model(input_ids=ids[None], use_cache=False).logits)(IDS)
    embeds = torch.randn(3, 8, 24, generator=torch.Generator().manual_seed(3))
    with forward_ad.dual_level():
        assert torch.equal(model(input_ids=IDS, use_cache=False).logits, before), "nothing is dual"
        with raises_everywhere(ConfigError, *WORDS):
            model(inputs_embeds=forward_ad.make_dual(embeds, embeds))
    assert torch.equal(model(input_ids=IDS, use_cache=False).logits, before)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_batched_and_dual_gradients_and_layers_by_themselves_are_refused() -> None:
    model: Any = parallel(llama(attn_implementation="eager"), 2)
    gradients = torch.eye(2)
    losses = torch.stack([model(input_ids=ids[None], labels=ids[None]).loss for ids in IDS[:2]])
    with raises_everywhere(ConfigError, *WORDS):
        vmap(lambda g: torch.autograd.grad(losses, list(model.parameters()), g, retain_graph=True))(gradients)
    with forward_ad.dual_level(), raises_everywhere(ConfigError, *WORDS):
        torch.autograd.grad(losses, list(model.parameters()), forward_ad.make_dual(gradients[0], gradients[1]))
    layer: nn.Module = model.model.layers[0].mlp.down_proj
    with raises_everywhere(ConfigError, *WORDS):
        vmap(layer)(torch.ones(3, 2, layer.in_features))  # type: ignore[arg-type]
    for ids in IDS:  # one sample at a time
        gradients = torch.autograd.grad(model(input_ids=ids[None], labels=ids[None]).loss, list(model.parameters()))
        assert all(gradient.isfinite().all() for gradient in gradients)
