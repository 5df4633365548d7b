"""The output of merge, reshard and split: a folder that appears whole, its small files, a progress bar."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from autopar.checkpoint.staging import Staging, fsync_files
from autopar.errors import CheckpointError

_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|gguf|onnx|index\.json|tmp|lock)|autopar\.json|\..*")


@contextmanager
def output_folder(verb: str, source: Path, destination: str | os.PathLike[str], force: bool) -> Iterator[Staging]:
    """Stage a folder while the body writes into it, then commit it; after an error nothing of it is left.

    Args:
        verb: of the command, for errors.
        source: folder that is read.
        force: replace a checkpoint in ``destination``.

    Raises:
        CheckpointError: the destination cannot be written, or is the source or a folder around it.
    """
    target, real = Path(os.path.abspath(destination)), source.resolve()
    if target.resolve() in (real, *real.parents):
        raise CheckpointError(f"cannot {verb} {source} into {target}: it would replace what it is read from")
    staging = Staging(target, replace=force)
    try:
        yield staging
        fsync_files(staging.temp)
        staging.commit()
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        staging.discard()


def progress_bar(verb: str, total: int, progress: bool | None) -> Any:
    """Make a progress bar over ``total`` bytes; ``progress=None`` shows it on a terminal."""
    show = sys.stderr.isatty() if progress is None else progress
    return tqdm(total=total, desc=verb, unit="B", unit_scale=True, disable=not show)


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return ``torch.bfloat16`` for ``bfloat16``. Raises CheckpointError unless it is a floating-point dtype."""
    if dtype is None:
        return None
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype) or found not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise CheckpointError(f"dtype={dtype!r} must be float32, bfloat16, float16 or float64")
    return found


def copy_small_files(source: Path, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Copy what every form of a checkpoint needs beside the weights: config, tokenizer, templates, code, notes.

    Sub-folders come along (of chat templates, of a second tokenizer), except those with weights: other checkpoints.

    Args:
        dtype: if given, ``config.json`` says that the weights have it.
    """
    _copy_small(source, folder)
    path = folder / "config.json"
    if dtype is None or not path.is_file():
        return
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it holds no mapping")
    except ValueError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _copy_small(source: Path, folder: Path) -> None:
    for path in sorted(source.iterdir()):
        if _WEIGHTS.fullmatch(path.name):
            continue
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
        elif path.is_dir() and not path.is_symlink() and not _holds_weights(path):
            (folder / path.name).mkdir(exist_ok=True)
            _copy_small(path, folder / path.name)


def _holds_weights(folder: Path) -> bool:
    names = (name for _, _, found in os.walk(folder) for name in found)
    return any(_WEIGHTS.fullmatch(name) and not name.startswith(".") for name in names)
