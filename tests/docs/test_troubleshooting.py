"""docs/troubleshooting.md quotes the messages of the code, and has a row for each way in which ranks differ or fail."""

import ast
import functools
import re

import autopar.errors
from tests.docs.messages import GAP, messages, sites, template, trees
from tests.docs.pages import DOCS

PAGE = DOCS / "troubleshooting.md"
FAMILIES = {"ConsistencyError", "PipelineError", "failure"}  # each of their messages has a row
NOT_QUOTED = {"text"}  # FailureLog.failure, which is looked at where it is called
FEWEST, WORDS = 4, 6  # of a message that lead to its row


@functools.cache
def texts() -> frozenset[str]:
    found = {template(node) for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.expr)}
    return frozenset(" ".join(text.split()) for text in found if text)


def lead(message: str) -> str:
    parts = [" ".join(part.split()).lstrip(",.: ") for part in message.split(GAP)]
    chosen = next((part for part in parts if len(part.split()) >= FEWEST), max(parts, key=len))
    return " ".join(chosen.split()[:WORDS])


def rows() -> list[list[str]]:
    lines = re.findall(r"^\| ?(.+?) ?\|", PAGE.read_text(), re.MULTILINE)
    return [re.findall(r"`([^`]+)`", line) for line in lines]


def quotations() -> list[str]:
    classes = {*vars(autopar.errors)}
    return [span for row in rows() for span in row if span not in classes and span not in {"None"}]


def says(text: str, quoted: str) -> bool:
    parts = (" ".join(part.split()) for part in quoted.split("..."))
    return re.search(".*".join(map(re.escape, parts)), text) is not None


def test_the_code_says_what_is_quoted() -> None:
    quoted = quotations()
    assert len(quoted) > 90
    assert not [span for span in quoted if not any(says(text, span) for text in texts())]


def test_each_message_of_ranks_that_differ_or_fail_has_a_row() -> None:
    page = " ... ".join(quotations())
    found, missing = 0, []
    for path, line, kind, argument, function in sites():
        inside = getattr(function, "name", "") == "failure" and ast.unparse(argument) in NOT_QUOTED
        if kind not in FAMILIES or inside:
            continue
        said = list(messages(argument, function))
        assert said, f"{path}:{line}: {ast.unparse(argument)} was not followed"
        found += len(said)
        missing += [f"{path}:{line}: {lead(text)}" for text in said if lead(text) not in page]
    assert found > 30
    assert not missing, "\n".join(missing)


def test_each_class_of_errors_has_a_row() -> None:
    kinds = {kind.__name__ for kind in autopar.AutoparError.__subclasses__() if kind.__module__ == "autopar.errors"}
    assert {span for row in rows() for span in row if span in kinds} == kinds


def test_a_message_that_the_code_does_not_say_is_found() -> None:
    assert not any(says(text, "the ranks have never heard of each other") for text in texts())
    assert says(f"the ranks {GAP} got different inputs ({GAP}", "the ranks ... got different inputs (")
    assert lead(f"{GAP} are in different calls:") == "are in different calls:"
