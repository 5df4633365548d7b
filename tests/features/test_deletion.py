"""Each folder of features, the integrations and the tools can be deleted: the rest trains, saves, loads and merges."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from autopar.registry import OF_FEATURES, SETTINGS

ROOT = Path(__file__).parents[2]
FEATURES = sorted(path.name for path in (ROOT / "autopar" / "features").iterdir() if (path / "__init__.py").exists())
# A setting that asks for the feature, and a configuration of two ranks with it.
ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "activation_checkpointing": (
        "activation_checkpointing: True",
        {"tp": 2, "activation_checkpointing": {"enable": True}},
    ),
    "context_parallel": ("context_parallel_size: 2", {"cp": 2}),
    "experts": ("expert_parallel_size: 2", {"ep": 2}),
    "host_transport": ("cpu_transport: shm", {"tp": 2, "model_parallelism": {"cpu_transport": "shm"}}),
    "sequence_parallel": ("sequence_parallel: True", {"tp": 2, "model_parallelism": {"sequence_parallel": True}}),
}
# A model or a call that asks for the feature, and further arguments of the script: a kind of model, a method.
OTHERS = {
    "generation": ("LlamaForCausalLM.generate on several ranks", "plain", "generate"),
    "peft": ("the adapters of PeftModelForCausalLM (PEFT)", "peft"),
    "quantized": ("LlamaForCausalLM with quantized weights", "quantized"),
}
SCRIPT = Path(__file__).with_name("without_a_folder.py")


def run(tree: Path, *arguments: str, ranks: int, script: Path = SCRIPT, path: Sequence[Path] = ()) -> str:
    """Run a script in a tree; returns what it prints."""
    command = [sys.executable, str(Path(__file__).with_name("forked.py")), str(ranks), str(script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, tree])), "OMP_NUM_THREADS": "1"}
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


@pytest.mark.every_case
@pytest.mark.tier("all")
@pytest.mark.parametrize("folder", [*(f"features/{name}" for name in FEATURES), "features", "integrations", "tools"])
def test_the_rest_trains_saves_loads_and_merges(folder: str, tmp_path: Path, complete: list[float]) -> None:
    tree = tree_without(tmp_path, folder)
    out = tmp_path / "out"
    out.mkdir()
    assert json.loads(run(tree, str(out), ranks=4).splitlines()[-1]) == complete


@pytest.mark.every_case
@pytest.mark.tier("all")
@pytest.mark.parametrize("name", [*ASKS, *OTHERS])
def test_what_asks_for_a_deleted_feature_is_an_error(name: str, tmp_path: Path) -> None:
    pytest.importorskip({"peft": "peft", "quantized": "bitsandbytes"}.get(name, "torch"))
    tree = tree_without(tmp_path, f"features/{name}")
    asked, config = ASKS.get(name, ("", {"tp": 2}))
    what, *more = OTHERS.get(name, (asked,))
    text = run(tree, str(tmp_path), json.dumps(config), *more, ranks=2)
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


CODE = re.search(r"```python\n(# scaled_rows\.py.*?)```", (ROOT / "docs" / "design.md").read_text(), re.S)

EXAMPLE = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import autopar
from autopar.cli import app
from tests.small import llama

folder = Path(sys.argv[1])
rule = {"scaled_row": "heads", "scale": 0.5}
policy = {"extends": "llama", "match": {"model_type": "llama"}, "blocks": {"modules": {"self_attn.o_proj": rule}}}
ids = torch.randint(0, 61, (2, 7), generator=torch.Generator().manual_seed(1))

plain = llama(vocab_size=61).double()
for layer in plain.model.layers:
    layer.self_attn.o_proj.register_forward_hook(lambda module, args, output: output * 0.5)
model = autopar.initialize(llama(vocab_size=61).double(), {"tp": 2}, policy=policy)
for each in (plain, model):
    optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3)
    for _ in range(3):
        loss = each(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
expected = plain(input_ids=ids, labels=ids).loss
torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected, rtol=0, atol=1e-6)
model.save_parallelized(folder / "saved")
if dist.get_rank() == 0:
    app(["merge", str(folder / "saved"), str(folder / "merged")], standalone_mode=False)
dist.barrier()
merged = type(plain).from_pretrained(folder / "merged", dtype=torch.float64).state_dict()
torch.testing.assert_close(merged, dict(plain.state_dict()), rtol=0, atol=1e-6)
autopar.deparallelize(model)
assert type(model.model.layers[0].self_attn.o_proj) is torch.nn.Linear
"""


@pytest.mark.tier("all")
def test_the_feature_of_the_design_page_works_from_another_distribution(tmp_path: Path) -> None:
    """It scales, trains, is saved, merged and undone."""
    assert CODE is not None and len(CODE[1].splitlines()) <= 40
    (tmp_path / "scaled_rows.py").write_text(CODE[1])
    info = tmp_path / "scaled_rows-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scaled-rows\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[autopar.features]\nscaled_rows = scaled_rows:FEATURE\n")
    (tmp_path / "script.py").write_text(EXAMPLE)
    run(tmp_path, str(tmp_path), ranks=2, script=tmp_path / "script.py", path=[ROOT])
