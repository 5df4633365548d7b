"""Find the checkpoint to go on from: the one that was saved last."""

from __future__ import annotations

import os
from pathlib import Path

from autopar.checkpoint.rotation import is_checkpoint, members, series, series_of
from autopar.checkpoint.state import listed
from autopar.errors import CheckpointError

__all__ = ["latest"]


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """Return the checkpoint of a series that was saved last, or None if there is none yet.

    The order of saves counts, not the numbers: a run that went back from step-400 to step-200 and saved step-300 goes
    on from that. A save that was interrupted has left no checkpoint. Reads the disk, without
    communication: on a shared disk every rank finds the same, and ``from_parallelized`` refuses what differs.

    Args:
        directory: the folder in which ``step-100``, ``step-200`` ... lie side by side; if it holds several series, with
            the beginning of their names: ``run/step-``.

    Raises:
        CheckpointError: several series lie there.
    """
    path = Path(os.path.realpath(directory))
    if is_checkpoint(path):
        return path
    parent, begins = (path, None) if path.is_dir() else (path.parent, path.name)
    entries = [entry for entry in (parent.iterdir() if parent.is_dir() else ()) if is_checkpoint(entry)]
    stems = {series(entry)[0] for entry in entries if series_of(entry) is not None}
    if begins is not None:
        stems &= {begins}
    if len(stems) > 1:
        raise CheckpointError(
            f"{parent} holds checkpoints of {len(stems)} series: {listed(sorted(f'{stem}*' for stem in stems))}\n"
            f'  Say which: autopar.latest("{parent / min(stems)}")'
        )
    found = [member for stem in stems for member in members(parent, stem)]
    return max(found, key=lambda member: (member.order, member.number)).path if found else None
