"""One part of a checkpoint (the model, the optimizer's state): its tensors, its files, and which holds which shard."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from autopar.distributed.mesh_sizes import MeshSizes
from autopar.layout import Layout
from autopar.plan.plan import TensorPlan
from autopar.storage.files import NAME
from autopar.storage.safetensors_io import dtype_of

_HEX = re.compile(r"[0-9a-f]{16}")


def shard_name(part: str, tp: int, pp: int, dp: int | None = None) -> str:
    """Return the file of tensor-parallel rank ``tp``, stage ``pp``; ``dp`` if the replicas hold different tensors."""
    replica = "" if dp is None else f"-dp{dp}"
    return f"{part}-tp{tp}-pp{pp}{replica}.safetensors"


@dataclass(frozen=True)
class FileRecord:
    """One shard file.

    Attributes:
        tp, pp, dp: the rank that wrote it; ``dp`` is None where the replicas hold the same.
        bytes: its size.
        header: checksum of its header.
        checksums: name -> checksum of each tensor in it.
    """

    tp: int
    pp: int
    dp: int | None
    bytes: int
    header: str
    checksums: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        place = {"tp": self.tp, "pp": self.pp, "dp": self.dp}
        return {**place, "bytes": self.bytes, f"header_{NAME}": self.header, NAME: dict(self.checksums)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FileRecord:
        """Inverse of :meth:`to_json`. Raises ``KeyError``, ``TypeError`` or ``ValueError`` on malformed data."""
        checksums = {str(name): str(value) for name, value in data[NAME].items()}
        header = str(data[f"header_{NAME}"])
        odd = [value for value in (header, *checksums.values()) if not _HEX.fullmatch(value)]
        if odd:
            raise ValueError(f"{odd[0]!r} is no checksum")
        dp = data["dp"]
        return cls(
            int(data["tp"]), int(data["pp"]), None if dp is None else int(dp), int(data["bytes"]), header, checksums
        )


@dataclass(frozen=True)
class Part:
    """The tensors of one part and the files that they lie in.

    A replicated tensor lies in one file; a sharded one lies in one file of each rank that holds shards, or of one of
    those ranks that hold the same shard.

    Attributes:
        name: ``model``, ``optimizer`` or ``extra``; the beginning of its files' names.
        tensors: canonical name -> shape and layout.
        files: file name -> :class:`FileRecord`.
    """

    name: str
    tensors: Mapping[str, TensorPlan]
    files: Mapping[str, FileRecord]

    @cached_property
    def holders(self) -> dict[str, dict[int, str]]:
        """Tensor -> tensor-parallel rank -> the file with this rank's shard of it."""
        found: dict[str, dict[int, str]] = {}
        for name, record in self.files.items():
            for tensor in record.checksums:
                found.setdefault(tensor, {})[record.tp] = name
        return found

    def holder(self, name: str, tp: int) -> str:
        """Return the file with the shard of rank ``tp``; of a replicated tensor, its only file."""
        holders, layout = self.holders[name], self.tensors[name].layout
        if layout is None:
            return next(iter(holders.values()))
        return (
            holders[tp]
            if tp in holders
            else next(file for rank, file in holders.items() if layout.ranges(rank) == layout.ranges(tp))
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "files": {name: record.to_json() for name, record in self.files.items()},
            "tensors": {name: tensor.to_json() for name, tensor in self.tensors.items()},
        }

    @classmethod
    def from_json(cls, name: str, data: Mapping[str, Any]) -> Part:
        """Inverse of :meth:`to_json`. Raises ``KeyError``, ``TypeError`` or ``ValueError`` on malformed data."""
        tensors = {str(key): TensorPlan.from_json(str(key), entry) for key, entry in data["tensors"].items()}
        files = {str(key): FileRecord.from_json(entry) for key, entry in data["files"].items()}
        return cls(name, tensors, files)

    def check(self, sizes: MeshSizes) -> None:
        """Raise ``ValueError`` unless every element of every tensor lies in exactly one place, or in one a replica."""
        for name, record in self.files.items():
            if name != shard_name(self.name, record.tp, record.pp, record.dp):
                raise ValueError(f"it names the file {name!r}, which is none of its shards")
            inside = 0 <= record.tp < sizes.tp and 0 <= record.pp < sizes.pp
            if not inside or not 0 <= (record.dp or 0) < sizes.dp:
                raise ValueError(f"{name} is no shard of the mesh {tuple(sizes[:3])}")
        count = dict.fromkeys(self.tensors, 0)
        for name, record in self.files.items():
            for tensor in record.checksums:
                if tensor not in self.tensors:
                    raise ValueError(f"{name} holds {tensor}, which is no tensor of the {self.name}")
                count[tensor] += 1
        for name, plan in self.tensors.items():
            dtype_of(plan.dtype)
            held, layout = self.holders.get(name, {}), plan.layout
            due, found = 1 if layout is None else sizes.tp, len(held)
            if layout is not None and layout.axis_size == sizes.tp:  # one of those that hold the same has it
                none = {()} if layout.size else set[tuple[()]]()  # who holds nothing of it may leave it out
                due, found = (len({layout.ranges(rank) for rank in ranks} - none) for ranks in (range(sizes.tp), held))
            if found != due or len(held) != count[name]:
                raise ValueError(f"{name} should lie in {due} files and lies in {count[name]}")
            if layout is not None:
                _check_layout(layout, sizes.tp)


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
