"""File names of a sharded checkpoint and the manifest ``autopar.json``.

    config.json, generation_config.json     as Hugging Face writes them
    model-tp{t}-pp{p}.safetensors           shards of tensor-parallel rank t, stage p, under Hugging Face's names
    model-tp{t}-pp{p}-dp{d}.safetensors     the same, written by replica d > 0
    optimizer-tp{t}-pp{p}.safetensors       the optimizer's state, and fp32 weights (``wte.weight::master``)
    base-tp{t}-pp{p}.safetensors            quantized weights: bytes and scales, unless a base model under adapters
    extra-tp{t}-pp{p}.safetensors           tensors of the user's data (``extra=``)
    autopar.json                            the manifest: mesh, layout of every tensor, sizes and checksums

[Note: checkpoints] A tensor is sharded over the tensor-parallel ranks by its layout. Ranks that hold the same shard
divide its rows, so each row is in exactly one file. The manifest records the rows of each file. Tied tensors are saved
once. Merging, resharding and loading need only the manifest, and never unpickle a file. Every tensor, every small file
and the manifest have a checksum. A save writes into a hidden folder next to the target and renames it when all ranks
have finished, so an interrupted save leaves the previous checkpoint (:mod:`autopar.checkpoint.staging`).
"""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from autopar import __version__
from autopar.checkpoint.staging import MANIFEST, REMOVED, leftovers
from autopar.distributed.axis import MeshSizes
from autopar.errors import CheckpointError, nearest
from autopar.layout import Range
from autopar.plan.plan import TensorPlan
from autopar.storage.files import NAME, checksum, small_file

FORMAT_VERSION = 9
WEIGHTS: tuple[str, ...] = ("model", "base")
PARTS = (*WEIGHTS, "optimizer", "extra")
_END = re.compile(rf',\n "{NAME}": "([0-9a-f]{{16}})"\n}}\n'.encode())
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
        raise CheckpointError(f"max_shard_size must be a number of bytes, or a text such as '5GB'; got {size!r}")
    return result


def versions() -> dict[str, str]:
    """Return the versions of Python, autopar, torch and transformers."""
    installed = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {"python": platform.python_version(), "autopar": __version__, **installed}


# -- one part of a checkpoint: its tensors, its files, and which file holds which shard --------------------------------


def shard_name(part: str, tp: int, pp: int, dp: int = 0) -> str:
    """Return the file name for tensor-parallel rank ``tp``, stage ``pp`` and replica ``dp``."""
    return f"{part}-tp{tp}-pp{pp}{f'-dp{dp}' if dp else ''}.safetensors"


@dataclass(frozen=True)
class FileRecord:
    """The manifest's record of one shard file.

    Attributes:
        tp, pp, dp: The coordinates of the rank that wrote the file.
        bytes: The size of the file.
        header: The checksum of the header.
        checksums: Tensor name -> checksum.
        rows: Tensor name -> rows ``[start, stop)`` of the shard, for tensors of which the file holds only some rows.
    """

    tp: int
    pp: int
    dp: int
    bytes: int
    header: str
    checksums: Mapping[str, str]
    rows: Mapping[str, Range] = field(default_factory=dict)

    def shape(self, tensor: TensorPlan) -> tuple[int, ...]:
        """Return the shape that a tensor has in this file."""
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
        rows = {str(name): (int(start), int(stop)) for name, (start, stop) in data["rows"].items()}
        return cls(tp, pp, dp, size, header, checksums, rows)


@dataclass(frozen=True)
class PartFiles:
    """The tensors of one part of a checkpoint, and their files.

    Attributes:
        name: One of :data:`PARTS`; the file names start with it.
        tensors: Canonical name -> shape and layout.
        files: File name -> :class:`FileRecord`.
    """

    name: str
    tensors: Mapping[str, TensorPlan]
    files: Mapping[str, FileRecord]

    @cached_property
    def _pieces(self) -> dict[tuple[str, Any], list[tuple[int, int, str]]]:
        """(Tensor, ranges of its layout) -> rows of this shard and their file, sorted: ``(start, stop, name)``."""
        found: dict[tuple[str, Any], list[tuple[int, int, str]]] = {}
        for file, record in self.files.items():
            for name in record.checksums:
                tensor = self.tensors[name]
                rows = record.rows.get(name) or (0, (*tensor.local_shape(record.tp), 1)[0])
                found.setdefault((name, tensor.layout and tensor.layout.ranges(record.tp)), []).append((*rows, file))
        return {shard: sorted(pieces) for shard, pieces in found.items()}

    def pieces(self, name: str, tp: int) -> list[tuple[int, int, str]]:
        """Return the rows of rank ``tp``'s shard and their files, in order: ``(start, stop, file)``."""
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

    def check(self) -> None:
        """Raise ``ValueError`` unless every row of every shard is in exactly one file."""
        for name, record in self.files.items():
            if name != shard_name(self.name, record.tp, record.pp, record.dp):
                raise ValueError(f"the file name {name!r} does not match its record")
        for name, plan in self.tensors.items():
            for tp in (0,) if plan.layout is None else {ranks[0] for ranks in plan.layout.holders}:
                shape, reached = plan.local_shape(tp), 0
                count = shape[0] if shape else 1
                for start, stop, _ in (*self.pieces(name, tp), (count, count, "")) if math.prod(shape) else ():
                    if start != reached or stop < start:
                        many = "several files hold" if start < reached else "no file holds"
                        raise ValueError(f"{many} row {min(start, reached)} of {name} on tensor-parallel rank {tp}")
                    reached = stop


