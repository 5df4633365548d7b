"""Merge a sharded checkpoint into a Hugging Face one: one process, one tensor at a time, no model code, no policy."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from autopar.checkpoint.folder import Staging, fsync_files
from autopar.checkpoint.format import parse_size
from autopar.checkpoint.safetensors_stream import SafetensorsWriter, dtype_of, nbytes
from autopar.checkpoint.shards import Shards
from autopar.errors import CheckpointError
from autopar.policy.plan import Piece

__all__ = ["FORMATS", "check_format", "merge_checkpoint", "write_merged"]

# File names of the weights, as transformers knows them.
FORMATS = {
    "safetensors": ("model{suffix}.safetensors", "model.safetensors.index.json"),
    "bin": ("pytorch_model{suffix}.bin", "pytorch_model.bin.index.json"),
}
OUTSIDE = "wrapper.safetensors"  # modules of the user's own around the Hugging Face model, under their own names
_ALONG = (
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.jinja",
    "*processor_config.json",
    "*.py",
)


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
    force: bool = False,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Write the Hugging Face checkpoint that ``save_pretrained`` of the plain model would have written.

    Args:
        source: folder that ``save_parallelized`` wrote.
        destination: folder to make; it appears when it is whole.
        max_shard_size: split the weights into files of at most this size (a larger tensor gets a file of its own).
        format: ``safetensors`` or ``bin`` (``pytorch_model.bin``, which needs one file's tensors in memory at once).
        force: replace a checkpoint in ``destination``; other files there are kept.
        progress: show a progress bar; by default on a terminal.

    Returns:
        ``{"destination": str, "files": {name: bytes}, "tensors": int, "parameters": int}``

    Raises:
        CheckpointError: if the source is incomplete, damaged or mixed, or the destination cannot be written.
    """
    check_format(format)
    size = parse_size(max_shard_size)
    folder, target = Path(source), Path(os.path.abspath(destination))
    show = sys.stderr.isatty() if progress is None else progress
    with Shards(folder) as shards:
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder} is incomplete: config.json is missing")
        real = folder.resolve()
        if target.resolve() in (real, *real.parents):
            raise CheckpointError(f"cannot merge {folder} into {target}: it would replace what it is read from")
        staging = Staging(target, replace=force)
        try:
            files = write_merged(shards, staging.temp, size, format, progress=show)
            for path in _along(folder):
                shutil.copyfile(path, staging.temp / path.name)
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


def _along(folder: Path) -> Iterable[Path]:
    found = {folder / "config.json"}
    for pattern in _ALONG:
        found.update(path for path in folder.glob(pattern) if path.is_file())
    return sorted(found)


def write_merged(shards: Shards, folder: Path, max_shard_size: int, format: str, progress: bool) -> dict[str, int]:
    """Write the weights of ``shards`` into ``folder``, whole and under the names that ``save_pretrained`` uses.

    Returns file name -> bytes. Raises CheckpointError if a checksum is wrong, ``OSError`` if a file cannot be written.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    manifest = shards.manifest
    source = _Source(shards)
    specs = source.specs
    pattern, index_name = FORMATS[format]
    split = split_state_dict_into_shards_factory(
        specs, get_storage_size=lambda spec: nbytes(*spec), filename_pattern=pattern, max_shard_size=max_shard_size
    )
    files: dict[str, int] = {}
    with tqdm(
        total=split.metadata["total_size"], desc="merging", unit="B", unit_scale=True, disable=not progress
    ) as bar:
        for file, saved in split.filename_to_tensors.items():
            if format == "safetensors":
                chosen = {name: specs[name] for name in saved}
                with SafetensorsWriter(folder / file, chosen, {"format": "pt"}) as writer:
                    for name in writer.order:
                        writer.write(name, source.read(name))
                        bar.update(nbytes(*specs[name]))
            else:
                tensors = {}
                for name in saved:
                    tensor = source.read(name)
                    tensors[name] = tensor if tensor._base is None else tensor.clone()  # a part, without the rest
                    bar.update(nbytes(*specs[name]))
                torch.save(tensors, folder / file)
            files[file] = (folder / file).stat().st_size
    files |= _write_outside(shards, folder)
    if split.is_sharded:
        index = {
            "metadata": {"total_parameters": manifest.total_parameters(), **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / index_name).write_text(text, encoding="utf-8")
    return files


class _Source:
    """The tensors of a merged checkpoint by the names that they have there.

    Stacked experts are read once for all their parts: the two that were read last stay in memory.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._places: dict[str, tuple[str, Piece | None]] = {}
        self._recent: dict[str, torch.Tensor] = {}
        self.specs: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, tensor in shards.manifest.tensors.items():
            for piece in tensor.pieces if tensor.saved_as is None else ():
                self._places[piece.name] = (name, piece)
                self.specs[piece.name] = (dtype_of(tensor.dtype), piece.shape)
            if tensor.saved_as is not None:
                self._places[tensor.saved_as] = (name, None)
                self.specs[tensor.saved_as] = (dtype_of(tensor.dtype), tensor.shape)

    def read(self, saved_as: str) -> torch.Tensor:
        """One tensor, whole. Raises CheckpointError if a checksum is wrong."""
        name, piece = self._places[saved_as]
        if piece is None:
            return self._shards.whole(name)
        if name not in self._recent:
            while len(self._recent) > 1:
                del self._recent[next(iter(self._recent))]
            self._recent[name] = self._shards.whole(name)
        try:
            return piece.of(self._recent[name])
        except RuntimeError as error:
            raise CheckpointError(f"the manifest describes {saved_as} wrongly: {error}") from error


def _write_outside(shards: Shards, folder: Path) -> dict[str, int]:
    """The user's own modules around the Hugging Face model, which ``from_pretrained`` does not ask for."""
    tensors = {name: t for name, t in shards.manifest.tensors.items() if t.outside}
    if not tensors:
        return {}
    specs = {name: (dtype_of(t.dtype), t.shape) for name, t in tensors.items()}
    with SafetensorsWriter(folder / OUTSIDE, specs, {"format": "pt"}) as writer:
        for name in writer.order:
            writer.write(name, shards.whole(name))
    return {OUTSIDE: (folder / OUTSIDE).stat().st_size}
