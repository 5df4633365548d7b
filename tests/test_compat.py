"""Private names of other libraries: written in the two folders compat only, and there as they were."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import probes

ROOT = Path(__file__).parents[1] / "autopar"
COMPAT = ROOT / "compat"
ALLOWED = {COMPAT, ROOT / "tools" / "compat"}
# With an underscore, and documented nevertheless: of sys and os, and of named tuples.
DOCUMENTED = {"_getframe", "_exit", "_asdict", "_replace", "_fields"}
# Always another library's, also where a class of ours has an attribute of that name by itself (``self._parameters``).
HELD = {"_parameters", "_buffers", "_modules", "_version", "_base", "_cdata", "_schema", "_C"}
# Methods of transformers' Trainer and of peft that a subclass or a bound method of ours extends.
EXTENDED = {"integrations/trainer", "features/peft", "tensor_parallel/hooks.py"}


@pytest.mark.parametrize("name", probes.PROBES)
def test_the_libraries_have(name: str) -> None:
    assert probes.PROBES[name].check(), f"{name}: stops working: {probes.PROBES[name].lost}"


def test_a_probe_that_fails_says_what_stops_working(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(probes.failures()) == []
    monkeypatch.delattr(probes.tensors, "version_of")
    (line,) = probes.failures()
    assert line.startswith("versions, bases and memory of tensors: AttributeError: ")
    assert line.endswith("\n  stops working: gradients that are computed once, checks of weights")


def test_nobody_else_writes_them() -> None:
    trees = {path: ast.parse(path.read_text()) for path in ROOT.rglob("*.py") if "_policies" not in path.parts}
    own = {name for tree in trees.values() for name in _defined(tree)}
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, tree in trees.items()
        if not ALLOWED & {*path.parents} and not any(path.is_relative_to(ROOT / each) for each in EXTENDED)
        for line, name in _foreign(tree, own)
    ]
    assert not found, found
    assert len(list(COMPAT.glob("*.py"))) <= 12


def _defined(tree: ast.AST) -> Iterator[str]:
    """Names that this project gives to functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _foreign(tree: ast.AST, own: set[str]) -> Iterator[tuple[int, str]]:
    """Private names that another library gave."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and not node.attr.startswith("_autopar"):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if node.attr not in DOCUMENTED and (node.attr not in own or (node.attr in HELD and not of_self)):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("autopar"):
            parts = [*node.module.split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, f"{node.module}: {part}") for part in parts if _is_private(part))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
