"""The trace of a real job: what AUTOPAR_TRACE writes, and what ``autopar trace`` says of it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from autopar.cli import app
from autopar.distributed.mesh import MPU
from autopar.tools.rehearsal.trace import read
from tests.harness.worlds import pooled
from tests.scripts import printed, torchrun

SCRIPT = """
import torch
import torch.distributed as dist
import autopar
from tests.small import llama

model = autopar.initialize(llama().train(), {"tp": 2})
ids = torch.arange(16).view(2, 8)
model(input_ids=ids, labels=ids).loss.backward()
group = model.mpu.get_tensor_parallel_group()
if dist.get_rank() == 1:
    dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.zeros(1), group=group)
else:
    dist.all_reduce(torch.zeros(3), group=group, async_op=True)
"""


@pytest.mark.tier("all")
def test_ranks_that_part_are_named_with_their_lines(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    torchrun(tmp_path, SCRIPT, 2, AUTOPAR_TRACE=str(traces))
    code, output = told(traces)
    assert code == 1
    assert "are different collectives:\n  rank 0: all_reduce over world [3] float32\n    train.py:14" in output
    assert "\n  rank 1: all_gather over world [1] float32\n    train.py:12\n" in output
    for file in traces.iterdir():  # a job that goes on as it began
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    code, output = told(traces)
    assert (code, output.partition("\n")[2]) == (0, ENDS_WELL)
    calls = read(traces)[0]
    assert {call.group.ranks for call in calls} == {(0, 1)}
    assert sum(call.kind == "all_reduce" and call.sizes == ((2, 8, 24),) for call in calls) > 4
    assert any(call.where.startswith("autopar/distributed/collectives.py") for call in calls)


def line(rank: int, kind: str = "all_reduce", ranks: Sequence[int] = (0, 1), peer: int = -1, size: int = 3) -> str:
    group = ["world" if len(ranks) > 2 else "tp", list(ranks)]
    return json.dumps([kind, group, [[size]], "float32", [], peer, 0, f"train.py:{10 + rank}", False]) + "\n"


def write(folder: Path, lines: Mapping[int, Sequence[str]], world: int = 0, job: str = "") -> None:
    folder.mkdir(exist_ok=True)
    head = json.dumps({"world": world, "job": job}) + "\n" if world else ""
    for rank, own in lines.items():
        (folder / f"rank-{rank}.jsonl").write_text(head + "".join(own))


def told(folder: Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["trace", str(folder)])
    return result.exit_code, result.output


ENDS_WELL = "all collectives and messages match, and all ranks finish\n"


def test_what_is_told_of_written_traces(tmp_path: Path) -> None:
    folder = tmp_path / "lines"
    write(folder, {rank: [line(rank)] for rank in (0, 1)})
    with (folder / "rank-1.jsonl").open("a") as file:
        file.write(line(1)[:30])
    (folder / "rank-0 (copy).jsonl").write_text("no trace")
    assert told(folder) == (0, "2 ranks, 1 calls each\n" + ENDS_WELL)
    write(folder, {0: ["[1, 2\n"]})
    code, output = told(folder)
    assert code == 1 and "rank-0.jsonl:1 is not a line of a trace: '[1, 2'" in output

    folder = tmp_path / "missing"
    ranks = (0, 1, 2, 3)
    write(folder, {rank: [line(rank, ranks=ranks)] for rank in (1, 3)})
    expected = "2 ranks, 1 calls each\nno trace of rank 0, 2: only the other ranks are compared\n"
    assert told(folder) == (1, expected + ENDS_WELL)

    folder = tmp_path / "jobs"
    write(folder, {rank: [line(rank)] for rank in range(4)}, world=4, job="first")
    write(folder, {rank: [line(rank)] for rank in range(2)}, world=2, job="second")
    code, output = told(folder)
    assert code == 1
    assert "rank-0.jsonl of 2 ranks (job second), rank-2.jsonl of 4 ranks (job first)" in output

    folder = tmp_path / "ends"
    write(folder, {0: [line(0), line(0)], 1: [line(1)]})
    code, output = told(folder)
    assert code == 1
    assert output.splitlines()[1] == "rank 1 ended after all_reduce over tp [3] float32"
    assert "rank 0 waits in all_reduce over tp [3] float32" in output

    folder = tmp_path / "ring"
    ring = {rank: [line(rank, "recv", peer=1 - rank), line(rank, "send", peer=1 - rank)] for rank in (0, 1)}
    write(folder, ring)
    assert told(folder) == (0, "2 ranks, 2 calls each\n" + ENDS_WELL)
    write(folder, {0: ring[0], 1: ring[1][:1]})
    code, output = told(folder)
    assert code == 1 and "rank 0 waits in recv from rank 1 over tp [3] float32\n    train.py:10" in output

    result = CliRunner().invoke(app, ["trace", str(tmp_path)])
    assert result.exit_code == 1
    assert f"has no traces (rank-N.jsonl). Start the job with AUTOPAR_TRACE={tmp_path}" in result.stderr


def test_an_attempt_of_an_elastic_job_has_a_folder_of_its_own(tmp_path: Path) -> None:
    code = "import torch, torch.distributed as dist; from autopar.tools.rehearsal.trace import trace_from_environment\n"
    code += "dist.init_process_group('gloo', init_method='tcp://127.0.0.1:0', rank=0, world_size=1)\n"
    code += "trace_from_environment(); dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX); dist.barrier()"
    job = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "mine"}
    printed("-c", code, AUTOPAR_TRACE=str(tmp_path), **job)
    file = tmp_path / "attempt-2" / "rank-0.jsonl"
    assert json.loads(file.read_text().partition("\n")[0]) == {"world": 1, "job": "mine"}
    assert str(read(file.parent)[0][0]) == "all_reduce (max) over world [3] float32"


@pytest.mark.tier("test")
@pooled(world_size=2)
def test_a_rank_that_traces_alone_takes_no_other_way() -> None:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setenv("AUTOPAR_TRACE", "traces")
        mpu = MPU(tensor_parallel_size=2)  # ranks agree on what carries their collectives
        assert mpu.tp.transport is None
        mpu.destroy()
    mpu = MPU(tensor_parallel_size=2, cpu_transport="shm")
    assert mpu.tp.transport is not None
