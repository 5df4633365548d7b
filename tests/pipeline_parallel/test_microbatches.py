"""Cutting batches, weighing losses, putting outputs together; rows that are not one each; packed documents."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchEncoding, DataCollatorWithFlattening
from transformers.modeling_outputs import CausalLMOutput

import autopar
from autopar.errors import ConfigError
from autopar.pipeline_parallel.microbatch import OwnLoss, batch_size, next_batch, sample_rows, split, weights_of
from autopar.pipeline_parallel.outputs import find_cache, merge_outputs
from tests.compare import same_gradients
from tests.harness.worlds import pooled
from tests.parity import close
from tests.pipeline_parallel.deep import deep
from tests.random_models import Case, batches, build, heads_of
from tests.small import llama


def test_batches_come_from_dicts_and_iterators() -> None:
    batch = BatchEncoding({"input_ids": torch.zeros(2, 3)})
    assert next_batch(batch).keys() == {"input_ids"}
    assert next_batch(iter([dict(batch)])).keys() == {"input_ids"}
    with pytest.raises(ConfigError, match=r"got list\n  For a DataLoader pass iter\(loader\)"):
        next_batch([batch])
    with pytest.raises(ConfigError, match="a batch must be a dict of the model's arguments, got list"):
        next_batch(iter([[1]]))
    with pytest.raises(ConfigError, match="the batch must contain a tensor, got a"):
        batch_size({"a": 1}, "input_ids")


SPLITS = [(5, 2, None, [2, 2, 1]), (4, 2, None, [2, 2]), (1, 2, None, [1]), (5, None, None, [5])]
SPLITS += [(5, None, 2, [2, 3]), (2, None, 4, [1, 1]), (7, 1, None, [1] * 7)]


@pytest.mark.parametrize(("samples", "size", "count", "expected"), SPLITS)
def test_tensors_with_a_row_per_sample_are_cut(samples: int, size: Any, count: Any, expected: list[int]) -> None:
    batch = {
        "input_ids": torch.arange(samples * 3).view(samples, 3),
        "nested": {"pair": (torch.arange(samples), None)},
        "scale": torch.tensor(2.0),
        "table": torch.zeros(11, 2),
        "use_cache": False,
    }
    parts = split(batch, samples, size, count)
    assert [part["input_ids"].shape[0] for part in parts] == expected
    assert torch.equal(torch.cat([part["input_ids"] for part in parts]), batch["input_ids"])
    assert torch.equal(torch.cat([part["nested"]["pair"][0] for part in parts]), torch.arange(samples))
    assert all(part["table"].shape == (11, 2) and part["scale"] == 2 and part["use_cache"] is False for part in parts)


def test_lists_with_an_entry_for_each_sample_are_cut() -> None:
    ragged = [torch.full((length, 2), float(length)) for length in (3, 5, 4, 4)]
    batch = {
        "time": torch.arange(4),
        "latents": ragged,
        "pairs": tuple((x, [x[:2], x]) for x in ragged),
        "nested": {"inner": list(ragged), "table": [torch.zeros(9), torch.ones(9)]},
        "labels": [{"boxes": torch.zeros(4, 4)}] * 4,
        "captions": ["a", "b", "c", "d"],
        "size": (4, 4, 4, 4),
        "states": (torch.arange(4), None, torch.tensor(1.0), None),
    }
    parts = split(batch, 4, None, 3)
    for part, start, stop in zip(parts, (0, 1, 2), (1, 2, 4), strict=True):
        lengths = [len(x) for x in ragged[start:stop]]
        assert [len(x) for x in part["latents"]] == [len(x) for x in part["nested"]["inner"]] == lengths
        assert [len(x) for x, _ in part["pairs"]] == lengths
        assert len(part["nested"]["table"]) == 2 and len(part["labels"]) == stop - start
        assert part["captions"] == batch["captions"][start:stop] and part["size"] == (4, 4, 4, 4)
        assert torch.equal(part["states"][0], torch.arange(start, stop)) and part["states"][1] is None
    assert torch.equal(merge_outputs([part["latents"] for part in parts], [1, 1, 2], [0.25] * 3)[3], ragged[3])
    same = [torch.zeros(4, 2)] * 4
    for name, value, what in (
        ("latents", same, "latents is a list of 4 entries with tensors of 4 rows"),
        ("pair", {"inner": tuple(same)}, r"pair\['inner'\] is a tuple of 4 entries with tensors of 4 rows"),
        ("pairs", tuple(ragged), "pairs is a tuple of 4 entries with tensors of 4 rows"),
        ("weights", [0.5, 1.0, 1.0, 2.0], "weights is a list of 4 numbers"),
    ):
        with pytest.raises(ConfigError, match=f"{what}, and the batch has 4 samples"):
            split({**batch, name: value}, 4, 2, None)
        assert len(split({**batch, name: value}, 4, 4, None)) == 1


def test_losses_count_by_their_labels() -> None:
    labels = torch.tensor([[1, 2, 3, 4], [1, 2, -100, -100], [-100, -100, -100, 5]])
    parts = split({"input_ids": labels, "labels": labels}, 3, 1, None)
    assert weights_of(parts, "input_ids", "tokens", shifted=False) == [4 / 7, 2 / 7, 1 / 7]
    assert weights_of(parts, "input_ids", "tokens", shifted=True) == [3 / 5, 1 / 5, 1 / 5]
    assert weights_of(parts, "input_ids", "microbatch", shifted=True) == [1 / 3] * 3
    nothing = split({"input_ids": labels, "labels": torch.full_like(labels, -100)}, 3, 2, None)
    assert weights_of(nothing, "input_ids", "tokens", shifted=True) == [0.0, 0.0]
    regression = split({"input_ids": labels, "labels": torch.zeros(3)}, 3, 2, None)
    assert weights_of(regression, "input_ids", "tokens", shifted=False) == [2 / 3, 1 / 3]


def text_of(model_type: str) -> Any:
    """A model of the type that makes text."""
    head = next(head for head in sorted(heads_of(model_type)) if head.endswith("ForConditionalGeneration"))
    return build(Case(model_type, head), 6, 3)


def test_which_losses_shift_their_labels() -> None:
    assert all(OwnLoss.of(deep(name, 1)).shifted for name in ("gpt2", "llama", "mixtral"))
    assert not any(OwnLoss.of(deep(name, 1)).shifted for name in ("bert", "t5", "bart"))
    for head in ("BertForSequenceClassification", "BertForPreTraining", "BertForTokenClassification"):
        assert not OwnLoss.of(build(Case("bert", head), 6, 3)).shifted, head
    assert OwnLoss.of(build(Case("bert", "BertLMHeadModel"), 6, 3)).shifted
    assert not OwnLoss.of(build(Case("t5gemma", "T5GemmaForConditionalGeneration"), 6, 3)).shifted
    for model_type in ("florence2", "moonshine"):  # labels=labels, shift_labels=labels
        assert not OwnLoss.of(text_of(model_type)).shifted, model_type
    for model_type in ("kosmos-2.5", "blip"):  # a model inside has the loss
        assert OwnLoss.of(text_of(model_type)).shifted, model_type


def test_outputs_are_put_together() -> None:
    outputs = [
        CausalLMOutput(loss=torch.tensor(1.0), logits=torch.zeros(2, 3), hidden_states=(torch.zeros(2, 1),)),
        CausalLMOutput(loss=torch.tensor(4.0), logits=torch.ones(1, 3), hidden_states=(torch.ones(1, 1),)),
    ]
    merged = merge_outputs(outputs, [2, 1], [0.75, 0.25])
    assert isinstance(merged, CausalLMOutput)
    assert merged.loss == 1.75
    assert torch.equal(merged.logits[:, 0], torch.tensor([0.0, 0.0, 1.0]))
    assert torch.equal(merged.hidden_states[0][:, 0], torch.tensor([0.0, 0.0, 1.0]))
    outputs[1].loss = torch.tensor(torch.nan)
    assert merge_outputs(outputs, [2, 1], [1.0, 0.0]).loss == 1.0
    frames = torch.arange(24.0).view(12, 2)  # 4 of each of 3 samples
    for sizes in ([2, 1], [1, 1, 1]):
        parts = list(frames.split([4 * size for size in sizes]))
        assert torch.equal(merge_outputs(parts, sizes, [1 / len(sizes)] * len(sizes)), frames)
    features = [torch.ones(4, 2), torch.zeros(4, 2)]  # four images of three samples, twice
    assert torch.equal(merge_outputs(features, [3, 3], [0.5, 0.5]), torch.cat(features))
    table = torch.rand(4, 2)  # no sample changes it
    assert torch.equal(merge_outputs([table, table.clone()], [1, 1], [0.5, 0.5]), table)
    losses = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])]  # of two heads
    assert torch.equal(merge_outputs(losses, [1, 1], [0.5, 0.5]), torch.tensor([2.0, 4.0]))


class Listed(nn.Module):
    """Takes one tensor for each sample in a list, next to a tensor, as diffusers' Z-Image does."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, latents: list[torch.Tensor], time: torch.Tensor) -> list[torch.Tensor]:
        hidden = pad_sequence([self.enter(x) for x in latents], batch_first=True) + time[:, None, None]
        for block in self.blocks:
            hidden = block(hidden)
        return [self.leave(hidden[place, : len(x)]) for place, x in enumerate(latents)]


