"""Derivatives through sharded layers: the first is exact, others are refused, none is left out without a word."""

from __future__ import annotations

import copy
import importlib
import inspect
import pkgutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.errors import ConfigError
from tests.parity import close, language_batches, whole
from tests.pool import pooled
from tests.small import llama
from tests.worlds import raises_everywhere

# Autograd functions that communicate nothing.
_LOCAL = {
    "autopar.tools.planner.storages._Attention",
    "autopar.dry_run.block_reads._Again",
    "autopar.foreign.probes._Double",
}
_TWICE = "create_graph=True: sharded layers exchange gradients in the backward, and that is not differentiated again"


def _functions() -> dict[str, Any]:
    """Return all autograd functions of autopar, by name."""
    for module in pkgutil.walk_packages(autopar.__path__, "autopar."):
        if ".integrations" not in module.name and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found, waiting = {}, list(torch.autograd.Function.__subclasses__())
    while waiting:
        each = waiting.pop()
        waiting += each.__subclasses__()
        if each.__module__.startswith("autopar."):
            found[f"{each.__module__}.{each.__qualname__}"] = each
    return found


def test_every_autograd_function_is_differentiated_once_and_hands_on_that_no_gradient_came() -> None:
    found = _functions()
    assert len(found) > 20 and found.keys() >= _LOCAL
    states = {name for name in found if ".rank_states." in name}  # a message goes to the next rank in any case
    for name, function in found.items():
        backward, forward = inspect.getsource(function.backward), inspect.getsource(function.forward)
        assert ("@single_backward" in backward) == (name not in _LOCAL), name
        assert ("keep_none(ctx)" in forward) == (name not in _LOCAL | states), name


def _sizes(**sizes: Any) -> dict[str, Any]:
    return {"model_parallelism": sizes}


@pytest.mark.tier("test", only=("tensor_parallel_size",))
@pytest.mark.parametrize("how", ["tensor_parallel_size", "sequence_parallel", "chunk", "always"])
@pooled(world_size=2)
def test_a_second_derivative_is_refused_and_training_goes_on(how: str) -> None:
    plain, batches = llama(), language_batches(131)
    model = copy.deepcopy(plain)
    config = _sizes(tensor_parallel_size=2, **({how: True} if how == "sequence_parallel" else {}))
    config |= {"chunk": {"loss": {"chunk": 3}}, "always": {"loss": {"gather_logits": "always"}}}.get(how, {})
    model = autopar.initialize(model, config)
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    first, *_, last = norms
    for loss_of in (lambda out: out.loss, lambda out: out.logits.float().square().mean()):
        with raises_everywhere(ConfigError, _TWICE):
            torch.autograd.grad(loss_of(model(**batches[0])), first, create_graph=True)
        with raises_everywhere(ConfigError, _TWICE):
            loss_of(model(**batches[0])).backward(create_graph=True)
    with raises_everywhere(ConfigError, "replicas of the whole model can"):  # MAML: a step that is differentiated
        (gradient,) = torch.autograd.grad(model(**batches[0]).loss, last, create_graph=True)
        torch.func.functional_call(model, {"model.norm.weight": last - 0.1 * gradient}, kwargs=batches[1])
    model.zero_grad()
    for each in (plain, model):
        for batch in batches:
            each(**batch).loss.backward()
    for name, gradient in whole(model, lambda parameter: parameter.grad).items():
        expected = plain.get_parameter(name).grad
        assert expected is not None
        close(gradient, expected, name)


@pooled(world_size=2)
def test_replicas_of_the_whole_model_have_second_derivatives() -> None:
    plain, (batch, _) = llama(attn_implementation="eager"), language_batches(131)
    model = autopar.initialize(copy.deepcopy(plain), {})
    found = []
    for each in (plain, model):
        weights = [parameter for name, parameter in each.named_parameters() if "norm" in name]
        gradients = torch.autograd.grad(each(**batch).loss, weights, create_graph=True)
        penalty = sum((gradient.square().sum() for gradient in gradients), torch.tensor(0.0))
        found.append(torch.autograd.grad(penalty, weights))
    for first, second in zip(*found, strict=True):
        close(second, first, "of a penalty on gradients")


@pytest.mark.parametrize("axis", ["tensor_parallel_size", "context_parallel_size"])
@pooled(world_size=2)
def test_transforms_and_forward_mode_are_refused(axis: str) -> None:
    model, (batch, _) = autopar.initialize(llama(), _sizes(**{axis: 2})), language_batches(131)
    weights = dict(model.named_parameters())

    def loss(weights: Any) -> Any:
        return torch.func.functional_call(model, weights, kwargs={**batch, "use_cache": False}).loss

    expected = loss(weights)
    with raises_everywhere(ConfigError, "torch.func: grad, vmap, jvp and the like do not", "functional_call"):
        torch.func.grad(loss)(weights)
    with raises_everywhere(ConfigError, "torch.func: grad, vmap"):
        torch.func.vmap(lambda row: model(row[None], labels=row[None], use_cache=False).loss)(batch["input_ids"])
    with forward_ad.dual_level():
        assert torch.equal(loss(weights), expected), "nothing is dual"
        dual = {name: forward_ad.make_dual(weight.detach(), weight.detach()) for name, weight in weights.items()}
        with raises_everywhere(ConfigError, "forward-mode derivatives (dual tensors, jvp) do not go through"):
            loss(dual)
    assert torch.equal(loss(weights), expected)


@pooled(world_size=2)
def test_transforms_go_through_replicas_of_the_whole_model() -> None:
    plain, (batch, _) = llama(attn_implementation="eager"), language_batches(131)
    model = autopar.initialize(copy.deepcopy(plain), {})
    found = []
    for each in (plain, model):

        def loss(weights: Any, each: Any = each) -> Any:
            return torch.func.functional_call(each, weights, kwargs={**batch, "use_cache": False}).loss

        found.append(torch.func.grad(loss)({name: x.detach() for name, x in each.named_parameters()}))
    for name, gradient in found[0].items():
        close(found[1][name], gradient, name)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_parameters_that_a_loss_does_not_use_have_no_gradient_under_ddp() -> None:
    """With ``find_unused_parameters`` DDP hands gradients that are undefined to every output of its forward."""
    plain, (batch, _) = llama(), language_batches(131)
    model = autopar.initialize(copy.deepcopy(plain), _sizes(tensor_parallel_size=2))
    alone = model.mpu.get_data_parallel_group()
    wrapped = DistributedDataParallel(model, process_group=alone, find_unused_parameters=True)
    for each in (plain, wrapped):
        each(**batch, output_hidden_states=True).hidden_states[1].square().mean().backward()
    unused = {name for name, parameter in plain.named_parameters() if parameter.grad is None}
    assert {"model.norm.weight", "lm_head.weight"} <= unused
    assert {name for name, parameter in model.named_parameters() if parameter.grad is None} == unused
    assert dist.get_world_size(alone) == 1
