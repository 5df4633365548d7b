"""``ParallelTrainer`` against transformers' own on one process: losses, norms, weights, evaluation."""

import json
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForCausalLM

from autopar.errors import ConfigError, ShardWarning
from tests.exchange import everyones, raises_everywhere
from tests.features.experts.mixtures import mixtral
from tests.harness.tiers import rows
from tests.harness.worlds import pooled
from tests.integrations.runs import (
    arguments,
    assert_same,
    assert_same_weights,
    collate,
    facts,
    history,
    launched,
    metrics,
    one_process,
    samples,
)
from tests.small import llama

pytest.importorskip("accelerate")

MODES = {
    "plain": {},
    "smoothed": {"label_smoothing_factor": 0.1, "train_sampling_strategy": "group_by_length", "max_grad_norm": 0.0},
    "matrices": {"optim": "adafactor"},  # looks at whole matrices
    "epochs": {  # the last step has one batch; the loss of each batch is its own mean
        "max_steps": -1,
        "num_train_epochs": 1,
        "gradient_accumulation_steps": 3,
        "average_tokens_across_devices": False,
    },
    "mixture": {"save_strategy": "steps", "save_steps": 3},
    "matrices of a mixture": {"optim": "adafactor"},
}


def model_of(name):
    return mixtral(vocab_size=131) if "mixture" in name else llama()


@pooled(world_size=1)
def on_one_process(folder):
    with launched():
        for name, changes in MODES.items():
            one_process(folder, name, model_of(name), **changes)


def trainer_of(folder, tp, pp=1, model=None, parallel=None, **changes):
    from autopar.integrations import ParallelTrainer

    replicas = max(1, dist.get_world_size() // (tp * pp * (parallel or {}).get("cp", 1)))
    return ParallelTrainer(
        model=llama() if model is None else model,
        args=arguments(folder, replicas, **changes),
        train_dataset=samples(40),
        eval_dataset=samples(21, 1),
        data_collator=collate,
        compute_metrics=metrics,
        parallel_config={"tp": tp, "pp": pp, **(parallel or {})},
    )


def compare(folder, name, parallel):
    tp, pp = parallel.get("tp", 1), parallel.get("pp", 1)
    merged = folder / f"merged-{name}-{dist.get_world_size()}-{parallel}"
    with launched():
        trainer = trainer_of(folder / "run", tp, pp, model_of(name), parallel=parallel, **MODES[name])
        with warnings.catch_warnings():
            warnings.simplefilter("error", ShardWarning)
            trainer.train()
            mine = facts(trainer, trainer.evaluate())
        assert_same(mine, json.loads((folder / f"{name}.json").read_text()))
        trainer.save_model(str(merged))
        if dist.get_rank() == 0:
            assert_same_weights(AutoModelForCausalLM.from_pretrained(merged), folder, name)


ON_TWO = rows(
    all=[("plain", {"tp": 2}), ("plain", {"pp": 2})],
    sweep=[(name, {"tp": 2}) for name in ("smoothed", "matrices", "epochs")],
)
ON_FOUR = rows(
    all=[
        ("plain", {"tp": 2}),
        ("plain", {"tp": 2, "pp": 2}),
        ("plain", {"cp": 2}),  # context ranks read one replica's batches, and count once
        ("plain", {"tp": 2, "zero": {"stage": 1}}),
        ("mixture", {"ep": 2}),
    ],
    sweep=[
        *((name, {"tp": 2}) for name in ("smoothed", "matrices")),
        ("plain", {"cp": 2, "pp": 2}),
        *(("plain", {axis: 2, "zero": {"stage": stage}}) for stage in (2, 3) for axis in ("tp", "pp")),
        ("matrices of a mixture", {"ep": 2, "zero": {"stage": 1}}),
        ("mixture", {"tp": 2, "ep": 4, "zero": {"stage": 3}}),
    ],
)


@pytest.mark.every_case
@pytest.mark.parametrize(("name", "parallel"), ON_TWO)
@pooled(world_size=2)
def test_on_two_ranks(folder, name, parallel):
    compare(folder, name, parallel)


@pytest.mark.every_case
@pytest.mark.parametrize(("name", "parallel"), ON_FOUR)
@pooled(world_size=4)
def test_on_four_ranks(folder, name, parallel):
    compare(folder, name, parallel)


class Stream(IterableDataset):
    """The samples without a length."""

    def __iter__(self):
        yield from samples(40)


@pooled(world_size=2)
def streamed(folder, tp):
    """Every replica takes its part of a stream, which each rank reads."""
    from autopar.integrations import ParallelTrainer

    with launched():
        args = arguments(folder, 2 // tp, max_steps=4, activation_checkpointing=True)
        trainer = ParallelTrainer(
            llama(), args, train_dataset=Stream(), data_collator=collate, parallel_config={"tp": tp}
        )
        assert trainer.model.is_activation_checkpointing
        trainer.train()
        path = folder / "stream.json"
        if tp == 2 and dist.get_rank() == 0:
            path.write_text(json.dumps(history(trainer)))
        if tp == 1:
            expected = torch.tensor(json.loads(path.read_text()))
            assert torch.allclose(torch.tensor(history(trainer)), expected, rtol=1e-5, atol=1e-5)
            with raises_everywhere(ConfigError, "over 2 replicas requires a dataset with a length"):
                trainer.evaluate(Stream())


@pytest.mark.tier("all")
def test_streams_and_recomputed_activations(tmp_path):
    streamed(tmp_path, 2)
    streamed(tmp_path, 1)


@pooled(world_size=4)
def test_workers_of_a_replica_are_seeded_alike(tmp_path):
    with launched():
        trainer = trainer_of(tmp_path, 2, dataloader_num_workers=1)
        worker = trainer.get_train_dataloader().base_dataloader.worker_init_fn
        assert worker.keywords == {"num_workers": 1, "rank": trainer.mpu.dp.rank}
        torch.manual_seed(dist.get_rank())  # stages, for one, draw apart
        with mock.patch.object(DataLoader, "_get_iterator", lambda _: iter([torch.empty(()).uniform_().item()])):
            (seed,) = iter(trainer.get_train_dataloader().base_dataloader)
        firsts = [torch.rand((), generator=torch.Generator().manual_seed(rank)).item() for rank in (0, 2)]
        assert everyones(seed) == [firsts[0], firsts[0], firsts[1], firsts[1]]
