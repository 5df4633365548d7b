"""The exception tree of autopar.

    AutoparError
    ├── ConfigError(ValueError)          the user's configuration, or sizes that do not fit
    ├── UnsupportedModelError            no policy matches the model
    ├── PolicyError                      a policy is wrong; carries file and line
    ├── CheckpointError                  a checkpoint is incomplete, damaged, or does not fit
    ├── ConsistencyError                 ranks that must agree do not
    ├── VerificationError                the parallelized model differs from the reference model
    └── PipelineError                    a stage of a pipeline did not deliver

The first line of a message states the problem, with the name and both numbers; then come its source and the fix. Errors
are raised before anything is changed.
"""

from __future__ import annotations

import difflib
import logging
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path


class AutoparError(Exception):
    """Base of all errors that autopar raises on purpose.

    Attributes:
        told_by_rank_0: True if rank 0 raises and prints the same, so this rank need not.
    """

    told_by_rank_0 = False


class ConfigError(AutoparError, ValueError):
    """A configuration key, type or size is wrong. ``problems`` lists every one that was found."""

    def __init__(self, message: str, problems: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (message,)


class UnsupportedModelError(AutoparError):
    """No policy matches the model."""


class PolicyError(AutoparError):
    """A policy is malformed or does not describe the model.

    Args:
        message: Text of the error.
        where: ``file:line`` of the entry, put in front of the message.
    """

    def __init__(self, message: str, where: object = None) -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.where = str(where) if where else None


class CheckpointError(AutoparError):
    """A checkpoint is incomplete, damaged, or does not fit the model or mesh."""


class ConsistencyError(AutoparError):
    """Ranks hold different values where they must hold the same.

    Args:
        parameter: Name of the first weight that differs; "" if that is something else.
    """

    def __init__(self, message: str = "", parameter: str = "") -> None:
        super().__init__(message)
        self.parameter = parameter


class VerificationError(AutoparError):
    """A parallelized model computes something else than the plain one."""


class PipelineError(AutoparError):
    """A stage of a pipeline did not deliver: its process ended, failed or hangs."""


class ShardWarning(UserWarning):
    """A rank's shard of a weight is used where the full weight is likely to be meant."""


def clip(text: str, width: int = 120) -> str:
    """Return ``text``, or of a longer one the beginning: for values of users in messages."""
    return text if len(text) <= width else f"{text[: width - 4]} ..."


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def in_one_line(error: object, width: int | None = None) -> str:
    """Return an error's text without its line breaks, or the beginning of one that is longer than ``width``."""
    text = " ".join(str(error).split())
    return text if width is None else clip(text, width)


def type_and_text(error: BaseException, width: int | None = None) -> str:
    """Return an error of foreign code as ``ValueError: text``, in one line."""
    return f"{type(error).__name__}: {in_one_line(error, width)}"


def listed(names: Sequence[str], limit: int = 5) -> str:
    """Join the first few names, and say how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def not_parallelized(model: object) -> ConfigError:
    """Return the error of a call that needs a parallelized model."""
    return ConfigError(f"{type(model).__name__} is not parallelized; autopar.initialize does that")


def nearest(name: str, candidates: Iterable[str], cutoff: float = 0.5) -> str:
    """Return ``" Did you mean 'x'?"`` for the candidate closest to ``name``, else an empty string."""
    found = difflib.get_close_matches(name, list(candidates), n=1, cutoff=cutoff)
    return f" Did you mean '{found[0]}'?" if found else ""


def missing(path: Path) -> str:
    """Say where a path stops to be there, and what may have been meant; "" if it is there."""
    path = path.absolute()
    if path.exists():
        return ""
    there = next(folder for folder in path.parents if folder.exists())
    name = path.relative_to(there).parts[0]
    found = sorted(entry.name for entry in there.iterdir()) if there.is_dir() else []
    return f"{there} has no '{name}'.{nearest(name, found)}"


def tell(log: logging.Logger, line: str) -> None:
    """Log a line that every user should see (INFO); print it where the program has set up no logging."""
    if log.hasHandlers():
        log.info("%s", line)
    else:
        print(f"autopar: {line}", file=sys.stderr, flush=True)
