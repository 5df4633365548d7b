"""Optimizers that hold weights of some stages only step as on one process; a stage that forgets its step is told."""

from __future__ import annotations

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
from autopar.pipeline_parallel.step_count import check_places, cut_by_place
from tests.compare import same_weights
from tests.parity import close, language_batches
from tests.pool import pooled
from tests.small import gpt2, llama
from tests.worlds import raises_everywhere

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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardWarning)  # weights that no optimizer steps
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


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_a_stage_that_an_optimizer_of_a_later_phase_leaves_out_is_told() -> None:
    """Its weights get gradients and stay, while the other stage steps; frozen ones say nothing."""
    for frozen in (True, False):
        model = autopar.initialize(llama(num_hidden_layers=2).train(), stages())
        (batch,) = language_batches(131, count=1, batch=2)
        head, rest = trained(model, "."), trained(model, "layers.0." if frozen else ".")
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for number in range(14):
                model.execute_pipeline(batch)
                if number < 2:
                    head(number)
                elif frozen or dist.get_rank() == 0:
                    rest(number)
                else:
                    model.zero_grad()
        told = [str(each.message) for each in found if issubclass(each.category, ShardWarning)]
        if frozen or dist.get_rank() == 0:
            assert not told
        else:  # told once
            count, (first, _) = len(list(model.parameters())), next(model.named_parameters())
            assert len(told) == 1 and told[0] == (
                "rank 1 has stepped no optimizer in the last 8 passes, and other stages of its replica have: "
                f"{count} weights, {first} first, have gradients there and stay as they are. If they are not to be "
                "trained, requires_grad_(False) says so; else make the optimizer on every rank, and step it there."
            )
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
    """Given to ``initialize`` it raises; of an optimizer that only exists on one rank it is told, once each pass."""
    plain = llama(num_hidden_layers=2).train()
    for rank in range(2):
        model = copy.deepcopy(plain)
        model, optimizer = autopar.initialize(model, stages(), optimizer=sgd(model.parameters()))
        words = f"optimizer steps so far: rank 0: {int(rank == 0)}, rank 1: {int(rank == 1)}"
        with pytest.raises(ConsistencyError, match=words):
            list(losses(model, optimizer.step if dist.get_rank() == rank else optimizer.zero_grad))
        model.mpu.destroy()
        dist.barrier()
    model = autopar.initialize(copy.deepcopy(plain), stages())
    optimizer = sgd(model.parameters())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        list(losses(model, optimizer.step if dist.get_rank() == 0 else optimizer.zero_grad))
    told = [str(each.message) for each in found if issubclass(each.category, ShardWarning)]
    if dist.get_rank() == 1:
        count = len(list(model.parameters()))
        first = next(name for name, _ in model.named_parameters())
        assert told[0] == (
            "rank 1 has stepped no optimizer, and other stages of its replica have: "
            f"{count} weights, {first} first, have gradients there and stay as they are. If they are not to be "
            "trained, requires_grad_(False) says so; else make the optimizer on every rank, and step it there."
        )
    model.mpu.destroy()


def by_name(model: Any) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    norms = [p for name, p in named if "norm" in name]
    return [{"params": norms, "lr": 0.01}, {"params": [p for name, p in named if "norm" not in name]}]


def by_layer(model: Any) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    layers = [[p for name, p in named if f"layers.{number}." in name] for number in range(4)]
    return [{"params": params, "lr": 0.1 * 0.5**number} for number, params in enumerate(layers)]


