"""Merge a sharded checkpoint into a Hugging Face checkpoint, or reshard it for another mesh, without model code.

One process runs, with one tensor in memory at a time.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autopar import registry
from autopar.checkpoint.format import PARTS, WEIGHTS, FileRecord, Manifest, PartFiles, parse_size, shard_name, versions
from autopar.checkpoint.shards import ShardReader, write_shard
from autopar.checkpoint.staging import MERGED, Staging, output_folder, parse_dtype
from autopar.distributed.axis import MeshSizes
from autopar.errors import CheckpointError
from autopar.layout import Layout
from autopar.plan.plan import Piece, TensorPlan
from autopar.storage.files import file_checksum
from autopar.storage.lazy_tensor import LazyTensor, lazy_shard, open_piece
from autopar.storage.progress import progress_bar
from autopar.storage.safetensors_io import SafetensorsWriter, dtype_of, nbytes

# File names of the weights, as transformers knows them.
_FORMATS = {
    "safetensors": ("model{suffix}.safetensors", "model.safetensors.index.json"),
    "bin": ("pytorch_model{suffix}.bin", "pytorch_model.bin.index.json"),
}
_NOT_SMALL = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|gguf|onnx|index\.json|tmp|lock)|autopar\.json|\..*"
)
_OUTSIDE = "wrapper.safetensors"  # custom modules around the Hugging Face model, under their names in the root model


def check_format(format: object) -> None:
    """Raise CheckpointError for an unknown format."""
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
    """Write the Hugging Face checkpoint that ``save_pretrained`` of the reference model would have written.

    Args:
        source: The folder that ``save_parallelized`` wrote.
        destination: The folder to make; it appears when it is complete.
        max_shard_size: The maximum size of a file of weights; a larger tensor gets a separate file.
        format: ``safetensors`` or ``bin`` (``pytorch_model.bin``, which needs one file's tensors in memory at once).
        dtype: The dtype for floating-point tensors, for example ``bfloat16``; by default the saved one.
        force: True to replace a checkpoint in ``destination``; other files there are kept.
        verify: True to compare every checksum.
        progress: True to show a progress bar; by default on a terminal.

    Returns:
        ``{"destination": str, "files": {name: bytes}, "tensors": int, "parameters": int}``

    Raises:
        CheckpointError: The source is incomplete, damaged or mixed, or the destination cannot be written.
    """
    check_format(format)
    size, chosen, folder = parse_size(max_shard_size), parse_dtype(dtype), Path(source)
    with ShardReader(folder) as shards:
        manifest = shards.manifest
        if manifest.base.forms and "base" not in manifest.parts:
            raise CheckpointError(
                f"{folder} lacks the {len(manifest.base.forms)} quantized weights of its base {manifest.base.name} and "
                "cannot be merged\n  Load it with from_parallelized into the same base model."
            )
        adapted = [name for name in manifest.tensors if ".base_layer." in name or ".modules_to_save." in name]
        if adapted:
            raise CheckpointError(
                f"{folder} holds a model with PEFT adapters ({adapted[0]}), which cannot be merged\n"
                "  Load it (from_parallelized) and save the adapters with save_parallelized(adapter_only=True)."
            )
        has_config = "config.json" in manifest.along
        if has_config and not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder} is incomplete: config.json is missing")
        if verify:
            shards.verify_along()
            shards.verify_share(WEIGHTS, progress=progress)
        with output_folder("merge", folder, destination, force) as staging:
            copy_small_files(folder, staging.temp, chosen if has_config else None)
            files = write_merged(shards, staging.temp, size, format, progress, chosen)
    return {
        "destination": os.path.abspath(destination),
        "files": files,
        "tensors": sum(len(tensor.saved_names()) for tensor in manifest.tensors.values()),
        "parameters": manifest.total_parameters(),
    }


def _stem(folder: Path) -> str:
    """Return the start of the names of weights files for the ``config.json`` of another library, or ""."""
    return getattr(registry.library_of_config(folder / "config.json"), "stem", "")


class _Saved(NamedTuple):
    """A tensor of a merged checkpoint: dtype, shape, and a function that opens it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    lazy: Callable[[], LazyTensor]


def write_merged(
    shards: ShardReader,
    folder: Path,
    max_shard_size: int,
    format: str,
    progress: bool | None,
    dtype: torch.dtype | None = None,
) -> dict[str, int]:
    """Write the full weights of ``shards`` into ``folder`` under the names that ``save_pretrained`` uses.

    Returns file name -> bytes. Raises ``OSError`` if a file cannot be written.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    manifest = shards.manifest
    saved, outside = _saved_tensors(shards, dtype)
    metadata = {"format": "pt"} | _notes(manifest, saved)
    if "config.json" not in manifest.along:  # of a custom module; the mark allows a later save to replace the file
        metadata[MERGED] = manifest.model_type
    names = (re.sub("^(pytorch_)?model", _stem(folder) or r"\g<0>", name) for name in _FORMATS[format])
    pattern, index_name = names
    split = split_state_dict_into_shards_factory(
        saved, get_storage_size=lambda one: nbytes(*one[:2]), filename_pattern=pattern, max_shard_size=max_shard_size
    )
    files: dict[str, int] = {}
    with progress_bar("merging", split.metadata["total_size"], progress) as bar:
        held = {file: {name: saved[name] for name in names} for file, names in split.filename_to_tensors.items()}
        # custom modules get a separate file, because from_pretrained does not read them
        for file, tensors in (held | ({_OUTSIDE: outside} if outside else {})).items():
            if format == "safetensors" or file == _OUTSIDE:
                with SafetensorsWriter(folder / file, {name: t[:2] for name, t in tensors.items()}, metadata) as writer:
                    for name in writer.order:
                        writer.copy(name, tensors[name].lazy())
                        bar.update(nbytes(*tensors[name][:2]))
            else:
                torch.save({name: t.lazy().read().to(t.dtype) for name, t in tensors.items()}, folder / file)
                bar.update(sum(nbytes(*t[:2]) for t in tensors.values()))
            files[file] = (folder / file).stat().st_size
    if split.is_sharded:
        index = {
            "metadata": {"total_parameters": manifest.total_parameters(), **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / index_name).write_text(text, encoding="utf-8")
    return files


def _saved_tensors(shards: ShardReader, dtype: torch.dtype | None) -> tuple[dict[str, _Saved], dict[str, _Saved]]:
    """Return the tensors of a merged checkpoint by saved name, and the tensors of modules around the model."""
    tensors = shards.manifest.tensors
    saved: dict[str, _Saved] = {}
    outside: dict[str, _Saved] = {}

    def one(part: str, name: str, piece: Piece | None) -> _Saved:
        plan = shards.manifest.parts[part].tensors[name]
        sources = [*piece.sources()] if piece is not None else []
        stored = [tensors[source].dtype for source in sources] or [plan.dtype]
        kind = written(functools.reduce(torch.promote_types, map(dtype_of, stored)))
        if piece is None:
            return _Saved(kind, plan.shape, lambda: shards.lazy(name, part))
        return _Saved(kind, piece.shape, lambda: open_piece(piece, name, lambda source: shards.lazy(source, part)))

    def written(stored: torch.dtype) -> torch.dtype:
        return stored if dtype is None or not stored.is_floating_point else dtype

    for name, tensor in tensors.items():
        if tensor.saved_as is None:
            saved |= {piece.name: one("model", name, piece) for piece in tensor.pieces}
        else:
            saved[tensor.saved_as] = one("model", name, None)
        if tensor.outside:
            outside[name] = one("model", name, None)
    for name, tensor in shards.manifest.quantized.items():  # keep their dtypes, scales included
        kind = dtype_of(tensor.dtype)
        saved |= {piece.name: one("base", name, piece)._replace(dtype=kind) for piece in tensor.pieces}
    return saved, outside


def _notes(manifest: Manifest, saved: Iterable[str]) -> dict[str, str]:
    """Return torchao's entries for the header of each file: the settings of every tensor."""
    if not manifest.base.notes:
        return {}
    found = dict.fromkeys(saved, json.dumps({"_type": "Tensor"}))
    for name, tensor in manifest.quantized.items():
        path = name.rpartition(".")[0]
        for piece in tensor.pieces:
            found.pop(piece.name)
            found[f"{piece.name.rpartition('.')[0]}.weight"] = manifest.base.notes[f"{path}.weight"]
    return found | {"tensor_names": json.dumps([*found])}


# -- the small files ---------------------------------------------------------------------------------------------------


def copy_small_files(source: Path, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Copy config, tokenizer, templates, code and notes; write ``dtype``, if given, into ``config.json``.

    Sub-folders (of chat templates, of a second tokenizer) are copied unless they contain weights.
    """
    for path in sorted(source.iterdir()):
        if _NOT_SMALL.fullmatch(path.name):
            continue
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
        elif path.is_dir() and not path.is_symlink():
            names = (name for _, _, found in os.walk(path) for name in found if not name.startswith("."))
            if not any(map(_NOT_SMALL.fullmatch, names)):
                (folder / path.name).mkdir(exist_ok=True)
                copy_small_files(path, folder / path.name)
    path = folder / "config.json"
    if dtype is None or not path.is_file() or _stem(folder):
        return
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it must hold a JSON object")
    except ValueError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


# -- the shards of another mesh ----------------------------------------------------------------------------------------


def reshard_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    tp: int,
    pp: int = 1,
    optimizer: bool = True,
    force: bool = False,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Write the shards of a mesh of ``tp`` x ``pp``, including the optimizer's state.

    ``from_parallelized`` loads any checkpoint without resharding. After resharding each rank opens fewer files. Each
    kind of unit is sharded separately: with uneven query heads, a rank may still need a head from its neighbor's file.

    Args:
        source: The folder that ``save_parallelized`` wrote.
        destination: The folder to make; it appears when it is complete.
        tp, pp: The sizes of the new mesh.
        optimizer: True to include the optimizer's state, if there is one.
        force: True to replace a checkpoint in ``destination``; other files there are kept.
        progress: True to show a progress bar; by default on a terminal.

    Returns:
        ``{"destination": str, "files": {name: bytes}, "tensors": int, "parameters": int}``

    Raises:
        CheckpointError: The source is incomplete or damaged, or the destination cannot be written.
    """
    check_sizes(tp, pp)
    folder = Path(source)
    with ShardReader(folder, PARTS) as shards:
        shards.verify_along()
        old = shards.manifest
        parts = {name: part for name, part in old.parts.items() if optimizer or name != "optimizer"}
        training = {k: v for k, v in old.training.items() if optimizer or k != "optimizer"}
        bytes_of = {
            part: {name: nbytes(dtype_of(t.dtype), t.shape) for name, t in parts[part].tensors.items()}
            for part in parts
        }
        shards.verify_share(parts, progress=progress)
        stages = stages_by_size(bytes_of["model"], pp)
        total = sum(sum(sizes.values()) for sizes in bytes_of.values())
        written: dict[str, PartFiles] = {}
        with (
            output_folder("reshard", folder, destination, force) as staging,
            progress_bar("resharding", total, progress) as bar,
        ):
            for name, part in parts.items():
                plans = {key: _reshard(tensor, tp) for key, tensor in part.tensors.items()}
                where = {key: stages.get(key.partition("::")[0], 0) for key in plans}
                lazy = functools.partial(shards.lazy, part=name)
                written[name] = write_part(staging, name, plans, lazy, (tp, pp), where, bar)
            manifest = replace(old, save_id=staging.id, sizes=MeshSizes(tp, pp, 1), cp=1, tp=tp, parts=written,
                               training=training, versions=versions(), along={})  # fmt: skip
            return write_manifest(staging, manifest, folder)


def stages_by_size(sizes: Mapping[str, int], pp: int) -> dict[str, int]:
    """Assign each tensor to a stage in state-dict order, with about the same number of bytes per stage."""
    ends = itertools.accumulate(sizes.values())
    total = max(1, sum(sizes.values()))
    middles = ((name, end - size / 2) for (name, size), end in zip(sizes.items(), ends, strict=True))
    return {name: min(pp - 1, int(pp * middle / total)) for name, middle in middles}


def _reshard(tensor: TensorPlan, tp: int) -> TensorPlan:
    """Plan the same units over ``tp`` ranks. With fewer units than ranks, several ranks hold the same unit."""
    if tensor.layout is None:
        return tensor
    return replace(tensor, layout=Layout.of(tensor.layout.dim, [block.over(tp) for block in tensor.layout.blocks]))


def write_part(
    staging: Staging,
    part: str,
    plans: Mapping[str, TensorPlan],
    lazy: Callable[[str], LazyTensor],
    mesh: tuple[int, int],
    stages: Mapping[str, int],
    bar: Any,
) -> PartFiles:
    """Write all shard files of a part for the mesh ``(tp, pp)``, one shard at a time.

    Tensors are converted to the dtypes of ``plans``. ``stages``: tensor name -> stage.
    """
    files: dict[str, FileRecord] = {}

    def shard(key: str) -> torch.Tensor:
        return lazy_shard(lazy(key), plans[key].layout, t).read().to(specs[key][0])

    for t, p in ((t, p) for p in range(mesh[1]) for t in range(mesh[0])):
        specs = {
            key: (dtype_of(plan.dtype), plan.local_shape(t))
            for key, plan in plans.items()  # if several ranks hold the same shard, only the first one's file gets it
            if stages[key] == p and t == (0 if plan.layout is None else plan.layout.holders[t][0])
        }
        if specs or part != "extra":  # most checkpoints have one file of extra
            record = write_shard(staging.temp, staging.id, part, (t, p, 0), specs, shard, bar)
            files[shard_name(part, t, p)] = record
    return PartFiles(part, plans, files)


def write_manifest(
    staging: Staging, manifest: Manifest, source: Path, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Copy the small files of ``source``, write the manifest, and return the report of the command."""
    copy_small_files(source, staging.temp, dtype)
    saved = [name for name in ("config.json", "generation_config.json") if (staging.temp / name).is_file()]
    manifest = replace(manifest, along={name: file_checksum(staging.temp / name) for name in saved})
    manifest.check()
    manifest.write(staging.temp)
    return {
        "destination": str(staging.target),
        "files": {name: record.bytes for name, record in manifest.files.items()},
        "tensors": len(manifest.tensors),
        "parameters": manifest.total_parameters(),
    }


def check_sizes(tp: int, pp: int) -> None:
    """Raise CheckpointError unless both sizes can be made."""
    if min(tp, pp) < 1 or tp * pp > 4096:
        raise CheckpointError(f"--tp and --pp must be at least 1, and make at most 4096 files; got {tp} and {pp}")
