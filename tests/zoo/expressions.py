"""Evaluate short expressions: arithmetic on names and numbers, comparisons, attributes of ``config``, calls."""

import ast
import functools
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.GtE: operator.ge,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
}

_SIZE = re.compile(r"(?=.*[a-z])(?:\b(?:heads|kv_heads|vocab)\b|[\d\s+*/%()-])+")


def is_size(text: str) -> bool:
    """Tell an expression over the sizes of a model from any other text: it has no other words."""
    return _SIZE.fullmatch(text) is not None


def evaluate(text: str, names: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]] | None = None) -> Any:
    """Return the value of an expression."""
    try:
        return _value(_parsed(text), names, functions or {})
    except SyntaxError as error:
        raise ValueError(f"{text!r} has no value: {error}") from error


@functools.cache
def _parsed(text: str) -> ast.expr:
    return ast.parse(text.strip(), mode="eval").body


def _value(node: ast.expr, names: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> Any:
    def value(inner: ast.expr) -> Any:
        return _value(inner, names, functions)

    match node:
        case ast.Constant():
            return node.value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Attribute(value=ast.Name(id="config") | ast.Attribute(), attr=attr) if not attr.startswith("_"):
            return getattr(value(node.value), attr)
        case ast.UnaryOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.operand))
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        case ast.Compare(ops=[compared], comparators=[right]) if type(compared) in _OPERATORS:
            return _OPERATORS[type(compared)](value(node.left), value(right))
        case ast.List():
            return [value(each) for each in node.elts]
        case ast.Call(func=ast.Name(id=name)) if name in functions:
            by_name = {each.arg: value(each.value) for each in node.keywords if each.arg is not None}
            return functions[name](*[value(each) for each in node.args], **by_name)
    raise SyntaxError(f"{ast.unparse(node)} is no name, function or form that is known")
