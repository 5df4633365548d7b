"""Optimizers over weights of some stages step as on one process, and user code may touch weights of other stages."""

import copy
import warnings
from collections.abc import Callable
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
from tests.pipeline_parallel.oracle import take_step
from tests.small import gpt2, llama
from tests.timeouts import told_at_once

Step = Callable[[int], None]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def one(optimizer: torch.optim.Optimizer | None) -> Step:
    def step(number: int) -> None:
        if optimizer is not None:
            take_step(optimizer)

    return step


def held(model: Any, part: str) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if part in name]


def two_optimizers(model: Any) -> Step:
    first = one(sgd(held(model, "embed")))
    second = one(torch.optim.Adam([p for name, p in model.named_parameters() if "embed" not in name], lr=1e-2))
    return lambda number: (first(number), second(number))[0]


def two_cadences(model: Any) -> Step:
    first, second = one(sgd(held(model, "embed"))), one(sgd(held(model, "lm_head")))
    return lambda number: (first(number), second(number) if number % 2 else None)[0]


def a_group_later(model: Any) -> Step:
    optimizer = sgd(held(model, "embed"))
    later = held(model, "lm_head")

    def step(number: int) -> None:
        if number == 1:
            optimizer.add_param_group({"params": later, "lr": 0.05})
        one(optimizer)(number)

    return step


def where_there_is_something(model: Any) -> Step:
    """Made after ``initialize``: this stage has no such weights, and torch takes no empty list."""
    mine = held(model, "lm_head")
    return one(sgd(mine) if mine else None)


BEFORE: dict[str, Callable[[Any], Step]] = {
    "embeddings": lambda model: one(sgd(held(model, "embed_tokens"))),
    "head": lambda model: one(sgd(held(model, "lm_head"))),
    "two": two_optimizers,
    "cadences": two_cadences,
    "later": a_group_later,
}


def alike(plain: Any, model: Any, plain_step: Step, step: Step) -> None:
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


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_a_stage_that_forgets_its_step() -> None:
    plain, (batch,) = llama(num_hidden_layers=2).train(), language_batches(131, count=1, batch=2)
    for rank in range(2):
        model = copy.deepcopy(plain)
        model, optimizer = autopar.initialize(model, stages(), optimizer=sgd(model.parameters()))
        words = f"optimizer steps so far: rank 0: {int(rank == 0)}, rank 1: {int(rank == 1)}"
        with pytest.raises(ConsistencyError, match=words):
            for _ in range(3):
                model.execute_pipeline(batch)
                (optimizer.step if dist.get_rank() == rank else optimizer.zero_grad)()
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
            take_step(optimizer)
    same_weights(model, plain, 2e-5)


@pooled(world_size=2)
@told_at_once
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


Change = Callable[[Any], Any]


def train(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in language_batches(131, count=2, batch=4):
        if hasattr(model, "mpu"):
            model.execute_pipeline(batch)
        else:
            model(**batch).loss.backward()
        take_step(optimizer)


def head_drawn(model: Any) -> None:
    nn.init.normal_(model.lm_head.weight, std=0.02)


def all_drawn(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.kaiming_uniform_(module.weight)
            module.weight.data.mul_(0.1).add_(0.01)


def merged(model: Any) -> None:
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith("q_proj"):
                rows, columns = module.weight.shape
                module.weight += torch.rand(rows, 2) @ torch.full((2, columns), 0.1)


def rows_written(model: Any) -> None:
    with torch.no_grad():
        model.model.embed_tokens.weight[:10] = 0.1
        model.lm_head.weight[3:5].fill_(0.2)
    model.lm_head.weight.data = torch.full((131, 24), 0.1)


def perturbed(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data += torch.randn_like(layer.mlp.up_proj.weight) * 0.01


def frozen_by_name(model: Any) -> None:
    for name, p in model.named_parameters():
        p.requires_grad = "lm_head" in name or "layers.3" in name or "norm" in name


def frozen_first_layers(model: Any) -> None:
    model.model.embed_tokens.requires_grad_(False)
    for layer in model.model.layers[:3]:
        layer.requires_grad_(False)


FROZEN: list[Change] = [frozen_by_name, frozen_first_layers]
WRITTEN: list[Change] = [head_drawn, all_drawn, merged, rows_written, perturbed]


@pooled(world_size=2)
def test_what_is_written_and_frozen_is_as_on_one_process() -> None:
    plain = llama(num_hidden_layers=4).train()
    for change in (*WRITTEN, *FROZEN):
        model, reference = autopar.initialize(copy.deepcopy(plain), stages()), copy.deepcopy(plain)
        after = []
        for each in (model, reference):
            torch.manual_seed(5)
            change(each)
            after.append(torch.rand(()).item())
        assert after[0] == after[1], change  # generators go on alike
        with warnings.catch_warnings():
            if change in FROZEN:
                warnings.simplefilter("error", autopar.ShardWarning)
            train(model)
        train(reference)
        same_weights(model, reference, 2e-5, when=change.__name__)


def _load_blocks(model: Any, source: Any) -> Any:
    for layer, other in zip(model.model.layers, source.model.layers, strict=True):
        layer.load_state_dict(copy.deepcopy(other.state_dict()))
    model.lm_head.load_state_dict(other_head := source.lm_head.state_dict())
    return other_head


@pytest.mark.parametrize("config", [{"pp": 2}, {"tp": 2}, {"zero": {"stage": 3}}], ids=["pp", "tp", "zero3"])
@pytest.mark.tier("test", only=("pp", "zero3"))
@pooled(world_size=2)
def test_a_block_is_loaded_by_itself(config: dict[str, Any]) -> None:
    plain, source = llama().train(), llama(seed=3)
    model = autopar.initialize(copy.deepcopy(plain), config)
    expected = copy.deepcopy(plain)
    _load_blocks(model, source)
    _load_blocks(expected, source)
    for name, tensor in autopar.hf_weights(model):
        close(tensor, expected.state_dict()[name], name, 0)
    model.model.norm.weight.data.zero_()
    own = {name: tensor.clone() for name, tensor in model.model.layers[0].state_dict().items()}
    model.model.layers[0].load_state_dict(own)  # this rank's own
    with pytest.raises(RuntimeError, match="Missing key"):
        model.model.layers[dist.get_rank()].load_state_dict({})
    if "zero" not in config:
        model = autopar.deparallelize(model)
        assert not any(module._load_state_dict_pre_hooks for module in model.model.layers.modules())
