"""The words of docstrings: a function's begins with a verb, and says what to do or what comes back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "autopar"
_NO_VERB = re.compile(r"(What|Who|Whether|Which|Where|How)\b")


def _functions() -> Iterator[tuple[Path, ast.FunctionDef]]:
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield path, node


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path, node in _functions()
        if not any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
        and _NO_VERB.match(ast.get_docstring(node) or "")
    ]
    assert not found, "\n".join(found)
