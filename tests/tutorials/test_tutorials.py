"""Every tutorial and the demo, small, on 2 processes and as plain ``python``; what they read offline."""

import argparse
import json
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.fetched_packages import with_package
from tests.harness.tiers import mainly
from tests.harness.worlds import distributed
from tests.scripts import printed as python_prints, python
from tests.tutorials.run_scripts import run_script
from tutorials import offline

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "tutorials"
NUMBERED = sorted(path.stem for path in TUTORIALS.glob("[0-9]*.py"))
APART = ("05_grpo", "14_plan_and_rehearse", "15_video_lora")  # these run outside of the common job
SCRIPTS = [*(name for name in NUMBERED if name not in APART), "demo"]
SMALL = ["--context", "32", "--vocab-size", "300", "--batch-size", "2"]
CLASSIFICATION = "06_hybrid_parallel_gpt2_classification"
MORE = ("classification zero 3", "replicas")
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "120",
}


def by_python(arguments: list[str], folder: Path) -> str:
    return python_prints(*arguments, folder=folder, **ENVIRONMENT)


def run(processes: int, folder: Path) -> dict[str, str]:
    """Run all scripts one after the other; return what each printed."""
    out = ["--output", str(folder / "out")]
    jobs = {name: [str(TUTORIALS / f"{name}.py"), *SMALL, "--steps", "4", *out] for name in SCRIPTS}
    (folder / "text.txt").write_text("\n".join(offline.load_text()[:40]))
    for name in SCRIPTS:  # a short text is encoded faster; these two use the text in the repository
        jobs[name] += [] if name in (CLASSIFICATION, "demo") else ["--dataset", str(folder / "text.txt")]
    jobs["demo"] += ["--layers", "1", "--hidden", "32"]
    replicas = ["--precision", "fp32", "--pipeline-parallel-size", "1", "--zero-stage", "3"]
    jobs["classification zero 3"] = [*jobs[CLASSIFICATION], *replicas]
    jobs["replicas"] = [*jobs["01_tensor_parallel"], "--tensor-parallel-size", "1"]
    if processes == 1:
        del jobs["12_unknown_model"], jobs["13_verify"]  # they start processes, which import everything again
    (folder / "jobs.json").write_text(json.dumps(jobs))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    script = [str(Path(__file__).with_name("run_scripts.py")), str(folder / "jobs.json")]
    by_python([*(launcher if processes > 1 else []), *script], folder)
    return {name: (folder / f"{name}.out").read_text() for name in jobs}


pytestmark = pytest.mark.tier("all")  # one set-up runs all scripts, each in a minute or less

