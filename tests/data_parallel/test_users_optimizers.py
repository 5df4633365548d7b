"""Optimizers as users write them, given to initialize: state of no parameter, one around another, a list of its own."""

import contextlib
import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import autopar
from autopar.errors import ConfigError
from tests.compare import same_weights
from tests.data_parallel.test_precision import IDS, by_hand, start
from tests.exchange import raises_everywhere
from tests.harness.worlds import pooled
from tests.parity import language_batches
from tests.pipeline_parallel.oracle import take_step
from tests.small import gpt2, llama

TP, PP = ({"model_parallelism": {f"{kind}_parallel_size": 2}} for kind in ("tensor", "pipeline"))
ZERO, CLIPPING = {"zero": {"stage": 1}}, {"gradient_clipping": 0.5}
BF16, FP16 = ({"precision": {"dtype": dtype}} for dtype in ("bf16", "fp16"))


class Counting(Optimizer):
    """Momentum, corrected by a number of steps that lies beside the state of the parameters."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.state["global"] = {"step": 0, "seen": torch.zeros(1)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        shared = self.state["global"]
        shared["step"] += 1
        shared["seen"] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                    average.lerp_(parameter.grad, 0.1)
                    parameter.sub_(average, alpha=group["lr"] / (1 - 0.9 ** shared["step"]))


class Lookahead(Optimizer):
    """As it is usually written: fast weights are the inner optimizer's, slow copies of them its own."""

    def __init__(self, inner: Optimizer, every: int = 2) -> None:
        super().__init__([{"params": group["params"]} for group in inner.param_groups], {})
        self.inner, self.every, self.count, self.state = inner, every, 0, defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter in parameters:
            if "slow" not in self.state[parameter]:
                self.state[parameter]["slow"] = parameter.detach().clone()
        self.inner.step()
        self.count += 1
        for parameter in parameters if self.count % self.every == 0 else ():
            parameter.copy_(self.state[parameter]["slow"].lerp_(parameter, 0.5))


class Listing(Optimizer):
    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.05})
        self.all = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.all:
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-0.05)


MOVED = (
    "{}.step() changed",
    "transformer.",
    "Wrap the optimizer after initialize: model, inner = autopar.initialize(model, config, optimizer=inner)",
    "{}(inner)",
    "leave precision out",
)


def _around(model: nn.Module) -> Lookahead:
    return Lookahead(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3))


MAKERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "beside": lambda model: Counting(model.parameters()),
    "around": _around,
    "list": lambda model: Listing(model.parameters()),
}


