"""The words of docstrings, comments, error texts and pages; functions begin with a verb, sentences with a subject.

UPDATE_DOCS=1 python -m pytest tests/docs/test_prose.py      lowers the counts of FEWER
"""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.messages import trees
from tests.docs.pages import PAGES, ROOT

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
PAGES_OF_WORDS = [*PAGES, ROOT / "tests" / "README.md"]
# Phrases that the pages and the package still have: a pattern, and how often, which only falls.
FEWER = {
    "of the user's": (r"\bof the user'?s\b|\bof one's own\b", 2),
    "of its/your/their own": (r"\bof (?:its|your|their) own\b", 1),
    "told, tells": (r"\b(?:is|are|be) told\b|\btells? (?:the|it|them|us)\b", 0),
    "behind, beside": (r"\b(?:behind|beside)\b", 3),
    "alike": (r"\balike\b", 2),
    "goes on, goes with": (r"\bgo(?:es)? (?:on|with)\b", 0),
    "is no, has not": (r"\bis no [a-z]+\b|\bhas not\b(?! been)|\bwhich an? \w+ has not\b", 11),
    "somebody, nobody": (r"\b(?:some|no)body\b", 0),
    "others, other ones": (r"\bothers\b|\bother ones\b", 12),
    "that of, those of": (r"\b(?:that|those) of\b", 13),
    "what ... is": (r"\b[Ww]hat (?:is|are|was|it|they|a|the|of|ranks?|others)\b", 18),
    "whole": (r"\bwhole\b", 14),
}


def prose() -> str:
    """All pages, and the docstrings, comments and texts of the package."""
    parts = [page.read_text() for page in PAGES]
    for path, tree in trees().items():
        parts += re.findall(r"#(?!:)(.*)", path.read_text())
        constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        parts += [value for value in constants if isinstance(value, str) and " " in value]
    return "\n".join(parts)


def test_odd_phrases_become_fewer() -> None:
    text, lines, more = prose(), Path(__file__).read_text(), {}
    for row, (pattern, most) in FEWER.items():
        if (count := len(re.findall(pattern, text))) > most:
            more[row] = f"{count}, at most {most}"
        lines = re.sub(rf'(^    "{row}": .*, )\d+\)', rf"\g<1>{min(count, most)})", lines, flags=re.M)
    if os.environ.get("UPDATE_DOCS"):
        Path(__file__).write_text(lines)
    assert not more, f"say it plainly, as torch and transformers do: {more}"


def _documented() -> Iterator[tuple[str, ast.AST, str]]:
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, _DOCUMENTED):
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", node, ast.get_docstring(node) or ""


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    found = [
        name
        for name, node, text in _documented()
        if isinstance(node, ast.FunctionDef)
        and not any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
        and _NO_VERB.match(text)
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


@pytest.mark.parametrize("page", PAGES_OF_WORDS, ids=[str(page.relative_to(ROOT)) for page in PAGES_OF_WORDS])
def test_sentences_of_pages_are_plain(page: Path) -> None:
    found = faults(page.read_text())
    assert not found, "\n".join(found)


def test_sentences_of_docstrings_are_plain() -> None:
    found = [f"{name} {fault}" for name, _, text in _documented() for fault in faults(text)]
    assert not found, "\n".join(found)


def test_which_sentences_are_faults() -> None:
    wrong = ["It is counted. What a rank\nholds is a shard.", "| a | What a rank holds. |", "a noun: who knows guesses"]
    right = ["What does a rank hold?", "## What a rank holds", "It is `no\nmodel`.", "```\nWhat is in code.\n```"]
    assert [len(faults(text)) for text in (*wrong, *right)] == [1] * len(wrong) + [0] * len(right)
