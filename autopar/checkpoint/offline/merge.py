"""Merge a sharded checkpoint into a Hugging Face one: one process, one tensor at a time, no model code, no policy."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import torch
from tqdm import tqdm

from autopar.checkpoint.format import parse_size
from autopar.checkpoint.shards import Shards
from autopar.checkpoint.staging import MERGED, Staging, fsync_files
from autopar.errors import CheckpointError
from autopar.plan.plan import Piece
from autopar.storage.lazy_tensor import LazyTensor
from autopar.storage.safetensors_io import SafetensorsWriter, dtype_of, nbytes
from autopar.storage.views import open_piece

__all__ = [
    "FORMATS",
    "check_format",
    "files_along",
    "merge_checkpoint",
    "parse_dtype",
    "refuse_own_place",
    "write_dtype",
    "write_merged",
]

# File names of the weights, as transformers knows them.
FORMATS = {
    "safetensors": ("model{suffix}.safetensors", "model.safetensors.index.json"),
    "bin": ("pytorch_model{suffix}.bin", "pytorch_model.bin.index.json"),
}
OUTSIDE = "wrapper.safetensors"  # modules of the user's own around the Hugging Face model, under their own names
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|gguf|onnx|index\.json|tmp|lock)|autopar\.json|\..*")


def check_format(format: object) -> None:
    """Raise CheckpointError for a format that is not offered."""
    if format not in FORMATS:
        raise CheckpointError(f"format={format!r} must be one of {', '.join(map(repr, FORMATS))}")


def merge_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    format: str = "safetensors",
    dtype: str | torch.dtype | None = None,
    force: bool = False,
    verify: bool = True,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Write the Hugging Face checkpoint that ``save_pretrained`` of the plain model would have written.

    Args:
        source: folder that ``save_parallelized`` wrote.
        destination: folder to make; it appears when it is whole.
        max_shard_size: split the weights into files of at most this size (a larger tensor gets a file of its own).
        format: ``safetensors`` or ``bin`` (``pytorch_model.bin``, which needs one file's tensors in memory at once).
        dtype: convert floating-point tensors, for example to ``bfloat16``; by default they stay as they are.
        force: replace a checkpoint in ``destination``; other files there are kept.
        verify: compare every checksum.
        progress: show a progress bar; by default on a terminal.

    Returns:
        ``{"destination": str, "files": {name: bytes}, "tensors": int, "parameters": int}``

    Raises:
        CheckpointError: if the source is incomplete, damaged or mixed, or the destination cannot be written.
    """
    check_format(format)
    size = parse_size(max_shard_size)
    chosen = parse_dtype(dtype)
    folder, target = Path(source), Path(os.path.abspath(destination))
    show = sys.stderr.isatty() if progress is None else progress
    with Shards(folder) as shards:
        if not (folder / "config.json").is_file() and "config.json" in shards.manifest.along:
            raise CheckpointError(f"{folder} is incomplete: config.json is missing")
        if verify:
            shards.verify_along()
        refuse_own_place("merge", folder, target)
        staging = Staging(target, replace=force)
        try:
            files = write_merged(shards, staging.temp, size, format, progress=show, dtype=chosen, verify=verify)
            for path in files_along(folder):
                shutil.copyfile(path, staging.temp / path.name)
            if chosen is not None and "config.json" in shards.manifest.along:
                write_dtype(staging.temp / "config.json", chosen)
            fsync_files(staging.temp)
            staging.commit()
        except OSError as error:
            raise CheckpointError(f"cannot write {target}: {error.strerror or error}") from error
        finally:
            staging.discard()
        return {
            "destination": str(target),
            "files": files,
            "tensors": sum(len(t.saved_names()) for t in shards.manifest.tensors.values()),
            "parameters": shards.manifest.total_parameters(),
        }


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """``torch.bfloat16`` for ``bfloat16``. Raises CheckpointError unless it is a floating-point dtype."""
    if dtype is None:
        return None
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype) or found not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise CheckpointError(f"dtype={dtype!r} must be float32, bfloat16, float16 or float64")
    return found


def refuse_own_place(verb: str, folder: Path, target: Path) -> None:
    """Raise CheckpointError if ``target`` is the folder that is read, or one around it."""
    real = folder.resolve()
    if target.resolve() in (real, *real.parents):
        raise CheckpointError(f"cannot {verb} {folder} into {target}: it would replace what it is read from")


