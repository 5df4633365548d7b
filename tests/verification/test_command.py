"""``autopar verify``: what it refuses before a process starts, models of a script, and its processes."""

import gc
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from autopar.cli import app
from autopar.config import ParallelConfig
from autopar.tools.verification.report import VerificationReport
from autopar.tools.verification.verify import checks_of, run_on_ranks, verify_on_ranks
from tests.harness.tiers import mainly
from tests.harness.worlds import pooled
from tests.random_models import batches, build, cases

_SCRIPT = """
import torch
from torch import nn

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x, y):
        out = self.down(torch.relu(self.up(x)))
        return out, nn.functional.mse_loss(out, y)

def batches():
    torch.manual_seed(0)
    return [{"x": torch.randn(4, 6), "y": torch.randn(4, 6)}]
"""
_POLICY = "units: {ffn: inferred}\nprefix: {up: {column: ffn}, down: {row: ffn}}\n"


@pytest.mark.tier("all")
def test_a_module_and_batches_of_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model exists in this process only: the ranks are forks."""
    monkeypatch.chdir(tmp_path)
    Path("my_model.py").write_text(_SCRIPT)
    Path("policy.yaml").write_text(_POLICY)
    command = ["verify", "my_model.py:Plain", "--tp", "2", "--policy", "policy.yaml", "--json"]
    result = CliRunner().invoke(app, command)
    said = json.loads(result.stdout)["error"]["message"]
    assert "verify cannot make inputs for Plain.\n  Pass batches=" in said
    result = CliRunner().invoke(app, [*command, "--batches", "my_model.py:batches"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["ok"] and report["mesh"] == {"tp": 2, "pp": 1, "dp": 1}
    assert {row["check"] for row in report["rows"] if row["holds"]} >= {"weights", "forward", "backward", "step"}
    assert [rank["weights"] for rank in report["memory"]] == [232, 232] and report["plain_memory"]["weights"] == 440


@pytest.mark.tier("all")
@pytest.mark.filterwarnings("ignore:the conversion of .* in save_pretrained:UserWarning")
@pooled(world_size=2)
def test_a_merged_checkpoint_with_the_names_in_memory_is_compared_with_those() -> None:
    """Tensors of this type are computed for the hub, so that merging keeps their names in memory."""
    (case, *_) = cases("inkling2_loop_text")
    model = build(case, 6, 3)
    checks = checks_of(["save", "reshard"])
    report = verify_on_ranks(model, ParallelConfig.parse({"tp": 2}), None, batches(case, model.config), checks, None)
    assert report.ok and [row.what for row in report.rows if row.check == "save"] == ["merged checkpoint"], str(report)


class Kept:
    """Holds a process group, and itself: only the garbage collection ends it."""

    def __init__(self, group: object) -> None:
        self.group, self.own = group, self


def collects(alarm: Callable[[VerificationReport], None]) -> str:
    gc.collect()
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"


@pytest.mark.tier("all")
@pytest.mark.parametrize("alive", mainly(True, False, later="sweep"))
def test_a_process_group_that_this_process_had_is_not_ended_by_its_forks(alive: bool, tmp_path: Path) -> None:
    """Its end joins threads that a fork does not have."""
    gc.disable()
    try:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
        kept = Kept(dist.group.WORLD)
        dist.destroy_process_group()
        held = [kept] if alive else []
        del kept
        assert run_on_ranks(collects, 2, timeout=60) == "rank 0 of 2"
        held.clear()
        assert run_on_ranks(collects, 2, timeout=60) == "rank 0 of 2"
    finally:
        gc.enable()
