"""Evaluate short expressions of this folder's data: arithmetic, comparisons, attributes of ``config``, calls."""

import functools
import re
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

_SIZE = re.compile(r"(?=.*[a-z])(?:\b(?:heads|kv_heads|vocab)\b|[\d\s+*/%()-])+")


def is_size(text: str) -> bool:
    """Tell an expression over the sizes of a model from any other text: it has no other words."""
    return _SIZE.fullmatch(text) is not None


def evaluate(text: str, names: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]] | None = None) -> Any:
    """Return the value of an expression."""
    try:
        return eval(_compiled(text), {"__builtins__": {}, **(functions or {})}, names)
    except (NameError, SyntaxError) as error:
        raise ValueError(f"{text!r} has no value: {error}") from error


@functools.cache
def _compiled(text: str) -> CodeType:
    return compile(text.strip(), "tests/zoo", "eval")
