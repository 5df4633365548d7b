"""Configuration files: JSON or YAML, in which no key stands twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from autopar.errors import ConfigError
from autopar.policy.yaml_reader import plain, read_text, yaml_tree

__all__ = ["read_file"]


def read_file(path: Path) -> object:
    """Read a ``.json``, ``.yaml`` or ``.yml`` file. Raises ConfigError, with the line."""
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise ConfigError(f"config file '{path}' must end in .json, .yaml or .yml")

    def fail(problem: str, line: int | str | None) -> ConfigError:
        return ConfigError(f"config file '{path}'{f', line {line}:' if line else ''} {problem}")

    text = read_text(path, fail)
    if path.suffix != ".json":
        return plain(yaml_tree(text, str(path), fail))
    try:
        return json.loads(text, object_pairs_hook=_each_key_once)
    except ValueError as error:
        problem, line = getattr(error, "msg", error), getattr(error, "lineno", 1)
        raise fail(f"cannot be parsed as JSON: {problem}", line) from error
    except (KeyError, RecursionError) as error:
        problem = (
            f"has the key '{error.args[0]}' twice in one section"
            if isinstance(error, KeyError)
            else "is nested too deeply"
        )
        raise fail(problem, None) from error


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise KeyError(key)
    return dict(pairs)
