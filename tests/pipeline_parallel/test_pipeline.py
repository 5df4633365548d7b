"""Training in pipeline stages equals the plain model: losses, every gradient, weights after a step."""

from typing import Any

import pytest

from tests.harness.worlds import pooled
from tests.parity import language_batches
from tests.pipeline_parallel.deep import NAMES, deep
from tests.pipeline_parallel.oracle import check_pipeline
from tests.random_models import Case, batches, build
from tests.small import gpt2, llama

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"]


@pytest.mark.parametrize("make", [gpt2, llama])
@pooled(world_size=2)
def test_two_stages(make: Any) -> None:
    check_pipeline(make, language_batches(131, count=2, batch=4)).mpu.destroy()


@pytest.mark.tier(
    "test", only=("gpt2-gpipe", "llama-1f1b", "gpt2-interleaved", "llama-zero-bubble", "gpt2-zbv", "llama-dualpipev")
)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("make", [gpt2, llama])
@pooled(world_size=2)
def test_every_schedule(make: Any, schedule: str) -> None:
    """Five micro-batches, then three (fewer than dualpipev needs); the last one is smaller."""
    piped = check_pipeline(
        lambda: make(**{"n_layer" if make is gpt2 else "num_hidden_layers": 5}),
        [*language_batches(131, count=1, batch=9), *language_batches(131, count=1, batch=5)],
        pipeline={"schedule": schedule, "microbatch_size": 2},
    )
    piped.mpu.destroy()


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
@pytest.mark.parametrize("name", ["gpt2", "mixtral", "t5"])
@pooled(world_size=3)
def test_three_ranks_in_a_v(name: str, schedule: str) -> None:
    _in_a_v(name, 3, schedule, microbatches=(7, 2))


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
@pooled(world_size=4)
def test_four_ranks_in_a_v(name: str) -> None:
    _in_a_v(name, 4, "dualpipev", microbatches=(8, 11))


def _in_a_v(name: str, pp: int, schedule: str, microbatches: tuple[int, ...]) -> None:
    """The last micro-batch of each batch is smaller, and one has no label."""
    made = []
    for count in microbatches:
        (batch,) = language_batches(131, count=1, batch=2 * count - 1)
        batch["labels"][2:4] = -100
        made.append(batch)
    settings = {"schedule": schedule, "microbatch_size": 2}
    check_pipeline(lambda: deep(name, 2 * pp), made, pp=pp, pipeline=settings).mpu.destroy()


@pytest.mark.tier(
    "test", only=("bert-BertForSequenceClassification", "t5-T5ForConditionalGeneration", "mixtral-MixtralForCausalLM")
)
@pytest.mark.parametrize(
    ("model_type", "head"),
    [
        ("bert", "BertForSequenceClassification"),
        ("bert", "BertForMaskedLM"),
        ("mixtral", "MixtralForCausalLM"),
        ("t5", "T5ForConditionalGeneration"),
        ("bart", "BartForConditionalGeneration"),
        ("gpt2", "GPT2ForSequenceClassification"),
    ],
)
@pooled(world_size=2)
def test_families(model_type: str, head: str) -> None:
    case = Case(model_type, head)
    model = build(case, 6, 3)
    check_pipeline(lambda: model, batches(case, model.config)).mpu.destroy()


@pytest.mark.tier("test", only=("2-2-gpt2", "1-4-gpt2", "2-2-bert"))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (1, 4), pytest.param(1, 2, marks=pytest.mark.tier("sweep"))])
@pooled(world_size=4)
def test_meshes(name: str, tp: int, pp: int) -> None:
    """The remaining ranks are data-parallel replicas."""
    batches_ = language_batches(131, count=2, batch=4)
    for batch in batches_:
        batch["labels"] = batch["input_ids"].clone()  # replicas whose labels count alike: the mean of means is the mean
    check_pipeline(lambda: deep(name, 4), batches_, tp=tp, pp=pp).mpu.destroy()
