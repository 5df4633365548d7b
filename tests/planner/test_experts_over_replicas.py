"""Whole experts, also over replicas, in the planner: bytes of real ranks, what is sent, what is searched."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

import autopar
from autopar.compat.tensors import local_part
from autopar.errors import ConfigError
from autopar.tools.planner.candidate import Rows
from autopar.tools.planner.hardware import find_node
from autopar.tools.planner.network import Group
from autopar.tools.planner.search import Space
from autopar.tools.planner.stage_costs import Collective, travel_over
from tests.harness.worlds import pooled
from tests.planner.command import planned, run, saved, sizes
from tests.planner.saved_bytes import SavedBytes, mixtral, states_are_as_planned
from tests.small import llama

BATCH = 4
SETTINGS = {"experts_implementation": "batched_mm"}  # the grouped one has no fp32 without data
SHARED = yaml.safe_load(Path(__file__).with_name("meshes.yaml").read_text())["experts over four ranks"]


@pytest.mark.parametrize("mesh", SHARED)
@pooled(world_size=4)
def test_states_are_those_that_ranks_hold(mesh: str) -> None:
    plan, model = states_are_as_planned(lambda: mixtral(**SETTINGS), SHARED[mesh], SEQUENCE, BATCH)
    mpu = model.mpu
    held = plan.ranks[mpu.pp.rank, mpu.dp_cp.rank, mpu.tp.rank]
    experts = [parameter for name, parameter in model.named_parameters() if ".experts." in name]
    assert held.expert_weights == sum(local_part(parameter).nbytes for parameter in experts)
    stage = plan.stages[mpu.pp.rank]
    peers = [bytes_ for (pp, _, _), bytes_ in plan.ranks.items() if pp == mpu.pp.rank]
    assert stage.weights == max(peer.weights for peer in peers)
    assert stage.optimizer == max(peer.optimizer for peer in peers if peer.weights == stage.weights)


@pytest.mark.parametrize("config", [{"ep": 2}, {"tp": 2, "ep": 2}], ids=["of replicas", "of tp ranks"])
@pooled(world_size=2)
def test_what_ranks_keep_is_what_was_planned(config: dict[str, Any]) -> None:
    """Routes are uneven on each rank, and even in the mean of them."""
    plan = autopar.plan_memory(mixtral(**SETTINGS), config, sequence=SEQUENCE, batch=BATCH, gpus=2, device="cpu")
    model: Any = autopar.initialize(mixtral(**SETTINGS), config).train()
    mpu = model.mpu
    ids = torch.randint(0, 131, (2 * BATCH, SEQUENCE), generator=torch.Generator().manual_seed(0))
    ids = ids[mpu.dp.rank * BATCH :][:BATCH]
    with SavedBytes(model) as waiting:
        model.execute_pipeline({"input_ids": ids, "labels": ids, "use_cache": False})
    kept = torch.tensor(float(waiting.most))
    dist.all_reduce(kept)
    due = sum(plan.kept.values()) / 2
    assert len(plan.kept) == 2 and abs(kept.item() / 2 / due - 1) < 0.05, (kept.item() / 2, due)
    assert plan.ranks[0, mpu.dp.rank, mpu.tp.rank].weights == sum(parameter.nbytes for parameter in model.parameters())


def test_the_search_tries_sizes_that_fit() -> None:
    space = Space(16, 8, 64)
    assert list(space.experts(2, 4)) == [1, 2, 4, 8] and list(space.experts(1, 1)) == [1]
    assert list(Space(256, 8, 64).experts(4, 64)) == [1, 4, 8, 16, 32, 64]
    assert list(Space(16, 8, 64, ep=4).experts(2, 4)) == [4] and not list(Space(16, 8, 64, ep=4).experts(8, 2))
    tried = [candidate for batch in space.candidates((2, 1, 1, 8)) for candidate in batch]
    for stage in (1, 3):
        assert {candidate.ep for candidate in tried if candidate.zero == stage} == {1, 2, 4, 8, 16}
    for candidate in tried:
        candidate.config("bf16")  # none is refused
    with pytest.raises(ConfigError, match="ep must be at least 1, not 0"):
        Space(16, 8, 64, ep=0)


@pytest.mark.parametrize(
    ("rows", "group"),
    [(Rows(1, ep=8), (8, 1)), (Rows(2, ep=8), (8, 1)), (Rows(1, ep=16), (16, 2)), (Rows(1, 2, ep=8), (8, 2))],
)
def test_a_group_that_leaves_the_node_sends_slower(rows: Rows, group: tuple[int, int]) -> None:
    node = find_node("dgx-h100")
    travel = travel_over(rows, node, [Collective("all_to_all", 10**9, False, "ep")])["ep"]
    assert travel.bytes == 10**9 * (rows.ep - 1) // rows.ep
    assert travel.forward == node.network.seconds("all_to_all", 10**9, Group(*group))
    assert (travel.forward > 5e-3) is (group[1] > 1)


def test_what_excludes_each_other_is_refused_and_a_dense_model_has_no_experts(folder: Path) -> None:
    with pytest.raises(ConfigError, match="expert_parallel_size=4 must be 1 or a multiple"):
        autopar.plan_memory(mixtral(), {"ep": 4}, sequence=SEQUENCE, gpus=2)
    result = run(folder / "llama", *SIZES, "--ep", 2)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: no mesh of 4 GPUs fits: expert_parallel_size: this model has no experts")
    with pytest.raises(autopar.ConfigError, match="this model has no experts that can be sharded by expert"):
        autopar.plan_memory(llama(), WHOLE, sequence=SEQUENCE)


SEQUENCE = 32
SIZES = sizes(SEQUENCE)
WHOLE = {"model_parallelism": {"tensor_parallel_size": 2, "expert_parallel_size": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for name, model in {"mixtral": mixtral(), "llama": llama(num_hidden_layers=4)}.items():
        saved(model, path / name)
    return path


@pytest.mark.tier("all")
def test_the_search_tries_both_and_plans_what_plan_memory_does(folder: Path) -> None:
    given = (folder / "mixtral", *SIZES, "--zero", 0, "--no-checkpointing")
    best = planned(*given, "--ep", 4)["best"]
    assert best and all(each["ep"] == 4 for each in best) and any(each["ep"] > each["tp"] for each in best)
    for each in best:
        assert each["config"]["model_parallelism"]["expert_parallel_size"] == each["ep"]
        assert each["bytes_sent"]["ep" if each["ep"] > each["tp"] else "tp"] > 0
        plan = autopar.plan_memory(mixtral(), each["config"], sequence=SEQUENCE, batch=8 // each["dp"], gpus=4)
        assert [{**memory.parts(), "total": memory.total} for memory in plan.stages] == each["memory"]
    either, sharded = planned(*given), planned(*given, "--ep", 1)
    assert either["tried"] > sharded["tried"] and all(each["ep"] == 1 for each in sharded["best"])


@pytest.mark.tier("all")
def test_a_row_for_whole_experts_where_some_have_them(folder: Path) -> None:
    refused = run(folder / "mixtral", *SIZES, "--ep", 3)
    assert refused.exit_code == 1 and "the experts that were asked for do not fit" in refused.stderr
    sharded = planned(folder / "mixtral", *SIZES, "--ep", 4, "--zero", 3)["best"]
    assert sharded and {each["config"]["zero"]["stage"] for each in sharded} == {3}
    assert "\n ep " in run(folder / "mixtral", *SIZES, "--ep", 2).stdout
    assert "\n ep " not in run(folder / "llama", *SIZES).stdout
