"""Read a sharded checkpoint once from end to end and list everything that is wrong with it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from autopar.checkpoint.format import PARTS, Manifest
from autopar.checkpoint.shards import Shards
from autopar.errors import CheckpointError

__all__ = ["check_checkpoint"]


def check_checkpoint(directory: str | os.PathLike[str], *, progress: bool | None = None) -> dict[str, Any]:
    """Check that every file is there, that every byte is the one that was saved, and that nothing lies there besides.

    That the shards cover every element of every tensor exactly once (or once a replica) is part of reading the
    manifest.

    Args:
        directory: folder that ``save_parallelized``, ``split`` or ``reshard`` wrote.
        progress: show a progress bar; by default on a terminal.

    Returns:
        ``{"directory": str, "files": int, "tensors": int, "bytes": int, "problems": [str]}``

    Raises:
        CheckpointError: the folder has no manifest that can be read.
    """
    folder = Path(directory)
    manifest = Manifest.read(folder)
    problems: list[str] = []
    with Shards(folder, ()) as shards:
        for name in manifest.files:
            if not (folder / name).is_file():
                problems.append(f"{folder / name} is missing")
        for name in manifest.along:
            try:
                shards.verify_one_along(name)
            except CheckpointError as error:
                problems.append(str(error))
        held = [item for item in shards.held(PARTS) if (folder / item.file).is_file()]
        total = sum(item.bytes for item in held)
        show = sys.stderr.isatty() if progress is None else progress
        broken: set[str] = set()
        with tqdm(total=total, desc="checking", unit="B", unit_scale=True, disable=not show) as bar:
            for item in held:
                bar.update(item.bytes)
                if item.file in broken:
                    continue
                try:
                    shards.open(item)
                except CheckpointError as error:
                    broken.add(item.file)
                    problems.append(str(error))
                    continue
                try:
                    shards.verify(item)
                except CheckpointError as error:
                    problems.append(str(error))
        for name, record in manifest.files.items():  # also those without a tensor
            if not record.checksums and (folder / name).is_file():
                try:
                    shards.open_file(name)
                except CheckpointError as error:
                    problems.append(str(error))
    known = set(manifest.files)
    for path in sorted(folder.glob("*-tp*-pp*.safetensors")):
        if path.name not in known:
            problems.append(f"{path} does not belong to this checkpoint")
    return {
        "directory": str(folder),
        "files": len(manifest.files),
        "tensors": sum(len(part.tensors) for part in manifest.parts.values()),
        "bytes": total,
        "problems": problems,
    }
