"""A rehearsed rank issues what a real one does, call for call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.distributed.trace import Call, Group, Recorder
from autopar.tools.rehearsal.one_rank import Job, inputs_of, train
from tests.pool import pooled
from tests.rehearsal.programs import CASES, Case, config_of
from tests.tiers import in_tier, mainly

FIRST = ("tp x dp", "pp x tp", "tp 4, sequence", "pp x dp, zero 3", "cp x tp", "experts of replicas", "interleaved")


def of_step(parts: list[tuple[str, Call]], *, routed: bool) -> list[tuple[str, Call]]:
    """Return the calls of the step and the evaluation, without places, and without the length of objects."""
    found = []
    for part, call in parts:
        objects = call.dtype == "uint8" and call.kind in ("all_gather", "broadcast")
        rows = routed and bool(call.splits)  # as many as the routers say
        if part != "initialize" and call.kind != "new_group":
            splits, sizes = () if rows else call.splits, () if rows or objects else call.sizes
            found.append((part, call._replace(where="", control=False, splits=splits, sizes=sizes)))
    return found


@pooled(world_size=4)
def write_traces(case: Case, folder: Path) -> None:
    model = case.build()
    inputs = inputs_of(model, case.batch, case.sequence)
    job = Job(model, config_of(case), 4, inputs, case.average)
    parts: list[tuple[str, Call]] = []
    now = ["initialize"]
    with Recorder(lambda call: parts.append((now[0], call))):
        train(job, model, now)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(parts))


def read(path: Path) -> list[tuple[str, Call]]:
    found = []
    for part, (kind, (name, ranks), sizes, dtype, splits, *rest) in json.loads(path.read_text()):
        group, shapes = Group(name, tuple(ranks)), tuple(map(tuple, sizes))
        found.append((part, Call(kind, group, shapes, dtype, tuple(map(tuple, splits)), *rest)))
    return found


@pytest.mark.tier("test")
@pytest.mark.parametrize("name", [*mainly(*FIRST), *in_tier("sweep", sorted(set(CASES) - set(FIRST)))])
def test_calls_of_four_ranks(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    write_traces(case, tmp_path)
    with torch.device("meta"):
        model: Any = case.build()
    found = autopar.rehearse(model, config_of(case), 4, batch=case.batch, sequence=case.sequence)
    assert found.problems == []
    assert len(found.traces) >= 2
    for rank, parts in found.traces.items():
        traced = read(tmp_path / f"{rank}.json")
        ours, real = (of_step(each, routed="experts" in name) for each in (parts, traced))
        for number, (one, other) in enumerate(zip(ours, real, strict=False)):
            assert one == other, f"call {number} of rank {rank}"
        assert len(ours) == len(real)
