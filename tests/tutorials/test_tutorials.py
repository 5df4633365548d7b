"""Every tutorial and the demo, small, under torchrun (2 processes) and as plain ``python``: the numbers they print."""

from __future__ import annotations

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
import torch.distributed as dist

from tests.tiers import mainly
from tests.tutorials.run_scripts import run_script
from tests.worlds import distributed
from tutorials import offline

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "tutorials"
APART = ("offline", "25_rehearse", "26_grpo")  # which are run outside of a job: tests/tutorials/test_printed_output.py
SCRIPTS = sorted(path.stem for path in TUTORIALS.glob("*.py") if path.stem not in APART)
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
    classification = "06_hybrid_parallel_gpt2_classification"
    for name in SCRIPTS[1:-1]:  # a short text is encoded faster; the first and the demo take the one that ships
        jobs[name] += [] if name == classification else ["--dataset", str(folder / "text.txt")]
    (folder / "text.txt").write_text("\n".join(offline.load_text()[:40]))
    jobs["demo"] += ["--layers", "1", "--hidden", "32"]
    jobs["classification fp32"] = [*jobs[classification], "--precision", "fp32"]
    jobs["classification replicas"] = [*jobs["classification fp32"], "--pipeline-parallel-size", "1"]
    jobs["classification zero 3"] = [*jobs["classification replicas"], "--zero-stage", "3"]
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


def number(text: str, pattern: str) -> float:
    """The number at ``#`` of the pattern."""
    found = re.search(re.escape(pattern).replace(r"\#", r"([-+.,\de]*\d)"), text)
    assert found, f"{pattern!r} is not in:\n{text}"
    return float(found.group(1).replace(",", ""))


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


def test_06_losses_and_accuracy_are_those_of_one_process(printed: dict[str, str]) -> None:
    text = printed["classification fp32"]
    assert number(text, "largest difference of losses: #") < 1e-5
    assert number(text, "difference of accuracies: #") == 0
    text = printed["06_hybrid_parallel_gpt2_classification"]  # fp16, compared with fp32
    assert 0 < number(text, "largest difference of losses: #") < 5e-3
    assert 0.3 < number(text, "accuracy # on 315 texts held out") < 0.9


@pytest.mark.tier("sweep")  # a run in one process
def test_06_in_fp16_stages_do_what_one_process_does(runs: Runs) -> None:
    stages, whole = (runs(processes)["06_hybrid_parallel_gpt2_classification"] for processes in (2, 1))
    assert "pipeline parallel 2" in stages
    assert "pipeline parallel 1" in whole
    for pattern in ("loss #", "-> #, ", ", # steps skipped", "accuracy #"):
        assert number(stages, pattern) == number(whole, pattern), pattern


@pytest.mark.parametrize("job", ["classification replicas", "classification zero 3"])
def test_06_replicas_with_zero_share_the_batch(runs: Runs, job: str) -> None:
    text = runs(2)[job]
    assert "data parallel 2" in text
    assert number(text, "largest difference of losses: #") < 1e-5
    assert number(text, "difference of accuracies: #") == 0


def test_07_the_toolbox(printed: dict[str, str]) -> None:
    text = printed["07_megatron_toolbox"]
    assert number(text, "a rank: differs by #") < 1e-6
    assert "iteration 4: loss" in text
    assert number(text, "largest difference of losses: #") < 1e-5
    assert number(text, "logits differ by #") < 1e-5


def test_07_mappings_of_two_ranks(runs: Runs) -> None:
    text = runs(2)["07_megatron_toolbox"]
    for line in (
        "scatter: own part forward: [0.0, 1.0] | [2.0, 3.0]",
        "scatter: all parts' gradients backward: [1.0, 1.0, 2.0, 2.0] | [1.0, 1.0, 2.0, 2.0]",
        "gather: all parts forward: [1.0, 1.0, 2.0, 2.0] | [1.0, 1.0, 2.0, 2.0]",
        "reduce: the sum forward: [3.0, 3.0] | [3.0, 3.0]",
        "copy: as it is forward, the sum of gradients backward: [3.0, 3.0] | [3.0, 3.0]",
        "saved at tensor parallel 2, loaded at 1:",
    ):
        assert line in text