Runs = Callable[[int], dict[str, str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return cache(lambda processes: run(processes, tmp_path_factory.mktemp(f"tutorials-{processes}")))


@pytest.fixture(scope="module", params=mainly(2, 1, later="sweep"), ids=["torchrun", "python"])
def printed(request: pytest.FixtureRequest, runs: Runs) -> dict[str, str]:
    return runs(request.param)


# Differences from one process are printed as 1.2e-07, as no other number is.
DIFFERENCE = re.compile(r"\d\.\d+e[-+]\d\d\b")
ALLOWED = {CLASSIFICATION: 5e-3, "13_verify": 1e-3, "05_grpo": 1e-4}  # fp16; gradients; gradient norms


def check_differences(name: str, text: str) -> None:
    found = [float(number) for number in DIFFERENCE.findall(text)]
    assert found or name == "11_mixture_of_experts", text
    assert max(found, default=0.0) < ALLOWED.get(name, 1e-5), text
    assert "False" not in text and "DIFFERENT" not in text


@pytest.mark.every_case
@pytest.mark.parametrize("name", [*SCRIPTS, *MORE])
def test_a_script_computes_what_one_process_computes(printed: dict[str, str], name: str) -> None:
    if name not in printed:
        pytest.skip("it starts processes")
    check_differences(name, printed[name])


def test_what_else_they_print(runs: Runs) -> None:
    printed = runs(2)
    assert "rank 1: shard 0 of replica 1, " in printed["replicas"]
    assert "\none process, batch size 4: loss" in printed["replicas"]
    assert printed["classification zero 3"].count("difference of accuracies: 0.0000") == 1
    for line in (
        "scatter forward: the shard: [0.0, 1.0] | [2.0, 3.0]",
        "scatter backward: the gradients of all shards: [1.0, 1.0, 2.0, 2.0] | [1.0, 1.0, 2.0, 2.0]",
        "gather forward: all shards: [1.0, 1.0, 2.0, 2.0] | [1.0, 1.0, 2.0, 2.0]",
        "reduce forward: the sum: [3.0, 3.0] | [3.0, 3.0]",
        "copy backward: the sum of the gradients: [3.0, 3.0] | [3.0, 3.0]",
    ):
        assert line in printed["07_megatron_toolbox"]
    for row in ("unigrams", "before training", "after training", "on rank 0", "4 training steps", "\nsampled: The "):
        assert row in printed["demo"]
    assert "the mistake is in transformer.h.0.attn: policy text:9:" in printed["13_verify"]
    assert "slope: {sharded: heads}" in printed["12_unknown_model"]
    assert "policy check: passed; dry run: ok\n" in printed["12_unknown_model"]


def test_the_demo_prints_its_own_lines_only(tmp_path: Path) -> None:
    (tmp_path / "bitsandbytes.py").write_text("print('bitsandbytes is imported')\n")
    script = [str(TUTORIALS / "demo.py"), *SMALL, "--steps", "4", "--layers", "1", "--hidden", "32"]
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script, "--output", "out"]
    done = python(*command, folder=tmp_path, **{**ENVIRONMENT, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"[^\r\n]+", done.stderr + done.stdout)
    own = r"2 process|[\d,]+ tokens|tp 2 x dp 1 on|autopar: |training: |merged |sampled: |[┌│└]|Next:$|  [123]\. "
    assert [line for line in lines if not re.match(own, line)] == []
    assert [line[:4] for line in lines[-4:]] == ["Next", "  1.", "  2.", "  3."]
    assert "-m autopar plan llama" in lines[-3] and "-m autopar verify llama" in lines[-2]
    assert (ROOT / lines[-1].split()[-1]).is_file()


def test_planning_and_rehearsing(tmp_path: Path) -> None:
    text = by_python([str(TUTORIALS / "14_plan_and_rehearse.py"), "--output", str(tmp_path)], tmp_path)
    assert "tp 4 x pp 2 x dp 8: " in text and "of 64 ranks rehearsed, problems: []\n" in text
    assert "14_plan_and_rehearse.py:" in text.partition("a loop with a mistake:\n")[2]
    compared = re.findall(r"planned ([\d,]+) bytes, held ([\d,]+) bytes", text)
    assert len(compared) == 3 and all(planned == held for planned, held in compared)


@with_package("trl", world_size=2, timeout=600)
def test_grpo(tmp_path: Path) -> None:
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(ENVIRONMENT, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    text = run_script(str(TUTORIALS / "05_grpo.py"), ["--steps", "4", "--output", str(tmp_path)])
    if rank == "0":
        check_differences("05_grpo", text)


@with_package("diffusers", world_size=2)
def test_video_lora(tmp_path: Path) -> None:
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(ENVIRONMENT, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    steps = ["--steps", "4", "--base-steps", "4", "--batch-size", "2", "--output", str(tmp_path)]
    text = run_script(str(TUTORIALS / "15_video_lora.py"), steps)
    if rank == "0":
        check_differences("15_video_lora", text)
        assert "3 heads, this rank has 2 of them" in text and "such as transformer.blocks.0.attn1." in text
        assert (tmp_path / "video_lora.png").read_bytes().startswith(b"\x89PNG")


def test_the_readme_lists_every_tutorial() -> None:
    text = (TUTORIALS / "README.md").read_text()
    assert [int(name[:2]) for name in NUMBERED] == list(range(1, len(NUMBERED) + 1))
    assert re.findall(r"^\| \[\d+\. .+\]\((\d\d_\w+)\.py\) \|", text, re.MULTILINE) == NUMBERED


def arguments(**changes: object) -> argparse.Namespace:
    return argparse.Namespace(**{"model": None, "vocab_size": 300, "context": 16, **changes})


@distributed(world_size=2)
def test_the_tokenizer_is_trained_once_and_is_lossless(tmp_path: Path) -> None:
    tokenizer = offline.load_tokenizer(arguments(output=tmp_path))
    assert len(tokenizer) == 300
    text = "Fellow-Citizens, ½ naïve\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    made = (tmp_path / "tokenizer-300" / "tokenizer.json").stat().st_mtime_ns
    again = offline.load_tokenizer(arguments(output=tmp_path))
    assert (tmp_path / "tokenizer-300" / "tokenizer.json").stat().st_mtime_ns == made
    assert again.get_vocab() == tokenizer.get_vocab()
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer-300"]

    blocks = offline.Blocks(["one two", "three"], tokenizer, context=4)
    words = [*tokenizer("one two")["input_ids"], tokenizer.eos_token_id, *tokenizer("three")["input_ids"]]
    assert blocks.ids.flatten().tolist() == words[: len(blocks) * 4]
    assert torch.equal(blocks[0]["labels"], blocks.ids[0])
    with pytest.raises(SystemExit, match="fewer than 1 sequence"):
        offline.Blocks(["one"], tokenizer, context=999)


@distributed(world_size=1)
def test_a_users_own_text_and_model_and_errors(tmp_path: Path) -> None:
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path / "cache")
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ("one", " ", "two")))
    (tmp_path / "b.jsonl").write_text(json.dumps({"words": "one"}))
    assert offline.load_text(str(tmp_path / "a.txt")) == ["one", "two"]
    assert offline.load_text(str(tmp_path / "a.jsonl")) == ["one", "two"]
    with pytest.raises(SystemExit, match="has no column 'text', only words"):
        offline.load_text(str(tmp_path / "b.jsonl"))
    with pytest.raises(SystemExit, match=r"error: --dataset .*nowhere cannot be read"):
        offline.load_text(str(tmp_path / "nowhere"))
    made = arguments(output=tmp_path)
    tokenizer = offline.load_tokenizer(made)
    model = offline.load_model(made, tokenizer)
    model.save_pretrained(tmp_path / "mine")
    tokenizer.save_pretrained(tmp_path / "mine")
    mine = arguments(model=str(tmp_path / "mine"))
    assert offline.load_tokenizer(mine).get_vocab() == tokenizer.get_vocab()
    assert torch.equal(offline.load_model(mine, None).lm_head.weight, model.lm_head.weight)
    nowhere = arguments(model=str(tmp_path / "nowhere"))
    with pytest.raises(SystemExit, match=r"error: --model .*nowhere cannot be loaded"):
        offline.load_model(nowhere, None)
    with pytest.raises(SystemExit, match=r"error: --model .*nowhere has no readable tokenizer"):
        offline.load_tokenizer(nowhere)
