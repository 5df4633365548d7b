"""``autopar policy check``, ``show`` and ``list``: what they print, as tables and as JSON, and when they fail."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.policy.files import policy_folder
from autopar.policy.match import supported_model_types
from tests.features.experts.mixtures import mixtral
from tests.harness.worlds import distributed
from tests.own_modules import GPT_POLICY
from tests.planner.command import saved
from tests.small import gpt2, llama

DATA: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("policy_command.yaml").read_text())
POLICY = DATA["policy"]


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["policy", *map(str, arguments)])


def fails(*arguments: object) -> Any:
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    return result


def of(result: Any) -> Any:
    return json.loads(result.stdout)


def line_of(path: str) -> int:
    lines = (policy_folder() / "gpt2.yaml").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip().startswith(f"{path}:"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a small GPT-2; no weights."""
    return saved(gpt2(n_layer=3), tmp_path_factory.mktemp("gpt2"))


def test_the_policy_found_for_a_folder(folder: Path) -> None:
    result = run("check", folder, "--tp", 2)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "GPT2LMHeadModel: 54,000 parameters, policy gpt2 (policies/gpt2.yaml:2)"
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines}
    assert rows["transformer.wte.weight"] == "131 x 36 embedding vocab 66 x 36 | 65 x 36"
    assert rows["transformer.wpe.weight"] == "32 x 36 replicated 32 x 36"
    assert rows["transformer.h.0-2.attn.c_attn.weight"] == "36 x 108 column heads | heads | heads 36 x 60 | 36 x 48"
    assert rows["transformer.h.0-2.attn.c_proj.bias"] == "36 replicated 36"
    assert rows["transformer.h.0-2.attn.split_size"] == "36 20 | 16"
    assert lines[-7:-5] == ["tp rank 0: 28,836 parameters, 115 KB", "tp rank 1: 27,036 parameters, 108 KB"]
    assert lines[-4:] == ["dry run: ok", "sequence parallel: ok", "context parallel: ok", "all checks pass"]
    assert not any(line != line.rstrip() for line in lines)


@distributed(world_size=4)
def what_ranks_hold(config: Path, report: dict[str, Any]) -> None:
    model = GPT2LMHeadModel(GPT2Config.from_pretrained(config))
    model = autopar.initialize(model, {"tp": 2, "pp": 2})
    held = sum(parameter.numel() for parameter in model.parameters() if parameter.numel())
    place = {"tp": model.mpu.get_tensor_parallel_rank(), "pp": model.mpu.get_pipeline_parallel_rank()}
    (mine,) = [rank for rank in report["ranks"] if {axis: rank[axis] for axis in place} == place]
    assert (mine["parameters"], mine["bytes"]) == (held, 4 * held), dist.get_rank()


@pytest.mark.tier("all")
def test_the_sizes_are_those_that_ranks_hold(folder: Path) -> None:
    what_ranks_hold(folder, of(run("check", folder, "--tp", 2, "--pp", 2, "--json")))


def test_as_json(folder: Path) -> None:
    report = of(run("check", folder, "--tp", 4, "--json"))
    assert report["holds"] is True and report["dry_run"] == "ok" and report["errors"] == []
    assert len(report["tensors"]) == 3 * 12 + 4 and len(report["ranks"]) == 4
    by_name = {tensor["name"]: tensor for tensor in report["tensors"]}
    assert by_name["transformer.wte.weight"]["tied"] == ["lm_head.weight"]
    assert by_name["transformer.h.1.mlp.c_fc.weight"] == {
        "name": "transformer.h.1.mlp.c_fc.weight",
        "tied": [],
        "dtype": "float32",
        "shape": [36, 144],
        "rule": "column ffn",
        "where": f"policies/gpt2.yaml:{line_of('mlp.c_fc')}",
        "local_shapes": [[36, 36]] * 4,
        "ranks": [0],
    }
    assert report["attributes"][0] == {
        "name": "transformer.h.0.attn.split_size",
        "where": f"policies/gpt2.yaml:{line_of('attn.split_size')}",
        "whole": 36,
        "local": [12, 8, 8, 8],
    }
    assert report["parameters"] == sum(parameter.numel() for parameter in gpt2(n_layer=3).parameters())


