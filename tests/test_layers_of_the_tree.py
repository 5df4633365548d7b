"""A module imports only lower rows of the tree, and nothing of its own row."""

from __future__ import annotations

import ast
from pathlib import Path

ROWS = [
    ["errors"],
    ["foreign"],
    ["class_swap", "model_methods", "tensor_tracking"],
    ["layout", "policy", "call_site", "adapters"],
    ["config", "plan"],
    ["distributed"],
    ["storage", "activation_checkpoint", "compiled_blocks", "data_parallel"],
    ["tensor_parallel", "pipeline_parallel", "checkpoint"],
    ["context_parallel"],
    ["deferred_init", "dry_run"],
    ["derivation"],
    ["planner"],
    ["api", "split"],
    ["verification"],
    ["pretrained", "cli"],
    ["integrations"],
    ["__init__", "__main__"],
]
ROOT = Path(__file__).parents[1] / "autopar"


def row_of(name: str) -> int:
    return next(number for number, row in enumerate(ROWS) if name in row)


def test_imports_point_downwards():
    for path in ROOT.rglob("*.py"):
        if "_policies" in path.parts:
            continue
        own = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            targets = []
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "autopar":
                parts = node.module.split(".")[1:]
                targets = [parts[0]] if parts else [alias.name for alias in node.names]
            for target in targets:
                if target not in ("__version__", own):
                    assert row_of(target) < row_of(own), f"{path.name} ({own}) imports {target}"


def test_no_file_is_long_and_none_is_called_utils():
    for path in ROOT.rglob("*.py"):
        assert "utils" not in path.name
        assert len(path.read_text().splitlines()) <= 400, path


def test_no_architecture_is_named_in_the_code():
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                assert "model_type ==" not in ast.unparse(node), path
