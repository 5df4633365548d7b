"""Every tutorial and the demo, small, under torchrun (2 processes) and as plain ``python``: the numbers they print."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.tiers import mainly
from tutorials import offline

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "tutorials"
APART = ("offline", "25_rehearse", "26_grpo")  # which are run outside of a job: tests/tutorials/test_printed_output.py
SCRIPTS = sorted(path.stem for path in TUTORIALS.glob("*.py") if path.stem not in APART)
SMALL = ["--context", "32", "--vocab-size", "300", "--batch-size", "2"]
MORE = ("classification zero 3", "replicas")
STEPS = {"01_tensor_parallel_inference": 5, "demo": 3}


def run(processes: int, folder: Path) -> dict[str, str]:
    """All scripts, one after another; name -> what it printed."""
    jobs = {
        name: [
            str(TUTORIALS / f"{name}.py"),
            *SMALL,
            "--steps",
            str(STEPS.get(name, 4)),
            "--output",
            str(folder / "out"),
        ]
        for name in SCRIPTS
    }
    classification = "06_hybrid_parallel_gpt2_classification"
    for name in SCRIPTS[1:-1]:  # a short text is encoded faster; the first and the demo take the one that ships
        jobs[name] += [] if name == classification else ["--dataset", str(folder / "text.txt")]
    (folder / "text.txt").write_text("\n".join(offline.load_text()[:40]))
    jobs["demo"] += ["--layers", "1", "--hidden", "32"]
    replicas = ["--precision", "fp32", "--pipeline-parallel-size", "1", "--zero-stage", "3"]
    jobs["classification zero 3"] = [*jobs[classification], *replicas]
    jobs["replicas"] = [*jobs["04_tensor_data_parallel"], "--tensor-parallel-size", "1"]
    if processes == 1:
        del jobs["18_prove_it"], jobs["19_derived_policy"]  # they start processes, which import all of it anew
    if find_spec("deepspeed") is None:
        del jobs["16_deepspeed"]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), str(Path(__file__).with_name("run_scripts.py"))]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }
    command.append(str(folder / "jobs.json"))
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: (folder / f"{name}.out").read_text() for name in jobs}


pytestmark = [pytest.mark.tier("all"), pytest.mark.together]  # one set-up runs all scripts, each in a minute or less

Runs = Callable[[int], dict[str, str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """What all scripts print with that many processes; run once."""
    return cache(lambda processes: run(processes, tmp_path_factory.mktemp(f"tutorials-{processes}")))


@pytest.fixture(scope="module", params=mainly(2, 1, later="sweep"), ids=["torchrun", "python"])
def printed(request: pytest.FixtureRequest, runs: Runs) -> dict[str, str]:
    return runs(request.param)


# How far two runs that must be one are apart; of a pair, before and after, the second one.
DIFFERENCE = re.compile(r"\d\.\d+e[-+]\d\d\b(?!,)")
ALLOWED = {"06_hybrid_parallel_gpt2_classification": 5e-3, "18_prove_it": 1e-3}  # fp16; gradients
WITHOUT = ("12_plan_before_you_rent", "19_derived_policy", "22_experts", "24_memory")  # which print no differences


@pytest.mark.every_case
@pytest.mark.parametrize("name", [*SCRIPTS, *MORE])
def test_a_script_ends_as_one_process_does(printed: dict[str, str], name: str) -> None:
    if name not in printed:
        pytest.skip("it is not installed, or starts processes")
    text = printed[name]
    found = [float(number) for number in DIFFERENCE.findall(text)]
    assert found or name in WITHOUT, text
    assert max(found, default=0.0) < ALLOWED.get(name, 1e-5), text
    assert "False" not in text


def test_what_else_they_print(runs: Runs) -> None:
    printed = runs(2)
    assert "part 0 of the model" in printed["replicas"] and "on the whole batch of 4:" in printed["replicas"]
    assert printed["classification zero 3"].count("difference of accuracies: 0.0000") == 1
    for line in (
        "scatter: own part forward: [0.0, 1.0] | [2.0, 3.0]",
        "scatter: all parts' gradients backward: [1.0, 1.0, 2.0, 2.0] | [1.0, 1.0, 2.0, 2.0]",
        "gather: all parts forward: [1.0, 1.0, 2.0, 2.0] | [1.0, 1.0, 2.0, 2.0]",
        "reduce: the sum forward: [3.0, 3.0] | [3.0, 3.0]",
        "copy: as it is forward, the sum of gradients backward: [3.0, 3.0] | [3.0, 3.0]",
    ):
        assert line in printed["07_megatron_toolbox"]
    for row in ("unigrams", "before training", "after training", "on rank 0", "3 training steps", "\nsampled: The "):
        assert row in printed["demo"]
    *_, rows = printed["24_memory"].partition("\n")
    losses = [float(row.split()[-1]) for row in rows.splitlines() if row.count("MB") == 4]
    assert len(losses) >= 7 and max(losses) - min(losses) < 1e-3
    assert "second policy: does not hold; dry run: fails\n  policy text:14: " in printed["11_first_policy"]
    assert "the fault is in transformer.h.0.attn: policy text:9:" in printed["18_prove_it"]
    assert "stays whole: nothing" in printed["19_derived_policy"]
    [(shard, momentum)] = re.findall(r"a shard of (\[.*?\]), its momentum (\[.*?\])", printed["20_any_optimizer"])
    assert shard != momentum
