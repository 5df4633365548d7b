import json
import os
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import yaml
from safetensors.torch import load_file
from typer.main import get_command
from typer.testing import CliRunner

import autopar
from autopar.checkpoint.format import Manifest
from autopar.cli import app
from autopar.cli.checkpoints import in_words
from autopar.cli.tables import size
from tests.checkpoint.tiny import layouts, save_alone, saved_state
from tests.derivation import odd_model
from tests.planner.command import saved
from tests.scripts import python
from tests.small import llama

ERRORS = yaml.safe_load(Path(__file__).with_name("cli_errors.yaml").read_text())


@pytest.fixture
def ckpt(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    save_alone(tmp_path / "ckpt", 3)
    return tmp_path / "ckpt"


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.tier("all")
def test_merge_in_a_process_of_its_own(ckpt, tmp_path):
    command = ("-m", "autopar", "merge", ckpt, tmp_path / "merged")
    done = python(*command)
    assert done.returncode == 0, done.stderr
    plain = saved_state(save_alone(tmp_path / "again", 1))
    assert load_file(tmp_path / "merged" / "model.safetensors").keys() == plain.keys()
    assert f"merged {len(plain)} tensors" in done.stdout
    assert done.stderr == "", "no progress bar where there is no terminal"
    result = run(*command[2:])
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and "--force" in result.stderr


def test_env_prints_what_a_bug_report_needs():
    result = run("env", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["autopar"] == autopar.__version__ and found["packages"]["torch"] == torch.__version__
    assert "gloo" in found["backends"] and found["cores"] >= 1 and found["model types"] > 400
    text = run("env").stdout
    assert text.startswith(f"* autopar: {autopar.__version__}\n") and "* features: activation_checkpointing, " in text


def test_merge_options(ckpt, tmp_path):
    merged = tmp_path / "merged"
    result = run("merge", ckpt, merged, "--max-shard-size", "300", "--format", "bin", "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["destination"] == str(merged) and len(summary["files"]) > 2
    assert {name: (merged / name).stat().st_size for name in summary["files"]} == summary["files"]
    result = run("merge", ckpt, merged, "--force")
    assert result.exit_code == 0, result.output
    assert sorted(os.listdir(merged)) == ["config.json", "model.safetensors"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return saved(llama(num_hidden_layers=4), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("arguments", "message"), [(f"{command} {rest}", text) for command, rows in ERRORS.items() for rest, text in rows]
)
def test_errors_are_one_line_or_json_without_traceback(ckpt, small, monkeypatch, arguments, message):
    monkeypatch.chdir(ckpt.parent)
    for name, text in {"broken": "{", "unknown": '{"model_type": "my_model"}'}.items():
        (ckpt.parent / name).mkdir()
        (ckpt.parent / name / "config.json").write_text(text)
    words = shlex.split(arguments.format(llama=small, odd=odd_model.__file__))
    result = run(*words)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ") and message in result.stderr and result.stderr.count("\n") == 1
    assert result.stdout == ""
    result = run(*words, "--json")
    assert result.exit_code == 1 and result.stderr == ""
    error = json.loads(result.stdout)["error"]
    assert error["type"].endswith("Error") and message in " ".join(error["message"].split())
    assert sorted(os.listdir(ckpt.parent)) == ["broken", "ckpt", "unknown"]


def test_inspect_as_text_and_as_json(ckpt):
    data = json.loads(run("inspect", ckpt, "--json").stdout)
    assert data["mesh"] == {"tensor_parallel_size": 3, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    assert [tensor["name"] for tensor in data["tensors"]] == list(Manifest.read(ckpt).tensors)
    assert [file["state"] for file in data["files"]] == ["ok"] * 3
    assert all("layout" in tensor for tensor in data["tensors"])
    result = run("inspect", ckpt)
    assert result.exit_code == 0, result.output
    for part in ("tensor_parallel_size 3", "model-tp2-pp0.safetensors", "vocab 6+6+5", "full on every rank", "layout",
                 "saved in", "not saved", "17 x 4", "bfloat16"):  # fmt: skip
        assert part in result.stdout
    os.remove(ckpt / "model-tp2-pp0.safetensors")
    os.truncate(ckpt / "model-tp1-pp0.safetensors", 99)
    output = run("inspect", ckpt).stdout
    assert "missing" in output and "99 bytes on disk" in output


def test_layouts_and_sizes_in_words():
    assert in_words(None) == "full on every rank"
    assert in_words(layouts(2)["qkv.weight"]) == (
        "dim 0: heads 3 on each of 2 (x 2) | kv_heads 1 on each of 2 (x 2) | kv_heads 1 on each of 2 (x 2)"
    )
    assert in_words(layouts(4)["proj.weight"]) == "dim 1: heads 2+1+2+1 (x 2)"
    assert in_words(layouts(4)["qkv.bias"]).endswith("some on several ranks")
    for count, words in ((999, "999 B"), (999_900, "1 MB"), (123_456, "123 KB"), (999.6e9, "1 TB")):
        assert size(count) == words
    assert size(1.2345e15) == "1,234 TB", "sizes have no exponents"


@pytest.mark.tier("all")
def test_version_and_completion():
    assert run("--version").stdout == f"autopar {autopar.__version__}\n"
    assert "--show-completion" in run("--help").stdout
    shell = CliRunner().invoke(app, prog_name="autopar", env={"_AUTOPAR_COMPLETE": "source_bash"})
    assert "complete" in shell.stdout and "_AUTOPAR_COMPLETE" in shell.stdout


def _commands() -> dict[str, click.Command]:
    group: Any = get_command(app)
    policies = {f"policy {name}": command for name, command in group.commands["policy"].commands.items()}
    return {name: command for name, command in group.commands.items() if name != "policy"} | policies


@pytest.mark.parametrize("name", _commands())
def test_help_fits_and_has_an_example_that_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = _commands()[name]
    text = run(*name.split(), "--help").stdout
    assert all(len(line) <= 80 for line in text.splitlines()) and "\N{HORIZONTAL ELLIPSIS}" not in text
    for option in command.params:
        assert all(word in text for word in option.opts if word.startswith("-")), option.opts
    example = " ".join(text.partition("Example: ")[2].split())
    assert example.startswith(f"autopar {name}")
    words = example.split()[1 + len(name.split()) :]
    command.make_context(name, words)  # its arguments are those of the command
    listed = run(*name.split()[:-1], "--help").stdout
    assert command.short_help and command.short_help in listed
    assert "..." not in listed.partition("Commands:")[2], "a line is cut"
