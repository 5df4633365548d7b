"""Read YAML as data with a line number for every value, safely for any file.

Policies and config files are read here, with or without libyaml. Unlike in ``yaml.safe_load``, a duplicate key, an
alias, a tag and a second document are errors. Scalars follow YAML 1.2 (``1e-5`` is a number; ``1:30``, ``010`` and
dates are text), with ``yes``, ``no``, ``on`` and ``off`` of 1.1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from autopar.errors import missing

Fail = Callable[[str, "int | str | None"], Exception]
"""A function that makes the error of a file from the problem and its line or key path, if any."""

_MOST_LEVELS = 50
_EVENTS: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader makes the same events ten times faster
_WORDS = {"": None, "~": None, "null": None} | dict.fromkeys(("true", "yes", "on"), True)
_WORDS |= dict.fromkeys(("false", "no", "off"), False)
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,99}(_[0-9]{1,99}){0,9})")
_OTHER_BASE = re.compile(r"0x[0-9a-fA-F]{1,99}|0o[0-7]{1,99}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*\.[0-9_]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")
_FLOAT_WORD = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


class Where(NamedTuple):
    """The place of an entry: file (or ``policy dict``) and line (or key path)."""

    file: str
    line: int | str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Node(NamedTuple):
    """A value with its place: a scalar, a list of nodes, or a dict of nodes."""

    value: Any
    where: Where


def read_text(path: Path, fail: Fail) -> str:
    """Read a UTF-8 file, with or without a byte order mark."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise fail(". ".join(filter(None, (f"cannot be read: {error.strerror}", missing(path)))), None) from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise fail(
            f"cannot be read: byte {content[error.start]:#04x} is not UTF-8; save the file as UTF-8", line
        ) from error


def yaml_tree(text: str, file: str, fail: Fail) -> Node:
    """Read the document in ``text``; None if it is empty."""
    text = text.removeprefix("\ufeff")
    if strange := yaml.reader.Reader.NON_PRINTABLE.search(text):
        line = text.count("\n", 0, strange.start()) + 1
        raise fail(f"cannot be parsed as YAML: character {strange.group()!r} is not allowed", line)
    builder = _Builder(file, fail)
    try:
        for event in yaml.parse(text, _EVENTS):
            builder.take(event)
    except yaml.YAMLError as error:
        raise fail(*_explained(error, text)) from error
    return builder.root or Node(None, Where(file, 1))


def plain(node: Node) -> Any:
    """Return the value without places, as ``yaml.safe_load``."""
    if isinstance(node.value, dict):
        return {key: plain(entry) for key, entry in node.value.items()}
    if isinstance(node.value, list):
        return [plain(entry) for entry in node.value]
    return node.value


def plain_tree(data: Any, file: str, fail: Fail, path: tuple[str, ...] = (), depth: int = 0) -> Node:
    """Reverse :func:`plain`, with paths of keys as places."""
    where = Where(file, ".".join(path) or "top")
    if depth > _MOST_LEVELS:
        raise fail(f"is nested more than {_MOST_LEVELS} levels deep, or contains itself", ".".join(path[:3]) or "top")
    if isinstance(data, Mapping):
        return Node({str(k): plain_tree(v, file, fail, (*path, str(k)), depth + 1) for k, v in data.items()}, where)
    if isinstance(data, (list, tuple)):
        return Node([plain_tree(item, file, fail, path, depth + 1) for item in data], where)
    return Node(data, where)


class _Builder:
    """Build a tree from events, with a loop and a stack, because a file could exceed the recursion limit."""

    def __init__(self, file: str, fail: Fail) -> None:
        self.file, self.fail = file, fail
        self.root: Node | None = None
        self.open: list[Node] = []  # the enclosing lists and dicts
        self.keys: list[tuple[str, int] | None] = []  # for each of them, the key whose value comes next

    def take(self, event: Any) -> None:
        line = event.start_mark.line + 1
        match event:
            case yaml.AliasEvent():
                raise self.fail(f"has an alias (*{event.anchor}), which is not supported; write the value out", line)
            case yaml.DocumentStartEvent() if self.root is not None:
                raise self.fail("must hold one document, got a second one ('---')", line)
            case yaml.ScalarEvent():
                self._scalar(event, line)
            case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                self._begin({} if isinstance(event, yaml.MappingStartEvent) else [], event, line)
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                self.open.pop()
                self.keys.pop()

    def _scalar(self, event: Any, line: int) -> None:
        self._no_tag(event, event.value, line)
        if not (self.open and isinstance(self.open[-1].value, dict) and self.keys[-1] is None):
            self._add(Node(_scalar(event.value) if event.implicit[0] else event.value, Where(self.file, line)))
            return
        known = self.open[-1].value.get(event.value)
        if known is not None:
            raise self.fail(f"key '{event.value}' is also in line {known.where.line}", line)
        if event.value == "<<":
            raise self.fail("has a merge key ('<<'), which is not supported; write the keys out", line)
        self.keys[-1] = (event.value, line)

    def _begin(self, content: Any, event: Any, line: int) -> None:
        self._no_tag(event, "{...}" if isinstance(content, dict) else "[...]", line)
        if self.open and isinstance(self.open[-1].value, dict) and self.keys[-1] is None:
            raise self.fail("has a list or a mapping as a key; a key must be a word", line)
        if len(self.open) >= _MOST_LEVELS:
            raise self.fail(f"is nested more than {_MOST_LEVELS} levels deep", line)
        node = Node(content, Where(self.file, line))
        self._add(node)
        self.open.append(node)
        self.keys.append(None)

    def _add(self, node: Node) -> None:
        if not self.open:
            self.root = node
        elif isinstance(self.open[-1].value, list):
            self.open[-1].value.append(node)
        else:
            key, line = self.keys[-1] or ("", 0)
            self.open[-1].value[key] = Node(node.value, Where(self.file, line))
            self.keys[-1] = None

    def _no_tag(self, event: Any, value: str, line: int) -> None:
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise self.fail(f"has a tag, which is not supported: {tag} with the value {value!r}", line)


def _scalar(text: str) -> Any:
    """Return the value of a plain (unquoted) scalar."""
    word = text if text.islower() else text.lower() if text in (text.upper(), text.capitalize()) else text
    if word in _WORDS:
        return _WORDS[word]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _OTHER_BASE.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    if found := _FLOAT_WORD.fullmatch(text):
        return float(f"{found[1]}inf" if found[2] else "nan")
    return text


def _explained(error: yaml.YAMLError, text: str) -> tuple[str, int]:
    """Return the description of a YAML error, with a fix for common mistakes, and its line."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    lines = text.split("\n")
    line = min(mark.line + 1 if mark is not None else 1, len(lines) - (not lines[-1]) or 1)
    if "nesting depth" in problem:  # libyaml in PyYAML 6.0.4 has a limit of 1,000 levels
        return f"is nested more than {_MOST_LEVELS} levels deep", line
    hint = ""
    if "\t" in lines[line - 1]:
        hint = "; indent with blanks instead of tabs"
    elif "got '?'" in problem:
        hint = "; inside [...] and {...} quote values with a '?'"
    return f"cannot be parsed as YAML: {problem}{hint}", line