def test_08_losses_are_those_of_one_process_before_and_after_resuming(printed: dict[str, str]) -> None:
    text = printed["08_3d_parallel"]
    assert number(text, "largest difference of losses: #") < 1e-5
    assert number(text, "largest difference of losses after resuming: #") < 1e-5
    assert "resumed at step 2" in text


def test_12_what_was_planned_is_held(printed: dict[str, str]) -> None:
    text = printed["12_plan_before_you_rent"]
    assert "planned and held are equal on all ranks: True" in text
    assert number(text, "weights on rank 0: planned #") == number(text, "bytes, held #")


def test_24_every_lever_leaves_the_loss(printed: dict[str, str]) -> None:
    _, *rows = printed["24_memory"].splitlines()
    losses = [float(row.split()[-1]) for row in rows if row.count("MB") == 4]
    assert len(losses) >= 7 and max(losses) - min(losses) < 1e-3


def test_15_adapters_are_those_of_one_process_and_of_plain_peft(printed: dict[str, str]) -> None:
    text = printed["15_lora"]
    assert number(text, "largest difference of losses: #") < 1e-5
    for line in ("logits of the base model differ by #", "plain PEFT reads them: logits differ by #"):
        assert number(text, line) < 1e-5
    assert number(text, "merged, plain transformers: logits differ by #") < 1e-5


def in_a_world(name: str, folder: Path, *more: str) -> str:
    """What one script prints in this world of ranks."""
    arguments = ["--vocab-size", "300", "--context", "16", "--batch-size", "1", "--steps", "4", *more]
    return run_script(str(TUTORIALS / f"{name}.py"), [*arguments, "--output", str(folder)])


@distributed(world_size=4)
def test_07_loads_at_tensor_parallel_4(tmp_path: Path) -> None:
    rank = dist.get_rank()
    text = in_a_world("07_megatron_toolbox", tmp_path)
    if rank == 0:
        assert number(text, "largest difference of losses: #") < 1e-5
        assert number(text, "saved at tensor parallel 2, loaded at 4: logits differ by #") < 1e-5


@pytest.mark.tier("all")
@distributed(world_size=8)
def test_08_two_by_two_by_two(tmp_path: Path) -> None:
    rank = dist.get_rank()
    text = in_a_world("08_3d_parallel", tmp_path)
    if rank == 0:
        assert "tensor parallel 2 x pipeline parallel 2 x data parallel 2: loss" in text
        assert "one process on the whole batch of 8:" in text
        assert number(text, "largest difference of losses: #") < 1e-5
        assert "tensor parallel 4 x pipeline parallel 1 x data parallel 2: resumed at step 2" in text
        assert number(text, "largest difference of losses after resuming: #") < 1e-5


def test_09_training_goes_on_with_the_same_losses(printed: dict[str, str]) -> None:
    text = printed["09_resume_on_another_mesh"]
    assert number(text, "largest difference of losses after resuming: #") < 1e-5
    assert number(text, "logits differ by #") == 0
    assert "resumed at step 2" in text


def test_10_losses_are_those_of_one_process(printed: dict[str, str]) -> None:
    text = printed["10_fully_sharded"]
    assert number(text, "fully_shard by hand: largest difference of losses: #") < 1e-5
    assert number(text.partition("one process")[2], "largest difference of losses: #") < 1e-5
    assert number(text, "logits differ by #") < 1e-5


@distributed(world_size=4)
def test_10_each_rank_holds_a_quarter(tmp_path: Path) -> None:
    rank = dist.get_rank()
    text = in_a_world("10_fully_sharded", tmp_path)
    if rank == 0:
        assert number(text.partition("one process")[2], "largest difference of losses: #") < 1e-5
        held, whole = (number(text, pattern) for pattern in ("replica 1: #", " of # weights"))
        assert 0.24 * whole < held < 0.27 * whole


def test_11_the_third_policy_holds_and_losses_are_those_of_one_process(printed: dict[str, str]) -> None:
    text = printed["11_first_policy"]
    assert "without a policy: no policy lists model_type 'scribe'" in text
    assert "first policy: does not hold; dry run: not run\n  policy text:2: no rule covers 2 parameters" in text
    assert "second policy: does not hold; dry run: fails\n  policy text:14: " in text
    assert "third policy: holds; dry run: ok" in text
    assert number(text, "largest difference of losses: #") < 1e-5
    assert number(text, "logits differ by #") < 1e-5


