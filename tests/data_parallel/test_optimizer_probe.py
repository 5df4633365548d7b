"""How an optimizer works is asked of it: steps of shards that would be others than those of one process are refused."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import autopar
from autopar.config import ParallelConfig
from autopar.data_parallel.optimizer_state import probe, stepping
from autopar.errors import ConfigError, ConsistencyError
from tests.data_parallel.whole_optimizers import ACROSS, MATRICES
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.parity import language_batches
from tests.small import gpt2


class Own(Optimizer):
    """As users write them: one function of parameter and gradient, and what the instance counts."""

    def __init__(self, params: Iterable[nn.Parameter], update: Callable[[Any, nn.Parameter], torch.Tensor]) -> None:
        self.update, self.total = update, 0.0
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.total += sum(float(p.grad.square().sum()) for p in found)
        for parameter in found:
            parameter.sub_(self.param_groups[0]["lr"] * self.update(self, parameter))


def _blocks(_: Any, p: nn.Parameter) -> torch.Tensor:
    """A scale for each 256 numbers in a row, as 8-bit states have."""
    flat = nn.functional.pad(p.grad.reshape(-1), (0, -p.numel() % 256)).view(-1, 256)
    scale = flat.abs().amax(1, keepdim=True) / 7
    return ((flat / scale).round() * scale).view(-1)[: p.numel()].view_as(p)


UPDATES: dict[str, tuple[Callable[[Any, nn.Parameter], torch.Tensor], str]] = {
    "sign": (lambda o, p: p.grad.sign(), "parts"),
    "weight decay": (lambda o, p: p.grad + 0.1 * p, "parts"),
    "trust ratio": (lambda o, p: p.grad * p.norm() / p.grad.norm(), "matrices"),
    "rows": (lambda o, p: p.grad / p.grad.norm(dim=-1, keepdim=True), "matrices"),
    "blocks": (_blocks, "matrices"),
    "by the norm of all": (lambda o, p: p.grad / o.total**0.5, "across"),
    "noise": (lambda o, p: p.grad + torch.randn_like(p), "random"),
}


def _parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.randn(7))]


@pytest.mark.parametrize("name", UPDATES)
def test_a_users_own_optimizer(name: str) -> None:
    update, expected = UPDATES[name]
    optimizer = Own(_parameters(), update)
    before, state = copy.deepcopy(optimizer.param_groups), torch.get_rng_state()
    assert probe(optimizer, optimizer.param_groups[0]) == expected
    assert optimizer.total == 0 and not optimizer.state and torch.equal(torch.get_rng_state(), state)
    for now, was in zip(optimizer.param_groups[0]["params"], before[0]["params"], strict=True):
        assert torch.equal(now, was) and now.grad is None


@pytest.mark.parametrize("rate", [0.0, 1e-10])
def test_the_small_rate_with_which_a_warm_up_begins_hides_nothing(rate: float) -> None:
    muon = torch.optim.Muon(_parameters()[:1], lr=rate)
    assert probe(muon, muon.param_groups[0]) == "matrices"
    for update, expected in (UPDATES["trust ratio"], UPDATES["by the norm of all"], UPDATES["sign"]):
        optimizer = Own(_parameters(), update)
        optimizer.param_groups[0]["lr"] = rate
        assert probe(optimizer, optimizer.param_groups[0]) == expected


def test_one_that_has_state() -> None:
    """State that the class makes is there in the trial; a class that needs more than its defaults is copied."""

    class Mine(torch.optim.Adagrad):
        pass

    parameters = _parameters()
    stepped = MATRICES["lamb"](parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    stepped.step()
    for optimizer, expected in ((Mine(parameters), "parts"), (stepped, "matrices")):
        assert optimizer.state and probe(optimizer, optimizer.param_groups[0]) == expected


def test_a_class_of_torch_is_known_and_one_that_derives_from_it_is_tried_if_it_can_be() -> None:
    class Signs(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.grad = p.grad / p.grad.norm()
            super().step()

    class Closing(torch.optim.SGD):
        def step(self, closure: Any) -> None:  # type: ignore[override]
            closure()

    made = (torch.optim.SparseAdam(_parameters()), Signs(_parameters()), Closing(_parameters()))
    for optimizer, expected in zip(made, ("parts", "matrices", None), strict=True):
        assert probe(optimizer, optimizer.param_groups[0]) == expected
    config = ParallelConfig.parse({"tp": 2, "pp": 2, "zero": {"stage": 1}})
    assert stepping(optimizer, optimizer.param_groups[0], config) == "parts"


def test_statistics_across_parameters_are_declared() -> None:
    optimizer = Own(_parameters(), UPDATES["sign"][0])

    def how(**sections: Any) -> str:
        config = ParallelConfig.parse({"optimizer": {"across_parameters": True}, **sections})
        return stepping(optimizer, optimizer.param_groups[0], config)

    assert how(tp=2) == "duplicated" and how() == "parts"
    for sections in ({"tp": 2, "pp": 2}, {"zero": {"stage": 1}}, {"tp": 2, "zero": {"stage": 3}}):
        with pytest.raises(ConfigError, match=r"Own computes statistics over all parameters\.\n  With "):
            how(**sections)
    optimizer = ACROSS["Prodigy"](_parameters())
    words = r"Prodigy computes statistics over all parameters(?s:.*)Write optimizer: {across_parameters: true} in the"
    for given in (True, False):
        with pytest.raises(ConfigError, match=words):
            stepping(optimizer, optimizer.param_groups[0], ParallelConfig.parse({"tp": 2}), given=given)


def test_an_optimizer_around_another_one_and_its_state_is_left_alone() -> None:
    class Around(Optimizer):
        def __init__(self, inner: Optimizer) -> None:
            super().__init__([p for group in inner.param_groups for p in group["params"]], {"lr": 0.1})
            self.inner = inner

        def step(self, closure: Any = None) -> None:
            self.inner.step()

    parameters = _parameters()
    inner = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    inner.step()
    kept = copy.deepcopy(inner.state_dict())
    outer = Around(inner)
    assert probe(outer, outer.param_groups[0]) == "parts"
    torch.testing.assert_close(inner.state_dict(), kept, rtol=0, atol=0)


def _step(model: nn.Module, optimizer: Optimizer) -> None:
    model(**language_batches(131)[0]).loss.backward()
    optimizer.step()


WHOLE = "Own depends on full matrices: a step of two halves differs from a step of the full matrix"
ALL = "Own computes statistics over all parameters"


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_made_before_or_after_it_is_refused_where_its_steps_would_be_others() -> None:
    whole, every = UPDATES["trust ratio"][0], UPDATES["by the norm of all"][0]
    tp, pp = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
    for sizes, more, update, text in (
        *((tp, {"zero": {"stage": stage}}, whole, "Use zero.stage 1, where a rank steps full") for stage in (2, 3)),
        (tp, {"zero": {"stage": 1}}, every, "With zero.stage=1 a rank steps only some parameters"),
        (pp, {}, every, "With pipeline_parallel_size=2 a rank steps only some parameters"),
        ({}, {"zero": {"stage": 1}}, every, "With zero.stage=1 a rank steps only some parameters"),
    ):
        model = gpt2()
        with raises_everywhere(ConfigError, text):
            autopar.initialize(model, {"model_parallelism": sizes, **more}, optimizer=Own(model.parameters(), update))
        assert not hasattr(model, "mpu"), "nothing has changed"
    for update, text in ((whole, WHOLE), (every, ALL)):
        model = autopar.initialize(gpt2(), {"model_parallelism": tp})
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ConfigError, match=text) as caught:
            _step(model, Own(model.parameters(), update))
        assert "ass it to autopar.initialize" in str(caught.value)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model = autopar.initialize(gpt2(), {"model_parallelism": tp})
    before = copy.deepcopy(model.state_dict())
    searching = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        searching.zero_grad()
        loss: torch.Tensor = model(**language_batches(131)[0]).loss
        loss.backward()
        return loss

    with pytest.raises(ConfigError, match="LBFGS is not supported") as caught:
        searching.step(closure)
    with pytest.raises(ConfigError) as given:
        whole_model = gpt2()
        autopar.initialize(whole_model, {}, optimizer=torch.optim.LBFGS(whole_model.parameters()))
    assert str(given.value) == str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    piped = autopar.initialize(gpt2(), {"model_parallelism": pp})
    piped.execute_pipeline(language_batches(131)[0])
    with pytest.raises(ConfigError, match=ALL):
        Own(piped.parameters(), every).step()


@pooled(world_size=2)
def test_where_whole_parameters_are_stepped_it_is_right() -> None:
    whole = UPDATES["trust ratio"][0]
    plain = gpt2()
    batch = language_batches(131)[0]
    plain(**batch).loss.backward()
    Own(plain.parameters(), whole).step()
    model = gpt2()
    optimizer = Own(model.parameters(), whole)
    model = autopar.initialize(model, {"pp": 2}, optimizer=optimizer)[0]
    model.execute_pipeline(batch)
    optimizer.step()
    weights = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.data, weights[name].data, rtol=1e-5, atol=1e-5)
    autopar.initialize(gpt2(), {"tp": 2})
    other = nn.Linear(4, 4)
    other(torch.ones(1, 4)).sum().backward()
    Own(other.parameters(), whole).step()


def refused(message, config=None, optimizer=None, lr_scheduler=None, model=None):
    model = model or gpt2()
    given = optimizer(model) if optimizer else None
    with raises_everywhere(ConfigError, message):
        autopar.initialize(model, config or {}, optimizer=given, lr_scheduler=lr_scheduler)
    assert not hasattr(model, "mpu")


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pooled(world_size=1)
def test_what_is_refused():
    for config, text in (
        ({"zero": {"stage": 1}}, "zero.stage=1 needs an optimizer, and initialize got none"),
        ({"precision": {"dtype": "bf16"}}, "precision.dtype=bf16 needs an optimizer"),
        ({"gradient_clipping": 1, "zero": {"stage": 1}}, "zero.stage=1, gradient_clipping=1 needs an optimizer"),
        ({"zero": {"stage": 3}, "precision": {"dtype": "fp16"}}, "precision.dtype=fp16 needs an optimizer"),
    ):
        refused(text, config)
    refused("optimizer must be a torch.optim.Optimizer, got object", optimizer=lambda model: object())
    refused("LBFGS is not supported with shards, with stages", optimizer=lambda m: torch.optim.LBFGS(m.parameters()))
    other = sgd(gpt2())
    refused("in group 0 of SGD are not parameters of GPT2LMHeadModel", optimizer=lambda model: other)
    scheduler = torch.optim.lr_scheduler.StepLR(other, 1)
    refused("lr_scheduler must drive the optimizer", optimizer=sgd, lr_scheduler=scheduler)
    refused("lr_scheduler needs an optimizer", lr_scheduler=scheduler)
    if not torch.accelerator.is_available():
        refused("zero.cpu_offload needs an accelerator", {"zero": {"stage": 3, "cpu_offload": True}})
    words = "Adagrad must not have state before initialize with zero.stage 3"
    refused(words, {"zero": {"stage": 3}}, lambda model: torch.optim.Adagrad(model.parameters()))
    model = gpt2()
    optimizer = sgd(model)
    autopar.initialize(model, {}, optimizer=optimizer)
    with pytest.raises(ConfigError, match="this SGD belongs to a parallelized model already"):
        autopar.initialize(gpt2(), {}, optimizer=optimizer)
    with pytest.raises(ConfigError, match=r"SGD.step\(closure\) is not supported: gradients inside of step"):
        optimizer.step(lambda: 0.0)


@pooled(world_size=2)
def test_ranks_whose_groups_differ():
    model = gpt2()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters if dist.get_rank() == 0 else parameters[::-1], lr=0.1)
    with raises_everywhere(ConsistencyError, "ranks [1] call autopar.initialize with other arguments than rank 0"):
        autopar.initialize(model, {}, optimizer=optimizer)
