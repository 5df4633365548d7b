"""The search: what it chooses beside the mesh."""

from dataclasses import replace

import autopar
from autopar.tools.planner.candidate import Candidate
from autopar.tools.planner.estimate import Estimator
from autopar.tools.planner.hardware import find_node
from autopar.tools.planner.planned_model import PlannedModel
from autopar.tools.planner.search import with_kept
from tests.small import llama


def test_recomputed_blocks_keep_what_fits() -> None:
    planned = PlannedModel(llama(num_hidden_layers=4), sequence=64, precision="bf16")
    candidate = Candidate(2, 1, 1, "1f1b", 4, 1, 0, True, sequence_parallel=True)
    roomy = Estimator(planned, find_node("dgx-h100"))
    alone = roomy.estimate(candidate)
    found = with_kept(roomy, alone)
    assert found.candidate.saves and found.time < alone.time
    config = found.candidate.config("bf16")
    assert config.checkpoint_saves == found.candidate.saves
    assert autopar.ParallelConfig.parse(found.candidate.sections("bf16")) == config
    assert str(found.candidate).endswith("checkpointing but " + " and ".join(found.candidate.saves))
    full = Estimator(planned, find_node("dgx-h100", gpu_memory=(alone.peak.total + 1) / 1e9))
    assert with_kept(full, alone).candidate == candidate
    other = roomy.estimate(replace(candidate, checkpointing=False))
    assert with_kept(roomy, other) is other
