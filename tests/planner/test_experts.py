"""Whole experts in the planner: the search over them, and what it counts against real ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from tests.small import llama

SEQUENCE = 32
SIZES = ("--gpus", 4, "--sequence", SEQUENCE, "--global-batch", 8, "--gpu-memory", 1.6)
WHOLE = {"model_parallelism": {"tensor_parallel_size": 2, "expert_parallel_size": 2}}


def mixtral(hidden: int = 32, **settings: Any) -> MixtralForCausalLM:
    """Five experts: three and two on two ranks."""
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=hidden, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=5, num_experts_per_tok=2, vocab_size=131, max_position_embeddings=64,
    )  # fmt: skip
    return MixtralForCausalLM._from_config(config, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for name, model in {"mixtral": mixtral(), "llama": llama(num_hidden_layers=4)}.items():
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(path / name)
    return path


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


@pytest.mark.tier("all")
def test_the_search_tries_both_and_plans_what_plan_memory_does(folder: Path) -> None:
    result = run(folder / "mixtral", *SIZES, "--zero", 0, "--no-checkpointing", "--ep", 4, "--json")
    assert result.exit_code == 0, result.output
    best = json.loads(result.stdout)["best"]
    assert best and all(each["ep"] == 4 for each in best) and any(each["ep"] > each["tp"] for each in best)
    for each in best:
        assert each["config"]["model_parallelism"]["expert_parallel_size"] == each["ep"]
        assert each["bytes_sent"]["ep" if each["ep"] > each["tp"] else "tp"] > 0
        planned = autopar.plan_memory(mixtral(), each["config"], sequence=SEQUENCE, batch=8 // each["dp"], gpus=4)
        assert [{**memory.parts(), "total": memory.total} for memory in planned.stages] == each["memory"]
    either = json.loads(run(folder / "mixtral", *SIZES, "--zero", 0, "--no-checkpointing", "--json").stdout)
    sharded = json.loads(run(folder / "mixtral", *SIZES, "--zero", 0, "--no-checkpointing", "--ep", 1, "--json").stdout)
    assert either["tried"] > sharded["tried"] and all(each["ep"] == 1 for each in sharded["best"])


@pytest.mark.tier("all")
def test_a_row_for_whole_experts_where_some_have_them(folder: Path) -> None:
    table = run(folder / "mixtral", *SIZES, "--ep", 2).stdout
    assert "\n ep " in table
    assert "\n ep " not in run(folder / "llama", *SIZES).stdout


def test_a_dense_model_has_none(folder: Path) -> None:
    result = run(folder / "llama", *SIZES, "--ep", 2)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: no mesh of 4 GPUs fits: expert_parallel_size: this model has no experts")
    with pytest.raises(autopar.ConfigError, match="this model has no experts that can be sharded by expert"):
        autopar.plan_memory(llama(), WHOLE, sequence=SEQUENCE)


@pytest.mark.tier("all")
def test_one_size_of_the_users(folder: Path) -> None:
    result = run(folder / "mixtral", *SIZES, "--ep", 4, "--json")
    best = json.loads(result.stdout)["best"]
    assert best and {each["config"]["model_parallelism"]["expert_parallel_size"] for each in best} == {4}
    refused = run(folder / "mixtral", *SIZES, "--ep", 3)
    assert refused.exit_code == 1 and "the experts that were asked for do not fit" in refused.stderr
    sharded = json.loads(run(folder / "mixtral", *SIZES, "--ep", 4, "--zero", 3, "--json").stdout)["best"]
    assert sharded and {each["config"]["zero"]["stage"] for each in sharded} == {3}
