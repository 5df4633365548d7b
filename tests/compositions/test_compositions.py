"""Compositions of options: how they are drawn and minimised, a few over ranks in each run, many in the sweep."""

from __future__ import annotations

import pytest

from tests.compositions.draw import MODEL_TYPES, Composition, draw, simpler
from tests.compositions.minimise import minimise
from tests.compositions.worlds import check
from tests.tiers import in_tier


def test_a_seed_is_one_composition_and_seeds_reach_everything() -> None:
    drawn = [draw(seed, 4) for seed in range(300)]
    assert drawn == [draw(seed, 4) for seed in range(300)]
    assert {each.model_type for each in drawn} == set(MODEL_TYPES)
    assert {name for each in drawn for name in each.config} == {
        "pipeline", "zero", "gradient_clipping", "activation_checkpointing", "loss", "consistency_check",
    }  # fmt: skip
    assert {each.replicas for each in drawn} == {1, 2, 4}
    assert all(each.loop["given"] for each in drawn if "zero" in each.config)


def test_what_does_not_matter_is_dropped() -> None:
    def failure_of(composition: Composition) -> str | None:
        bad = composition.sizes.get("tensor_parallel_size") == 2 and "loss" in composition.config
        return "off by 1" if bad else None

    seed = next(seed for seed in range(300) if failure_of(draw(seed, 4)) and draw(seed, 4).model_type != "llama")
    simplest, text = minimise(draw(seed, 4), failure_of)
    assert (simplest.model_type, set(simplest.sizes), text) == ("llama", {"tensor_parallel_size"}, "off by 1")
    assert set(simplest.config) - {"pipeline"} == {"loss"}
    assert not any(failure_of(each) for each in simpler(simplest))
    with pytest.raises(ValueError, match="does not fail"):
        minimise(Composition("llama", 2), failure_of)


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
