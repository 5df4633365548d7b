"""Every tutorial and the demo, small, under torchrun (2 processes) and as plain ``python``: the numbers they print."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tutorials import offline

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "tutorials"
SCRIPTS = sorted(path.stem for path in TUTORIALS.glob("*.py") if path.stem != "offline")
SMALL = ["--context", "32", "--vocab-size", "300", "--batch-size", "2"]
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
    for name in SCRIPTS[1:-1]:  # a short text is encoded faster; the first and the demo take the one that ships
        jobs[name] += ["--dataset", str(folder / "text.txt")]
    (folder / "text.txt").write_text("\n".join(offline.load_text()[:40]))
    jobs["demo"] += ["--layers", "1", "--hidden", "32"]
    jobs["replicas"] = [*jobs["04_tensor_data_parallel"], "--tensor-parallel-size", "1"]
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
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: (folder / f"{name}.out").read_text() for name in jobs}


@pytest.fixture(scope="module", params=[2, 1], ids=["torchrun", "python"])
def printed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run(request.param, tmp_path_factory.mktemp(f"tutorials-{request.param}"))


def number(text: str, pattern: str) -> float:
    """The number at ``#`` of the pattern."""
    found = re.search(re.escape(pattern).replace(r"\#", r"([-+.\de]+)"), text)
    assert found, f"{pattern!r} is not in:\n{text}"
    return float(found.group(1))


def test_01_logits_and_tokens_are_the_plain_models(printed: dict[str, str]) -> None:
    text = printed["01_tensor_parallel_inference"]
    assert number(text, "largest difference of logits: #") < 1e-5
    assert "same tokens as the plain model: True" in text
    assert "generated 5 tokens for 2 prompts" in text


def test_02_losses_are_those_of_one_process(printed: dict[str, str]) -> None:
    assert number(printed["02_tensor_parallel_training"], "largest difference of losses: #") < 1e-5


def test_03_the_merged_checkpoint_is_the_model(printed: dict[str, str]) -> None:
    text = printed["03_merge_checkpoints"]
    assert number(text, "largest difference of logits: #") < 1e-5
    before, after = (float(part) for part in re.findall(r"from_parallelized: (\S+), (\S+)\n", text)[0])
    assert before > 1e-3
    assert after == 0
    assert re.search(r"both merged checkpoints hold the same \d+ tensors: True", text)


def test_04_losses_are_those_of_one_process_on_the_whole_batch(printed: dict[str, str]) -> None:
    assert number(printed["04_tensor_data_parallel"], "largest difference of losses: #") < 1e-5


def test_04_replicas_share_the_batch(printed: dict[str, str]) -> None:
    text = printed["replicas"]  # tensor_parallel_size 1: two processes are two replicas
    assert number(text, "largest difference of losses: #") < 1e-5
    replicas = text.count("part 0 of the model")
    assert f"one process on the whole batch of {2 * replicas}:" in text


def test_05_losses_are_those_of_one_process(printed: dict[str, str]) -> None:
    text = printed["05_megatron_like_gpt2"]
    assert number(text, "largest difference of losses: #") < 1e-5
    assert "transformer.wte.weight: [300, 128]" in text


def test_09_training_goes_on_with_the_same_losses(printed: dict[str, str]) -> None:
    text = printed["09_resume_on_another_mesh"]
    assert number(text, "largest difference of losses after resuming: #") < 1e-5
    assert number(text, "logits differ by #") == 0
    assert "resumed at step 2" in text


def test_the_demo_goes_the_whole_way(printed: dict[str, str]) -> None:
    text = printed["demo"]
    assert number(text, "logits differ by at most #") < 1e-5
    assert "the same greedy tokens" in text
    for row in ("unigrams", "before training", "after training", "on rank 0", "3 training steps"):
        assert row in text
    assert re.search(r"^merged model, .*\nsampled: The state of the Union", text, re.MULTILINE)
