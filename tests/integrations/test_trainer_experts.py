"""``ParallelTrainer`` of a mixture whose experts lie on several replicas, against transformers' own on one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import MixtralForCausalLM

from tests.integrations.runs import (
    arguments,
    assert_same,
    assert_same_weights,
    collate,
    facts,
    launched,
    metrics,
    one_process,
    samples,
)
from tests.pool import pooled
from tests.tensor_parallel.mixtures import mixtral

pytest.importorskip("accelerate")
pytestmark = pytest.mark.together  # what one process trains is made once


MODES = {"mixture": {}, "matrices": {"optim": "adafactor"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("one-process")
    run_on_one_process(path)
    return path


@pooled(world_size=1)
def run_on_one_process(folder: Path) -> None:
    with launched():
        for name, changes in MODES.items():
            one_process(folder, name, mixtral(vocab_size=131), **changes)


@pooled(world_size=4)
def on_four_ranks(folder: Path, config: dict[str, Any], name: str = "mixture") -> None:
    from autopar.integrations import ParallelTrainer

    replicas = 4 // config.get("tp", 1)
    with launched():
        trainer = ParallelTrainer(
            model=mixtral(vocab_size=131),
            args=arguments(folder / "run", replicas, save_strategy="steps", save_steps=3, **MODES[name]),
            train_dataset=samples(40),
            eval_dataset=samples(21, 1),
            data_collator=collate,
            compute_metrics=metrics,
            parallel_config=config,
        )
        trainer.train()
        assert_same(facts(trainer, trainer.evaluate()), json.loads((folder / f"{name}.json").read_text()))
        merged = folder / f"merged-{name}-{config}"
        trainer.save_model(str(merged))
        if dist.get_rank() == 0:
            assert_same_weights(MixtralForCausalLM.from_pretrained(merged), folder, name)
        dist.barrier()


@pytest.mark.tier("all")
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_zero(folder: Path, stage: int) -> None:
    on_four_ranks(folder, {"ep": 2, "zero": {"stage": stage}})


@pytest.mark.tier("all")
@pytest.mark.parametrize("stage", [0, 1])
def test_an_optimizer_that_looks_at_whole_matrices(folder: Path, stage: int) -> None:
    on_four_ranks(folder, {"ep": 2, "zero": {"stage": stage}}, "matrices")


@pytest.mark.tier("all")
def test_zero_3_with_tensor_parallelism(folder: Path) -> None:
    on_four_ranks(folder, {"tp": 2, "ep": 4, "zero": {"stage": 3}})
