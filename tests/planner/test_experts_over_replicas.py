"""Experts that replicas share in the planner: bytes of real ranks, what is sent, and which sizes the search tries."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.compat.tensors import local_part
from autopar.errors import ConfigError
from autopar.tools.planner.candidate import Rows
from autopar.tools.planner.hardware import find_node
from autopar.tools.planner.network import Group
from autopar.tools.planner.search import Space
from autopar.tools.planner.stage_costs import Collective, travel_over
from tests.planner.saved_bytes import SavedBytes, states_are_as_planned
from tests.planner.test_experts import SEQUENCE, mixtral
from tests.pool import pooled

BATCH = 4
SETTINGS = {"experts_implementation": "batched_mm"}  # the grouped one has no fp32 without data
SHARED = {
    "ep 2 of 4": {"ep": 2},
    "ep 2 of 4, ZeRO-1": {"ep": 2, "zero": {"stage": 1}},
    "ep 4, ZeRO-1, bf16": {"ep": 4, "zero": {"stage": 1}, "precision": {"dtype": "bf16"}},
    "tp 2, ep 4": {"tp": 2, "ep": 4, "zero": {"stage": 1}},
    "pp 2, ep 2": {"pp": 2, "ep": 2, "zero": {"stage": 1}},
    "cp 2, ep 2, ZeRO-1": {"cp": 2, "ep": 2, "zero": {"stage": 1}},
    "ep 2 of 4, ZeRO-3": {"ep": 2, "zero": {"stage": 3}},
    "ep 4, ZeRO-3, bf16": {"ep": 4, "zero": {"stage": 3}, "precision": {"dtype": "bf16"}},
    "tp 2, ep 4, ZeRO-3": {"tp": 2, "ep": 4, "zero": {"stage": 3}},
}


def _ids(rows: int) -> torch.Tensor:
    return torch.randint(0, 131, (rows, SEQUENCE), generator=torch.Generator().manual_seed(0))


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
    mpu.destroy()


@pytest.mark.parametrize("config", [{"ep": 2}, {"tp": 2, "ep": 2}], ids=["of replicas", "of tp ranks"])
@pooled(world_size=2)
def test_what_ranks_keep_is_what_was_planned(config: dict[str, Any]) -> None:
    """Routes are uneven on each rank, and even in the mean of them."""
    plan = autopar.plan_memory(mixtral(**SETTINGS), config, sequence=SEQUENCE, batch=BATCH, gpus=2, device="cpu")
    model: Any = autopar.initialize(mixtral(**SETTINGS), config).train()
    mpu = model.mpu
    ids = _ids(2 * BATCH)[mpu.dp.rank * BATCH :][:BATCH]
    saved = SavedBytes(model)
    with saved:
        model.execute_pipeline({"input_ids": ids, "labels": ids, "use_cache": False})
    kept = torch.tensor(float(saved.most))
    dist.all_reduce(kept)
    planned = sum(plan.kept.values()) / 2
    assert len(plan.kept) == 2 and abs(kept.item() / 2 / planned - 1) < 0.05, (kept.item() / 2, planned)
    assert plan.ranks[0, mpu.dp.rank, mpu.tp.rank].weights == sum(parameter.nbytes for parameter in model.parameters())
    mpu.destroy()


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


def test_what_excludes_each_other_is_refused() -> None:
    with pytest.raises(ConfigError, match="expert_parallel_size=4 must be 1 or a multiple"):
        autopar.plan_memory(mixtral(), {"ep": 4}, sequence=SEQUENCE, gpus=2)
