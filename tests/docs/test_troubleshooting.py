"""docs/troubleshooting.md quotes what the code says, and has a row for each way in which ranks differ or fail.

A quotation is a code span in the first column of a table; ``...`` in it stands for what an f-string fills in.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import autopar.errors
from tests.docs.pages import DOCS, ROOT

PAGE = DOCS / "troubleshooting.md"
GAP = "\0"  # what an f-string fills in
FAMILIES = {"ConsistencyError", "PipelineError"}  # each of their messages has a row
NOT_QUOTED = {"text"}  # FailureLog.failure, which is looked at where it is called
FEWEST, WORDS = 4, 6  # of a message that lead to its row


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted((ROOT / "autopar").rglob("*.py"))}


def template(node: ast.expr) -> str | None:
    """The literal text of an expression, with gaps; None if it has none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else GAP for part in node.values)  # type: ignore[misc]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [template(node.left), template(node.right)]
        return None if sides == [None, None] else "".join(GAP if side is None else side for side in sides)
    return None


@functools.cache
def texts() -> frozenset[str]:
    """All texts of the package, spaces and line ends alike."""
    found = {template(node) for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.expr)}
    return frozenset(" ".join(text.split()) for text in found if text)


@functools.cache
def functions() -> dict[str, list[ast.FunctionDef]]:
    found: dict[str, list[ast.FunctionDef]] = {}
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, []).append(node)
    return found


def messages(node: ast.expr, scope: ast.AST, seen: frozenset[int] = frozenset()) -> Iterator[str]:
    """The texts that an expression can be: of a name those that are assigned to it, of a call those that it returns."""
    if id(node) in seen:
        return
    seen, text = seen | {id(node)}, template(node)
    if text is not None:
        yield text
    elif isinstance(node, ast.IfExp):
        yield from messages(node.body, scope, seen)
        yield from messages(node.orelse, scope, seen)
    elif isinstance(node, ast.Name):
        for statement in ast.walk(scope):
            if isinstance(statement, ast.Assign):
                for target in statement.targets:
                    pairs = [(target, statement.value)]
                    if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                        pairs = list(zip(target.elts, statement.value.elts, strict=True))
                    for name, value in pairs:
                        if isinstance(name, ast.Name) and name.id == node.id:
                            yield from messages(value, scope, seen)
    elif isinstance(node, ast.Call):
        first = node.args[0] if node.args else None
        if getattr(node.func, "attr", "") == "join" and isinstance(first, ast.List):
            yield from messages(first.elts[0], scope, seen)
        for function in functions().get(getattr(node.func, "id", ""), []):
            for statement in ast.walk(function):
                if isinstance(statement, ast.Return) and statement.value is not None:
                    yield from messages(statement.value, function, seen)


def raise_sites() -> Iterator[tuple[str, ast.expr, ast.AST]]:
    """Where an error of the families is made: the place, its first argument, the function around it."""
    for path, tree in trees().items():
        inside = {id(child): f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for child in ast.walk(f)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args:
                made = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if made in FAMILIES or made == "failure":
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node.args[0], inside[id(node)]


def lead(message: str) -> str:
    """The first words of a message that name no rank: of its first literal part that has some, else the longest."""
    parts = [" ".join(part.split()).lstrip(",.: ") for part in message.split(GAP)]
    chosen = next((part for part in parts if len(part.split()) >= FEWEST), max(parts, key=len))
    return " ".join(chosen.split()[:WORDS])


def rows() -> list[list[str]]:
    lines = re.findall(r"^\| (.+?) \|", PAGE.read_text(), re.MULTILINE)
    return [re.findall(r"`([^`]+)`", line) for line in lines]


def quotations() -> list[str]:
    classes = {*vars(autopar.errors)}
    return [span for row in rows() for span in row if span not in classes and span not in {"None"}]


def says(text: str, quoted: str) -> bool:
    """Whether a text holds a quotation: its parts between ``...``, in order."""
    place = 0
    for part in quoted.split("..."):
        words = " ".join(part.split())
        at = text.find(words, place)
        if at < 0:
            return False
        place = at + len(words)
    return True


def test_the_code_says_what_is_quoted() -> None:
    quoted = quotations()
    assert len(quoted) > 90
    assert not [span for span in quoted if not any(says(text, span) for text in texts())]


def test_each_message_of_ranks_that_differ_or_fail_has_a_row() -> None:
    page = " ... ".join(quotations())
    found, missing = 0, []
    for place, argument, function in raise_sites():
        if isinstance(argument, ast.Name) and argument.id in NOT_QUOTED and getattr(function, "name", "") == "failure":
            continue
        said = list(messages(argument, function))
        assert said, f"{place}: {ast.unparse(argument)} was not followed"
        found += len(said)
        missing += [f"{place}: {lead(text)}" for text in said if lead(text) not in page]
    assert found > 30
    assert not missing, "\n".join(missing)


def test_each_class_of_errors_has_a_row() -> None:
    found = vars(autopar.errors).items()
    kinds = {name for name, kind in found if isinstance(kind, type) and issubclass(kind, autopar.AutoparError)}
    kinds.remove("AutoparError")
    assert {span for row in rows() for span in row if span in kinds} == kinds


def test_a_message_that_the_code_does_not_say_is_found() -> None:
    assert not any(says(text, "the ranks have never heard of each other") for text in texts())
    assert says(f"the ranks {GAP} got different inputs ({GAP}", "the ranks ... got different inputs (")
    assert lead(f"{GAP} are in different calls:") == "are in different calls:"
