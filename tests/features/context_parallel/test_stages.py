"""Rows of the sequence on pipeline stages: each stage computes own rows only, with the numbers of the plain model."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import autopar
from tests.features.context_parallel.test_exactness import labelled_on_one_rank, made, packed, padded_left, sizes
from tests.features.context_parallel.test_memory import Largest
from tests.harness.worlds import pooled
from tests.parity import language_batches
from tests.pipeline_parallel.oracle import check_pipeline
from tests.small import gpt2, llama

VOCAB, WIDTH, HEAD_DIM = 131, 24, 4
Batch = dict[str, Any]


def four_sequences(batch: Batch) -> Batch:
    """Four sequences of a batch of one or two, for two micro-batches."""
    return {
        name: value.repeat(4 // value.shape[0], 1) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


def embedded(length: int) -> Batch:
    """Embeddings in the place of ids."""
    (batch,) = language_batches(VOCAB, count=1, batch=4, seq=length)
    del batch["input_ids"]
    return {**batch, "inputs_embeds": torch.randn(4, length, WIDTH, generator=torch.Generator().manual_seed(3))}


def causal_batches() -> list[Batch]:
    """Padding on both sides, documents, a rank without labels, lengths that do not divide."""
    (short,) = language_batches(VOCAB, count=1, batch=4, seq=7)
    return [short, *map(four_sequences, (padded_left(16), packed(7, 9), labelled_on_one_rank(33)))]


def translations() -> list[Batch]:
    listed = []
    for length, target in ((7, 16), (16, 7), (9, 3)):  # of 3 labels one rank would have one row: they are not cut
        (batch,) = language_batches(VOCAB, count=1, batch=4, seq=length)
        listed.append({**batch, "labels": torch.arange(4 * target).view(4, target)})
    return listed


def staged(schedule: str = "1f1b", method: str = "auto", **more: Any) -> dict[str, Any]:
    chunks = {"chunks": 2} if schedule == "interleaved" else {}
    pipeline = {"num_microbatches": 2, "schedule": schedule, **chunks}
    return {**sizes(2, method, pipeline_parallel_size=2, **more), "pipeline": pipeline}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
@pooled(world_size=4)
def test_masks_and_lengths(schedule: str) -> None:
    for build in (
        functools.partial(llama, num_hidden_layers=4, tie_word_embeddings=schedule != "1f1b"),
        functools.partial(gpt2, n_layer=4, n_positions=64),
    ):
        listed = causal_batches() + ([embedded(7)] if build.func is llama else [])
        config = staged(schedule, "ulysses" if schedule == "gpipe" else "auto")
        check_pipeline(build, listed, **config).mpu.destroy()


@pytest.mark.parametrize(
    ("model_type", "head", "listed"),
    [
        ("gemma3_text", "Gemma3ForCausalLM", causal_batches),
        ("bert", "BertForMaskedLM", functools.partial(language_batches, VOCAB, batch=4, seq=9)),
        ("t5", "T5ForConditionalGeneration", translations),
        ("bart", "BartForConditionalGeneration", translations),
    ],
    ids=["gemma3", "bert", "t5", "bart"],
)
@pooled(world_size=4)
def test_other_models(model_type: str, head: str, listed: Callable[[], list[Batch]]) -> None:
    check_pipeline(functools.partial(made, model_type, head), listed(), **staged()).mpu.destroy()


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pooled(world_size=4)
def test_no_stage_makes_rows_of_another_rank(tied: bool) -> None:
    """Of embeddings, hidden states and logits; neither does the first step, which is examined."""
    build = functools.partial(llama, tie_word_embeddings=tied, max_position_embeddings=128)
    model: Any = autopar.initialize(build(), staged(method="ulysses")).train()
    for length in (64, 96):
        ids = torch.arange(2 * length).view(2, -1) % VOCAB
        with Largest() as largest:
            model.execute_pipeline({"input_ids": ids, "labels": ids})
        rows = length // 2  # of one sequence: a micro-batch is one
        for width in (WIDTH, VOCAB) if model.mpu.pp.rank else (WIDTH,):
            assert largest.elements[width] <= rows * width, f"{length} tokens, {width} wide: {largest.elements}"
        assert model.mpu.pp.rank or VOCAB not in largest.elements, "logits on the first stage"


@pooled(world_size=4)
def test_the_first_step_gathers_no_logits() -> None:
    """Under tensor parallelism neither: whether a stage has what its logits are made of is seen by their parts."""
    read = []
    for config in (staged(), {**staged(), **sizes(1, tensor_parallel_size=2, pipeline_parallel_size=2)}):
        model: Any = autopar.initialize(llama(), config).train()
        with pytest.MonkeyPatch.context() as patch:
            place = "autopar.tensor_parallel.sharded_logits._Gather.apply"
            patch.setattr(place, lambda logits: read.append(list(logits.shape)))
            model.execute_pipeline(language_batches(VOCAB, count=1, batch=4, seq=9)[0])
        assert not read
        model.mpu.destroy()
