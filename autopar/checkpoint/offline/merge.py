"""Merge a sharded checkpoint into a Hugging Face one: one process, one tensor at a time, no model code, no policy."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import torch

from autopar.checkpoint.format import WEIGHTS, Manifest, parse_size
from autopar.checkpoint.offline.output import copy_small_files, output_folder, parse_dtype, progress_bar
from autopar.checkpoint.shards import Shards
from autopar.checkpoint.staging import MERGED
from autopar.errors import CheckpointError
from autopar.plan.plan import Piece
from autopar.storage.lazy_tensor import LazyTensor
from autopar.storage.safetensors_io import SafetensorsWriter, dtype_of, nbytes
from autopar.storage.views import open_piece

# File names of the weights, as transformers knows them.
_FORMATS = {
    "safetensors": ("model{suffix}.safetensors", "model.safetensors.index.json"),
    "bin": ("pytorch_model{suffix}.bin", "pytorch_model.bin.index.json"),
}
_OUTSIDE = "wrapper.safetensors"  # modules of the user's own around the Hugging Face model, under their own names


def check_format(format: object) -> None:
    """Raise CheckpointError for a format that is not offered."""
    if format not in _FORMATS:
        raise CheckpointError(f"format={format!r} must be one of {', '.join(map(repr, _FORMATS))}")


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
    size, chosen, folder = parse_size(max_shard_size), parse_dtype(dtype), Path(source)
    with Shards(folder) as shards:
        manifest = shards.manifest
        _refuse_parts(folder, manifest)
        has_config = "config.json" in manifest.along
        if has_config and not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder} is incomplete: config.json is missing")
        if verify:
            shards.verify_along()
        with output_folder("merge", folder, destination, force) as staging:
            files = write_merged(shards, staging.temp, size, format, progress, chosen, verify)
            copy_small_files(folder, staging.temp, chosen if has_config else None)
    return {
        "destination": os.path.abspath(destination),
        "files": files,
        "tensors": sum(len(tensor.saved_names()) for tensor in manifest.tensors.values()),
        "parameters": manifest.total_parameters(),
    }


def _refuse_parts(folder: Path, manifest: Manifest) -> None:
    """Raise CheckpointError for what is not a whole model that Hugging Face could read."""
    if manifest.base.forms and "base" not in manifest.parts:
        raise CheckpointError(
            f"{folder} leaves out {len(manifest.base.forms)} quantized weights of {manifest.base}, without which no "
            "model\n  can be read. Load it into the same base (from_parallelized), which has them."
        )
    adapted = next((name for name in manifest.tensors if ".base_layer." in name or ".modules_to_save." in name), None)
    if adapted is not None:
        raise CheckpointError(
            f"{folder} holds a model with adapters of PEFT ({adapted}), for which a Hugging Face checkpoint has no "
            "place.\n  Load it (from_parallelized) and save the adapters with save_parallelized(adapter_only=True)."
        )


def write_merged(
    shards: Shards,
    folder: Path,
    max_shard_size: int,
    format: str,
    progress: bool | None,
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
    pattern, index_name = _FORMATS[format]
    split = split_state_dict_into_shards_factory(
        specs, get_storage_size=lambda spec: nbytes(*spec), filename_pattern=pattern, max_shard_size=max_shard_size
    )
    files: dict[str, int] = {}
    with (
        _verified_meanwhile(shards, verify),
        progress_bar("merging", split.metadata["total_size"], progress) as bar,
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
            source.write(folder / _OUTSIDE, source.outside, lambda _: None)
            files[_OUTSIDE] = (folder / _OUTSIDE).stat().st_size
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
    """Verify the model's shards in a thread while the body writes; raises at the end if a checksum is wrong."""
    if not verify:
        yield
        return
    stored = sorted(shards.stored(WEIGHTS), key=lambda shard: shard.file)
    for file in dict.fromkeys(shard.file for shard in stored):
        shards.check_file(file)
    stop = Event()

    def run() -> None:
        for shard in stored:
            if stop.is_set():
                return
            shards.verify(shard)

    with ThreadPoolExecutor(1, "autopar verify") as pool:
        done = pool.submit(run)
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
        self._places: dict[str, tuple[str, str, Piece | None]] = {}
        self.specs: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self.outside: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        tensors = shards.manifest.tensors

        def written(*names: str) -> torch.dtype:
            stored = functools.reduce(torch.promote_types, (dtype_of(tensors[name].dtype) for name in names))
            return stored if dtype is None or not stored.is_floating_point else dtype

        for name, tensor in tensors.items():
            for piece in tensor.pieces if tensor.saved_as is None else ():
                self._places[piece.name] = ("model", name, piece)
                self.specs[piece.name] = (written(*(list(piece.sources()) or [name])), piece.shape)
            if tensor.saved_as is not None:
                self._places[tensor.saved_as] = ("model", name, None)
                self.specs[tensor.saved_as] = (written(name), tensor.shape)
            if tensor.outside:
                self._places[name] = ("model", name, None)
                self.outside[name] = (written(name), tensor.shape)
        for name, tensor in shards.manifest.quantized.items():
            for piece in tensor.pieces:
                self._places[piece.name] = ("base", name, piece)
                self.specs[piece.name] = (dtype_of(tensor.dtype), piece.shape)

    def lazy(self, saved_as: str) -> LazyTensor:
        """Return one tensor. Raises CheckpointError if the manifest describes a part of it that is not there."""
        part, name, piece = self._places[saved_as]
        if piece is None:
            return self._shards.lazy(name, part)
        return open_piece(piece, name, lambda stored: self._shards.lazy(stored, part))

    def _notes(self) -> dict[str, str]:
        """Return what torchao reads in the head of each file: the settings of every tensor of the model."""
        manifest = self._shards.manifest
        if not manifest.base.notes:
            return {}
        found = dict.fromkeys(self.specs, json.dumps({"_type": "Tensor"}))
        for name, tensor in manifest.quantized.items():
            path = name.rpartition(".")[0]
            for piece in tensor.pieces:
                found.pop(piece.name)
                found[f"{piece.name.rpartition('.')[0]}.weight"] = manifest.base.notes[f"{path}.weight"]
        return found | {"tensor_names": json.dumps([*found])}

    def write(
        self, path: Path, specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], progress: Callable[[int], Any]
    ) -> None:
        """Write one safetensors file with these tensors."""
        metadata = {"format": "pt"} | self._notes()
        if "config.json" not in self._shards.manifest.along:  # of a plain module; nothing else says whose file it is
            metadata[MERGED] = self._shards.manifest.model_type
        with SafetensorsWriter(path, specs, metadata) as writer:
            for name in writer.order:
                writer.copy(name, self.lazy(name))
                progress(nbytes(*specs[name]))