def test_show(folder: Path) -> None:
    result = run("show", folder, "--tp", 2, "--pp", 2)
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in result.stdout.splitlines()}
    place = f"policies/gpt2.yaml:{line_of('attn.c_attn')}"
    layout = "column heads | heads | heads"
    assert rows["transformer.h.1-2.attn.c_attn.weight"] == f"36 x 108 {layout} {place} 36 x 60 | 36 x 48 1"
    place = f"policies/gpt2.yaml:{line_of('ln_f')}"
    assert rows["transformer.ln_f.weight"] == f"36 replicated {place} 36 1", "also of what stays whole"
    place = f"policies/gpt2.yaml:{line_of('attn.split_size')}"
    assert rows["transformer.h.0-2.attn.split_size"] == f"36 {place} 20 | 16"
    assert "dry run" not in result.stdout and "holds" not in result.stdout
    report = of(run("show", folder, "--pp", 2, "--json"))
    assert all(re.fullmatch(r"policies/.*\.yaml:\d+", tensor["where"]) for tensor in report["tensors"])
    stages = [["transformer.h.0"], ["transformer.h.1", "transformer.h.2"]]
    assert [stage["modules"] for stage in report["stages"]] == stages


@pytest.mark.tier("all")
def test_long_sequences(folder: Path) -> None:
    report = of(run("check", folder, "--json"))
    assert (report["sequence_parallel"], report["context_parallel"]) == ("ok", "ok")
    report = of(run("check", "swin", "--json"))
    assert report["holds"] and report["sequence_parallel"].startswith("refused: sequence_parallel does not fit Swin")
    assert report["context_parallel"].startswith("refused: context_parallel_size=2 does not fit Swin")
    result = fails("check", "swin", "--cp", 3)
    assert "context parallel: fails" in result.stdout
    assert "error: context_parallel_size=3 does not fit SwinModel" in result.stderr
    assert "error: sequence_parallel does not fit SwinModel" in fails("check", "swin", "--sequence-parallel").stderr


def test_every_head(folder: Path) -> None:
    result = run("check", folder, "--heads", "--json")
    assert result.exit_code == 0, result.output
    heads = {report["model"]: report for report in of(result)}
    assert {"GPT2Model", "GPT2LMHeadModel", "GPT2ForSequenceClassification"} <= heads.keys()
    assert all(report["holds"] and report["dry_run"] == "ok" for report in heads.values())
    shown = run("check", folder, "--heads").stdout
    assert shown.count("all checks pass") == len(heads) and "transformer.wte.weight" not in shown


def test_a_policy_of_the_user_and_the_dtype_of_the_config(tmp_path: Path, folder: Path) -> None:
    config = llama().config
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path)
    report = of(run("check", tmp_path, "--json"))
    assert report["model"] == "LlamaForCausalLM"
    assert all(rank["bytes"] == 2 * rank["parameters"] for rank in report["ranks"])
    file = tmp_path / "mine.yaml"
    file.write_text(POLICY)
    report = of(run("check", file, "--model", folder, "--json"))
    assert report["holds"] and report["policy"]["where"] == f"{file}:1"
    assert run("check", file).stdout.startswith("GPT2LMHeadModel: 124,439,808 parameters"), "the type in its match"


