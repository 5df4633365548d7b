"""Read a sharded checkpoint once from end to end and list everything that is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autopar.checkpoint.format import PARTS
from autopar.checkpoint.offline.output import progress_bar
from autopar.checkpoint.shards import Shards
from autopar.errors import CheckpointError


def check_checkpoint(directory: str | os.PathLike[str], *, progress: bool | None = None) -> dict[str, Any]:
    """Check that every file is there, that every byte is the one that was saved, and that nothing lies there besides.

    Reading the manifest already checks that the shards cover every element of every tensor exactly once (or once a
    replica).

    Args:
        directory: folder that ``save_parallelized``, ``split`` or ``reshard`` wrote.
        progress: show a progress bar; by default on a terminal.

    Returns:
        ``{"directory": str, "files": int, "tensors": int, "bytes": int, "problems": [str]}``

    Raises:
        CheckpointError: the folder has no manifest that can be read.
    """
    folder = Path(directory)
    problems: list[str] = []

    def passes(check: Callable[[Any], None], what: Any) -> bool:
        try:
            check(what)
        except CheckpointError as error:
            problems.append(str(error))
            return False
        return True

    with Shards(folder, ()) as shards:
        manifest = shards.manifest
        present = [name for name in manifest.files if (folder / name).is_file()]
        problems += [f"{folder / name} is missing" for name in manifest.files if name not in present]
        for name in manifest.along:
            passes(shards.verify_one_along, name)
        intact = {name for name in present if passes(shards.check_file, name)}
        stored = [shard for shard in shards.stored(PARTS) if shard.file in present]
        total = sum(shard.bytes for shard in stored)
        with progress_bar("checking", total, progress) as bar:
            for shard in stored:
                if shard.file in intact:
                    passes(shards.verify, shard)
                bar.update(shard.bytes)
    for path in sorted(folder.glob("*-tp*-pp*.safetensors")):
        if path.name not in manifest.files:
            problems.append(f"{path} does not belong to this checkpoint")
    return {
        "directory": str(folder),
        "files": len(manifest.files),
        "tensors": sum(len(part.tensors) for part in manifest.parts.values()),
        "bytes": total,
        "problems": problems,
    }
