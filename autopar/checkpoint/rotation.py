"""Keep the last n checkpoints of a series: folders side by side whose names differ only in the number at their end.

What is newest is told by the numbers alone: times change when folders are copied, and differ on network file systems.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
import warnings
from pathlib import Path

from autopar.checkpoint.folder import fsync
from autopar.errors import CheckpointError

__all__ = ["check_keep_last", "is_checkpoint", "rotate", "series"]

_NUMBERED = re.compile(r"(.*?)([0-9]+)", re.DOTALL)
_DROPPED = re.compile(r"\.(.+)\.old-[0-9a-f]{16}", re.DOTALL)
_MARK = "autopar.json"  # what makes a folder a checkpoint of ours: deleted before the rest
_TEMPORARY = re.compile(r"\.(.+)\.tmp-[0-9a-f]{16}", re.DOTALL)
_ABANDONED = 24 * 3600  # seconds after which a temporary folder of the series is nobody's any more


def series(path: str | os.PathLike[str]) -> tuple[str, int]:
    """What a folder's name is before the number at its end, and the number: ``step-100`` -> ``("step-", 100)``.

    Raises:
        CheckpointError: if the name does not end in a number.
    """
    name = Path(path).name
    found = _NUMBERED.fullmatch(name)
    if found is None:
        raise CheckpointError(
            f"{name!r} does not end in a number, so it is not known which checkpoints are older\n"
            "  With keep_last= a folder is called like step-100, checkpoint-7 or epoch3; those that differ only in\n"
            "  the number are one series, and the highest numbers are kept."
        )
    return found[1], int(found[2])


def check_keep_last(target: str | os.PathLike[str], keep_last: object) -> None:
    """Check the arguments of :func:`rotate` before anything is written.

    Raises:
        CheckpointError: if ``keep_last`` is no whole number above 0, or the target's name does not end in a number.
    """
    if not isinstance(keep_last, int) or isinstance(keep_last, bool) or keep_last < 1:
        raise CheckpointError(
            f"keep_last={keep_last!r} must be a whole number of at least 1\n"
            "  It counts the checkpoint that is being saved; leave it out to keep all."
        )
    series(os.path.realpath(target))


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds a checkpoint in autopar's form; False for a symbolic link.

    A merged folder looks like any model's, a user's base model included, and is never deleted.
    """
    return not folder.is_symlink() and (folder / _MARK).is_file()


def rotate(target: Path, keep_last: int) -> list[Path]:
    """Delete the checkpoints of the target's series with the lowest numbers, so that ``keep_last`` remain.

    Call it when ``target`` is whole. It counts and always stays, even if its number is the lowest. Everything else in
    the parent folder is left alone: other series, folders that hold no checkpoint, symbolic links and what they point
    to. A checkpoint that is deleted disappears at once: it is renamed to the hidden ``.name.old-<id>`` and loses what
    makes it a checkpoint before the rest. What an earlier call left of such a folder when it was killed goes too,
    unless it is still whole (killed right after the renaming).

    A checkpoint that cannot be deleted is no error, as the new one is written: it ends in a warning.

    Args:
        target: the checkpoint that was just written; a symbolic link stands for what it points to.
        keep_last: how many remain, ``target`` included.

    Returns:
        The folders that were deleted, lowest number first.

    Raises:
        CheckpointError: as :func:`check_keep_last`.
    """
    check_keep_last(target, keep_last)
    target = Path(os.path.realpath(target))
    stem, _ = series(target)
    for path in _half_deleted(target.parent, stem):
        shutil.rmtree(path, ignore_errors=True)
    others = [path for path in _members(target.parent, stem) if path != target and is_checkpoint(path)]
    removed = []
    for path in others[: max(0, len(others) + 1 - keep_last)]:
        try:
            _remove(path)
        except FileNotFoundError:
            continue  # somebody else deletes it
        except OSError as error:
            warnings.warn(f"{path} could not be deleted: {error.strerror or error}", stacklevel=2)
            continue
        removed.append(path)
    return removed


def _members(parent: Path, stem: str) -> list[Path]:
    """The folders of a series, lowest number first."""
    found = []
    for entry in os.scandir(parent):
        numbered = _NUMBERED.fullmatch(entry.name)
        if numbered is not None and numbered[1] == stem:
            found.append((int(numbered[2]), entry.name))
    return [parent / name for _, name in sorted(found)]


def _half_deleted(parent: Path, stem: str) -> list[Path]:
    """Hidden folders of the series that are no checkpoint any more, or that a killed save left long ago."""
    found = []
    for entry in os.scandir(parent):
        hidden = _DROPPED.fullmatch(entry.name) or _TEMPORARY.fullmatch(entry.name)
        numbered = _NUMBERED.fullmatch(hidden[1]) if hidden is not None else None
        if numbered is None or numbered[1] != stem or entry.is_symlink():
            continue
        if _TEMPORARY.fullmatch(entry.name) and time.time() - entry.stat().st_mtime < _ABANDONED:
            continue
        if not is_checkpoint(Path(entry.path)):  # a whole one may be what an interrupted save was about to replace
            found.append(Path(entry.path))
    return sorted(found)


def _remove(path: Path) -> None:
    """Delete a checkpoint. Whoever is killed at whatever moment leaves it whole or nothing that looks whole."""
    hidden = path.parent / f".{path.name}.old-{secrets.token_hex(8)}"
    os.rename(path, hidden)
    fsync(path.parent)
    (hidden / _MARK).unlink(missing_ok=True)
    fsync(hidden)
    shutil.rmtree(hidden)
