"""Optimizers that hold weights of some stages only step as on one process; a stage that forgets its step raises."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn

import autopar
from autopar.errors import ConfigError, ConsistencyError, PipelineError, ShardWarning
from tests.compare import same_weights
from tests.harness.worlds import pooled
from tests.parity import close, language_batches
from tests.small import gpt2, llama

Step = Callable[[int], None]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def one(optimizer: torch.optim.Optimizer | None) -> Step:
    def step(number: int) -> None:
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return step


def embeddings(model: Any) -> Step:
    return one(sgd([p for name, p in model.named_parameters() if "embed_tokens" in name]))


def head(model: Any) -> Step:
    return one(sgd([p for name, p in model.named_parameters() if "lm_head" in name]))


def two_optimizers(model: Any) -> Step:
    named = list(model.named_parameters())
    first = one(sgd([p for name, p in named if "embed" in name]))
    second = one(torch.optim.Adam([p for name, p in named if "embed" not in name], lr=1e-2))
    return lambda number: (first(number), second(number))[0]


def two_cadences(model: Any) -> Step:
    named = list(model.named_parameters())
    first = one(sgd([p for name, p in named if "embed" in name]))
    second = one(sgd([p for name, p in named if "lm_head" in name]))
    return lambda number: (first(number), second(number) if number % 2 else None)[0]


def a_group_later(model: Any) -> Step:
    named = dict(model.named_parameters())
    optimizer = sgd([p for name, p in named.items() if "embed" in name])

    def step(number: int) -> None:
        if number == 1:
            optimizer.add_param_group({"params": [p for name, p in named.items() if "lm_head" in name], "lr": 0.05})
        one(optimizer)(number)

    return step


def where_there_is_something(model: Any) -> Step:
    """Made after ``initialize``: this stage has no such weights, and torch takes no empty list."""
    mine = [p for name, p in model.named_parameters() if "lm_head" in name]
    return one(sgd(mine) if mine else None)


BEFORE = {
    "embeddings": embeddings,
    "head": head,
    "two": two_optimizers,
    "cadences": two_cadences,
    "later": a_group_later,
}


def alike(plain: Any, model: Any, plain_step: Step, step: Step) -> None:
    """Four steps of both: the same losses and weights."""
    for number, batch in enumerate(language_batches(131, count=4, batch=2)):
        expected = plain(**batch).loss
        expected.backward()
        plain_step(number)
        loss = model.execute_pipeline(batch, broadcast_loss=True).loss
        step(number)
        close(loss, expected, f"loss {number}")
    whole = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        close(parameter.data, whole[name].data, name)
    model.mpu.destroy()


def stages() -> dict[str, Any]:
    pipeline = {"num_microbatches": 2, "timeout": 20}
    return {"model_parallelism": {"pipeline_parallel_size": 2}, "pipeline": pipeline}


@pytest.mark.tier("test", only=("head",))
@pytest.mark.parametrize("name", [*BEFORE, "head of a stage"])
@pooled(world_size=2)
def test_they_step_as_on_one_process(name: str) -> None:
    plain = llama(num_hidden_layers=2).train()
    model = copy.deepcopy(plain)
    make = BEFORE.get(name, where_there_is_something)
    step = make(model) if name in BEFORE else None
    model = autopar.initialize(model, stages())
    alike(plain, model, make(plain), step or make(model))


def trained(model: Any, names: str) -> Step:
    """A new optimizer over the weights that ``names`` are part of; the others are frozen, if they are of this stage."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in names.split()))
    mine = [p for p in model.parameters() if p.requires_grad]
    return one(torch.optim.AdamW(mine, lr=1e-2) if mine else None)


PHASES = {
    "probe, then all": ["lm_head", "."],
    "all, then the head": [".", "lm_head"],
    "unfrozen from above": ["layers.1.", "layers.1. layers.0.", "."],
    "blocks in turn": ["layers.0.", "layers.1.", "layers.0.", "layers.1."],
}


@pytest.mark.tier("test", only=("probe, then all",))
@pytest.mark.parametrize("name", PHASES)
@pooled(world_size=2)
def test_each_phase_has_an_optimizer_of_its_own(name: str) -> None:
    plain = llama(num_hidden_layers=2).train()
    model = autopar.initialize(copy.deepcopy(plain), stages())
    kept = []  # earlier optimizers live on, as in a list of schedulers
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShardWarning)
        for phase in PHASES[name]:
            steps = trained(plain, phase), trained(model, phase)
            kept.append(steps)
            for batch in language_batches(131, count=2, batch=2):
                plain(**batch).loss.backward()
                model.execute_pipeline(batch)
                for number, step in enumerate(steps):
                    step(number)
    same_weights(model, plain, 2e-5)
    model.mpu.destroy()


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_a_step_that_is_forgotten_later_is_told_of_an_optimizer_made_afterwards() -> None:
    model = autopar.initialize(llama(num_hidden_layers=2).train(), stages())
    (batch,) = language_batches(131, count=1, batch=2)
    step = trained(model, "lm_head")
    for number in range(5):
        if number == 2:  # a second phase
            step = trained(model, ".")
        model.execute_pipeline(batch)
        if number != 4 or dist.get_rank() == 0:
            step(number)
    with pytest.raises(ConsistencyError, match="optimizer steps so far: rank 0: 3, rank 1: 2"):
        model.execute_pipeline(batch)
    dist.barrier()
    model.mpu.destroy()


