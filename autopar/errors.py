"""The exceptions of autopar, and helpers for messages.

    AutoparError
    ├── ConfigError(ValueError)          an argument or a config key is wrong, or sizes do not fit
    ├── UnsupportedModelError            no policy matches the model
    ├── PolicyError                      a policy is wrong (with file and line)
    ├── CheckpointError                  a checkpoint is incomplete, damaged, or does not fit
    ├── ConsistencyError                 values that must be identical on ranks differ
    ├── VerificationError                the parallelized model differs from the reference model
    └── PipelineError                    a rank failed, ended or hangs

The first line of a message states the problem with the offending and the expected value; the next lines give the fix.
Errors are raised before anything changes.
"""

from __future__ import annotations

import difflib
import logging
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path


class AutoparError(Exception):
    """The base class of autopar's errors.

    Attributes:
        told_by_rank_0: True if rank 0 raises and prints the same error, so that this rank need not print it.
    """

    told_by_rank_0 = False


class ConfigError(AutoparError, ValueError):
    """A configuration key, type or size is wrong. ``problems`` lists all problems."""

    def __init__(self, message: str, problems: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (message,)


class UnsupportedModelError(AutoparError):
    """No policy matches the model."""


class PolicyError(AutoparError):
    """A policy is malformed or does not describe the model.

    Args:
        message: The text of the error.
        where: The ``file:line`` of the entry, which precedes the message.
    """

    def __init__(self, message: str, where: object = None) -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.where = str(where) if where else None


class CheckpointError(AutoparError):
    """A checkpoint is incomplete, damaged, or does not fit the model or mesh."""


class ConsistencyError(AutoparError):
    """Ranks have different values that must be identical.

    Args:
        message: The text of the error.
        parameter: The name of the first weight that differs; "" if another value differs.
    """

    def __init__(self, message: str = "", parameter: str = "") -> None:
        super().__init__(message)
        self.parameter = parameter


class VerificationError(AutoparError):
    """The results of a parallelized model differ from the reference model."""


class PipelineError(AutoparError):
    """A rank ended, failed or hangs."""


class ShardWarning(UserWarning):
    """Code uses a rank's shard of a weight where the full weight is probably intended."""


def clip(text: str, width: int = 120) -> str:
    """Truncate a long text, for user values in messages."""
    return text if len(text) <= width else f"{text[: width - 4]} ..."


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def in_one_line(error: object, width: int | None = None) -> str:
    """Return an error's text in one line, truncated to ``width``."""
    text = " ".join(str(error).split())
    return text if width is None else clip(text, width)


def type_and_text(error: BaseException, width: int | None = None) -> str:
    """Return an error of other code in one line, as ``ValueError: text``."""
    return f"{type(error).__name__}: {in_one_line(error, width)}"


def listed(names: Sequence[str], limit: int = 5) -> str:
    """Join the first ``limit`` names, followed by the number of remaining ones."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def not_parallelized(model: object) -> ConfigError:
    """Return the error of a call that needs a parallelized model."""
    return ConfigError(f"{type(model).__name__} is not parallelized\n  Call autopar.initialize first.")


def nearest(name: str, candidates: Iterable[str], cutoff: float = 0.5) -> str:
    """Return ``" Did you mean 'x'?"`` for the candidate closest to ``name``, or an empty string."""
    found = difflib.get_close_matches(name, list(candidates), n=1, cutoff=cutoff)
    return f" Did you mean '{found[0]}'?" if found else ""


def missing(path: Path) -> str:
    """Return a text with the first missing part of a path and the closest name; "" if the path exists."""
    path = path.absolute()
    if path.exists():
        return ""
    there = next(folder for folder in path.parents if folder.exists())
    name = path.relative_to(there).parts[0]
    found = sorted(entry.name for entry in there.iterdir()) if there.is_dir() else []
    return f"{there} has no '{name}'.{nearest(name, found)}"


def tell(log: logging.Logger, line: str) -> None:
    """Log a line for every user (INFO), or print it if the program has no logging."""
    if log.hasHandlers():
        log.info("%s", line)
    else:
        print(f"autopar: {line}", file=sys.stderr, flush=True)
