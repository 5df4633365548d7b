"""Cutting batches, weighing losses, putting outputs together."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput

import autopar
from autopar.errors import ConfigError
from autopar.pipeline_parallel.microbatch import (
    OwnLoss,
    batch_size,
    next_batch,
    split,
    weights_of,
)
from autopar.pipeline_parallel.outputs import merge_outputs
from tests.harness.worlds import pooled
from tests.pipeline_parallel.deep import deep
from tests.random_models import Case, build, heads_of


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


@pytest.mark.parametrize(
    ("samples", "size", "count", "expected"),
    [
        (5, 2, None, [2, 2, 1]),
        (4, 2, None, [2, 2]),
        (1, 2, None, [1]),
        (5, None, None, [5]),
        (5, None, 2, [2, 3]),
        (2, None, 4, [1, 1]),
        (7, 1, None, [1] * 7),
    ],
)
def test_tensors_with_a_row_per_sample_are_cut(
    samples: int, size: int | None, count: int | None, expected: list[int]
) -> None:
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
        assert [len(x) for x in part["latents"]] == [len(x) for x in ragged[start:stop]]
        assert (
            [len(x) for x, _ in part["pairs"]]
            == [len(x) for x in part["nested"]["inner"]]
            == [*map(len, part["latents"])]
        )
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


def auto(model_type: str) -> str:
    """The class of a model type that makes text."""
    return next(head for head in sorted(heads_of(model_type)) if head.endswith("ForConditionalGeneration"))


def test_which_losses_shift_their_labels() -> None:
    assert all(OwnLoss.of(deep(name, 1)).shifted for name in ("gpt2", "llama", "mixtral"))
    assert not any(OwnLoss.of(deep(name, 1)).shifted for name in ("bert", "t5", "bart"))
    for head in ("BertForSequenceClassification", "BertForPreTraining", "BertForTokenClassification"):
        assert not OwnLoss.of(build(Case("bert", head), 6, 3)).shifted, head
    assert OwnLoss.of(build(Case("bert", "BertLMHeadModel"), 6, 3)).shifted
    assert not OwnLoss.of(build(Case("t5gemma", "T5GemmaForConditionalGeneration"), 6, 3)).shifted
    for model_type in ("florence2", "moonshine"):  # labels=labels, shift_labels=labels
        assert not OwnLoss.of(build(Case(model_type, auto(model_type)), 6, 3)).shifted, model_type
    for model_type in ("kosmos-2.5", "blip"):  # a model inside has the loss
        assert OwnLoss.of(build(Case(model_type, auto(model_type)), 6, 3)).shifted, model_type


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


def test_several_rows_of_each_sample_are_put_together_and_what_no_sample_changes_is_left() -> None:
    frames = torch.arange(24.0).view(12, 2)  # 4 of each of 3 samples
    for sizes in ([2, 1], [1, 1, 1]):
        parts = list(frames.split([4 * size for size in sizes]))
        assert torch.equal(merge_outputs(parts, sizes, [1 / len(sizes)] * len(sizes)), frames)
    table = torch.rand(4, 2)
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
    config = {"model_parallelism": {"pipeline_parallel_size": pp}, "pipeline": {"microbatch_size": 2}}
    policy = {
        "units": {},
        "prefix": {"enter": "replicated"},
        "blocks": {"path": "blocks", "modules": {"0": "replicated"}},
        "suffix": {"leave": "replicated"},
    }
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
    model.mpu.destroy()
