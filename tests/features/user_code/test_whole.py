"""Whole parameters on every rank, for a while or differentiable: what a user does to them is as on one process."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.errors import ConfigError, ConsistencyError
from tests.compare import same_gradients, same_weights
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.parity import close, language_batches
from tests.small import gpt2, llama

# ruff: noqa: SIM117 (which with statement raises is the point)


def prune(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data[parameter.abs() < parameter.abs().flatten().quantile(0.3)] = 0


def edit(model: nn.Module) -> None:
    """As ROME: one matrix gets an outer product."""
    weight = next(p for name, p in model.named_parameters() if name.endswith(("mlp.c_proj.weight", "down_proj.weight")))
    weight.data += torch.outer(torch.arange(weight.shape[0]) / 10.0, torch.arange(weight.shape[1]) / 10.0)


def draw(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.orthogonal_(parameter)


def clip(model: nn.Module) -> None:
    """Each gradient by itself, by the norm of its parameter (AGC), and centred."""
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.ndim == 2:
            parameter.grad -= parameter.grad.mean(1, keepdim=True)
            parameter.grad *= (0.01 * parameter.norm() / parameter.grad.norm()).clamp(max=1)


CHANGES: dict[str, Callable[[nn.Module], None]] = {f.__name__: f for f in (prune, edit, draw, clip)}


def changed(build: Callable[[], Any], config: dict[str, Any], change: Callable[[nn.Module], None]) -> None:
    plain: Any = build()
    model = autopar.initialize(copy.deepcopy(plain), config)
    batches = language_batches(131)
    for batch in batches:
        (plain(**batch).loss / 2).backward()
        if model.mpu.pp.size == 1:
            (model(**batch).loss / 2).backward()
    autopar.average_gradients(model)
    storages = {name: p.data_ptr() for name, p in model.named_parameters()}
    torch.manual_seed(11)
    change(plain)
    torch.manual_seed(11)
    with autopar.full_params(model) as same:
        assert same is model and [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
        for name, parameter in plain.named_parameters():
            assert model.get_parameter(name).shape == parameter.shape
        change(model)
    assert storages == {name: p.data_ptr() for name, p in model.named_parameters()}
    if model.mpu.pp.size == 1:
        same_gradients(model, plain)
        close(model(**batches[0]).loss, plain(**batches[0]).loss, "loss")
    same_weights(model, plain, 1e-6, when=change.__name__)


@pytest.mark.tier("test", only=("prune",))
@pytest.mark.parametrize("name", CHANGES)
@pooled(world_size=2)
def test_what_is_changed_inside_is_as_on_one_process(name: str) -> None:
    for build in (gpt2, lambda: llama(num_key_value_heads=1)):
        changed(build, {"tp": 2}, CHANGES[name])


@pytest.mark.tier("sweep")
@pooled(world_size=4)
def test_with_replicas_and_stages() -> None:
    for config in ({"tp": 2}, {"tp": 2, "pp": 2}, {"pp": 4}, {"tp": 2, "cp": 2}):
        for change in (prune, draw):
            changed(lambda: llama(num_hidden_layers=4), config, change)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_what_is_done_wrong_inside_changes_nothing() -> None:
    model = autopar.initialize(gpt2(), {"tp": 2})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def unchanged() -> None:
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        model(**language_batches(131)[0])

    weight = model.transformer.h[0].mlp.c_fc.weight
    with raises_everywhere(ConsistencyError, "full_params: ranks have changed transformer.h.0.mlp.c_fc.weight in diff"):
        with autopar.full_params(model):
            if dist.get_rank() == 0:
                weight.data.zero_()
    unchanged()
    with raises_everywhere(ConfigError, "must keep their shape: transformer.h.0.mlp.c_fc.weight is [3, 3] now"):
        with autopar.full_params(model):
            weight.data = torch.zeros(3, 3)
    unchanged()
    with raises_everywhere(ConfigError, "must not run inside autopar.full_params, where its layers hold full weights"):
        with autopar.full_params(model):
            model(**language_batches(131)[0])
    unchanged()
    with pytest.raises(KeyError):
        with autopar.full_params(model):
            weight.data.zero_()
            raise KeyError
    unchanged()
    with pytest.raises(ConfigError, match=r"full_params requires a model from autopar.initialize, got Linear"):
        with autopar.full_params(nn.Linear(2, 2)):
            pass

    model = autopar.initialize(gpt2(), {"tp": 2})
    model(**language_batches(131)[0]).loss.backward()
    block = model.transformer.h[1].mlp
    shard, gradient = list(block.c_fc.weight.shape), block.c_fc.weight.grad
    wrapped = DistributedDataParallel(model, process_group=model.mpu.get_data_parallel_group())
    with autopar.full_params(wrapped, "transformer.h.1.mlp", grads=False) as inside:
        assert inside is model
        assert list(block.c_fc.weight.shape) != shard and block.c_fc.weight.grad is None
        assert list(model.transformer.h[0].mlp.c_fc.weight.shape) == shard
    assert list(block.c_fc.weight.shape) == shard and block.c_fc.weight.grad is gradient
    with pytest.raises(ConfigError, match=r"no parameter or module 'transformer.h.1.mlb'.*'transformer.h.1.mlp'"):
        with autopar.full_params(model, ["transformer.h.1.mlb"]):
            pass


PENALTIES: dict[str, Callable[[nn.Module, Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]] = {
    "norms": lambda model, full: sum((full(p).norm() for p in model.parameters()), torch.zeros(())),
    "nuclear": lambda model, full: sum(
        (torch.linalg.svdvals(full(p)).sum() for n, p in model.named_parameters() if n.endswith("k_proj.weight")),
        torch.zeros(()),
    ),
    "rows": lambda model, full: sum(
        (full(p).softmax(0).max(1).values.sum() for p in model.parameters() if p.ndim == 2), torch.zeros(())
    ),
}


@pytest.mark.tier("test", only=("norms",))
@pytest.mark.parametrize("kind", PENALTIES)
@pooled(world_size=2)
def test_penalties_on_whole_parameters(kind: str) -> None:
    plain: Any = llama(num_key_value_heads=1)
    model = autopar.initialize(copy.deepcopy(plain), {"tp": 2})
    for batch in language_batches(131):
        (plain(**batch).loss + 0.1 * PENALTIES[kind](plain, lambda x: x)).backward()
        (model(**batch).loss + 0.1 * PENALTIES[kind](model, autopar.full_tensor)).backward()
    autopar.average_gradients(model)
    same_gradients(model, plain, when=kind)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_full_of_gradients_and_of_what_has_their_shape() -> None:
    plain: Any = llama(attn_implementation="eager")
    model = autopar.initialize(copy.deepcopy(plain), {"tp": 2})
    batch = language_batches(131)[0]
    results = []
    for each, full in ((plain, lambda x, of=None: x), (model, autopar.full_tensor)):
        parameters = list(each.parameters())
        found = torch.autograd.grad(each(**batch).loss, parameters, create_graph=True)
        norm = torch.stack([full(g, of=p).square().sum() for g, p in zip(found, parameters, strict=True)]).sum().sqrt()
        (norm - 1).square().backward()  # of one number of all gradients
        results.append(norm.detach())
    close(results[1], results[0], "norm")
    same_gradients(model, plain, scaled=True)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert autopar.full_tensor(weight.grad).shape == plain.model.layers[0].mlp.up_proj.weight.shape
    with pytest.raises(ConfigError, match="expected a parameter of a parallelized model on this rank"):
        autopar.full_tensor(torch.zeros(2, 2))
    with pytest.raises(ConfigError, match=r"expected the local shard of model\.layers.0.mlp.up_proj"):
        autopar.full_tensor(torch.zeros(2, 2), of=weight)
    assert autopar.full_tensor(model.model.norm.weight) is model.model.norm.weight


@pooled(world_size=4)
def test_a_penalty_through_stages_counts_each_parameter_once() -> None:
    def penalty(parameters: dict[str, nn.Parameter]) -> Any:
        return sum(0.1 * autopar.full_tensor(p).norm() for p in parameters.values())

    batch = language_batches(131)[0]
    plain: Any = gpt2()  # tied embeddings, on the first stage and on the last
    loss = plain(**batch).loss + penalty(dict(plain.named_parameters()))
    loss.backward()
    model = autopar.initialize(gpt2(), {"tp": 2, "pp": 2, "pipeline": {"num_microbatches": 2}})
    out = model.execute_pipeline(batch, penalty=penalty, broadcast_loss=True)
    close(out.loss, loss.detach(), "loss")
    with autopar.full_params(model):
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        close(gradients[name], parameter.grad, name)
    model.eval()
    evaluated = model.execute_pipeline(batch, penalty=penalty, broadcast_loss=True).loss
    close(evaluated, loss.detach(), "evaluated")
    with pytest.raises(ConfigError, match="penalty= must return one number, got a tensor of"):
        model.execute_pipeline(batch, penalty=lambda own: next(iter(own.values())).flatten())
