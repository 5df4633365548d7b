"""Context parallelism beside each other axis, on four ranks; ``make verify-all`` has every model type."""

from pathlib import Path

import pytest

from benchmarks.context_parallel_policies import NOT_IN_STAGES, NOT_OVER_FOUR
from tests.features.context_parallel.meshes import MESHES, compare
from tests.harness.worlds import pooled
from tests.random_models import Case
from tests.refused_types import LATE_IN_CONTEXT, NOT_IN_CONTEXT
from tests.test_every_policy import WHOLE

GPT2, LLAMA = Case("gpt2", "GPT2LMHeadModel"), Case("llama", "LlamaForCausalLM")
T5 = Case("t5", "T5ForConditionalGeneration")


@pytest.mark.tier("all")
@pytest.mark.parametrize("mesh", MESHES)
@pooled(world_size=4)
def test_it_equals_the_plain_model(mesh: str) -> None:
    for case, method in ((GPT2, "gather"), (LLAMA, "ulysses"), (T5, "ulysses")):
        verdict = compare(case, MESHES[mesh], method)
        if (case, mesh) == (T5, "cp2xsp2"):
            assert verdict.verdict == "refused" and "with sequence_parallel" in verdict.why
            continue
        assert verdict.verdict == "equal", f"{case}: {verdict.why}"
        assert (len(verdict.cut) > 0) == (MESHES[mesh].cp > 1)


def test_the_page_has_the_numbers_of_all_meshes() -> None:
    page = " ".join((Path(__file__).parents[3] / "docs" / "long-sequences.md").read_text().split())
    assert set(WHOLE) - NOT_IN_CONTEXT - LATE_IN_CONTEXT >= NOT_IN_STAGES.keys() | NOT_OVER_FOUR.keys()
    assert f"{len(NOT_IN_STAGES)} of them have no two stages" in page
    assert f"{len(NOT_OVER_FOUR)} do not fit a context-parallel size of 4" in page
