"""``autopar plan``: its tables, its JSON, the files that it writes, and what it refuses."""

from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from tests.planner.command import planned, run, saved, sizes
from tests.small import llama

SIZES = sizes(64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(llama(num_hidden_layers=4), tmp_path / "model")


@pytest.mark.tier("all")
def test_the_command_at_its_end_rehearses_the_best(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    assert "autopar rehearse" not in run(folder, *SIZES).stdout
    title, command = run(folder, *SIZES, "-o", config).stdout.splitlines()[-2:]
    assert title == "to count its memory and match its collectives:"
    arguments = command.split()
    assert arguments[:3] == ["autopar", "rehearse", str(folder)] and "--config" in arguments
    rehearsed = CliRunner().invoke(app, [*arguments[1:], "--json"])
    assert rehearsed.exit_code == 0, rehearsed.output
    assert '"problems": []' in rehearsed.output


def test_json_has_all_of_it_and_the_best_comes_first(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    found = planned(folder, *SIZES, "-o", config)
    assert len(found["best"]) == 5 and found["tried"] > 20
    times = [best["step_time"] for best in found["best"]]
    assert times == sorted(times)
    for best in found["best"]:
        assert best["tp"] * best["pp"] * best["dp"] == 4
        assert best["dp"] * best["microbatch"] * best["microbatches"] == 8
        assert best["step_time"] == pytest.approx(sum(best["step_time_parts"].values()))
        for memory in best["memory"]:
            total = memory.pop("total")
            assert total == sum(memory.values()) <= 1.6e9
        autopar.ParallelConfig.parse(best["config"], 4)
    assert yaml.safe_load(config.read_text()) == found["best"][0]["config"]


def test_machines_by_name_and_number(folder: Path) -> None:
    slow, fast = (
        planned(folder, *SIZES, *node, "--zero", 0, "--storage-bandwidth", speed)
        for node, speed in ((("--node", "2xt4", "--latency", 50), 1), (("--inter-node-bandwidth", 100), 10))
    )
    assert (slow["node"], slow["gpus_per_node"], slow["gpu"]) == ("2xt4", 2, "t4")
    assert (fast["node"], fast["gpus_per_node"]) == ("dgx-h100", 8)
    first, second = slow["best"][0], fast["best"][0]
    assert first["checkpoint_bytes"] == second["checkpoint_bytes"] > 0
    assert first["save_time"] == pytest.approx(first["checkpoint_bytes"] / 2 / 1e9), "two nodes"
    assert second["save_time"] == pytest.approx(second["checkpoint_bytes"] / 1e10)
    for each in (first, second):
        low, high = each["step_time_range"]
        assert low < each["step_time"] < high
        assert each["step_time_without_overlap"] == pytest.approx(
            each["step_time"] + sum(each["step_time_hidden"].values())
        )


def test_meshes_that_cross_nodes_are_named_and_those_that_are_asked_for_are_all_that_is_tried(folder: Path) -> None:
    many = ("--gpus", 30, "--sequence", 64, "--global-batch", 30)
    found = planned(folder, *many, "--zero", 0, "--no-checkpointing")
    assert {best["tp"] for best in found["best"]} <= {1, 2}
    assert any(line.endswith("tensor-parallel groups would cross nodes, of 8 GPUs each") for line in found["rejected"])
    found = planned(folder, *SIZES, "--zero", 1, "--checkpointing")
    assert found["best"] and all(best["zero"] == 1 and best["checkpointing"] for best in found["best"])
    assert any("the ZeRO stage, the sequences or the experts that were asked" in line for line in found["rejected"])


def test_nothing_fits_or_the_model_is_nowhere(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    result = run(folder, *SIZES[:-1], 1.5, "-o", config)
    assert result.exit_code == 1 and not config.exists()
    assert "fits: use more GPUs, or adapters (LoRA)" in result.stderr and f"{config} is not written" in result.stderr
    assert "closest meshes (" in result.stdout and "other meshes (" not in result.stdout
    assert any("needs 1.5 GB: reserve 1.5" in line for line in result.stdout.splitlines())
    result = run("nobody/nothing", *SIZES)
    assert result.exit_code == 1
    assert "'nobody/nothing' is not a folder with a config.json, and its config cannot be read" in result.stderr


def test_where_nothing_fits_the_memory_of_the_cpu_is_named(tmp_path: Path) -> None:
    layers = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    LlamaConfig(**layers, vocab_size=32000, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    common = (tmp_path, "--sequence", 2048, "--global-batch", 8, "--no-checkpointing")
    one = " ".join(run(*common, "--gpus", 1).output.split())
    assert "fits with zero.optimizer_offload: 55 GB, 81 GB in the CPU's memory, and about" in one
    four = " ".join(run(*common, "--gpus", 4, "--gpu", "l4", "--zero", 3).output.split())
    assert "fits with zero.cpu_offload: " in four
