"""TRL's trainers that sample completions, with a parallelized model, against themselves on plain processes."""

from __future__ import annotations

import pytest

from tests.fetched_packages import with_package
from tests.integrations.runs import launched
from tests.integrations.trl_runs import SAMPLED, compare, save_model, trainer_of

pytest.importorskip("accelerate")

CASES = {
    "grpo": ("GRPO", {}),
    "grpo-reference": ("GRPO", {"beta": 0.1, "loss_type": "grpo", "num_iterations": 2, "steps_per_generation": 4}),
    "rloo": ("RLOO", {"beta": 0.05}),
}


def config(tp, **others):
    return {"model_parallelism": {"tensor_parallel_size": tp}, **others}


def run(folder, base, tp, names):
    with launched():
        for name in names:
            kind, changes = CASES[name]
            made = trainer_of(kind, folder, config(tp) if tp else None, **SAMPLED, **changes)
            compare(made, folder / f"{name}-{base}.json")


@with_package("trl", world_size=1)
def plain_on_one(folder, names):
    run(folder, 1, 0, names)


@with_package("trl", world_size=2)
def plain_on_two(folder, names):
    run(folder, 2, 0, names)


@with_package("trl", world_size=2)
def on_two(folder, names):
    run(folder, 1, 2, names)


@with_package("trl", world_size=4)
def on_four(folder, names):
    run(folder, 2, 2, names)


@pytest.mark.tier("all")
@pytest.mark.parametrize("names", [list(CASES)])
def test_tensor_parallel(tmp_path, names):
    save_model(tmp_path)
    plain_on_one(tmp_path, names)
    on_two(tmp_path, names)


@pytest.mark.tier("all")
@pytest.mark.parametrize("names", [list(CASES)])
def test_replicas(tmp_path, names):
    save_model(tmp_path)
    plain_on_two(tmp_path, names)
    on_four(tmp_path, names)
