"""The folder of a sharded checkpoint: file names and the manifest ``autopar.json``.

    config.json, generation_config.json     as Hugging Face writes them
    model-tp{t}-pp{p}.safetensors           shards of tensor-parallel rank t, stage p, under Hugging Face's names
    model-tp{t}-pp{p}-dp{d}.safetensors     the same, written by replica d > 0
    optimizer-tp{t}-pp{p}.safetensors       the optimizer's state, and fp32 weights (``wte.weight::master``)
    base-tp{t}-pp{p}.safetensors            quantized weights: bytes and scales, unless a base model under adapters
    extra-tp{t}-pp{p}.safetensors           tensors of the user's data
    autopar.json                            the manifest: mesh, layout of every tensor, sizes and checksums

A tensor is sharded by its layout over the tensor-parallel ranks, and each shard is divided along its first dim among
the ranks that hold it. The record of a file says which rows of a shard it holds; every row is in one file. Tied
tensors are saved once. The manifest is all that merging, resharding and loading need. It ends with a checksum of
itself, and no file of a checkpoint is ever unpickled.
"""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from autopar.checkpoint.staging import MANIFEST, REMOVED, leftovers
from autopar.distributed.axis import MeshSizes
from autopar.errors import CheckpointError, nearest
from autopar.layout import Layout, Range
from autopar.plan.plan import TensorPlan
from autopar.storage.files import NAME, checksum, small_file
from autopar.storage.safetensors_io import dtype_of

FORMAT_VERSION = 9
WEIGHTS = ("model", "base")
PARTS = (*WEIGHTS, "optimizer", "extra")
_END = re.compile(rf',\n "{NAME}": "([0-9a-f]{{16}})"\n}}\n'.encode())
_HEX = re.compile(r"[0-9a-f]{16}")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# Attributes of a manifest that are plain data; rotation reads the first two from the beginning of the file.
_PLAIN: dict[str, type] = {
    "save_id": str,
    "order": int,
    "model_type": str,
    "policy": str,
    "hf_prefix": str,
    "versions": dict,
    "along": dict,
    "training": dict,
}


