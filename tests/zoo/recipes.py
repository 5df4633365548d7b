"""Make inputs of the steps that the data lists: each names what the batch gets, or a function of ``inputs``."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from transformers import PretrainedConfig

from tests.zoo import inputs as steps_in_python
from tests.zoo.form import Batch, Draw, Inputs, Scene
from tests.zoo.reading import evaluate

_CONDITIONS = ("for", "not", "when", "if")
Step = str | Mapping[str, Any]


def recipe(steps: Sequence[Step]) -> Inputs:
    """Return a function that goes through the steps."""

    def inputs(head: str, config: PretrainedConfig, batch: Batch, draw: Draw) -> Batch:
        scene = Scene(head, config, draw)
        for step in steps:
            batch = _after(step, dict(batch), scene)
        return batch

    return inputs


def _after(step: Step, batch: Batch, scene: Scene) -> Batch:
    functions = {**PURE, **_random(scene.draw)}
    if isinstance(step, str):
        in_python = {name: functools.partial(each, batch, scene) for name, each in steps_in_python.STEPS.items()}
        return evaluate(step, {**batch, "config": scene.config}, {**functions, **in_python})
    if not _applies(step, batch, scene):
        return batch
    for name, value in step.items():
        if name == "steps":
            for each in value:
                batch = _after(each, dict(batch), scene)
        elif name == "only":
            batch = {kept: batch[kept] for kept in value if kept in batch}
        elif name == "drop":
            for dropped in [value] if isinstance(value, str) else value:
                batch.pop(dropped, None)
        elif name not in _CONDITIONS:
            batch[name] = _made(value, {**batch, "config": scene.config}, functions)
    batch.pop("_", None)  # drawn, and not given
    return batch


def _applies(step: Mapping[str, Any], batch: Batch, scene: Scene) -> bool:
    """Whether head, config and batch are those that a step is for."""
    named = {name: [step[name]] if isinstance(step.get(name), str) else step.get(name, ()) for name in ("for", "not")}
    if named["for"] and not any(fnmatchcase(scene.head, pattern) for pattern in named["for"]):
        return False
    if any(fnmatchcase(scene.head, pattern) for pattern in named["not"]):
        return False
    if "if" in step and step["if"] not in batch:
        return False
    return all(_field(scene.config, name) == value for name, value in step.get("when", {}).items())


def _field(config: PretrainedConfig, path: str) -> Any:
    try:
        return operator.attrgetter(path)(config)
    except AttributeError:
        return None


def _made(value: Any, names: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> Any:
    if isinstance(value, str):
        return evaluate(value, names, functions)
    return torch.tensor(value) if isinstance(value, list) else value


def _shape(sizes: Sequence[Any]) -> tuple[int, ...]:
    """Numbers, and the shapes of tensors, in one row."""
    return tuple(n for size in sizes for n in (size.shape if isinstance(size, torch.Tensor) else (size,)))


def _random(draw: Draw) -> dict[str, Callable[..., torch.Tensor]]:
    return {
        "draw": lambda low, high, *shape: draw(low, high, *_shape(shape)),
        "normal": lambda *shape: draw.normal(*_shape(shape)),
    }


def _padded(mask: torch.Tensor, count: int) -> torch.Tensor:
    """``mask`` without the last places of the last sample."""
    mask[-1, ..., -count:] = 0
    return mask


def _mentions(places: torch.Tensor) -> torch.Tensor:
    """``places`` of the words of entities, one of them of one word."""
    places[..., 1, 1] = -1
    return places


def _with_places(patches: torch.Tensor) -> torch.Tensor:
    """Rows of 3 x 3 patches, each with its row and column in front; the last two of the second image are padding."""
    place = torch.arange(patches.shape[1])
    places = torch.stack([place // 3 + 1, place % 3 + 1], 1).expand(*patches.shape[:2], 2)
    result = torch.cat([places, patches], 2)
    result[1, 7:] = 0
    return result


def _two_images_seen(ids: torch.Tensor) -> torch.Tensor:
    """Which of two images each word sees: the first words of the first text none, those of the second one image."""
    seen = torch.ones(*ids.shape, 2, dtype=torch.long)
    seen[0, :3] = seen[1, :, 1] = 0
    return seen


# What expressions may call. Where a shape is wanted, a tensor stands for its own.
PURE: dict[str, Callable[..., Any]] = {
    "ones": lambda *shape: torch.ones(_shape(shape), dtype=torch.long),
    "zeros": lambda *shape: torch.zeros(_shape(shape), dtype=torch.long),
    "full": lambda value, *shape: torch.full(_shape(shape), value),
    "eye": lambda size: torch.eye(size).expand(2, -1, -1),
    "lengths": lambda size, *lengths: (torch.arange(size) < torch.tensor(lengths)[:, None]).long(),
    "length": lambda tensor: tensor.shape[-1],
    "grid": lambda side: torch.cartesian_prod(torch.arange(side), torch.arange(side)).expand(2, side * side, 2),
    "each": lambda tensor: tensor[..., None],
    "in_one_row": lambda codes: codes.transpose(1, 2).reshape(-1, codes.shape[1]),
    "rows": lambda tensor: tensor[..., 0],
    "padded": _padded,
    "mentions": _mentions,
    "with_places": _with_places,
    "two_images_seen": _two_images_seen,
    "masked": lambda tensor, where, value=-100: tensor.masked_fill(where, value),
    "cat": lambda *tensors: torch.cat(tensors, -1),
    "clamp": lambda tensor, low=None, high=None: tensor.clamp(low, high),
    "first": lambda tensor, count: tensor[:, :count].contiguous(),
    "after": lambda tensor, count: tensor[:, count:],
    "flip": lambda tensor: tensor.flip(1),
    "sort": lambda tensor: tensor.sort(-1).values,
    "softmax": lambda tensor: tensor.softmax(-1),
    "swap": lambda tensor, one, other: torch.where(tensor == one, other, tensor),
    "float": lambda tensor: tensor.float(),
    "bool": lambda tensor: tensor.bool(),
}
