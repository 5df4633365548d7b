"""A rehearsed rank issues what a real one does, call for call."""

import pickle
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

import autopar
from autopar.tensor_parallel import regions
from autopar.tools.planner.planned_model import inputs_of
from autopar.tools.rehearsal.one_rank import Job, train
from autopar.tools.rehearsal.trace import Call, Group, Recorder
from tests.harness.tiers import in_tier, mainly
from tests.harness.worlds import pooled
from tests.rehearsal.programs import BATCH, CASES, POLICIES, SEQUENCE, Case, case_of_type, config_of

FIRST = (
    *("tp x dp", "pp x tp", "tp 4, sequence", "pp x dp, zero 3", "cp x tp", "experts of replicas", "interleaved"),
    *("cp 4, states", "tp x dp, torch's replicas", "dp in two parts, torch's norms", "pp 4, numbers of the host"),
    "tp x dp, muon",
)


def of_program(parts: list[tuple[str, Call]], *, routed: bool) -> list[tuple[str, Call]]:
    """Return the calls behind ``initialize``, without places, and without the length of objects."""
    found = []
    for part, call in parts:
        objects = call.dtype == "uint8" and call.kind in ("all_gather", "broadcast")
        rows = routed and bool(call.splits)  # as many as the routers say
        states = "state_passing.py" in call.where
        of_gloo = states and call.kind == "all_reduce"  # which number the pass has: nccl has no tags
        if part != "initialize" and call.kind != "new_group" and not of_gloo:
            splits, sizes = () if rows else call.splits, () if rows or objects else call.sizes
            group = Group("pp control", call.group.ranks) if call.group.name.startswith("pp ") else call.group
            tag = 0 if states else call.tag
            plain = call._replace(group=group, where="", control=False, splits=splits, sizes=sizes, tag=tag)
            found.append((part, plain))
    return found


@pooled(world_size=4)
def write_traces(case: Case, folder: Path) -> None:
    write(case, folder)


@pooled(world_size=8)
def write_traces_of_eight(case: Case, folder: Path) -> None:
    write(case, folder)


# As over nccl, where tensors are messages of their own and receives are posted when they are awaited.
@mock.patch("autopar.pipeline_parallel.p2p.in_fake_world", lambda: True)
def write(case: Case, folder: Path) -> None:
    model = case.build()
    inputs, settings = inputs_of(model, BATCH, SEQUENCE), {"own": case.loop, "optimizer": case.optimizer}
    job = Job(model, config_of(case), dist.get_world_size(), inputs, folder=str(folder / "checkpoint"), **settings)
    parts: list[tuple[str, Call]] = []
    now = ["initialize"]
    with Recorder(lambda call: parts.append((now[0], call))):
        train(job, model, now)
    (folder / f"{dist.get_rank()}.pickle").write_bytes(pickle.dumps(parts))


@pytest.mark.tier("test")
@pytest.mark.parametrize("name", [*mainly(*FIRST), *in_tier("sweep", sorted(set(CASES) - set(FIRST)))])
def test_calls_of_four_ranks(name: str, tmp_path: Path) -> None:
    compare(CASES[name], tmp_path, routed="experts" in name)


@pytest.mark.tier("all")
@pytest.mark.parametrize("model_type", POLICIES)
def test_every_policy_in_two_stages_of_two(model_type: str, tmp_path: Path) -> None:
    compare(case_of_type(model_type), tmp_path, routed=False)


@pytest.mark.tier("sweep")
@pytest.mark.parametrize("name", ["pp x tp", "pp x dp, zero 3", "cp x tp", "tp x dp, zero 1, clipped", "interleaved"])
def test_calls_of_eight_ranks(name: str, tmp_path: Path) -> None:
    compare(CASES[name], tmp_path, routed=False, world=8)


@pytest.fixture(autouse=True)
def _overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum gradients beside those of weights in small models too, as real ranks do."""
    monkeypatch.setattr(regions, "_LEAST", 0)


def compare(case: Case, folder: Path, *, routed: bool, world: int = 4) -> None:
    (write_traces if world == 4 else write_traces_of_eight)(case, folder)
    sizes = {"batch": BATCH, "sequence": SEQUENCE}
    found = autopar.rehearse(case.build(), config_of(case), world, optimizer=case.optimizer, loop=case.loop, **sizes)
    assert found.problems == []
    assert len(found.traces) >= 2
    for rank, parts in found.traces.items():
        traced = pickle.loads((folder / f"{rank}.pickle").read_bytes())
        ours, real = (of_program(each, routed=routed) for each in (parts, traced))
        for number, (one, other) in enumerate(zip(ours, real, strict=False)):
            assert one == other, f"call {number} of rank {rank}"
        assert len(ours) == len(real)
    expected = {"step"} if case.loop else {"step", "evaluation", "save", "load"}
    assert expected <= {part for part, _ in found.traces[0]}
