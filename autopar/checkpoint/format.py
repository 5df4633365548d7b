"""The folder of a sharded checkpoint: file names and the manifest ``autopar.json``.

    config.json, generation_config.json     as Hugging Face writes them
    model-tp{t}-pp{p}.safetensors           what tensor-parallel rank t of stage p holds, under Hugging Face's names
    autopar.json                            the manifest: mesh, layout of every tensor, sizes and checksums

A tensor that all tensor-parallel ranks hold whole lies in the file of rank 0 of its stage only; tied tensors lie there
once. The manifest says everything that merging and loading need; no file of a checkpoint is ever unpickled.
"""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from autopar.checkpoint.folder import leftovers
from autopar.checkpoint.safetensors_stream import dtype_of
from autopar.errors import CheckpointError, nearest
from autopar.layout import Layout
from autopar.mesh import MeshSizes
from autopar.policy.plan import TensorPlan

__all__ = ["MANIFEST", "FileRecord", "Manifest", "parse_size", "shard_name", "sizes_text", "versions"]

FORMAT_VERSION = 1
MANIFEST = "autopar.json"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def shard_name(tp: int, pp: int) -> str:
    """File of tensor-parallel rank ``tp`` of stage ``pp``."""
    return f"model-tp{tp}-pp{pp}.safetensors"


def sizes_text(sizes: MeshSizes) -> str:
    """The part of a mesh that the shards depend on, as users write it."""
    return f"tensor_parallel_size={sizes.tp}, pipeline_parallel_size={sizes.pp}"


def parse_size(size: int | str) -> int:
    """Bytes of ``"5GB"``, ``"200MB"`` or a number. Raises CheckpointError if it is neither, or not above 0."""
    result = 0
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]B)?\s*", size, re.IGNORECASE)
        if match:
            result = int(float(match[1]) * _UNITS.get((match[2] or "").upper(), 1))
    elif isinstance(size, int) and not isinstance(size, bool):
        result = size
    if result < 1:
        raise CheckpointError(f"max_shard_size={size!r} is no size; write '5GB', '200MB' or a number of bytes")
    return result


