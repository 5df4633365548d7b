"""Steps of making inputs that need code: placeholders that are counted, words that move, labels of some heads.

Each gets the batch so far, and for whom it is (:class:`Scene`), and returns the batch; the data gives the rest.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.zoo.form import Batch, Scene

__all__ = ["STEPS"]


def merged_images(batch: Batch, scene: Scene) -> Batch:
    """An image of four patches and one of eight; a merged patch, which one word stands for, is four."""
    vision = getattr(scene.config, "vision_config", scene.config)
    grids = torch.tensor([[1, 2, 2], [1, 2, 4]])
    volume = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = scene.draw.normal(int(grids.prod(-1).sum()), volume)
    ids, image = batch["input_ids"], scene.config.image_token_id
    special = (ids >= image) & (ids <= scene.config.vision_end_token_id)
    ids = torch.where(special, ids + 10, ids)
    ids[0, 2:3], ids[1, 1:3] = image, image
    more = {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": (ids == image).int()}
    if "labels" in batch and batch["labels"].shape == ids.shape:
        more["labels"] = batch["labels"].masked_fill(ids == image, -100)
    return {**batch, "input_ids": ids, **more}


def stand_in(batch: Batch, scene: Scene, word: int, count: int, start: int = 0) -> Batch:
    """``count`` words of each text stand for the parts of something else."""
    ids = torch.where(batch["input_ids"] == word, word + 10, batch["input_ids"])
    ids[:, start : start + count] = word
    return {**batch, "input_ids": ids}


_ALL = (merged_images, stand_in)
STEPS: dict[str, Callable[..., Batch]] = {each.__name__: each for each in _ALL}
