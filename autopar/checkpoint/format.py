"""The folder of a sharded checkpoint: file names and the manifest ``autopar.json``.

    config.json, generation_config.json     as Hugging Face writes them
    model-tp{t}-pp{p}.safetensors           the shards of tensor-parallel rank t, stage p, under Hugging Face's names
    optimizer-tp{t}-pp{p}.safetensors       the state of the optimizer in the same form, if it was saved, and the fp32
                                            weights of half-precision parameters (``wte.weight::master``)
    optimizer-tp{t}-pp{p}-dp{d}.safetensors with ZeRO-1, the state that replica d keeps
    base-tp{t}-pp{p}.safetensors            quantized weights: bytes and scales, where no adapters stand before them
    extra-tp{t}-pp{p}.safetensors           tensors among the user's own data, if there are any: rank 0's, and shards
    autopar.json                            the manifest: mesh, layout of every tensor, sizes and checksums

A replicated tensor lies in the file of tensor-parallel rank 0 only; tied tensors lie there once. The manifest
says everything that merging, resharding and loading need, and ends with a checksum of itself; no file of a checkpoint
is ever unpickled.
"""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from autopar.checkpoint.quantized_base import QuantizedBase
from autopar.checkpoint.shard_index import FileRecord, Part
from autopar.checkpoint.staging import MANIFEST, REMOVED, leftovers
from autopar.distributed.mesh_sizes import MeshSizes
from autopar.errors import CheckpointError, nearest
from autopar.plan.plan import Piece, TensorPlan
from autopar.storage.files import NAME, checksum, small_file

__all__ = ["MANIFEST", "PARTS", "SHARDED_EXTRA", "WEIGHTS", "Manifest", "parse_size", "sizes_text", "versions"]

FORMAT_VERSION = 2
WITH_JOINED = 3  # of manifests with tensors that are merged into one, which a reader of version 2 would misread
WITH_EXPERTS = 5  # of manifests with experts over more ranks than other layers, which an earlier reader would miss
WITH_BASE = 6  # of manifests with quantized weights, which an earlier reader would leave out
WITH_SHARDS = 4  # of manifests with shards among the user's own data, of which an earlier reader would give whole ones
SHARDED_EXTRA = "sharded_extra"  # in ``training``: dictionaries of shards in ``extra``
WEIGHTS = ("model", "base")
PARTS = (*WEIGHTS, "optimizer", "extra")
_END = re.compile(rf',\n "{NAME}": "([0-9a-f]{{16}})"\n}}\n'.encode())
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def sizes_text(manifest: Manifest) -> str:
    """Return the sizes that the shards depend on, as users write them."""
    experts = f"expert_parallel_size={manifest.sizes.tp}, " if manifest.experts > 1 else ""
    return f"tensor_parallel_size={manifest.tp}, {experts}pipeline_parallel_size={manifest.sizes.pp}"


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


