"""Inputs of models whose forward wants more than the dry run's samples: images beside text, towers over patches.

They are tried one after another: a model is asked by running it, not by its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from autopar.dry_run.inputs import pixel_shape, sample_inputs

__all__ = ["candidates"]

_SIDE = 4  # patches of an image, across and down


def candidates(model: PreTrainedModel, rows: int, length: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield inputs that a model may take, on the meta device, the likeliest first; data of grids is real.

    Args:
        rows: how many samples; ``length``: tokens of each.

    Raises:
        ValueError: none are known.
    """
    taken = inspect.signature(model.forward).parameters
    patches = list(_patches(model.config, rows, taken))
    try:
        inputs = sample_inputs(model, rows, length)
    except ValueError:
        if not patches:
            raise
        inputs = {}
    width = _width(model)
    whole = _required(inputs, taken, rows, length, width)
    if inputs:
        yield whole
    if "pixel_values" in taken and "pixel_values" not in inputs and "input_ids" in inputs:
        pixels = {"pixel_values": torch.empty(pixel_shape(model.config, rows), device="meta", dtype=model.dtype)}
        yield {**whole, **pixels}
        if "decoder_input_ids" in inputs:
            yield {**pixels, "decoder_input_ids": inputs["decoder_input_ids"]}
    yield from patches
    if "inputs_embeds" in taken and "input_ids" in inputs:
        embedded = torch.empty(rows, length, width, device="meta", dtype=model.dtype)
        yield {**{name: value for name, value in whole.items() if name != "input_ids"}, "inputs_embeds": embedded}


def _width(model: PreTrainedModel) -> int:
    try:
        config: Any = model.config.get_text_config()
    except ValueError:  # it has several
        config = model.config
    return int(getattr(config, "hidden_size", 0) or 1)


def _required(
    inputs: dict[str, torch.Tensor], taken: Any, rows: int, length: int, width: int
) -> dict[str, torch.Tensor]:
    """Add what the forward takes without a default: other ids, or sequences of vectors."""
    found = dict(inputs)
    for name, parameter in taken.items():
        if name in found or parameter.default is not parameter.empty or parameter.kind is parameter.VAR_KEYWORD:
            continue
        if name.endswith("input_ids"):
            found[name] = torch.zeros(rows, length, dtype=torch.long, device="meta")
        elif name.endswith(("embeds", "states", "context")):
            found[name] = torch.empty(rows, length, width, device="meta")
    return found


def _patches(config: PretrainedConfig, rows: int, taken: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Patches of all images in one row, with the sizes of the images: as flat numbers, or as small pictures."""
    grid = next((name for name in ("grid_thw", "image_grid_thw") if name in taken), None)
    main = next((name for name in ("hidden_states", "pixel_values") if name in taken), None)
    side, channels = getattr(config, "patch_size", None), _channels(config)
    if grid is None or main is None or type(side) is not int or "input_ids" in taken:
        return
    more = {"merge_sizes": torch.full((rows,), 2)} if "merge_sizes" in taken else {}
    sizes = torch.tensor([[1, _SIDE, _SIDE]] * rows)
    count, frames = rows * _SIDE * _SIDE, int(getattr(config, "temporal_patch_size", 1))
    merge = int(getattr(config, "spatial_merge_size", 1) or 1)
    shapes: list[tuple[int, ...]] = [
        (count, channels * frames * side * side),
        (count, channels * side * side),
        (count, channels, side, side),
        (1, count, channels, side, side),
        (count, side * merge, side * merge, channels),
    ]
    for shape in dict.fromkeys(shapes):
        yield {main: torch.empty(shape, device="meta"), grid: sizes, **more}


def _channels(config: PretrainedConfig) -> int:
    return int(getattr(config, "in_channels", None) or getattr(config, "num_channels", None) or 3)
