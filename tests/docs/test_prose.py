"""The words of docstrings and pages: functions begin with a verb, and sentences with their subject."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT as REPOSITORY

ROOT = Path(__file__).parents[2] / "autopar"
_NO_VERB = re.compile(r"(What|Who|Whether|Which|Where|How)\b")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

# What no sentence has -> what to write instead. Questions and headings are left out.
PATTERNS = {
    r"^What(ever)?\b": "name the thing: 'The small config needs ...', not 'What the small config needs is ...'",
    r"^Who(ever)?\b|([:;] |\b(for|to|of|by|than) )who(ever)?\b": "a noun before 'who': 'a reader who ...'",
    r"^Of (?!course\b|the \d|no\b)": "the subject first: 'One rank writes a weight that ...'",
    r"(?<![Tt]here )\b(is|are|was|were) no (?!longer\b|more\b|less\b|other\b)": "'is not a ...', 'has no ...'",
    r"\b(None|none|list|breaks|no \w+) but (?!not\b)": "'except'",
    r"\b(which ever|have how many|go(es)? with the \w+ whose|at a venture)\b": "another sentence",
}
PAGES_OF_WORDS = [*PAGES, REPOSITORY / "tests" / "README.md"]


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


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of Markdown or of a docstring, each in one line, without code, headings and questions."""
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"(`+)[^`]+\1", "`code`", text)
    text = re.sub(r"^#.*$|^\|[-| ]+\|$", "", text, flags=re.MULTILINE)
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[*|-]|\d+\.) )|(?<=\|)", text):
        line = re.sub(r"^(\d+\. |[*-] )+", "", " ".join(part.split()).strip("| "))
        for sentence in re.split(r"(?<=[.!?])\*{0,2} +(?=\*{0,2}[A-Z`\[])|(?<=: )(?=[A-Z])", line):
            if sentence.strip() and not sentence.rstrip("*").endswith("?"):
                yield sentence.strip().lstrip("*")


def faults(text: str) -> list[str]:
    """Return the sentences that have a pattern, with the advice."""
    return [
        f"{sentence[:160]!r}: {advice}"
        for sentence in sentences(text)
        for pattern, advice in PATTERNS.items()
        if re.search(pattern, sentence)
    ]


@pytest.mark.parametrize("page", PAGES_OF_WORDS, ids=[str(page.relative_to(REPOSITORY)) for page in PAGES_OF_WORDS])
def test_sentences_of_pages_are_plain(page: Path) -> None:
    found = faults(page.read_text())
    assert not found, "\n".join(found)


def test_sentences_of_docstrings_are_plain() -> None:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, _DOCUMENTED):
                name = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
                found += [f"{name} {fault}" for fault in faults(ast.get_docstring(node) or "")]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("It is counted. What a rank\nholds is a shard.", 1),
        ("| a | What a rank holds. |", 1),
        ("What does a rank hold?", 0),
        ("## What a rank holds", 0),
        ("named by a noun: who knows the field guesses", 1),
        ("It says `the module is no model`.", 0),
        ("```\nWhat is in code.\n```", 0),
    ],
)
def test_which_sentences_are_faults(text: str, count: int) -> None:
    assert len(faults(text)) == count
