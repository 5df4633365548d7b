"""Groups of an optimizer through stages: by name they are right, by place in a list they are other weights on each."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.errors import ConsistencyError
from autopar.pipeline_parallel.step_count import check_places, cut_by_place
from tests.compare import same_weights
from tests.parity import language_batches
from tests.pipeline_parallel.test_steps_of_stages import losses, stages
from tests.pool import pooled
from tests.small import llama
from tests.worlds import raises_everywhere


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