@dataclass(frozen=True)
class Manifest:
    """The content of ``autopar.json``.

    Attributes:
        save_id: random token of the save; each shard file carries it too.
        sizes: of the mesh, without cp: tp counts the ranks that together held a stage, dp those that held the same
            (:attr:`MPU.saved_sizes`).
        model_type: of the model that was saved.
        policy: of the model that was saved.
        hf_prefix: where the Hugging Face model sits in the root model, ``""`` or ``"model."``.
        parts: ``model``, and what else was saved of :data:`PARTS`.
        parameters: names of the model's tensors that are parameters; the others are buffers.
        along: small files of the save (``config.json``) -> their checksum.
        training: what is not in tensors of the optimizer, the scheduler, the user's data, the random states; JSON.
        versions: of the packages that wrote it.
        order: counts the saves of a series (``step-100``, ``step-200``); 0 if it is not known.
        follows: the ``order`` of the save that this one goes on from; 0 if it is not known.
        cp: context-parallel size of the mesh.
        tp: tensor-parallel size of the mesh, if experts were sharded over more ranks; else 0.
        base: the quantized weights, which are left out unless there is a part ``base``.
    """

    save_id: str
    sizes: MeshSizes
    model_type: str
    policy: str
    hf_prefix: str
    parts: Mapping[str, Part]
    parameters: frozenset[str]
    along: Mapping[str, str] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    order: int = 0
    follows: int = 0
    cp: int = 1
    tp: int = 0
    base: QuantizedBase = field(default_factory=QuantizedBase)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tp", self.tp or self.sizes.tp)

    @property
    def experts(self) -> int:
        """How many times as many ranks held the experts as the other layers."""
        return self.sizes.tp // self.tp

    def writer(self, record: FileRecord) -> int:
        """Return the global rank that wrote a file."""
        replica, context = divmod(record.dp or 0, self.cp)
        inner, tp = divmod(record.tp, self.tp)
        replica += record.pp * (self.sizes.dp // self.cp)
        return ((replica * self.experts + inner) * self.cp + context) * self.tp + tp

    @property
    def tensors(self) -> Mapping[str, TensorPlan]:
        """Shape and layout of the model's tensors by their canonical names, in state-dict order."""
        return self.parts["model"].tensors

    @property
    def quantized(self) -> Mapping[str, TensorPlan]:
        """The tensors that stand for quantized weights, by path and name in a file; empty if they are left out."""
        return self.parts["base"].tensors if "base" in self.parts else {}

    @property
    def files(self) -> dict[str, FileRecord]:
        """All shard files."""
        return {name: record for part in self.parts.values() for name, record in part.files.items()}

    def total_parameters(self) -> int:
        """Count the elements of the Hugging Face model's parameters, tied ones once."""
        mine = (t for name, t in self.tensors.items() if name in self.parameters and name.startswith(self.hf_prefix))
        return sum(math.prod(tensor.shape) for tensor in mine)

    def pieces_with(self, name: str) -> list[str]:
        """Return the tensors of a merged checkpoint that one of the model's is a part of, or that are parts of it."""
        return [*self._pieces.get(name, ())]

    @cached_property
    def _pieces(self) -> dict[str, dict[str, None]]:
        found: dict[str, dict[str, None]] = {}
        for name, tensor in self.tensors.items():
            for piece in tensor.pieces:
                for source in (name, *piece.sources()):
                    found.setdefault(source, {})[piece.name] = None
        return found

    def _joined(self) -> Iterator[Piece]:
        return (piece for tensor in self.tensors.values() for piece in tensor.pieces if piece.joined)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        _, pp, dp, _ = self.sizes
        mesh = {"tensor_parallel_size": self.tp, "pipeline_parallel_size": pp, "data_parallel_size": dp * self.experts}
        mesh |= {"expert_parallel_size": self.sizes.tp} if self.experts > 1 else {}
        version = WITH_JOINED if any(self._joined()) else FORMAT_VERSION
        version = WITH_SHARDS if SHARDED_EXTRA in self.training else version
        return {
            "format_version": WITH_BASE if "base" in self.parts else WITH_EXPERTS if self.experts > 1 else version,
            "save_id": self.save_id,
            "order": self.order,
            "follows": self.follows,
            "mesh": mesh | ({"context_parallel_size": self.cp} if self.cp > 1 else {}),
            "model_type": self.model_type,
            "policy": self.policy,
            "hf_prefix": self.hf_prefix,
            "versions": dict(self.versions),
            "along": dict(self.along),
            "buffers": [name for name in self.tensors if name not in self.parameters],
            "parts": {name: part.to_json() for name, part in self.parts.items()},
            "training": dict(self.training),
        } | ({"quantized_base": self.base.to_json()} if self.base.digests else {})

    def write(self, folder: Path) -> None:
        """Write ``autopar.json``."""
        text = json.dumps(self.to_json(), indent=1).encode().removesuffix(b"\n}")
        (folder / MANIFEST).write_bytes(text + f',\n "{NAME}": "{checksum(text)}"\n}}\n'.encode())

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """Inverse of :meth:`to_json`. Raises ``KeyError``, ``TypeError``, ``AttributeError`` or ``ValueError``."""
        mesh = data["mesh"]
        tp, pp, dp = (int(mesh[f"{axis}_parallel_size"]) for axis in ("tensor", "pipeline", "data"))
        shards = int(mesh.get("expert_parallel_size", tp))
        if min(tp, shards) < 1:
            raise ValueError(f"the mesh {(tp, pp, dp)} is impossible")
        if shards % tp or dp % (shards // tp):
            raise ValueError(f"expert_parallel_size {shards} does not fit tensor_parallel_size {tp} and {dp} replicas")
        sizes = MeshSizes(shards, pp, dp * tp // shards)
        parts = {str(name): Part.from_json(str(name), entry) for name, entry in data["parts"].items()}
        buffers = {str(name) for name in data["buffers"]}
        manifest = cls(
            save_id=str(data["save_id"]),
            sizes=sizes,
            model_type=str(data["model_type"]),
            policy=str(data["policy"]),
            hf_prefix=str(data["hf_prefix"]),
            parts=parts,
            parameters=frozenset(parts["model"].tensors) - buffers,
            along={str(name): str(value) for name, value in data["along"].items()},
            training=dict(data["training"]),
            versions={str(key): str(value) for key, value in data["versions"].items()},
            order=int(data.get("order", 0)),
            follows=int(data.get("follows", 0)),
            cp=int(mesh.get("context_parallel_size", 1)),
            tp=tp,
            base=QuantizedBase.from_json(data["quantized_base"]) if "quantized_base" in data else QuantizedBase(),
        )
        manifest.check()
        return manifest

    def check(self) -> None:
        """Raise ``ValueError`` unless the parts of the manifest agree with each other."""
        if min(self.sizes) < 1 or math.prod(self.sizes) > 10_000_000:
            raise ValueError(f"the mesh {tuple(self.sizes[:3])} is impossible")
        if self.cp < 1 or self.sizes.dp % self.cp:
            raise ValueError(f"context_parallel_size {self.cp} does not divide {self.sizes.dp} replicas")
        foreign = [name for name in self.parts if name not in PARTS]
        if foreign:
            raise ValueError(f"it has a part {foreign[0]!r}")
        for name in self.along:
            if not re.fullmatch(r"[\w-][\w.-]*", name):
                raise ValueError(f"it names the file {name!r}, which is not inside the folder")
        for part in self.parts.values():
            part.check(self.sizes)
        for piece in self._joined():
            unknown = [name for name in piece.sources() if name not in self.tensors]
            if unknown:
                raise ValueError(f"{piece.name} is joined from {unknown[0]}, which is no tensor of the model")
        saved_as: set[str] = set()
        for tensor in self.tensors.values():
            for saved in tensor.saved_names():
                if saved in saved_as:
                    raise ValueError(f"two tensors are saved as {saved}")
                saved_as.add(saved)

    @classmethod
    def read(cls, folder: Path, file: str = MANIFEST) -> Manifest:
        """Read ``autopar.json``, or another file of that kind.

        Raises:
            CheckpointError: if the folder or the file is missing, is not ours, damaged, or from a newer version.
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
            raise CheckpointError(f"{path} is no manifest of a checkpoint: {_reason(error)}") from error
        if version not in range(FORMAT_VERSION, WITH_BASE + 1):
            raise CheckpointError(
                f"{path} has format_version {version!r}; this version of autopar reads {FORMAT_VERSION} to {WITH_BASE}"
            )
        end = list(_END.finditer(text))
        if not end or end[-1].end() != len(text) or checksum(text[: end[-1].start()]) != end[-1][1].decode():
            raise CheckpointError(f"{path} was changed after it was written: its own checksum at its end differs")
        try:
            return cls.from_json(data)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)


def _why_missing(folder: Path) -> str:
    if (folder / REMOVED).is_file():
        return (
            f"{folder} was being deleted when its process ended: it has no {MANIFEST} any more.\n"
            "  keep_last deletes old checkpoints, and the next save deletes the rest of this one. "
            "autopar.latest finds the newest."
        )
    if (folder / "config.json").is_file():
        return (
            f"{folder} is no sharded checkpoint: it has config.json but no {MANIFEST}.\n"
            "  It looks like a Hugging Face checkpoint: from_pretrained reads it as it is."
        )
    if folder.is_dir():
        return f"{folder} is no checkpoint: it has no {MANIFEST}"
    whole = [path for path in leftovers(folder) if (path / MANIFEST).is_file()]
    if whole:
        return (
            f"{folder} does not exist, but a save that was interrupted left {whole[0].name} beside it.\n"
            f"  It is a whole checkpoint: rename {whole[0]} to {folder.name}."
        )
    hint = ""
    if folder.parent.is_dir():
        siblings = [path.name for path in folder.parent.iterdir() if (path / MANIFEST).is_file()]
        hint = nearest(folder.name, siblings)
    return f"{folder} does not exist.{hint}"