def parse_size(size: int | str) -> int:
    """Return the bytes of ``"5GB"``, ``"200MB"`` or a number. Raises CheckpointError for anything else, and for 0."""
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
    """Return the versions of Python and of the packages that write the checkpoint."""
    found = {"python": platform.python_version()}
    for name in ("autopar", "torch", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


# -- one part of a checkpoint: its tensors, its files, and which file holds which shard --------------------------------


def shard_name(part: str, tp: int, pp: int, dp: int = 0) -> str:
    """Return the file of tensor-parallel rank ``tp``, stage ``pp`` and replica ``dp``."""
    return f"{part}-tp{tp}-pp{pp}{f'-dp{dp}' if dp else ''}.safetensors"


@dataclass(frozen=True)
class FileRecord:
    """One shard file.

    Attributes:
        tp, pp, dp: The rank that wrote it.
        bytes: The size of the file.
        header: The checksum of its header.
        checksums: name -> the checksum of each tensor in it.
        rows: name -> the rows ``[start, stop)`` of the shard of rank ``tp`` in it, unless they are all.
    """

    tp: int
    pp: int
    dp: int
    bytes: int
    header: str
    checksums: Mapping[str, str]
    rows: Mapping[str, Range] = field(default_factory=dict)

    def shape(self, tensor: TensorPlan) -> tuple[int, ...]:
        """Return the shape of a tensor in this file."""
        start, stop = self.rows.get(tensor.name, (0, 0))
        local = tensor.local_shape(self.tp)
        return (stop - start, *local[1:]) if tensor.name in self.rows else local

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        place = {"tp": self.tp, "pp": self.pp, "dp": self.dp}
        sums = {f"header_{NAME}": self.header, NAME: dict(self.checksums)}
        return {**place, "bytes": self.bytes, **sums, "rows": {name: list(rows) for name, rows in self.rows.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FileRecord:
        """Inverse of :meth:`to_json`. Raises ``KeyError``, ``TypeError`` or ``ValueError`` on malformed data."""
        checksums = {str(name): str(value) for name, value in data[NAME].items()}
        header, tp, pp, dp, size = str(data[f"header_{NAME}"]), *(int(data[key]) for key in ("tp", "pp", "dp", "bytes"))
        for value in (header, *checksums.values()):
            if not _HEX.fullmatch(value):
                raise ValueError(f"{value!r} is no checksum")
        rows = {str(name): (int(start), int(stop)) for name, (start, stop) in data["rows"].items()}
        return cls(tp, pp, dp, size, header, checksums, rows)


@dataclass(frozen=True)
class PartFiles:
    """The tensors of one part and their files.

    Attributes:
        name: ``model``, ``optimizer`` or ``extra``; the beginning of its files' names.
        tensors: canonical name -> shape and layout.
        files: file name -> :class:`FileRecord`.
    """

    name: str
    tensors: Mapping[str, TensorPlan]
    files: Mapping[str, FileRecord]

    @cached_property
    def _pieces(self) -> dict[tuple[str, Any], list[tuple[int, int, str]]]:
        """(Tensor, ranges of its layout) -> rows of this shard and their file, ``(start, stop, name)``, sorted."""
        found: dict[tuple[str, Any], list[tuple[int, int, str]]] = {}
        for file, record in self.files.items():
            for name in record.checksums:
                tensor = self.tensors[name]
                rows = record.rows.get(name) or (0, (*tensor.local_shape(record.tp), 1)[0])
                found.setdefault((name, tensor.layout and tensor.layout.ranges(record.tp)), []).append((*rows, file))
        return {shard: sorted(pieces) for shard, pieces in found.items()}

    def pieces(self, name: str, tp: int) -> list[tuple[int, int, str]]:
        """Return the place of rank ``tp``'s shard, in order: first row, row after the last, file."""
        layout = self.tensors[name].layout
        return self._pieces.get((name, layout and layout.ranges(tp)), [])

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "files": {name: record.to_json() for name, record in self.files.items()},
            "tensors": {name: tensor.to_json() for name, tensor in self.tensors.items()},
        }

    @classmethod
    def from_json(cls, name: str, data: Mapping[str, Any]) -> PartFiles:
        """Inverse of :meth:`to_json`. Raises ``KeyError``, ``TypeError`` or ``ValueError`` on malformed data."""
        tensors = {str(key): TensorPlan.from_json(str(key), entry) for key, entry in data["tensors"].items()}
        files = {str(key): FileRecord.from_json(entry) for key, entry in data["files"].items()}
        return cls(name, tensors, files)

    def check(self, sizes: MeshSizes) -> None:
        """Raise ``ValueError`` unless every row of every shard is in exactly one file."""
        for name, record in self.files.items():
            if name != shard_name(self.name, record.tp, record.pp, record.dp):
                raise ValueError(f"it names the file {name!r}, which is none of its shards")
            inside = 0 <= record.tp < sizes.tp and 0 <= record.pp < sizes.pp
            if not inside or not 0 <= record.dp < sizes.dp:
                raise ValueError(f"{name} is no shard of the mesh {tuple(sizes[:3])}")
            for tensor in record.checksums:
                if tensor not in self.tensors:
                    raise ValueError(f"{name} holds {tensor}, which is no tensor of the {self.name}")
        for plan in self.tensors.values():
            dtype_of(plan.dtype)
            if plan.layout is not None:
                _check_layout(plan.layout, sizes.tp)
        for name, plan in self.tensors.items():
            for tp in (0,) if plan.layout is None else {ranks[0] for ranks in plan.layout.holders}:
                shape, reached = plan.local_shape(tp), 0
                count = shape[0] if shape else 1
                for start, stop, _ in (*self.pieces(name, tp), (count, count, "")) if math.prod(shape) else ():
                    if start != reached or stop < start:
                        many = "several files hold" if start < reached else "no file holds"
                        raise ValueError(f"{many} row {min(start, reached)} of {name} on tensor-parallel rank {tp}")
                    reached = stop


@lru_cache(maxsize=4096)
def _check_layout(layout: Layout, tp: int) -> None:
    if layout.axis_size != tp:
        raise ValueError(f"a layout is for {layout.axis_size} ranks in a mesh of {tp}")
    for block in layout.blocks:
        reached = 0
        for start, stop in sorted(block.ranges):
            if start > reached:
                break
            reached = max(reached, stop)
        if reached != block.count:
            raise ValueError(f"no rank holds unit {reached} of {block.count} {block.unit}")


@dataclass(frozen=True)
class QuantizedBase:
    """The quantized weights of a model.

    Attributes:
        name: The origin of the model, as transformers notes it; ``""`` if it does not say.
        forms: name -> the form of a weight.
        notes: name -> what the header of a file says of it, where that is not in tensors.
    """

    name: str = ""
    forms: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> QuantizedBase:
        """Read the dict of the attributes. Raises ``ValueError``, ``KeyError``, ``TypeError`` or ``AttributeError``."""
        tables = ({str(k): str(v) for k, v in data[key].items()} for key in ("forms", "notes"))
        return cls(str(data["name"]), *tables)


@dataclass(frozen=True)
class Manifest:
    """The content of ``autopar.json``.

    Attributes:
        save_id: The random token of the save; each shard file carries it too.
        sizes: The mesh without cp: tp counts the ranks that together held a stage, dp those that held the same
            (:attr:`MPU.saved_sizes`).
        hf_prefix: The path of the Hugging Face model in the root model, ``""`` or ``"model."``.
        parts: ``model``, and the other parts of :data:`PARTS` that were saved.
        parameters: The names of the model's tensors that are parameters; the others are buffers.
        along: The small files of the save (``config.json``) -> their checksum.
        training: The JSON of the optimizer, the scheduler, the user's data and the random states, without tensors.
        versions: The packages that wrote it.
        order: The number of the save in its series (``step-100``, ``step-200``); 0 if it is not known.
        cp, tp: The context- and tensor-parallel sizes of the mesh; experts may be sharded over more ranks than tp.
        base: The quantized weights, which are left out unless there is a part ``base``.
    """

    save_id: str
    sizes: MeshSizes
    model_type: str
    policy: str
    hf_prefix: str
    parts: Mapping[str, PartFiles]
    parameters: frozenset[str]
    tp: int
    along: Mapping[str, str] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    order: int = 0
    cp: int = 1
    base: QuantizedBase = field(default_factory=QuantizedBase)

    @property
    def experts(self) -> int:
        """Return how many times as many ranks held the experts as the other layers."""
        return self.sizes.tp // self.tp

    @property
    def tensors(self) -> Mapping[str, TensorPlan]:
        """Return shape and layout of the model's tensors by their canonical names, in state-dict order."""
        return self.parts["model"].tensors

    @property
    def quantized(self) -> Mapping[str, TensorPlan]:
        """Return the tensors of quantized weights, by path and name in a file; empty if they are left out."""
        return self.parts["base"].tensors if "base" in self.parts else {}

    @property
    def files(self) -> dict[str, FileRecord]:
        """All shard files."""
        return {name: record for part in self.parts.values() for name, record in part.files.items()}

    def total_parameters(self) -> int:
        """Count the elements of the Hugging Face model's parameters, tied ones once."""
        mine = (t for name, t in self.tensors.items() if name in self.parameters and name.startswith(self.hf_prefix))
        return sum(math.prod(tensor.shape) for tensor in mine)

    @cached_property
    def pieces_with(self) -> dict[str, list[str]]:
        """The tensors of a merged checkpoint that each of the model's is a part of, or that are parts of it."""
        found: dict[str, list[str]] = {name: [] for name in self.tensors}
        for name, tensor in self.tensors.items():
            for piece in tensor.pieces:
                for source in {name, *piece.sources()}:
                    found[source].append(piece.name)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "format_version": FORMAT_VERSION,
            **{name: kind(getattr(self, name)) for name, kind in _PLAIN.items()},
            "mesh": {
                "tensor_parallel_size": self.tp,
                "expert_parallel_size": self.sizes.tp,
                "pipeline_parallel_size": self.sizes.pp,
                "data_parallel_size": self.sizes.dp * self.experts,
                "context_parallel_size": self.cp,
            },
            "buffers": [name for name in self.tensors if name not in self.parameters],
            "parts": {name: part.to_json() for name, part in self.parts.items()},
            "quantized_base": asdict(self.base),
        }

    def write(self, folder: Path) -> None:
        """Write ``autopar.json``."""
        text = _lines(self.to_json(), 4).encode().removesuffix(b"\n}")
        (folder / MANIFEST).write_bytes(text + f',\n "{NAME}": "{checksum(text)}"\n}}\n'.encode())

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """Inverse of :meth:`to_json`. Raises ``KeyError``, ``TypeError``, ``AttributeError`` or ``ValueError``."""
        axes = ("tensor", "expert", "pipeline", "data", "context")
        tp, shards, pp, dp, cp = (int(data["mesh"][f"{axis}_parallel_size"]) for axis in axes)
        if min(tp, shards) < 1:
            raise ValueError(f"the mesh {(tp, pp, dp)} is impossible")
        if shards % tp or dp % (shards // tp):
            raise ValueError(f"expert_parallel_size {shards} does not fit tensor_parallel_size {tp} and {dp} replicas")
        parts = {str(name): PartFiles.from_json(str(name), entry) for name, entry in data["parts"].items()}
        manifest = cls(
            **{name: kind(data[name]) for name, kind in _PLAIN.items()},
            sizes=MeshSizes(shards, pp, dp * tp // shards),
            cp=cp,
            tp=tp,
            parts=parts,
            parameters=frozenset(parts["model"].tensors) - {str(name) for name in data["buffers"]},
            base=QuantizedBase.from_json(data["quantized_base"]),
        )
        manifest.check()
        return manifest

    def check(self) -> None:
        """Raise ``ValueError`` unless the parts of the manifest agree with each other."""
        if min(self.sizes) < 1 or math.prod(self.sizes) > 10_000_000:
            raise ValueError(f"the mesh {tuple(self.sizes[:3])} is impossible")
        if self.cp < 1 or self.sizes.dp % self.cp:
            raise ValueError(f"context_parallel_size {self.cp} does not divide {self.sizes.dp} replicas")
        for name in self.along:
            if not re.fullmatch(r"[\w-][\w.-]*", name):
                raise ValueError(f"it names the file {name!r}, which is not inside the folder")
        for name, part in self.parts.items():
            if name not in PARTS:
                raise ValueError(f"it has a part {name!r}")
            part.check(self.sizes)
        saved_as: set[str] = set()
        for tensor in self.tensors.values():
            for piece in tensor.pieces:
                unknown = [name for name in piece.sources() if name not in self.tensors]
                if unknown:
                    raise ValueError(f"{piece.name} is joined from {unknown[0]}, which is no tensor of the model")
            for saved in tensor.saved_names():
                if saved in saved_as:
                    raise ValueError(f"two tensors are saved as {saved}")
                saved_as.add(saved)

    @classmethod
    def read(cls, folder: Path, file: str = MANIFEST) -> Manifest:
        """Read ``autopar.json``, or another file of that kind.

        Raises:
            CheckpointError: The file is missing, damaged, of another version, or not a manifest.
        """
        path = folder / file
        try:
            text = small_file(path)
        except FileNotFoundError:
            raise CheckpointError(_why_missing(folder)) from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        try:
            data = json.loads(text)
            version = data["format_version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} is no manifest of a checkpoint: {reason(error)}") from error
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format_version {version!r}; this version of autopar reads {FORMAT_VERSION}\n"
                "  Load it with the version of autopar that wrote it, and merge it there (autopar merge)."
            )
        end = list(_END.finditer(text))
        if not end or end[-1].end() != len(text) or checksum(text[: end[-1].start()]) != end[-1][1].decode():
            raise CheckpointError(f"{path} was changed after it was written: its own checksum at its end differs")
        try:
            return cls.from_json(data)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: {reason(error)}") from error


def _lines(value: Any, levels: int, indent: int = 1) -> str:
    """Return JSON with one line for each file and each tensor.

    Below ``levels`` of dicts json writes in C, without line breaks: with ZeRO 3 there are tensors x ranks of them.
    """
    if not levels or not isinstance(value, dict) or not value:
        return json.dumps(value)
    start = "\n" + " " * indent
    entries = (f"{start}{json.dumps(key)}: {_lines(each, levels - 1, indent + 1)}" for key, each in value.items())
    return f"{{{','.join(entries)}{start[:-1]}}}"


def reason(error: BaseException) -> str:
    """Return why plain data is malformed, from the error that reading it raised."""
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)


def _why_missing(folder: Path) -> str:
    if (folder / REMOVED).is_file():
        return (
            f"{folder} was being deleted when its process ended: it has no {MANIFEST} any more.\n"
            "  autopar.latest finds the newest checkpoint."
        )
    if folder.is_dir():
        hint = "  It looks like a Hugging Face checkpoint: from_pretrained reads it."
        return f"{folder} is no checkpoint: it has no {MANIFEST}" + f".\n{hint}" * (folder / "config.json").is_file()
    whole = [path for path in leftovers(folder) if (path / MANIFEST).is_file()]
    if whole:
        return (
            f"{folder} does not exist, but a save that was interrupted left {whole[0].name} beside it.\n"
            f"  It is a whole checkpoint: rename {whole[0]} to {folder.name}."
        )
    return f"{folder} does not exist.{nearest(folder.name, [path.name for path in folder.parent.glob('*')])}"