@dataclass(frozen=True)
class QuantizedBase:
    """The quantized weights of a model.

    Attributes:
        name: The origin of the model (transformers' ``_name_or_path``); ``""`` if unknown.
        forms: Name of a weight -> its quantized form.
        notes: Name of a weight -> its entry in the header of its file, for torchao.
    """

    name: str = ""
    forms: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> QuantizedBase:
        """Create from JSON. Raises ``ValueError``, ``KeyError``, ``TypeError`` or ``AttributeError`` if malformed."""
        tables = ({str(k): str(v) for k, v in data[key].items()} for key in ("forms", "notes"))
        return cls(str(data["name"]), *tables)


@dataclass(frozen=True)
class Manifest:
    """The content of ``autopar.json``.

    Attributes:
        save_id: The random token of the save; each shard file contains it too.
        sizes: The mesh without cp (:attr:`MPU.saved_sizes`). tp counts the ranks that together hold a stage, dp the
            replicas of these ranks.
        hf_prefix: The path of the Hugging Face model in the root model, ``""`` or ``"model."``.
        parts: ``model``, and the other saved parts of :data:`PARTS`.
        parameters: The names of the model's tensors that are parameters; the remaining tensors are buffers.
        along: Name of a small file of the save (``config.json``) -> checksum.
        training: The JSON of the optimizer, the scheduler, the user's data and the random states, without tensors.
        versions: Package -> version, for Python and the packages that wrote the checkpoint.
        order: The number of the save in its series (``step-100``, ``step-200``); 0 if unknown.
        cp, tp: The context- and tensor-parallel sizes of the mesh; experts may be sharded over more ranks than tp.
        base: The quantized weights. Their values are saved only if there is a part ``base``.
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
        """Return the number of expert-parallel ranks per tensor-parallel rank."""
        return self.sizes.tp // self.tp

    @property
    def tensors(self) -> Mapping[str, TensorPlan]:
        """Return the plans of the model's tensors by canonical name, in state-dict order."""
        return self.parts["model"].tensors

    @property
    def quantized(self) -> Mapping[str, TensorPlan]:
        """Return the plans of the tensors of quantized weights; empty if the checkpoint leaves them out."""
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
        """Name of a tensor of the model -> names of the tensors of a merged checkpoint that share elements with it."""
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
        """Write ``autopar.json``, one line for each entry."""
        entries = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in self.to_json().items())
        text = ("{\n " + ",\n ".join(entries)).encode()
        (folder / MANIFEST).write_bytes(text + f',\n "{NAME}": "{checksum(text)}"\n}}\n'.encode())

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """Inverse of :meth:`to_json`. Raises ``KeyError``, ``TypeError``, ``AttributeError`` or ``ValueError``."""
        axes = ("tensor", "expert", "pipeline", "data", "context")
        tp, shards, pp, dp, cp = (int(data["mesh"][f"{axis}_parallel_size"]) for axis in axes)
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
        for name in self.along:
            if not re.fullmatch(r"[\w-][\w.-]*", name):
                raise ValueError(f"it names the file {name!r}, which must be inside the folder")
        for name, part in self.parts.items():
            if name not in PARTS:
                raise ValueError(f"a part must be one of {', '.join(PARTS)}; got {name!r}")
            part.check()
        saved_as: set[str] = set()
        for tensor in self.tensors.values():
            for saved in tensor.saved_names():
                if saved in saved_as:
                    raise ValueError(f"two tensors are saved as {saved}")
                saved_as.add(saved)

    @classmethod
    def read(cls, folder: Path, file: str = MANIFEST) -> Manifest:
        """Read ``autopar.json``, or a renamed manifest.

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
            raise CheckpointError(f"{path} is not a manifest of a checkpoint: {reason(error)}") from error
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format_version {version!r}; this version of autopar reads {FORMAT_VERSION}\n"
                "  Load it with the version of autopar that wrote it, and merge it there (autopar merge)."
            )
        end = list(_END.finditer(text))
        if not end or end[-1].end() != len(text) or checksum(text[: end[-1].start()]) != end[-1][1].decode():
            raise CheckpointError(f"{path} was changed after the save: its checksum differs")
        try:
            return cls.from_json(data)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise CheckpointError(f"{path} is damaged: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Return the reason that an error gives for malformed data."""
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)


def _why_missing(folder: Path) -> str:
    if (folder / REMOVED).is_file():
        return (
            f"{folder} has no {MANIFEST}: a process ended while it deleted this checkpoint.\n"
            "  Use autopar.latest to find the newest checkpoint."
        )
    if folder.is_dir():
        hint = "  It looks like a Hugging Face checkpoint: use from_pretrained."
        return f"{folder} is not a checkpoint: it has no {MANIFEST}" + f".\n{hint}" * (folder / "config.json").is_file()
    complete = [path for path in leftovers(folder) if (path / MANIFEST).is_file()]
    if complete:
        return (
            f"{folder} does not exist, but an interrupted save left the complete checkpoint {complete[0].name}.\n"
            f"  Rename {complete[0]} to {folder.name}."
        )
    return f"{folder} does not exist.{nearest(folder.name, [path.name for path in folder.parent.glob('*')])}"
