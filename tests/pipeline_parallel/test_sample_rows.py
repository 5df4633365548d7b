"""Rows of samples that are not one each: channels of targets, and images wherever the text says that they are."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.pipeline_parallel.microbatch import sample_rows, split
from autopar.pipeline_parallel.outputs import merge_outputs
from tests.harness.worlds import pooled
from tests.parity import close
from tests.random_models import Case, batches, build

CONFIG = SimpleNamespace(image_token_id=5, video_token_id=6, audio_token_id=7)
GRIDS = [[1, 2, 2], [1, 4, 2], [1, 2, 2], [1, 2, 4]]  # 4, 8, 4 and 8 patches
# two images side by side in the third sample, one patch in four is a token
IDS = torch.tensor([[5, 1, 1, 1, 1], [1, 1, 1, 1, 1], [5, 5, 5, 1, 1], [1, 5, 5, 1, 1]])
BATCH = {"input_ids": IDS, "pixel_values": torch.arange(24.0).view(24, 1), "image_grid_thw": torch.tensor(GRIDS)}


def test_patches_go_with_the_tokens_that_stand_for_them() -> None:
    rows = sample_rows(BATCH, 4, CONFIG)
    assert rows == {"pixel_values": [0, 4, 4, 16, 24], "image_grid_thw": [0, 1, 1, 3, 4]}
    parts = split(BATCH, 4, 1, None, CONFIG)
    assert [len(part.get("pixel_values", ())) for part in parts] == [4, 0, 12, 8]
    assert set(parts[1]) == {"input_ids"}  # it has no images
    halves = split(BATCH, 4, 2, None, CONFIG)
    assert torch.equal(halves[1]["image_grid_thw"], torch.tensor(GRIDS[1:])) and len(halves[0]["pixel_values"]) == 4
    (whole,) = split({**BATCH, "image_grid_thw": torch.ones(1, 3)}, 4, 4, None, CONFIG)  # nothing is asked
    assert len(whole["pixel_values"]) == 24


def test_images_without_sizes_are_counted_by_their_runs_or_by_equal_parts() -> None:
    ids = torch.tensor([[5, 5, 1, 5, 5], [1, 1, 1, 1, 1]])
    pixels = torch.zeros(2, 3, 4, 4)
    assert sample_rows({"input_ids": ids, "pixel_values": pixels}, 2, CONFIG) == {}  # one of each: rows of samples
    three = torch.tensor([[5, 5, 5, 5, 1], [1, 5, 5, 1, 1]])  # two side by side
    found = sample_rows({"input_ids": three, "pixel_values": torch.zeros(3, 3, 4, 4)}, 2, CONFIG)
    assert found == {"pixel_values": [0, 2, 3]}
    ragged = torch.tensor([[5, 1, 5, 5, 5], [1, 5, 5, 1, 1]])  # of other sizes, each a run
    found = sample_rows({"input_ids": ragged, "pixel_values": torch.zeros(3, 3, 4, 4)}, 2, CONFIG)
    assert found == {"pixel_values": [0, 2, 3]}


def test_videos_and_sounds() -> None:
    ids = torch.tensor([[6, 6, 1, 7], [7, 1, 7, 1]])
    batch = {
        "input_ids": ids,
        "pixel_values_videos": torch.zeros(8, 2),
        "video_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 2]]),
        "second_per_grid_ts": [0.5, 1.0],  # of each video
        "input_features": torch.zeros(3, 4, 9),
        "feature_attention_mask": torch.zeros(3, 9),
    }
    parts = split(batch, 2, 1, None, CONFIG)
    assert parts[0]["second_per_grid_ts"] == [0.5, 1.0] and "second_per_grid_ts" not in parts[1]
    assert [len(part["input_features"]) for part in parts] == [1, 2]
    assert [len(part["feature_attention_mask"]) for part in parts] == [1, 2]


@pytest.mark.parametrize(
    ("changes", "config", "reason"),
    [
        ({"image_grid_thw": torch.tensor(GRIDS[::-1])}, CONFIG, "token 5 (image_token_id"),
        ({"pixel_values": torch.zeros(23, 1)}, CONFIG, "pixel_values [23, 1], image_grid_thw [4, 3] cannot be split"),
        ({}, SimpleNamespace(), "token None (image_token_id"),
        ({"input_ids": None}, CONFIG, "token 5 (image_token_id"),
    ],
)
def test_what_cannot_be_told_is_refused(changes: dict[str, Any], config: Any, reason: str) -> None:
    with pytest.raises(autopar.ConfigError) as raised:
        split({**BATCH, **changes}, 4, 2, None, config)
    assert reason in str(raised.value) and "pipeline.microbatch_size: 4" in str(raised.value)


def test_targets_in_rows_of_channels() -> None:
    batch = {"input_ids": torch.zeros(2, 3), "labels": torch.arange(12).view(6, 2), "table": torch.zeros(6, 2)}
    parts = split(batch, 2, 1, None)
    assert [part["labels"].tolist() for part in parts] == [batch["labels"][:3].tolist(), batch["labels"][3:].tolist()]
    assert all(part["table"].shape == (6, 2) for part in parts)
    assert len(split({**batch, "labels": torch.zeros(5, 2)}, 2, 1, None)[0]["labels"]) == 5


def test_outputs_of_images_are_put_together() -> None:
    features = [torch.ones(4, 2), torch.zeros(4, 2)]  # four images of three samples, twice
    assert torch.equal(merge_outputs(features, [3, 3], [0.5, 0.5]), torch.cat(features))


def _images(config: Any) -> dict[str, Any]:
    """Four samples with 1, 0, 2 and 1 images of other sizes."""
    draw = torch.Generator().manual_seed(0)
    image, grids = config.image_token_id, [[1, 4, 4], [1, 4, 4], [1, 4, 8], [1, 4, 4]]
    ids = torch.randint(20, 100, (4, 16), generator=draw)
    for sample, places in ((0, range(1, 5)), (2, [*range(1, 5), *range(6, 14)]), (3, range(8, 12))):
        ids[sample, list(places)] = image
    kinds = (ids == image).int()
    pixels = torch.randn(80, 96, generator=draw)
    labels = ids.masked_fill(ids == image, -100)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": labels,
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": kinds,
    }


@pytest.mark.parametrize("size", [1, 2])
@pooled(world_size=2)
def test_images_of_other_sizes_in_stages(size: int) -> None:
    plain = build(Case("qwen2_vl", "Qwen2VLForConditionalGeneration"), 4, 2).train()
    piped = autopar.initialize(copy.deepcopy(plain), {"pp": 2, "pipeline": {"microbatch_size": size}})
    batch = _images(plain.config)
    out = piped.execute_pipeline(copy.deepcopy(batch), broadcast_loss=True)
    expected = plain(**batch)
    expected.loss.backward()
    close(out.loss, expected.loss.detach(), "loss")
    theirs = dict(plain.named_parameters())
    for name, parameter in piped.named_parameters():
        close(parameter.grad, theirs[name].grad, name)
    assert dist.get_rank() == 1 or any("visual" in name for name, _ in piped.named_parameters())
    piped.mpu.destroy()


@pooled(world_size=2)
def test_channels_of_sound_in_stages() -> None:
    case = Case("dia", "DiaForConditionalGeneration")
    plain = build(case, 4, 2).train()
    (batch,) = batches(case, plain.config, 1)
    piped = autopar.initialize(copy.deepcopy(plain), {"model_parallelism": {"pipeline_parallel_size": 2}})
    out = piped.execute_pipeline(copy.deepcopy(batch), broadcast_loss=True, return_outputs=True)
    expected = plain(**batch)
    close(out.loss, expected.loss.detach(), "loss")
    if dist.get_rank() == 1:
        close(out.outputs.logits, expected.logits, "logits")
    piped.mpu.destroy()
