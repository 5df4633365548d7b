"""The tables of docs/coming-from.md: every name of autopar in them exists, and the printed policy is right."""

import importlib
import inspect
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.config import ParallelConfig
from autopar.config.sections import SECTIONS
from autopar.features.megatron.accessors import MeshAccessors
from tests.docs.pages import DOCS, codes
from tests.small import gpt2

TEXT = (DOCS / "coming-from.md").read_text()
TABLES = re.findall(r"^\|(.*)\|(.*)\|$", TEXT, re.MULTILINE)
HERE = [code for _, right in TABLES for code in re.findall(r"`([^`]+)`", right)]
ATTACHED = {"save_parallelized", "from_parallelized", "execute_pipeline", "generate", "no_sync"}  # to a model
POLICY = next(code.text for code in codes(TEXT, "yaml") if code.file == "colo_gpt2.yaml")


def names(pattern: str) -> set[str]:
    return {name for code in re.findall(r"`([^`\n]+)`", TEXT) for name in re.findall(pattern, code)}


@pytest.mark.parametrize("name", sorted(names(r"\b(autopar(?:\.\w+)+)")))
def test_every_name_of_autopar_exists(name: str) -> None:
    path, _, last = name.rpartition(".")
    value = getattr(importlib.import_module(path), last)
    assert callable(value) or inspect.ismodule(value)


def test_every_name_of_the_mesh_and_every_method_of_a_model_exists() -> None:
    found = names(r"\bmpu\.(\w+)")
    attributes = {"tp", "pp", "dp", "dp_cp", "device"}
    assert attributes <= found and len(found - attributes) > 12
    assert {name for name in found if not hasattr(autopar.MPU, name) and name not in vars(MeshAccessors)} == attributes
    assert all(f"{name}:" in (inspect.getdoc(autopar.MPU) or "") for name in attributes)
    assert {name for code in HERE for name in re.findall(r"\bmodel\.(\w+)", code)} == ATTACHED | {"mpu"}


@pytest.mark.parametrize("code", [code for code in HERE if re.match(r"\w+: \{", code)])
def test_every_key_of_the_configuration_is_known(code: str) -> None:
    config = yaml.safe_load(code)
    for section, keys in config.items():
        assert keys.keys() <= SECTIONS[section].keys()
    if "..." not in code and all(value is not None for keys in config.values() for value in keys.values()):
        ParallelConfig.parse(config)


def test_the_policy_of_colotensor_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("colo_gpt2.yaml").write_text(POLICY)
    gpt2().save_pretrained("gpt2")
    (command,) = re.findall(r"`autopar (policy check colo_gpt2.yaml .*?)`", TEXT)
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0 and "all checks pass" in result.output, result.output
