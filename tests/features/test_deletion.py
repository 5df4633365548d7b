"""Each folder of features, the integrations and the tools can be deleted: the rest trains, saves, loads and merges."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.registry import OF_FEATURES, SETTINGS

ROOT = Path(__file__).parents[2]
FEATURES = sorted(path.name for path in (ROOT / "autopar" / "features").iterdir() if (path / "__init__.py").exists())
# A configuration, on two ranks, that asks for the feature.
ASKS = {
    "activation_checkpointing": (
        {"tp": 2, "activation_checkpointing": {"enable": True}},
        "activation_checkpointing: True",
    ),
    "context_parallel": ({"cp": 2}, "context_parallel_size: 2"),
    "experts": ({"ep": 2}, "expert_parallel_size: 2"),
    "host_transport": ({"tp": 2, "model_parallelism": {"cpu_transport": "shm"}}, "cpu_transport: shm"),
    "sequence_parallel": ({"tp": 2, "model_parallelism": {"sequence_parallel": True}}, "sequence_parallel: True"),
}
# A configuration, and a method of a Llama that needs the feature there.
CALLS = {"generation": ({"tp": 2}, "generate")}
# What in a model asks for the feature: the script builds a model of that name, with a package.
MODELS = {
    "peft": ("peft", "the adapters of PeftModelForCausalLM (PEFT)"),
    "quantized": ("bitsandbytes", "LlamaForCausalLM with quantized weights"),
}
SCRIPT = Path(__file__).with_name("without_a_folder.py")


def run(tree: Path, *arguments: str, ranks: int) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(SCRIPT)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments], env=environment, cwd=tree, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def tree_without(tmp_path: Path, folder: str) -> Path:
    """Copy the package, but for one of its folders."""
    for name in ("autopar", "policies"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored, symlinks=True)
    assert (tmp_path / "autopar" / folder).is_dir()
    shutil.rmtree(tmp_path / "autopar" / folder)
    return tmp_path


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses and norms of the complete tree."""
    found: list[float] = json.loads(run(ROOT, str(tmp_path_factory.mktemp("complete")), ranks=4).splitlines()[-1])
    return found


@pytest.mark.tier("all")
@pytest.mark.parametrize("folder", [*(f"features/{name}" for name in FEATURES), "features", "integrations", "tools"])
def test_the_rest_trains_saves_loads_and_merges(folder: str, tmp_path: Path, complete: list[float]) -> None:
    tree = tree_without(tmp_path, folder)
    out = tmp_path / "out"
    out.mkdir()
    assert json.loads(run(tree, str(out), ranks=4).splitlines()[-1]) == complete


@pytest.mark.tier("all")
@pytest.mark.parametrize("name", sorted(ASKS))
def test_a_configuration_that_asks_for_a_deleted_feature_is_an_error(name: str, tmp_path: Path) -> None:
    tree = tree_without(tmp_path, f"features/{name}")
    config, asked = ASKS[name]
    text = run(tree, str(tmp_path), json.dumps(config), ranks=2)
    assert f"{asked} needs the feature '{name}', which is not installed.\n  Installed: " in text


@pytest.mark.tier("all")
@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_call_that_needs_a_deleted_feature_is_an_error(name: str, tmp_path: Path) -> None:
    tree = tree_without(tmp_path, f"features/{name}")
    config, method = CALLS[name]
    text = run(tree, str(tmp_path), json.dumps(config), "plain", method, ranks=2)
    assert f"LlamaForCausalLM.{method} on several ranks needs the feature '{name}', which is not installed.\n" in text


@pytest.mark.tier("all")
@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_model_that_needs_a_deleted_feature_is_an_error(name: str, tmp_path: Path) -> None:
    package, what = MODELS[name]
    pytest.importorskip(package)
    tree = tree_without(tmp_path, f"features/{name}")
    text = run(tree, str(tmp_path), json.dumps({"tp": 2}), name, ranks=2)
    assert f"{what} needs the feature '{name}', which is not installed.\n  Installed: " in text


NAMES = """
import autopar
for name in {names}:
    try:
        getattr(autopar, name)
    except autopar.ConfigError as error:
        print(error)
"""


@pytest.mark.parametrize("feature", sorted(set(OF_FEATURES.values())))
def test_a_public_name_of_a_deleted_feature_is_an_error(feature: str, tmp_path: Path) -> None:
    tree = tree_without(tmp_path, feature if feature == "tools" else f"features/{feature}")
    names = [name for name, owner in OF_FEATURES.items() if owner == feature]
    command = [sys.executable, "-c", NAMES.format(names=names)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True, check=True)
    for name in names:
        assert f"autopar.{name} needs the feature '{feature}', which is not installed.\n  Installed: " in done.stdout


def test_each_feature_that_a_setting_turns_on_is_deleted_once() -> None:
    assert {feature for feature, _ in SETTINGS.values()} == set(ASKS)