def squares(outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
    pairs = zip(outputs, inputs["latents"], inputs["time"], strict=True)
    return torch.stack([(x - y + t).square().mean() for x, y, t in pairs]).mean()


@pytest.mark.tier("test")
@pytest.mark.parametrize("pp", [1, 2])
@pooled(world_size=2)
def test_a_model_of_lists(pp: int) -> None:
    torch.manual_seed(0)
    plain, time = Listed(), torch.rand(6)
    batch = {"latents": [torch.randn(length, 3) for length in (2, 5, 3, 4, 6, 1)], "time": time}
    expected = squares(plain(**batch), batch)
    expected.backward()
    config = {"pp": pp, "pipeline": {"microbatch_size": 2}}
    blocks = {"path": "blocks", "modules": {"0": "replicated"}}
    policy = {"units": {}, "prefix": {"enter": "replicated"}, "blocks": blocks, "suffix": {"leave": "replicated"}}
    model = autopar.initialize(copy.deepcopy(plain), config, policy=policy)
    model.zero_grad()
    dp = model.mpu.dp
    mine = {name: value[dp.rank * 6 // dp.size : (dp.rank + 1) * 6 // dp.size] for name, value in batch.items()}
    out = model.execute_pipeline(mine, squares, return_outputs=True, broadcast_loss=True)
    if pp == 2:
        torch.testing.assert_close(out.loss, expected.detach())
    if model.mpu.pp.rank == model.mpu.pp.size - 1:
        assert [len(x) for x in out.outputs] == [len(x) for x in mine["latents"]]
    for name, parameter in model.named_parameters():
        if parameter.numel():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


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


def _images(config: Any) -> dict[str, Any]:
    """Four samples with 1, 0, 2 and 1 images of other sizes."""
    draw = torch.Generator().manual_seed(0)
    image, grids = config.image_token_id, [[1, 4, 4], [1, 4, 4], [1, 4, 8], [1, 4, 4]]
    ids = torch.randint(20, 100, (4, 16), generator=draw)
    for sample, places in ((0, range(1, 5)), (2, [*range(1, 5), *range(6, 14)]), (3, range(8, 12))):
        ids[sample, list(places)] = image
    kinds = (ids == image).int()
    pixels = torch.randn(80, 96, generator=draw)
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(ids == image, -100)}
    return {**text, "pixel_values": pixels, "image_grid_thw": torch.tensor(grids), "mm_token_type_ids": kinds}


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


@pooled(world_size=2)
def test_channels_of_sound_in_stages() -> None:
    case = Case("dia", "DiaForConditionalGeneration")
    plain = build(case, 4, 2).train()
    (batch,) = batches(case, plain.config, 1)
    piped = autopar.initialize(copy.deepcopy(plain), {"pp": 2})
    out = piped.execute_pipeline(copy.deepcopy(batch), broadcast_loss=True, return_outputs=True)
    expected = plain(**batch)
    close(out.loss, expected.loss.detach(), "loss")
    if dist.get_rank() == 1:
        close(out.outputs.logits, expected.logits, "logits")


LENGTHS = (5, 9, 3)


@pytest.mark.tier("test")
@pooled(world_size=4)
def test_packed_documents_through_stages_of_two_ranks() -> None:
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(0, 131, (length,), generator=generator) for length in LENGTHS]
    packed = DataCollatorWithFlattening()([{"input_ids": one.tolist()} for one in documents])
    assert packed["position_ids"].flatten().tolist() == [place for length in LENGTHS for place in range(length)]
    packed = {name: torch.as_tensor(value) for name, value in packed.items()} | {"use_cache": False}
    plain = llama(hidden_size=32, num_attention_heads=8, num_key_value_heads=2).train()
    model = autopar.initialize(copy.deepcopy(plain), {"tp": 2, "pp": 2}).train()
    tokens = sum(LENGTHS) - len(LENGTHS)
    logits, loss = [], torch.zeros(())
    for one in documents:
        output = plain(one[None], labels=one[None])
        logits.append(output.logits.detach())
        loss = loss + output.loss * (len(one) - 1) / tokens
    loss.backward()
    close(model.execute_pipeline(packed, broadcast_loss=True).loss, loss.detach(), "loss")
    same_gradients(model, plain)
    with torch.no_grad():
        close(model.eval()(**{k: v for k, v in packed.items() if k != "labels"}).logits, torch.cat(logits, 1), "logits")


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_a_training_pass_makes_no_cache_where_transformers_does_the_same_without() -> None:
    """Positions that are given may start again, and with a cache transformers does not see it."""
    plain = llama().train()
    ids = torch.randint(0, 131, (2, 8), generator=torch.Generator().manual_seed(3))
    again = torch.arange(8).remainder(5).expand(2, -1)
    caches: list[bool] = []
    for given, cached in (({}, False), ({"position_ids": again}, True), ({"use_cache": True}, True)):
        model = autopar.initialize(copy.deepcopy(plain), {"pp": 2, "pipeline": {"microbatch_size": 1}}).train()
        for block in model.model.layers:
            block.register_forward_pre_hook(
                lambda _, args, kwargs: caches.append(find_cache(args, kwargs) is not None), with_kwargs=True
            )
        caches.clear()
        output = model.execute_pipeline({"input_ids": ids, "labels": ids, **given})
        assert set(caches) == {cached}
        reference = copy.deepcopy(plain)
        expected = reference(input_ids=ids, labels=ids, **given).loss
        expected.backward()
        if output.loss is not None:
            close(output.loss.detach(), expected.detach(), "loss")
        same_gradients(model, reference)
