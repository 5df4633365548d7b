"""Compositions of options: how they are drawn, a few over ranks in each run, many in the sweep."""

import pytest
import torch.distributed as dist

from tests.compositions.compare import compare
from tests.compositions.draw import MODEL_TYPES, Composition, draw
from tests.harness.tiers import in_tier
from tests.harness.worlds import pooled


def body(composition: Composition) -> None:
    """Run on each rank: compare, and let rank 0 say what is refused."""
    try:
        refused = compare(composition)
    except Exception as error:
        raise AssertionError(f"{composition}: {error}") from error
    if refused and dist.get_rank() == 0:
        print(f"refused: {refused}", flush=True)


def check(seed: int, ranks: int) -> None:
    pooled(ranks, timeout=120.0)(body)(draw(seed, ranks))


def test_a_seed_is_one_composition_and_seeds_reach_everything() -> None:
    drawn = [draw(seed, 4) for seed in range(300)]
    assert drawn == [draw(seed, 4) for seed in range(300)]
    assert {each.model_type for each in drawn} == set(MODEL_TYPES)
    assert {name for each in drawn for name in each.config} == {
        "pipeline", "zero", "gradient_clipping", "activation_checkpointing", "loss", "consistency_check",
    }  # fmt: skip
    assert {each.replicas for each in drawn} == {1, 2, 4}
    assert all(each.loop["given"] for each in drawn if "zero" in each.config)


@pytest.mark.tier("all")
@pytest.mark.parametrize("seed", [*range(4), *in_tier("sweep", range(4, 150))])
def test_on_four(seed: int) -> None:
    check(seed, 4)


@pytest.mark.tier("sweep")
@pytest.mark.parametrize("seed", range(1000, 1050))
def test_on_two(seed: int) -> None:
    check(seed, 2)


@pytest.mark.tier("sweep")
@pytest.mark.parametrize("seed", range(2000, 2020))
def test_on_eight(seed: int) -> None:
    check(seed, 8)