@pooled(world_size=2)
def test_adapters_on_blocks_of_one_stage() -> None:
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], layers_to_transform=[0], init_lora_weights=False)
    plain = get_peft_model(llama(num_hidden_layers=2), config).train()
    model = autopar.initialize(copy.deepcopy(plain), stages())

    def make(of: nn.Module) -> Step:
        mine = [p for p in of.parameters() if p.requires_grad]
        return one(sgd(mine) if mine else None)

    with warnings.catch_warnings():
        warnings.simplefilter("error", ShardWarning)
        alike(plain, model, make(plain), make(model))


def losses(model: Any, step: Callable[[], None]) -> Iterator[Any]:
    for batch in language_batches(131, count=3, batch=2):
        yield model.execute_pipeline(batch, broadcast_loss=True).loss
        step()


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_a_stage_that_forgets_its_step() -> None:
    plain = llama(num_hidden_layers=2).train()
    for rank in range(2):
        model = copy.deepcopy(plain)
        model, optimizer = autopar.initialize(model, stages(), optimizer=sgd(model.parameters()))
        words = f"optimizer steps so far: rank 0: {int(rank == 0)}, rank 1: {int(rank == 1)}"
        with pytest.raises(ConsistencyError, match=words):
            list(losses(model, optimizer.step if dist.get_rank() == rank else optimizer.zero_grad))
        model.mpu.destroy()
        dist.barrier()


@pooled(world_size=2)
def test_a_model_beside_it_may_step_on_one_stage_only() -> None:
    """A critic on the last stage steps after each pass, the model after two."""
    plain = llama(num_hidden_layers=2).train()
    model = autopar.initialize(copy.deepcopy(plain), stages())
    critic = nn.Linear(2, 1)
    critics = sgd(critic.parameters())
    optimizers = [sgd(each.parameters()) for each in (plain, model)]
    for number, batch in enumerate(language_batches(131, count=4, batch=2)):
        plain(**batch).loss.backward()
        model.execute_pipeline(batch)
        if dist.get_rank() == 1:
            critic(torch.ones(2)).sum().backward()
            critics.step()
        for optimizer in optimizers if number % 2 else ():
            optimizer.step()
            optimizer.zero_grad()
    same_weights(model, plain, 2e-5)
    model.mpu.destroy()


@pooled(world_size=2)
def test_an_optimizer_in_the_backward_is_refused() -> None:
    model = autopar.initialize(llama(num_hidden_layers=2).train(), stages())
    optimizers = {parameter: sgd([parameter]) for parameter in model.parameters()}
    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    probe = nn.Linear(2, 2)
    for parameter in probe.parameters():
        parameter.grad = torch.ones_like(parameter)
    probes = sgd(probe.parameters())
    model.register_forward_pre_hook(lambda *_: probes.step())  # not of the model
    words = r"SGD.step\(\) is not supported inside of execute_pipeline, before all 2 micro-batches have run\n"
    with pytest.raises((ConfigError, PipelineError), match=words):
        model.execute_pipeline(language_batches(131, count=1, batch=2)[0])
    dist.barrier()
    model.mpu.destroy()


@pytest.mark.tier("all")
@pooled(world_size=2)
def test_copies_of_tied_weights_that_drift_apart_are_told() -> None:
    model = autopar.initialize(gpt2().train(), stages())
    (batch,) = language_batches(131, count=1, batch=2)
    name, table = next((name, p) for name, p in model.named_parameters() if "wte" in name)
    for _ in range(2):  # an update of one's own, the same on both stages
        model.execute_pipeline(batch)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
        model.zero_grad()
    with torch.no_grad():
        table -= 0.01 * torch.stack([p.norm() for p in model.parameters()]).sum()  # of this stage's
    words = rf"the copies of {name} differ between stages of one model replica:\n  rank 0: \w+, rank 1: \w+\n  Make the"
    with pytest.raises(ConsistencyError, match=words):
        model.execute_pipeline(batch)
    model.mpu.destroy()
