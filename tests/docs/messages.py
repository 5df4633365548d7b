"""The messages of the package's exceptions and warnings."""

import ast
import builtins
import functools
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import ROOT

GAP = "\0"  # a value in an f-string
Site = tuple[str, int, str, ast.expr, ast.AST]  # file, line, class of the exception, its argument, the function around


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted((ROOT / "autopar").rglob("*.py"))}


def template(node: ast.AST) -> str | None:
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
def functions() -> dict[str, list[ast.FunctionDef]]:
    found: dict[str, list[ast.FunctionDef]] = {}
    for node in (node for tree in trees().values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).append(node)
    return found


def messages(node: ast.expr, scope: ast.AST, seen: frozenset[int] = frozenset()) -> Iterator[str]:
    """The texts that an expression can be: for a name the assigned texts, for a call the returned texts."""
    if id(node) in seen:
        return
    seen, text = seen | {id(node)}, template(node)
    if text is not None:
        yield text
    elif isinstance(node, ast.IfExp):
        yield from messages(node.body, scope, seen)
        yield from messages(node.orelse, scope, seen)
    elif isinstance(node, ast.Name):
        for target, value in (
            (each, a.value) for a in ast.walk(scope) if isinstance(a, ast.Assign) for each in a.targets
        ):
            several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            for name, one in zip(target.elts, value.elts, strict=True) if several else [(target, value)]:
                if isinstance(name, ast.Name) and name.id == node.id:
                    yield from messages(one, scope, seen)
    elif isinstance(node, ast.Call):
        first = node.args[0] if node.args else None
        if getattr(node.func, "attr", "") == "join" and isinstance(first, ast.List):
            yield from messages(first.elts[0], scope, seen)
        for function in functions().get(getattr(node.func, "id", ""), []):
            for statement in ast.walk(function):
                if isinstance(statement, ast.Return) and statement.value is not None:
                    yield from messages(statement.value, function, seen)


def sites() -> Iterator[Site]:
    """Where the package makes an exception or a warning (``warn``), or reports a failed rank (``failure``)."""
    kinds = {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)}
    kinds |= {"warn", "failure"}
    classes = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for _ in range(3):  # the depth of the tree of classes
        kinds |= {each.name for each in classes if any(getattr(base, "id", "") in kinds for base in each.bases)}
    for path, tree in trees().items():
        inside = {id(child): f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for child in ast.walk(f)}
        for node in ast.walk(tree):
            kind = isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", ""))
            if kind in kinds and node.args:
                yield str(path.relative_to(ROOT)), node.lineno, kind, node.args[0], inside.get(id(node), tree)
