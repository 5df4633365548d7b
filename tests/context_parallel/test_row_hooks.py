"""Hooks of the user's where ranks share sequences see, change and train what they do on the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.errors import ConfigError, ConsistencyError
from tests.context_parallel.test_exactness import METHODS, made, sizes
from tests.parity import close, language_batches, whole
from tests.pool import pooled
from tests.rows import rows
from tests.small import gpt2, llama
from tests.tensor_parallel.test_whole_hooks import PLACES, Seen, Steering
from tests.worlds import raises_everywhere

LENGTHS = (7, 16)  # ragged rows, and even ones
EMBEDDED = {"embeddings": ["model.embed_tokens"], "inner model": ["model"]}


def ragged(length: int) -> list[dict[str, Any]]:
    return language_batches(131, seq=length)


def as_plain(
    build: Callable[[], Any], paths: list[str], config: dict[str, Any], *, every: bool = False, length: int = 7
) -> None:
    plain: Any = build().train()
    model = autopar.initialize(copy.deepcopy(plain), config).train()
    seen: list[Seen] = []
    scales = []
    for each in (plain, model):
        hooks = Steering(each, paths, every=every)
        for batch in ragged(length):
            (each(**batch, use_cache=False).loss / 2).backward()
        hooks.remove()
        seen.append(hooks.seen)
        scales.append(hooks.scale.grad)
    assert [name for name, _ in seen[0]] == [name for name, _ in seen[1]]
    for (name, expected), (_, found) in zip(*seen, strict=True):
        close(found, expected, name)
    if scales[0] is not None:
        scale = max(1.0, float(scales[0].abs()))
        close(scales[1] / scale, scales[0] / scale, "the hook's own parameter")
    compare_gradients(model, plain)
    with torch.no_grad():
        close(model(**ragged(length)[0]).loss, plain(**ragged(length)[0]).loss, "without hooks")
    model.mpu.destroy()


def compare_gradients(model: Any, plain: Any) -> None:
    autopar.average_gradients(model)
    gradients = whole(model, lambda p: p.grad)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        largest = max(1.0, float(parameter.grad.abs().max()))
        close(gradients[name] / largest, parameter.grad / largest, name)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("place", PLACES)
@pooled(world_size=2)
def test_a_hook_at_any_place_is_as_on_the_plain_model(place: str, method: str) -> None:
    for length in LENGTHS:
        as_plain(llama, PLACES[place], sizes(2, method), length=length)
