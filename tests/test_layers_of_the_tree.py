"""Budgets of the tree: lines of packages, and modules that a call loads. Which imports which: make lint."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scripts import printed

# Lines of each package. Who raises one says why in the commit.
LINES = {
    "cli": 564,
    "setup": 425,
    "checkpoint": 4573,
    "config": 594,
    "data_parallel": 2609,
    "deferred_init": 987,
    "distributed": 2441,
    "dry_run": 1577,
    "features": 11595,
    "compat": 916,
    "guards": 572,
    "integrations": 2244,
    "pipeline_parallel": 3489,
    "plan": 2192,
    "policy": 1485,
    "storage": 1191,
    "tensor_parallel": 2761,
    "tools": 12045,
}
LOADED = 148  # modules that initialize loads; fewer is better
ROOT = Path(__file__).parents[1] / "autopar"


def files() -> Iterator[tuple[Path, tuple[str, ...]]]:
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] != "_policies":
            yield path, parts


def test_the_core_names_no_module_of_a_feature() -> None:
    """Contracts see imports only. The registry finds features by the name of their folder."""
    above = {"features", "integrations", "tools", "registry.py", "__init__.py"}
    core = [path for path, own in files() if path.relative_to(ROOT).parts[0] not in above]
    named = {str(path): re.findall(r"autopar\.features\.\w+", path.read_text()) for path in core}
    assert not {path: found for path, found in named.items() if found}


def test_packages_keep_to_their_lines() -> None:
    lines = Counter[str]()
    for path, own in files():
        lines[own[0]] += len(path.read_text().splitlines()) if len(own) > 1 else 0
    over = [f"{name}: {has}, at most {LINES.get(name, 0)}" for name, has in lines.items() if has > LINES.get(name, 0)]
    assert not over, f"lines of {over}. Remove some, or raise the number in LINES and give the reason in the commit"


_INITIALIZE = """
import sys, autopar
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, bos_token_id=0, eos_token_id=0))
autopar.initialize(model, {})
print(*(name for name in sys.modules if name.startswith("autopar.")))
"""


def test_initialize_loads_neither_tools_nor_integrations(tmp_path: Path) -> None:
    loaded = printed("-c", _INITIALIZE, folder=tmp_path).split()
    above = [name for name in loaded if name.split(".")[1] in ("tools", "integrations", "cli")]
    assert above == ["autopar.tools"]  # its entries in the registry
    assert len(loaded) <= LOADED, f"{len(loaded)} modules, at most {LOADED}: import in the function that needs it"


@pytest.mark.parametrize("command", ["--version", "--help", "merge --help", "policy list"])
def test_the_command_line_starts_without_torch(command: str) -> None:
    script = f"""
import sys
from autopar.cli import app
try:
    app({command.split()!r}, prog_name="autopar")
finally:
    assert not {{"torch", "transformers", "numpy"}} & set(sys.modules), sorted(sys.modules)
"""
    assert printed("-c", script)


def test_no_file_and_no_function_is_long_and_none_names_an_architecture() -> None:
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        lines = len(text.splitlines())
        assert "utils" not in path.name and lines <= 600, f"{path}: {lines} lines, at most 600; its name has no 'utils'"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                lines = node.end_lineno - node.lineno
                assert lines < 80, f"{path}: {node.name} has {lines + 1} lines, at most 80"
            elif isinstance(node, ast.Compare):
                assert "model_type ==" not in ast.unparse(node), path
