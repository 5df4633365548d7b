"""Keep the last n checkpoints of a series: sibling folders whose names differ only in the number at the end.

The newest checkpoint is found by the order of the saves, which each manifest records. Times change when a folder is
copied, and numbers in names decrease when a run goes back to an earlier checkpoint.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import warnings
from pathlib import Path

from autopar.checkpoint.format import Manifest
from autopar.checkpoint.staging import ABANDONED, HIDDEN, MANIFEST, REMOVED, fsync
from autopar.errors import CheckpointError, listed

_NUMBERED = re.compile(r"(.*?)([0-9]+)", re.DOTALL)
_ORDER = re.compile(rb'\n "order": (\d{1,18}),\n')


def series(path: str | os.PathLike[str]) -> tuple[str, int] | None:
    """Split a folder's name before the number at its end: ``("step-", 100)``, or None without a number."""
    found = _NUMBERED.fullmatch(Path(path).name)
    return None if found is None else (found[1], int(found[2]))


def check_keep_last(target: str | os.PathLike[str], keep_last: object) -> None:
    """Raise CheckpointError unless ``keep_last`` is a positive integer and the target's name ends in a number."""
    if not isinstance(keep_last, int) or isinstance(keep_last, bool) or keep_last < 1:
        raise CheckpointError(
            f"keep_last={keep_last!r} must be a positive integer\n"
            "  It counts the new checkpoint too. Leave it out to keep all checkpoints."
        )
    target = os.path.realpath(target)
    if series(target) is None:
        raise CheckpointError(
            f"keep_last= needs a folder name that ends in a number; got {os.path.basename(target)!r}\n"
            "  Use names such as step-100, checkpoint-7 or epoch3. Names that differ only in the number are one series."
        )


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder holds a sharded checkpoint; False for a symbolic link.

    A merged folder may be the user's base model, so it is never deleted.
    """
    return not folder.is_symlink() and (folder / MANIFEST).is_file()


def next_order(target: Path) -> int:
    """Return the order of a checkpoint that is about to be saved as ``target``; 0 if its name ends in no number."""
    found = series(target)
    return 0 if found is None else 1 + max((order for order, _, _ in members(target.parent, found[0])), default=0)


def rotate(target: Path, keep_last: int) -> list[Path]:
    """Delete the oldest checkpoints of the target's series, and keep the last ``keep_last``.

    Only files that a save has written are deleted; files of the user stay, with a warning. The manifest is renamed
    first, so that a partly deleted folder does not count as a checkpoint; the next call completes the deletion. A
    checkpoint that cannot be deleted gives a warning, because the new one is written already.

    Args:
        target: The new checkpoint, which always stays, or a symbolic link to it.
        keep_last: The number of checkpoints that remain, ``target`` included.

    Returns:
        The deleted checkpoints, in the order of their saves.
    """
    target = Path(os.path.realpath(target))
    stem, _ = series(target) or ("", 0)
    for path, kind in _folders(target.parent, stem):
        if is_checkpoint(path):  # a hidden one may be the checkpoint that an interrupted save was replacing
            continue
        if kind == "old" or (kind == "tmp" and time.time() - path.stat().st_mtime > ABANDONED):
            shutil.rmtree(path, ignore_errors=True)
        elif (path / REMOVED).is_file() and not kind:
            _try_to_remove(path)
    others = [path for _, _, path in sorted(members(target.parent, stem)) if path != target]
    return [path for path in others[: max(0, len(others) + 1 - keep_last)] if _try_to_remove(path)]


def _folders(parent: Path, stem: str) -> list[tuple[Path, str]]:
    """Return the folders of a series, lowest number first; a hidden folder of a killed save has ``tmp`` or ``old``."""
    found = []
    for entry in os.scandir(parent) if parent.is_dir() else ():
        hidden = HIDDEN.fullmatch(entry.name)
        name, kind = (hidden[1], hidden[2]) if hidden is not None else (entry.name, "")
        begins, number = series(name) or (None, 0)
        if begins == stem and entry.is_dir(follow_symlinks=False):
            found.append((number, Path(entry.path), kind))
    return [(path, kind) for _, path, kind in sorted(found)]


def members(parent: Path, stem: str) -> list[tuple[int, int, Path]]:
    """Return the checkpoints of a series, lowest number first: order of the save, number, path."""
    found = []
    for path in (path for path, kind in _folders(parent, stem) if not kind and is_checkpoint(path)):
        try:
            with open(path / MANIFEST, "rb") as file:
                order = _ORDER.search(file.read(512))
        except OSError:
            continue  # another process deletes it
        found.append((int(order[1]) if order else 0, int(path.name.removeprefix(stem)), path))
    return found


def _try_to_remove(path: Path) -> bool:
    """Delete the files of a checkpoint, and its folder if it is then empty. Return False, with a warning, on failure.

    A killed process leaves it complete, or with a renamed manifest that lists the files still to delete.
    """
    try:
        note = MANIFEST if (path / MANIFEST).exists() else REMOVED
        try:
            manifest = Manifest.read(path, note)
        except CheckpointError:
            os.stat(path / note)  # raises FileNotFoundError if another process deletes the checkpoint
            raise
        ours = {*manifest.along, *manifest.files, MANIFEST, REMOVED}
        folders = {entry.name for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)}  # the user's
        if note == MANIFEST:
            os.rename(path / MANIFEST, path / REMOVED)
            fsync(path)
        for name in (*sorted(ours - {REMOVED} - folders), REMOVED):
            (path / name).unlink(missing_ok=True)
        others = sorted(os.listdir(path))
        if not others:
            os.rmdir(path)
    except FileNotFoundError:
        return False  # another process deletes it
    except (OSError, CheckpointError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        warnings.warn(f"{path} could not be deleted: {reason}", stacklevel=3)
        return False
    if others:
        warnings.warn(
            f"the checkpoint {path} was deleted, but the folder stays: the save did not write {listed(others)}",
            stacklevel=3,
        )
    return True


# -- the newest checkpoint ---------------------------------------------------------------------------------------------


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """Return the last saved checkpoint of a series, or None if there is none.

    The order of saves counts, not the number in the name: a run that went back from step-400 to step-200 and saved
    step-300 continues from step-300. It does not communicate. On a shared disk every rank finds the same folder, and
    ``from_parallelized`` raises if ranks differ.

    Args:
        directory: The folder that holds ``step-100``, ``step-200`` ...; if it holds several series, followed by the
            beginning of their names: ``run/step-``.

    Raises:
        CheckpointError: The folder holds several series.
    """
    path = Path(os.path.realpath(directory))
    if is_checkpoint(path):
        return path
    parent, begins = (path, None) if path.is_dir() else (path.parent, path.name)
    entries = [entry for entry in (parent.iterdir() if parent.is_dir() else ()) if is_checkpoint(entry)]
    stems = {stem for stem, _ in filter(None, map(series, entries))}
    if begins is not None:
        stems &= {begins}
    if len(stems) > 1:
        raise CheckpointError(
            f"{parent} holds checkpoints of {len(stems)} series: {listed(sorted(f'{stem}*' for stem in stems))}\n"
            f'  Choose one: autopar.latest("{parent / min(stems)}")'
        )
    found = [member for stem in stems for member in members(parent, stem)]
    return max(found)[2] if found else None