def write_dtype(path: Path, dtype: torch.dtype) -> None:
    """Note in a ``config.json`` that the weights were converted."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it holds no mapping")
    except ValueError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def files_along(folder: Path) -> Iterable[Path]:
    """What every form of a checkpoint needs beside the weights: config, tokenizer, templates, code, notes."""
    return sorted(path for path in folder.iterdir() if path.is_file() and not _WEIGHTS.fullmatch(path.name))


def write_merged(
    shards: Shards,
    folder: Path,
    max_shard_size: int,
    format: str,
    progress: bool,
    dtype: torch.dtype | None = None,
    verify: bool = True,
) -> dict[str, int]:
    """Write the weights of ``shards`` into ``folder``, whole and under the names that ``save_pretrained`` uses.

    Returns file name -> bytes. Raises CheckpointError if a checksum is wrong, ``OSError`` if a file cannot be written.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    manifest = shards.manifest
    source = _Source(shards, dtype)
    specs = source.specs
    pattern, index_name = FORMATS[format]
    split = split_state_dict_into_shards_factory(
        specs, get_storage_size=lambda spec: nbytes(*spec), filename_pattern=pattern, max_shard_size=max_shard_size
    )
    files: dict[str, int] = {}
    total = split.metadata["total_size"]
    with (
        _verified_meanwhile(shards, verify),
        tqdm(total=total, desc="merging", unit="B", unit_scale=True, disable=not progress) as bar,
    ):
        for file, saved in split.filename_to_tensors.items():
            if format == "safetensors":
                source.write(folder / file, {name: specs[name] for name in saved}, bar.update)
            else:
                tensors = {}
                for name in saved:
                    tensors[name] = source.lazy(name).read().to(specs[name][0])
                    bar.update(nbytes(*specs[name]))
                torch.save(tensors, folder / file)
            files[file] = (folder / file).stat().st_size
        if source.outside:  # the user's own modules, which from_pretrained does not ask for
            source.write(folder / OUTSIDE, source.outside, lambda _: None)
            files[OUTSIDE] = (folder / OUTSIDE).stat().st_size
    if split.is_sharded:
        index = {
            "metadata": {"total_parameters": manifest.total_parameters(), **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / index_name).write_text(text, encoding="utf-8")
    return files


@contextmanager
def _verified_meanwhile(shards: Shards, verify: bool) -> Iterator[None]:
    """Verify all of the model's shards in a thread while the body writes; raises at the end if a checksum is wrong."""
    if not verify:
        yield
        return
    held = sorted(shards.held(("model",)), key=lambda item: item.file)
    for item in held:
        shards.open(item)
    stop = Event()

    def run() -> None:
        for item in held:
            if stop.is_set():
                return
            shards.verify(item)

    try:
        pool = ThreadPoolExecutor(1, "autopar verify")
        done = pool.submit(run)
    except RuntimeError:  # the interpreter is ending, and a save in the background with it
        run()
        yield
        return
    with pool:
        try:
            yield
        except BaseException:
            stop.set()
            raise
        done.result()


class _Source:
    """The tensors of a merged checkpoint by the names that they have there, as they lie in the shards."""

    def __init__(self, shards: Shards, dtype: torch.dtype | None) -> None:
        self._shards = shards
        self._places: dict[str, tuple[str, Piece | None]] = {}
        self.specs: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self.outside: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        tensors = shards.manifest.tensors

        def written(*names: str) -> torch.dtype:
            stored = functools.reduce(torch.promote_types, (dtype_of(tensors[name].dtype) for name in names))
            return stored if dtype is None or not stored.is_floating_point else dtype

        for name, tensor in tensors.items():
            for piece in tensor.pieces if tensor.saved_as is None else ():
                self._places[piece.name] = (name, piece)
                self.specs[piece.name] = (written(*(list(piece.sources()) or [name])), piece.shape)
            if tensor.saved_as is not None:
                self._places[tensor.saved_as] = (name, None)
                self.specs[tensor.saved_as] = (written(name), tensor.shape)
            if tensor.outside:
                self._places[name] = (name, None)
                self.outside[name] = (written(name), tensor.shape)

    def lazy(self, saved_as: str) -> LazyTensor:
        """One tensor. Raises CheckpointError if the manifest describes a part of it that is not there."""
        name, piece = self._places[saved_as]
        return self._shards.lazy(name) if piece is None else open_piece(piece, name, self._shards.lazy)

    def write(
        self, path: Path, specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], progress: Callable[[int], Any]
    ) -> None:
        """Write one safetensors file with these tensors."""
        metadata = {"format": "pt"}
        if "config.json" not in self._shards.manifest.along:  # of a plain module; nothing else says whose file it is
            metadata[MERGED] = self._shards.manifest.model_type
        with SafetensorsWriter(path, specs, metadata) as writer:
            for name in writer.order:
                writer.copy(name, self.lazy(name))
                progress(nbytes(*specs[name]))
