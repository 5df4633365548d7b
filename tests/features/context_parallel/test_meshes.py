"""Context parallelism beside each other axis, on four ranks; ``make verify-all`` has every model type."""

from pathlib import Path

import pytest

from benchmarks.context_parallel_policies import NOT_IN_STAGES, NOT_OVER_FOUR
from tests.features.context_parallel.meshes import MESHES, compare
from tests.pool import pooled
from tests.random_models import Case
from tests.refused_types import LATE_IN_CONTEXT, NOT_BY_ROWS, NOT_IN_CONTEXT
from tests.test_every_policy import WHOLE

GPT2, LLAMA, T5 = (
    Case("gpt2", "GPT2LMHeadModel"),
    Case("llama", "LlamaForCausalLM"),
    Case("t5", "T5ForConditionalGeneration"),
)


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


# Model types whose policies are younger than the results of all meshes.
YOUNGER = {
    "apertus1p5",
    "apertus1p5_text",
    "chameleon",
    "dory",
    "exaone",
    "fast_vlm",
    "glm5_next",
    "hy_v4_vl",
    "lara_mini",
    "inkling2_loop",
    "inkling2_loop_text",
    "muse_spark",
    "omniasr",
    "perception_lm",
    "sarvam_mla",
    "sarvam_moe",
}


def test_the_page_has_the_numbers_of_all_meshes() -> None:
    page = (Path(__file__).parents[3] / "docs" / "long-sequences.md").read_text()
    found = [line.split(" | ") for line in page.splitlines() if line.startswith("| context 2 x ")]
    run = set(WHOLE) - NOT_IN_CONTEXT - LATE_IN_CONTEXT - YOUNGER
    assert len(found) == 5 and run >= NOT_IN_STAGES.keys() | NOT_OVER_FOUR.keys()
    assert f"| context 4 | {len(run) - len(NOT_OVER_FOUR)} | {len(NOT_OVER_FOUR)}: " in page
    for mesh, equal, refused, wrong in found:
        count = int(refused.split(":")[0])
        of = len(run - NOT_BY_ROWS if "sequence_parallel" in mesh else run)
        expected = len(NOT_IN_STAGES) if "stages" in mesh else count if "sequence_parallel" in mesh else 0
        assert (int(equal), count, wrong) == (of - expected, expected, "0 |"), mesh