@pytest.mark.parametrize(("old", "new", "error"), DATA["mistakes"])
def test_mistakes_are_told_with_their_line(old: str, new: str, error: str, tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "mine.yaml"
    assert old in POLICY
    file.write_text(POLICY.replace(old, new).replace("attributes:\nsuffix", "attributes: {}\nsuffix"))
    result = fails("check", file, "--model", folder)
    assert error in result.stderr and re.search(r"mine\.yaml:\d+: ", result.stderr)
    assert "all checks pass" not in result.stdout


def test_code_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_code.py").write_text(DATA["code"])
    monkeypatch.chdir(tmp_path)
    assert of(run("check", "some_code.py:small", "--json"))["holds"]
    assert of(run("check", "some_code:small", "--json"))["holds"], "a module that can be imported from here"
    result = fails("check", "some_code.py:Renamed")
    assert "no policy lists model_type 'renamed'" in result.stderr and "policy='derive'" in result.stderr
    for name, told in {
        "smal": "some_code.py has no class or function 'smal'. Did you mean 'small'?",
        "takes": "takes: missing a required argument: 'layers'; name a function that returns a model",
        "Fails": "Fails cannot be built: RuntimeError: out of luck",
    }.items():
        result = fails("check", f"some_code.py:{name}")
        assert result.stderr.startswith(f"error: {told}"), result.stderr
        assert result.stdout == ""


def test_a_module_that_is_no_hugging_face_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(GPT_POLICY)
    code = "from tests.own_modules import GPT, GPTConfig\n\ndef nano():\n    return GPT(GPTConfig())\n"
    (tmp_path / "nano.py").write_text(code)
    result = run("check", "mine.yaml", "--model", "nano.py:nano")
    assert result.exit_code == 0, result.output
    assert "dry run: not run: the forward's arguments are unknown" in result.stdout
    assert "has no 'match', so --model is required" in fails("check", "mine.yaml").stderr


def test_the_list_of_model_types() -> None:
    listed = of(run("list", "--json"))
    assert listed.keys() == supported_model_types().keys()
    assert all(Path(file).parent == policy_folder() and Path(file).is_file() for file in listed.values())
    assert f"llama {policy_folder() / 'llama.yaml'}" in run("list").stdout.splitlines()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a small Mixtral of five experts."""
    return saved(mixtral(5), tmp_path_factory.mktemp("mixtral"))


def test_experts_that_replicas_share(mixture: Path) -> None:
    result = run("show", mixture, "--tp", 2, "--ep", 4)
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in result.stdout.splitlines()}
    assert rows["parameter"].endswith("on each ep rank")
    name = "model.layers.0-1.mlp.experts.down_proj"
    assert rows[name].endswith("2 x 16 x 24 | 1 x 16 x 24 | 1 x 16 x 24 | 1 x 16 x 24")
    assert rows["model.layers.0-1.self_attn.q_proj.weight"].endswith(" 8 x 16")
    assert rows["lm_head.weight"].endswith(" 16 x 16 | 15 x 16"), "as on the tp ranks of each replica"
    lines = result.stdout.splitlines()
    places = [f"ep rank {rank}, tp rank {rank % 2}" for rank in range(4)]
    assert [line.partition(":")[0] for line in lines if line.startswith("ep rank")] == places
    checked = run("check", mixture, "--tp", 2, "--ep", 4)
    assert checked.exit_code == 0 and checked.stdout.splitlines()[-1] == "all checks pass", checked.output
    alone = run("check", mixture, "--tp", 1, "--ep", 2)
    assert "dry run: not run: one rank holds the full model, except for experts" in alone.stdout
    whole = of(run("show", mixture, "--tp", 2, "--ep", 2, "--json"))
    assert [rank["tp"] for rank in whole["ranks"]] == [0, 1] and whole["expert_parallel_size"] == 2


def test_sizes_that_do_not_fit(mixture: Path, folder: Path) -> None:
    assert "Largest size that fits this model: 9." in fails("check", folder, "--tp", 10).stderr
    result = fails("check", folder, "--pp", 4)
    assert "Largest number of stages that fits this model: 3." in result.stderr
    assert "dry run: ok" in result.stdout and "stages: fails" in result.stdout
    for command in ("check", "show"):
        said = fails(command, mixture, "--tp", 2, "--ep", 3).stderr
        assert "expert_parallel_size=3 must be 1 or a multiple of tensor_parallel_size=2" in said
        said = fails(command, mixture, "--tp", 2, "--ep", 8).stderr
        assert "expert_parallel_size=8 does not fit MixtralForCausalLM: 5 experts" in said
        assert "Largest size that fits this model: 4." in said, "a multiple of --tp"
        assert "this model has no experts" in fails(command, folder, "--ep", 2).stderr
