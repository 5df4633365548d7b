"""Sums, counts and extremes over ``model.parameters()`` through pipeline stages: the user's code is told, once a line.

A weight of a stage is whole, so a function of it alone gives the plain model's number. What a line makes of weights of
several blocks is of this stage's blocks, and another number on each stage: a norm of all gradients, a number of
parameters, a penalty, a threshold. Functions of tensors that put two together are seen as they are called. Numbers of
Python (``p.numel()``, ``p.grad.norm().item()``) are not seen any more: of a line that reads some of several blocks, its
source says whether they are added up.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType

__all__ = ["MIXERS", "NUMBERS", "Stage", "adds_up"]

_MIXERS = """
    cat concat concatenate stack hstack vstack dstack column_stack row_stack block_diag add add_ __add__ __radd__
    __iadd__ sub sub_ __sub__ __rsub__ __isub__ maximum minimum fmax fmin max min gt lt ge le __gt__ __lt__ __ge__
    __le__ logical_or logical_and logical_or_ logical_and_ bitwise_or bitwise_and __or__ __ror__ __and__ __rand__
    __ior__ __iand__ addcmul addcdiv hypot logaddexp __setitem__
"""
_NUMBERS = "item __float__ __int__ __bool__ __index__ numel nelement tolist"
_OF_SEVERAL = "sum max min any all fsum"
_OF_COLLECTED = "mean median std var norm quantile percentile average fmean stdev sorted prod"
MIXERS, NUMBERS, _SUMS = (frozenset(names.split()) for names in (_MIXERS, _NUMBERS, _OF_SEVERAL))
_OF_LISTS = _SUMS | frozenset(_OF_COLLECTED.split())
_PARTED = ("body", "orelse", "finalbody", "handlers", "cases")


class Stage:
    """The weights that a rank holds of a model in stages.

    Args:
        held: ``this rank holds stage 0 of 2: 20 of 39 parameters``.
    """

    def __init__(self, held: str) -> None:
        self.held = held
        self.quiet = False  # nothing is missing: weights of all stages are here, or a sum over the stages follows
        self._read: dict[
            tuple[CodeType, int], tuple[str, str] | None
        ] = {}  # line -> of what it reads; None: it is known

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Say nothing inside of ``with``."""
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before

    def reads_number(self, block: str, name: str, frame: FrameType) -> str | None:
        """Return the weight of another block of which a line of the user's has read a number, if it adds them up.

        Once, and None before and after it.
        """
        place = (frame.f_code, frame.f_lineno)
        first = self._read.setdefault(place, (block, name))
        if first is None or first[0] == block:
            return None
        self._read[place] = None
        return first[1] if adds_up(frame.f_code.co_filename, frame.f_lineno) else None

    def explain(self, how: str, one: str, other: str) -> str:
        """Return the warning for a line that puts two weights together."""
        return (
            f"{how} of {one} and {other} is of this stage's weights alone: {self.held}.\n"
            "  torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm) returns the norm of all stages; "
            "model.num_parameters() counts all;\n  execute_pipeline(batch, penalty=...) adds a penalty on all; with "
            "autopar.whole(model): all weights and gradients are here.\n  Where that is meant: "
            "warnings.filterwarnings('ignore', category=autopar.ShardWarning)."
        )


# -- what the source says ----------------------------------------------------------------------------------------------


def adds_up(file: str, line: int) -> bool:
    """Return whether numbers that a line reads, one after the other, go into one: a sum, an extreme, an end of a loop.

    False where the source is not known.
    """
    tree = _parsed(file, tuple(linecache.getlines(file)))
    if tree is None:
        return False
    around = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and _spans(node, line)]
    inner = [node for node in around if not any(other is not node and _holds(node, other) for other in around)]
    return any(_adds_up(statement, around, _scope(around) or tree) for statement in inner)


def _adds_up(statement: ast.stmt, around: Sequence[ast.stmt], scope: ast.AST) -> bool:
    if any(_is_called(each, _SUMS) for part in _own_parts(statement) for each in ast.walk(part)):
        return True
    if isinstance(statement, ast.AugAssign):
        return _accumulates(statement, scope)
    if isinstance(statement, ast.If):
        in_loop = any(isinstance(each, ast.For | ast.While) for each in around)
        return in_loop and any(map(_decides, statement.body))
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.BinOp | ast.BoolOp):
        names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
        if any(_is_name(each, name) for each in _operands(statement.value) for name in names):
            return True
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
    several = any(isinstance(each, ast.GeneratorExp | ast.ListComp | ast.SetComp) for each in node.args)
    running = name in ("max", "min") and len(node.args) > 1  # largest = max(largest, p.grad.abs().max().item())
    return name in names and (several or (running and isinstance(node.func, ast.Name)))


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