def _plain(make: Callable[[nn.Module], Optimizer], steps: int) -> nn.Module:
    model = gpt2().train()
    optimizer = make(model)
    for batch in language_batches(131, count=steps, batch=4):
        model(**batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        take_step(optimizer)
    return model


def _train(model: Any, optimizer: Optimizer, steps: int) -> None:
    for batch in language_batches(131, count=steps, batch=4):
        dp = model.mpu.dp
        rows = {name: tensor.chunk(dp.size)[dp.rank] for name, tensor in batch.items()}
        model.execute_pipeline(rows, optimizer=optimizer)
        take_step(optimizer)


@pytest.mark.tier("test", only=("beside",))
@pytest.mark.parametrize("name", MAKERS)
@pooled(world_size=2)
def test_on_every_mesh_they_step_as_on_one_process(name: str) -> None:
    expected = _plain(MAKERS[name], 4)
    for config in (TP, PP, ZERO, {}):
        model = gpt2()
        optimizer = MAKERS[name](model)
        model, optimizer = autopar.initialize(model, {**config, **CLIPPING}, optimizer=optimizer)
        _train(model.train(), optimizer, 4)
        same_weights(model, expected, when=f"with {config}")
        if name == "beside":
            assert optimizer.state["global"] == {"step": 4, "seen": torch.full((1,), 4.0)}


@pytest.mark.tier("test")
@pooled(world_size=1)
def test_state_of_no_parameter_beside_fp32_weights() -> None:
    plain = gpt2().train()
    model, optimizer = start(copy.deepcopy(plain), make=MAKERS["beside"], **BF16)
    half, step = by_hand(plain, torch.bfloat16, MAKERS["beside"])
    for ids in IDS.split(4)[:4]:
        step(ids)
        model(ids, labels=ids).loss.backward()
        take_step(optimizer)
    for (name, parameter), expected in zip(model.named_parameters(), half.parameters(), strict=True):
        assert torch.equal(parameter, expected), name
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.state["global"]["step"] = 0
    optimizer.load_state_dict(saved)
    assert optimizer.state["global"]["step"] == 4


@pooled(world_size=1)
def test_a_step_that_overflows_is_not_counted_beside_the_parameters() -> None:
    model = gpt2()
    model, optimizer = autopar.initialize(model, FP16, optimizer=Counting(model.parameters()))
    for step, batch in enumerate(language_batches(131, count=3)):
        optimizer.scale_loss(model(**batch).loss * (float("inf") if step == 1 else 1.0)).backward()
        take_step(optimizer)
    assert optimizer.skipped_steps == 1
    assert optimizer.state["global"] == {"step": 2, "seen": torch.full((1,), 2.0)}


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_what_steps_weights_past_the_fp32_ones_raises_and_is_right_around_it() -> None:
    for name, config in (("around", {}), ("list", {}), ("list", TP), ("around", ZERO), ("around", PP)):
        model = gpt2()
        optimizer = MAKERS[name](model)
        model, optimizer = autopar.initialize(model, {**config, **BF16}, optimizer=optimizer)
        kind = type(optimizer).__name__
        with raises_everywhere(ConfigError, *(text.format(kind) for text in MOVED)):
            _train(model.train(), optimizer, 1)
    expected = _plain(_around, 4)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    model, optimizer = autopar.initialize(model, {**ZERO, **BF16, **CLIPPING}, optimizer=optimizer)
    _train(model.train(), Lookahead(optimizer), 4)
    same_weights(model, expected, tolerance=2e-2)


@pooled(world_size=1)
def test_hooks_of_the_step_that_write_into_the_model() -> None:
    def clamp(optimizer: Optimizer, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.data.clamp_(-0.05, 0.05)

    for before in (True, False):
        model = gpt2()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if before:
            optimizer.register_step_post_hook(clamp)
        model, optimizer = autopar.initialize(model, BF16, optimizer=optimizer)
        if before:
            with pytest.raises(ConfigError, match="Register hooks of the step after initialize, too"):
                _train(model.train(), optimizer, 1)
            continue
        optimizer.register_step_post_hook(clamp)
        _train(model.train(), optimizer, 2)
        assert all(parameter.abs().max() <= 0.0501 for parameter in model.parameters())


@pooled(world_size=2)
def test_state_from_before_initialize_is_refused_unless_it_is_given() -> None:
    ids = torch.arange(14).view(2, 7)
    for given in (True, False):
        model = llama().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model(ids, labels=ids).loss.backward()
        take_step(optimizer)
        config = {"model_parallelism": {"tensor_parallel_size": 2}}
        if given:
            model, optimizer = autopar.initialize(model, config, optimizer=optimizer)
        else:
            model = autopar.initialize(model, config)
        model(ids, labels=ids).loss.backward()
        shape = list(model.get_input_embeddings().weight.shape)
        words = (
            "AdamW has state of full weights: exp_avg of model.embed_tokens.weight must have the shape of the shard, "
            f"{shape}; got [131, 24].\n  Pass it to initialize, which shards its state: model, optimizer = "
            "autopar.initialize(model, config, optimizer=optimizer)"
        )
        with contextlib.nullcontext() if given else pytest.raises(ConfigError, match=re.escape(words)):
            optimizer.step()


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {}], ids=["tp2", "dp2"])
@pooled(world_size=2)
def test_a_compiled_step_is_checked_too(sizes: dict[str, int]) -> None:
    ids = torch.arange(14).view(2, 7)
    plain = llama().train()
    model = autopar.initialize(copy.deepcopy(plain), {"model_parallelism": sizes})
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        step = torch.compile(lambda of=optimizer: of.step(), backend="eager")
        for _ in range(2):
            each(ids, labels=ids).loss.backward()
            if each is model:
                autopar.average_gradients(each)
            step()
            optimizer.zero_grad()
    same_weights(model, plain, 2e-5)
    assert model._autopar.dp.steps.made == 2
