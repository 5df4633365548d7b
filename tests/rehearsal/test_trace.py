"""The trace of a real job: what AUTOPAR_TRACE writes, and what ``autopar trace`` says of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

import autopar
from autopar.distributed.mesh import MPU
from autopar.distributed.trace import read
from autopar.tools.cli import app
from tests.pool import pooled
from tests.small import llama

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


def run(folder: Path) -> Path:
    """Run the script on two ranks; returns the folder of their traces."""
    script, traces = folder / "train.py", folder / "traces"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "AUTOPAR_TRACE": str(traces), "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([*launcher, str(script)], env=environment, capture_output=True, timeout=200, check=False)
    return traces


@pytest.mark.tier("all")
def test_ranks_that_part_are_named_with_their_lines(tmp_path: Path) -> None:
    traces = run(tmp_path)
    result = CliRunner().invoke(app, ["trace", str(traces)])
    assert result.exit_code == 1
    assert "are different collectives:\n  rank 0: all_reduce over world [3] float32\n    train.py:14" in result.output
    assert "\n  rank 1: all_gather over world [1] float32\n    train.py:12\n" in result.output
    strays, right = autopar.rehearse(llama(), {"tp": 2}, 2).against(read(traces))
    assert (strays.rank, strays.wrong is None, right.wrong) == (0, False, None)
    assert "then call 0 of the next is all_reduce over world [3] float32\n    train.py:14\n  where the" in str(strays)
    for file in traces.iterdir():  # a job that goes on as it began
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    result = CliRunner().invoke(app, ["trace", str(traces)])
    assert (result.exit_code, result.output.partition("\n")[2]) == (
        0,
        "every collective and message finds its like, and all ranks come to an end\n",
    )
    calls = read(traces)[0]
    assert {call.group.ranks for call in calls} == {(0, 1)}
    assert sum(call.kind == "all_reduce" and call.sizes == ((2, 8, 24),) for call in calls) > 4
    assert any(call.where.startswith("autopar/distributed/collectives.py") for call in calls)


def test_a_folder_without_traces(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["trace", str(tmp_path)])
    assert result.exit_code == 1
    assert f"has no traces (rank-0.jsonl ...): start the job with AUTOPAR_TRACE={tmp_path}" in result.stderr


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
    mpu.destroy()