def versions() -> dict[str, str]:
    """What wrote the checkpoint."""
    found = {"python": platform.python_version()}
    for name in ("autopar", "torch", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


@dataclass(frozen=True)
class FileRecord:
    """One shard file: its size in bytes, and the CRC-32 of each tensor in it."""

    bytes: int
    checksums: Mapping[str, int]


@dataclass(frozen=True)
class Manifest:
    """What ``autopar.json`` says.

    Attributes:
        save_id: random token of the save; each shard file carries it too.
        sizes: of the mesh.
        model_type, policy: of the model that was saved.
        hf_prefix: where the Hugging Face model sits in the root model, ``""`` or ``"model."``.
        tensors: canonical name -> how it is shared out, in state-dict order.
        parameters: names of those that are parameters; the others are buffers.
        files: file name -> :class:`FileRecord`.
        versions: what wrote it.
    """

    save_id: str
    sizes: MeshSizes
    model_type: str
    policy: str
    hf_prefix: str
    tensors: Mapping[str, TensorPlan]
    parameters: frozenset[str]
    files: Mapping[str, FileRecord]
    versions: Mapping[str, str]

    @property
    def shards(self) -> Iterator[tuple[int, int, str]]:
        """``(t, p, file name)`` of every shard."""
        return ((t, p, shard_name(t, p)) for p in range(self.sizes.pp) for t in range(self.sizes.tp))

    def stage_of(self, name: str) -> int:
        """First stage that holds a tensor; its file of rank 0 always has it."""
        return next(p for p in range(self.sizes.pp) if name in self.files[shard_name(0, p)].checksums)

    def on_stage(self, stage: int) -> Mapping[str, int]:
        """The names of the tensors that a stage holds."""
        return self.files[shard_name(0, stage)].checksums

    def total_parameters(self) -> int:
        """Elements of the Hugging Face model's parameters, tied ones once."""
        mine = (t for name, t in self.tensors.items() if name in self.parameters and name.startswith(self.hf_prefix))
        return sum(math.prod(tensor.shape) for tensor in mine)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        tp, pp, dp = self.sizes
        kind = {True: "parameter", False: "buffer"}
        return {
            "format_version": FORMAT_VERSION,
            "save_id": self.save_id,
            "mesh": {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "data_parallel_size": dp},
            "model_type": self.model_type,
            "policy": self.policy,
            "hf_prefix": self.hf_prefix,
            "versions": dict(self.versions),
            "files": {name: {"bytes": f.bytes, "crc32": dict(f.checksums)} for name, f in self.files.items()},
            "tensors": {
                name: {"kind": kind[name in self.parameters], **tensor.to_json()}
                for name, tensor in self.tensors.items()
            },
        }

    def write(self, folder: Path) -> None:
        """Write ``autopar.json``."""
        (folder / MANIFEST).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """Inverse of :meth:`to_json`. Raises ``KeyError``, ``TypeError``, ``AttributeError`` or ``ValueError``."""
        mesh = data["mesh"]
        sizes = MeshSizes(
            *(int(mesh[f"{axis}_parallel_size"]) for axis in ("tensor", "pipeline", "data"))  # tp, pp, dp
        )
        tensors = {str(name): TensorPlan.from_json(str(name), entry) for name, entry in data["tensors"].items()}
        files = {
            str(name): FileRecord(int(f["bytes"]), {str(key): int(crc) for key, crc in f["crc32"].items()})
            for name, f in data["files"].items()
        }
        manifest = cls(
            save_id=str(data["save_id"]),
            sizes=sizes,
            model_type=str(data["model_type"]),
            policy=str(data["policy"]),
            hf_prefix=str(data["hf_prefix"]),
            tensors=tensors,
            parameters=frozenset(name for name, entry in data["tensors"].items() if entry["kind"] == "parameter"),
            files=files,
            versions={str(key): str(value) for key, value in data["versions"].items()},
        )
        manifest.check()
        return manifest

    def check(self) -> None:
        """Raise ``ValueError`` unless the parts of the manifest agree with each other."""
        if min(self.sizes) < 1 or self.sizes.tp * self.sizes.pp > 1_000_000:
            raise ValueError(f"the mesh {tuple(self.sizes)} is impossible")
        expected = [name for _, _, name in self.shards]
        foreign = sorted(set(self.files) - set(expected))
        if foreign:
            raise ValueError(f"it names the file {foreign[0]!r}, which is none of its shards")
        absent = sorted(set(expected) - set(self.files))
        if absent:
            raise ValueError(f"it lacks the file {absent[0]!r}")
        for t, p, name in self.shards:
            held, first = self.files[name].checksums, self.files[shard_name(0, p)].checksums
            due = [tensor for tensor in first if t == 0 or self._tensor(tensor).layout is not None]
            if set(due) != set(held):
                raise ValueError(f"{name} should hold {len(due)} tensors and holds {len(held)} or others")
        found = {name for record in self.files.values() for name in record.checksums}
        saved_as: set[str] = set()
        for name, tensor in self.tensors.items():
            dtype_of(tensor.dtype)
            if name not in found:
                raise ValueError(f"no file holds {name}")
            for saved in tensor.saved_names():
                if saved in saved_as:
                    raise ValueError(f"two tensors are saved as {saved}")
                saved_as.add(saved)
            if tensor.layout is not None:
                _check_layout(tensor.layout, self.sizes.tp)

    def _tensor(self, name: str) -> TensorPlan:
        if name not in self.tensors:
            raise ValueError(f"a file holds {name}, which is no tensor of the model")
        return self.tensors[name]

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read ``autopar.json``.

        Raises:
            CheckpointError: if the folder or the file is missing, is not ours, damaged, or from a newer version.
        """
        path = folder / MANIFEST
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise CheckpointError(_absent(folder)) from None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        try:
            data = json.loads(text)
            version = data["format_version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} is no manifest of a checkpoint: {_say(error)}") from error
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format_version {version!r}; this version of autopar reads {FORMAT_VERSION}"
            )
        try:
            return cls.from_json(data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {_say(error)}") from error


@lru_cache(maxsize=4096)
def _check_layout(layout: Layout, tp: int) -> None:
    if layout.axis_size != tp:
        raise ValueError(f"a layout is shared out over {layout.axis_size} ranks in a mesh of {tp}")
    for block in layout.blocks:
        reached = 0
        for start, stop in sorted(block.shares):
            if start > reached:
                break
            reached = max(reached, stop)
        if reached != block.count:
            raise ValueError(f"no rank holds unit {reached} of {block.count} {block.unit}")


def _say(error: BaseException) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)


def _absent(folder: Path) -> str:
    if (folder / "config.json").is_file():
        return (
            f"{folder} is no sharded checkpoint: it has config.json but no {MANIFEST}\n"
            "  It looks like a Hugging Face checkpoint: from_pretrained reads it as it is."
        )
    if folder.is_dir():
        return f"{folder} is no checkpoint: it has no {MANIFEST}"
    whole = [path for path in leftovers(folder) if (path / MANIFEST).is_file()]
    if whole:
        return (
            f"{folder} does not exist, but a save that was interrupted left {whole[0].name} beside it\n"
            f"  It is a whole checkpoint: rename {whole[0]} to {folder.name}."
        )
    hint = ""
    if folder.parent.is_dir():
        siblings = [path.name for path in folder.parent.iterdir() if (path / MANIFEST).is_file()]
        hint = nearest(folder.name, siblings)
    return f"{folder} does not exist.{hint}"