def test_13_losses_are_those_of_one_process(printed: dict[str, str]) -> None:
    text = printed["13_long_sequences"]
    assert number(text, "largest difference of losses: #") < 1e-5
    assert len(re.findall(r"tokens, plain: .* tokens/s", text)) == 3


@distributed(world_size=4)
def test_13_each_rank_holds_a_quarter_of_the_activations(tmp_path: Path) -> None:
    rank = dist.get_rank()
    text = in_a_world("13_long_sequences", tmp_path, "--length", "2048", "--steps", "1")
    if rank == 0:
        assert number(text, "largest difference of losses: #") < 1e-5
        cut, whole = (float(x) for x in re.findall(r"2048 tokens, .* at most ([\d.]+) MiB", text))
        assert cut < 0.3 * whole


def test_14_losses_are_those_of_one_process(printed: dict[str, str]) -> None:
    text = printed["14_trainer"]
    assert number(text, "resumed after 2 steps: largest difference of losses: #") == 0
    assert number(text.partition("one process")[2], "largest difference of losses: #") < 1e-5
    assert number(text, "logits differ by #") < 1e-5
    assert "held out: 11 sequences" in text


def test_16_losses_are_those_of_one_process(printed: dict[str, str]) -> None:
    if "16_deepspeed" not in printed:
        pytest.skip("deepspeed is not installed")
    assert number(printed["16_deepspeed"], "largest difference of losses: #") < 1e-5


def test_17_losses_are_those_of_one_process(printed: dict[str, str]) -> None:
    text = printed["17_survive_a_lost_rank"]  # here without restarts, so nothing is lost
    assert "attempt 1: loss" in text
    assert number(text, "without interruption: largest difference of losses: #") < 1e-5


def test_the_demo_goes_the_whole_way(printed: dict[str, str]) -> None:
    text = printed["demo"]
    assert number(text, "logits differ by at most #") < 1e-5
    assert "the same greedy tokens" in text
    for row in ("unigrams", "before training", "after training", "on rank 0", "3 training steps"):
        assert row in text
    assert re.search(r"^merged model, .*\nsampled: The state of the Union", text, re.MULTILINE)


def test_18_the_right_policy_holds_and_the_mistake_is_found(runs: Runs) -> None:
    text = runs(2)["18_prove_it"]
    assert "15 comparisons hold, 0 do not: it is the plain model" in text
    assert number(text, "worst gradient differ by #") < 1e-4
    assert "the fault is in transformer.h.0.attn: policy text:9: transformer.h.0.attn.c_attn: column" in text


def test_19_the_derived_policy_is_proven_and_trains(runs: Runs) -> None:
    text = runs(2)["19_derived_policy"]
    assert "  ffn: block.lift.in_features" in text and "    strokes: {column: heads}" in text
    assert "stays whole: nothing" in text and "check: holds; dry run: ok" in text
    assert "verify: 6 comparisons hold, 0 do not" in text
    assert number(text, "-> #") < number(text, "loss #")
    assert "merged checkpoint, plain model: logits differ by less than 1e-5: True" in text


def test_20_an_optimizer_of_whole_matrices_makes_the_weights_of_one_process(printed: dict[str, str]) -> None:
    text = printed["20_any_optimizer"]
    assert number(text, "weights: at most #") < 1e-5
    assert re.search(r"momenta on 1 rank, from \d: at most ", text)
    shards = re.search(r"a shard of \[(\d+), (\d+)\], its momentum \[(\d+), (\d+)\]", text)
    assert "tensor parallel 1 " in text or (shards is not None and shards.groups()[:2] != shards.groups()[2:])


def test_21_hooks_and_edits_are_those_of_the_plain_model(printed: dict[str, str]) -> None:
    text = printed["21_look_inside"]
    for what in ("blocks: at most #", "at position 3: #", "ablated head 0: #", "neurons: #", "edited: #"):
        assert number(text, what) < 1e-5, what
    assert number(text, "effect #") > 0.01
