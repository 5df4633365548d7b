"""Lines of the user's code that add numbers up, by their source.

A weight of a pipeline stage is whole, so a function of it alone gives the plain model's number. A number that a line
makes of several blocks is of this stage's blocks, and another one on each stage: a norm of all gradients, a count of
parameters. Numbers of Python (``p.numel()``, ``p.grad.norm().item()``) go on unseen: of a line that reads some of
several blocks, its source says whether they become one.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterable, Iterator, Sequence

__all__ = ["adds_up", "goes_over_parameters"]

_SUMS = frozenset(("sum", "max", "min", "any", "all", "fsum"))
_OF_LISTS = _SUMS | frozenset(
    ["mean", "median", "std", "var", "norm", "quantile", "percentile", "average", "fmean", "stdev", "sorted", "prod"]
)
_PARAMETERS = ("parameters", "named_parameters")
_PARTED = ("body", "orelse", "finalbody", "handlers", "cases")


def adds_up(file: str, line: int) -> bool:
    """Return whether numbers that a line reads, one after the other, go into one: a sum, an extreme, an end of a loop.

    False where the source is not known.
    """
    tree, around = _around(file, line)
    inner = [node for node in around if not any(other is not node and _holds(node, other) for other in around)]
    return any(_adds_up(statement, around, _scope(around) or tree) for statement in inner)


def goes_over_parameters(file: str, line: int) -> bool:
    """Return whether a line is in a loop over ``model.parameters()``, where weights of other stages are not."""
    loops = (each for node in _around(file, line)[1] for each in (node, *_own_parts(node)))
    iterated = (inner.iter for each in loops for inner in ast.walk(each) if isinstance(inner, ast.comprehension))
    named = (node.iter for node in _around(file, line)[1] if isinstance(node, ast.For))
    called = (each.func for part in (*iterated, *named) for each in ast.walk(part) if isinstance(each, ast.Call))
    return any(isinstance(each, ast.Attribute) and each.attr in _PARAMETERS for each in called)


def _around(file: str, line: int) -> tuple[ast.Module, list[ast.stmt]]:
    """Return the source of a file, and the statements that a line is in."""
    tree = _parsed(file, tuple(linecache.getlines(file))) or ast.Module([], [])
    return tree, [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and _spans(node, line)]


def _adds_up(statement: ast.stmt, around: Sequence[ast.stmt], scope: ast.AST) -> bool:
    loops = [node for node in around if isinstance(node, ast.For)]
    if isinstance(statement, ast.AugAssign):
        return _accumulates(statement, scope) and not _begins_again(statement.target, loops)
    called = [each for part in _own_parts(statement) for each in ast.walk(part) if _is_called(each, _SUMS)]
    if called:
        return any(not _is_of_one(each, loops) for each in called)
    if isinstance(statement, ast.If):
        in_loop = any(isinstance(each, ast.For | ast.While) for each in around)
        return in_loop and any(map(_decides, statement.body))
    if isinstance(statement, ast.Assign):  # total = total + ..., largest = max(largest, ...)
        names = [target for target in statement.targets if isinstance(target, ast.Name)]
        grows = [each for each in names if any(_is_name(one, each.id) for one in _operands(statement.value))]
        if grows:
            return not _begins_again(grows[0], loops)
    return any(_is_summed(name, scope) for name in _collected(statement))


@functools.lru_cache(maxsize=32)
def _parsed(file: str, lines: tuple[str, ...]) -> ast.Module | None:
    try:
        return ast.parse("".join(lines)) if lines else None
    except (SyntaxError, ValueError):  # a notebook's line with a command
        return None


def _spans(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _holds(node: ast.stmt, other: ast.stmt) -> bool:
    return any(other is each for each in ast.walk(node))


def _scope(around: Iterable[ast.stmt]) -> ast.stmt | None:
    functions = [node for node in around if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return max(functions, key=lambda node: node.lineno, default=None)


def _own_parts(statement: ast.stmt) -> list[ast.AST]:
    """Return what a statement computes itself, without the statements inside of it."""
    return [
        each
        for name, field in ast.iter_fields(statement)
        if name not in _PARTED
        for each in (field if isinstance(field, list) else [field])
        if isinstance(each, ast.AST)
    ]


def _is_called(node: ast.AST, names: frozenset[str]) -> bool:
    """Return whether ``node`` is a call of a function, with one of these names, of several things."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        return False
    name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
    return name in names and any(isinstance(each, ast.GeneratorExp | ast.ListComp | ast.SetComp) for each in node.args)


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _is_of_one(call: ast.AST, loops: Sequence[ast.For]) -> bool:
    """Return whether a sum goes over a part of what a loop around it goes through: of one layer."""
    items = {name for loop in loops for name in _names(loop.target)}
    made = [each for each in ast.walk(call) if isinstance(each, ast.comprehension)]
    return bool(made) and all(items & _names(each.iter) for each in made)


def _begins_again(target: ast.AST, loops: Sequence[ast.For]) -> bool:
    """Return whether a sum over a part of what a loop goes through begins again for the next one."""
    name, last = next(iter(_names(target)), ""), max(loops, key=lambda loop: loop.lineno, default=None)
    for loop in loops:
        if last is not None and (loop is last or _names(loop.target) & _names(last.iter)):
            set_anew = (each for each in loop.body if isinstance(each, ast.Assign) and not _names(each.value) & {name})
            if any(_is_name(each, name) for one in set_anew for each in one.targets):
                return True
    return False


def _accumulates(statement: ast.AugAssign, scope: ast.AST) -> bool:
    """Return whether a name grows in a loop; a place in a flat vector, which slices take, is none."""
    if not isinstance(statement.target, ast.Name | ast.Attribute):
        return False  # stats[name] += ...
    names = {each.id for each in ast.walk(statement.target) if isinstance(each, ast.Name)}
    slices = [each for each in ast.walk(scope) if isinstance(each, ast.Slice)]
    return not any(_is_name(each, name) for one in slices for each in ast.walk(one) for name in names)


def _decides(node: ast.stmt) -> bool:
    """Return whether a statement ends a loop, or sets a flag for what follows it."""
    flag = isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    return isinstance(node, ast.Break | ast.Return) or (
        flag and isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    )


def _operands(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.BinOp):
        return [*_operands(node.left), *_operands(node.right)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("max", "min"):
        return [each for argument in node.args for each in _operands(argument)]
    return [each for value in node.values for each in _operands(value)] if isinstance(node, ast.BoolOp) else [node]


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _collected(statement: ast.stmt) -> Iterator[str]:
    """Yield the names of lists and dicts that a statement collects numbers in."""
    if isinstance(statement, ast.Assign):
        made = isinstance(statement.value, ast.ListComp | ast.DictComp | ast.GeneratorExp)
        for target in statement.targets:
            if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                yield target.value.id
            elif made and isinstance(target, ast.Name):
                yield target.id
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        called = statement.value.func
        if (
            isinstance(called, ast.Attribute)
            and called.attr in ("append", "extend")
            and isinstance(called.value, ast.Name)
        ):
            yield called.value.id


def _is_summed(name: str, scope: ast.AST) -> bool:
    """Return whether a function gives what it has collected under ``name`` to a sum, a mean or the like."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if called in _OF_LISTS and any(_is_name(each, name) for part in node.args for each in ast.walk(part)):
                return True
    return False
