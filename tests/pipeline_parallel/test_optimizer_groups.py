"""Groups of an optimizer through stages: by name, or by position before ``initialize``, they are right."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import autopar
from tests.compare import same_weights
from tests.parity import language_batches
from tests.pipeline_parallel.test_steps_of_stages import stages
from tests.pool import pooled
from tests.small import llama


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
def test_groups_by_name_are_right() -> None:
    plain = llama(num_hidden_layers=4).train()
    for groups in BY_NAME:
        model = autopar.initialize(copy.deepcopy(plain), stages())
        reference = copy.deepcopy(plain)
        made, expected = (torch.optim.SGD(groups(each), lr=0.1) for each in (model, reference))
        for number, batch in enumerate(language_batches(131, count=4, batch=2)):
            model.execute_pipeline(batch)
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
        same_weights(model, reference, 2e-5)
        model.mpu.destroy()


def by_position(model: Any) -> list[dict[str, Any]]:
    listed = list(model.parameters())
    return [{"params": listed[:10], "lr": 0.01}, {"params": listed[10:]}]


def from_the_end(model: Any) -> list[dict[str, Any]]:
    listed = [p for p in model.parameters() if p.requires_grad]
    return [{"params": listed[-8:], "weight_decay": 0.0}, {"params": listed[:-8], "weight_decay": 0.1}]


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_groups_by_position_are_right_if_made_before_initialize() -> None:
    plain = llama(num_hidden_layers=4).train()
    for groups in (by_position, from_the_end):
        own, reference = copy.deepcopy(plain), copy.deepcopy(plain)
        made, expected = (torch.optim.SGD(groups(each), lr=0.1) for each in (own, reference))
        model, made = autopar.initialize(own, stages(), optimizer=made)
        for batch in language_batches(131, count=3, batch=2):
            model.execute_pipeline(batch)
            reference(**batch).loss.backward()
            for optimizer in (made, expected):
                optimizer.step()
                optimizer.zero_grad()
        same_weights(model, reference, 2e-5)
        model.mpu.destroy()