def without_decay(model: Any) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    plain = [p for _, p in named if p.ndim < 2]
    return [{"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1}, {"params": plain}]


def head_apart(model: Any) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    head = [p for name, p in named if "lm_head" in name or "embed" in name]
    rest = [p for name, p in named if "layers" in name or "model.norm" in name]
    return [{"params": head, "lr": 0.01}, {"params": rest}]


def decayed_by_layer(model: Any) -> list[dict[str, Any]]:
    groups = []
    for name, p in model.named_parameters():
        layer = int(name.split("layers.")[1].split(".")[0]) + 1 if "layers." in name else 5 * ("embed" not in name)
        groups.append({"params": [p], "lr": 0.1 * 0.8 ** (5 - layer), "weight_decay": 0.0 if p.ndim < 2 else 0.01})
    return groups


def attention_and_the_rest(model: Any) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    inside = [p for name, p in named if "self_attn" in name]
    return [{"params": inside, "lr": 0.01}, {"params": [p for name, p in named if "self_attn" not in name]}]


def last_half(model: Any) -> list[dict[str, Any]]:
    """The others are frozen."""
    trained = [p for name, p in model.named_parameters() if any(f"layers.{n}." in name for n in (1, 3))]
    for p in model.parameters():
        p.requires_grad_(any(p is each for each in trained))
    return [{"params": trained}]


def embeddings_apart(model: Any) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    apart = [p for name, p in named.items() if "embed" in name or "q_proj" in name]
    return [{"params": apart, "lr": 0.01}, {"params": [p for p in named.values() if all(p is not a for a in apart)]}]


BY_NAME = (
    by_name,
    embeddings_apart,
    by_layer,
    without_decay,
    head_apart,
    decayed_by_layer,
    attention_and_the_rest,
    last_half,
)


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_groups_by_name_are_right_and_nothing_is_told() -> None:
    plain = llama(num_hidden_layers=4).train()
    for groups in BY_NAME:
        model = autopar.initialize(copy.deepcopy(plain), stages())
        reference = copy.deepcopy(plain)
        made, expected = (torch.optim.SGD(groups(each), lr=0.1) for each in (model, reference))
        told = []
        for number, batch in enumerate(language_batches(131, count=4, batch=2)):
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                model.execute_pipeline(batch)
            told += [str(each.message) for each in found if "by place" in str(each.message)]
            reference(**batch).loss.backward()
            for optimizer in (made, expected):
                optimizer.step()
                optimizer.zero_grad()
            if number == 1 and groups is last_half:  # unfreeze the others
                for each, optimizer in ((model, made), (reference, expected)):
                    others = [p for p in each.parameters() if not p.requires_grad]
                    for p in others:
                        p.requires_grad_()
                    optimizer.add_param_group({"params": others, "lr": 0.02})
        assert not told, (groups, told)
        same_weights(model, reference, 2e-5)
        model.mpu.destroy()


def by_place(model: Any) -> list[dict[str, Any]]:
    listed = list(model.parameters())
    return [{"params": listed[:10], "lr": 0.01}, {"params": listed[10:]}]


def from_the_end(model: Any) -> list[dict[str, Any]]:
    listed = [p for p in model.parameters() if p.requires_grad]
    return [{"params": listed[-8:], "weight_decay": 0.0}, {"params": listed[:-8], "weight_decay": 0.1}]


def one_weight(model: Any) -> list[dict[str, Any]]:
    """On one stage the embeddings, on the other one a weight inside of a block."""
    first, *others = model.parameters()
    return [{"params": [first], "lr": 0.01}, {"params": others}]


def decayed_by_place(model: Any) -> list[dict[str, Any]]:
    return [{"params": [p], "lr": 0.1 * 0.9**place} for place, p in enumerate(model.parameters())]


def halves(model: Any) -> list[dict[str, Any]]:
    """Another place on each stage: that these are no groups by name is a guess."""
    listed = list(model.parameters())
    place = len(listed) // 2 + model.mpu.pp.rank if hasattr(model, "mpu") else 16
    return [{"params": listed[:place], "lr": 0.01}, {"params": listed[place:]}]


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_groups_by_place_are_refused() -> None:
    plain = llama(num_hidden_layers=4).train()
    words = {
        by_place: (
            "the first 10 weights are a group",
            "rank 0: one ends at model.layers.0.post_attention_layernorm.weight, the next begins at model.layers.1",
            "rank 1: one ends at model.layers.3.self_attn.q_proj.weight, the next begins at model.layers.3",
        ),
        from_the_end: ("the last 8 weights are a group",),
        one_weight: ("the first 1 weights are a group", "rank 1: one ends at model.layers.2.self_attn.q_proj.weight"),
        decayed_by_place: ("the first 1 weights are a group",),
    }
    for groups, expected in words.items():
        model = autopar.initialize(copy.deepcopy(plain), stages())
        made = torch.optim.SGD(groups(model), lr=0.1)
        with raises_everywhere(ConsistencyError, "are cut by place in model.parameters()", *expected, "Make groups by"):
            list(losses(model, made.step))
        model.mpu.destroy()


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_groups_that_may_be_by_place_are_told() -> None:
    plain = llama(num_hidden_layers=4).train()
    for groups, before in ((halves, False), (by_place, True), (from_the_end, True)):
        model = copy.deepcopy(plain)
        made = torch.optim.SGD(groups(model), lr=0.1) if before else None
        if made is not None:
            model, made = autopar.initialize(model, stages(), optimizer=made)
        else:
            model = autopar.initialize(model, stages())
            made = torch.optim.SGD(groups(model), lr=0.1)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            list(losses(model, made.step))
        told = [str(each.message) for each in found if "by place" in str(each.message)]
        assert len(told) == (groups is halves and dist.get_rank() == 1), (groups, told)
        if told:  # by the rank behind
            assert told[0].startswith(
                "groups of the optimizer seem to be cut by place in model.parameters(): one ends on"
            )
            assert told[0].endswith("make the optimizer before autopar.initialize and give it (optimizer=).")
        model.mpu.destroy()


@pytest.mark.parametrize(
    ("layers", "first_group", "told"),
    [
        (([0, 1, 2, 3], [4, 5, 6, 7]), {0, 1, 4, 5}, 1),  # the first five of each list
        (([0, 1], [2, 3]), {0, 2}, 0),  # every other layer
        (([0, 1, 4, 5], [2, 3, 6, 7]), {0, 1, 2, 3}, 0),  # the first half of a model whose ranks have two chunks each
        (([0, 1, 2, 3], [4, 5, 6, 7]), {0, 1, 2, 3}, 0),
        (([0, 1, 2, 3], [4, 5, 6, 7]), {0, 1, 2, 3, 4, 5}, 0),
    ],
)
def test_groups_of_the_first_layers_and_the_last(
    layers: tuple[list[int], list[int]], first_group: set[int], told: int
) -> None:
    said = {}
    for rank, held in enumerate(layers):
        model = nn.ModuleDict({str(layer): nn.Linear(1, 1) for layer in held})
        groups: list[list[Any]] = [[], []]
        for layer in held:
            groups[layer not in first_group] += model[str(layer)].parameters()
        if told:
            groups[0].append(groups[1].pop(0))
        first = {"params": groups[0], "lr": 0.1, "scale": torch.ones(2)}  # settings may be tensors
        said[rank] = cut_by_place(torch.optim.SGD([first, {"params": groups[1], "lr": 0.2, "scale": 1}]), model, ())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        check_places(said, own=1)
    assert len(found) == told


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
    words = r"SGD.step\(\) inside of execute_pipeline: the gradients are those of some of its 2 micro-batches,\n  and"
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
    words = (
        rf"have drifted apart: their copies of {name} differ:\n  rank 0: \w+, rank 1: \w+\n  Every stage that holds it"
    )
    with pytest.raises(ConsistencyError, match=words):
        model.execute_pipeline(batch)
    model.mpu.destroy()
