"""The shard files of a checkpoint: checked against the manifest, verified once over all ranks, read as tensors."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from autopar.checkpoint.format import MANIFEST, WEIGHTS, Manifest, sizes_text
from autopar.checkpoint.shard_index import FileRecord, Part
from autopar.distributed.mesh_sizes import MeshSizes
from autopar.errors import CheckpointError
from autopar.layout import Layout, replica_rows
from autopar.storage.files import Closing, file_checksum
from autopar.storage.lazy_tensor import Joined, LazyTensor, read_shard, whole_box
from autopar.storage.safetensors_io import SafetensorsReader, dtype_name, nbytes
from autopar.storage.views import narrowed

if TYPE_CHECKING:
    from autopar.distributed.mesh import MPU


class StoredShard(NamedTuple):
    """One tensor's shard in one file."""

    part: str
    name: str
    tp: int
    file: str
    bytes: int


class Shards(Closing):
    """The shard files of one checkpoint; a context manager. Files are opened when they are first needed.

    Args:
        folder: of the checkpoint.
        parts: which of its parts are going to be used; presence and size of all their files are checked at once.
        access: whether lazy tensors may lie in maps of the files.

    Attributes:
        manifest: the checkpoint's.

    Raises:
        CheckpointError: for a file that is missing, truncated, swapped, of another save, or holds something else.
    """

    def __init__(self, folder: Path, parts: Iterable[str] = WEIGHTS, mapped: bool = False) -> None:
        self.folder = folder
        self._mapped = mapped
        self.manifest = Manifest.read(folder)
        self._readers: dict[str, SafetensorsReader] = {}
        used = [self.manifest.parts[name] for name in parts if name in self.manifest.parts]
        self._check_presence(used)
        try:
            for part in used:
                for name, record in part.files.items():
                    if (folder / name).stat().st_size != record.bytes:
                        self._open(part, name)
        except BaseException:
            self.close()
            raise

    def _check_presence(self, parts: list[Part]) -> None:
        manifest = self.manifest
        files = {name: record for part in parts for name, record in part.files.items()}
        missing = [name for name in files if not (self.folder / name).is_file()]
        if not missing:
            return
        record = files[missing[0]]
        rank = manifest.writer(record)
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{self.folder} is incomplete: {len(files) - len(missing)} of {len(files)} shards found, "
            f"{missing[0]} is missing{more}.\n"
            f"  It was saved with {sizes_text(manifest)} ({self.folder / MANIFEST}).\n"
            f"  Copy the file from the node that ran rank {rank}, or save again."
        )

    def _open(self, part: Part, name: str) -> SafetensorsReader:
        if name in self._readers:
            return self._readers[name]
        path, record = self.folder / name, part.files[name]
        actual = path.stat().st_size if path.is_file() else 0
        truncated = f"{path} is truncated or overwritten: it has {actual} bytes, it was saved with {record.bytes}"
        try:
            reader = SafetensorsReader(path, self._mapped)
        except CheckpointError as error:
            if actual != record.bytes:
                raise CheckpointError(truncated) from error
            raise
        try:
            self._check_origin(reader, record)
            if actual != record.bytes:
                raise CheckpointError(truncated)
            self._check_entries(reader, part, record)
        except BaseException:
            reader.close()
            raise
        self._readers[name] = reader
        return reader

    def _check_origin(self, reader: SafetensorsReader, record: FileRecord) -> None:
        path, save_id = reader.path, self.manifest.save_id
        found = reader.metadata.get("autopar_save_id")
        if found != save_id:
            raise CheckpointError(
                f"{path} belongs to another save: its id is {found}, {MANIFEST} says {save_id}\n"
                "  Files of two saves were mixed in one folder."
            )
        own = reader.metadata.get("autopar_file")
        if own != path.name:
            raise CheckpointError(f"{path} was saved as {own}: {own} was copied or renamed to it")
        if reader.header != record.header and set(reader.entries) == set(record.checksums):
            raise CheckpointError(f"{path} is damaged: its header is not the one that was saved (its checksum differs)")

    def _check_entries(self, reader: SafetensorsReader, part: Part, record: FileRecord) -> None:
        if set(reader.entries) != set(record.checksums):
            odd = sorted(set(reader.entries) ^ set(record.checksums))
            raise CheckpointError(f"{reader.path} does not hold what {MANIFEST} says; they differ in {odd[0]}")
        for key, entry in reader.entries.items():
            plan = part.tensors[key]
            due = plan.local_shape(record.tp)
            if entry.shape != due or dtype_name(entry.dtype) != plan.dtype:
                raise CheckpointError(
                    f"{reader.path} holds {key} as {dtype_name(entry.dtype)} {list(entry.shape)}, "
                    f"{MANIFEST} says {plan.dtype} {list(due)}"
                )

    def stored(self, parts: Iterable[str]) -> Iterator[StoredShard]:
        """Iterate over the shards of some parts, file by file."""
        for part in (self.manifest.parts[name] for name in parts if name in self.manifest.parts):
            for file, record in part.files.items():
                for name in record.checksums:
                    plan = part.tensors[name]
                    size = nbytes(getattr(torch, plan.dtype), plan.local_shape(record.tp))
                    yield StoredShard(part.name, name, record.tp, file, size)

    def verify(self, shard: StoredShard) -> None:
        """Raise CheckpointError if the bytes of that shard are not those that were saved."""
        part = self.manifest.parts[shard.part]
        self._open(part, shard.file).verify(shard.name, part.files[shard.file].checksums[shard.name])

    def verify_share(self, parts: Iterable[str], now: MeshSizes, rank: int) -> None:
        """Verify what ``rank`` of the mesh ``now`` has to: all ranks together read every byte once."""
        for shard in assign_verification(list(self.stored(parts)), self.manifest.sizes, now, rank):
            self.verify(shard)

    def check_file(self, name: str) -> None:
        """Raise CheckpointError if that file's header is not what the manifest describes."""
        self._open(next(part for part in self.manifest.parts.values() if name in part.files), name)

    def verify_along(self) -> None:
        """Raise CheckpointError if a small file of the save is missing or is not the one that was saved."""
        for name in self.manifest.along:
            self.verify_one_along(name)

    def verify_one_along(self, name: str) -> None:
        """Raise CheckpointError if that small file is missing or is not the one that was saved."""
        path = self.folder / name
        if not path.is_file():
            raise CheckpointError(f"{self.folder} is incomplete: {name} is missing")
        if file_checksum(path) != self.manifest.along[name]:
            raise CheckpointError(
                f"{path} is not the file that was saved (its checksum differs)\n"
                "  If it was edited on purpose, pass verify=False (--no-verify)."
            )

    def lazy(self, name: str, part: str = "model") -> LazyTensor:
        """Return the full tensor, to be read in ranges from the shards that hold it. Nothing is verified.

        Raises:
            CheckpointError: a file is not what the manifest says.
        """
        there = self.manifest.parts[part]
        plan = there.tensors[name]
        if plan.layout is None:
            return self._open(there, there.holder(name, 0)).lazy(name)
        pieces: list[tuple[int, LazyTensor]] = []
        for tp in range(self.manifest.sizes.tp):
            if not plan.layout.owned(tp):
                continue
            shard = self._open(there, there.holder(name, tp)).lazy(name)
            for (start, _), (low, high) in zip(plan.layout.owned(tp), plan.layout.owned_local(tp), strict=True):
                whole = (low, high) == (0, shard.shape[plan.layout.dim])
                pieces.append((start, shard if whole else narrowed(shard, plan.layout.dim, low, high)))
        if not pieces:  # a dim of size 0
            return self._open(there, there.holder(name, 0)).lazy(name)
        ordered = [piece for _, piece in sorted(pieces, key=lambda pair: pair[0])]
        return ordered[0] if len(ordered) == 1 else Joined(ordered, plan.layout.dim)

    @torch.no_grad()
    def read_shard(self, name: str, part: str, layout: Layout | None, mpu: MPU, out: torch.Tensor) -> None:
        """Read what this rank holds of a tensor by ``layout`` into ``out``; of a DTensor its own rows only."""
        from torch.distributed.tensor import DTensor  # takes half a second, which what reads a folder alone spares

        lazy = self.lazy(name, part)
        if not isinstance(out, DTensor):
            read_shard(lazy, layout, mpu.shards.rank, out)
            return
        local = out.to_local()
        if local.numel() == 0:
            return
        if layout is not None:
            lazy = Joined(
                [narrowed(lazy, layout.dim, *wanted) for wanted in layout.ranges(mpu.shards.rank)], layout.dim
            )
        if lazy.shape != tuple(out.shape):
            raise ValueError(f"a tensor of shape {list(out.shape)} cannot take a shard of shape {list(lazy.shape)}")
        axis = mpu.fsdp if out.device_mesh.size() == mpu.dp_cp.size else mpu.copies
        rows = replica_rows(out.shape[0], axis.rank, axis.size)
        lazy.read_into(local, (rows, *whole_box(lazy.shape[1:])))

    def whole(self, name: str, part: str = "model") -> torch.Tensor:
        """Read the full tensor with checksums verified; one shard is in memory at a time beside it."""
        there = self.manifest.parts[part]
        plan = there.tensors[name]
        if plan.layout is None:
            return self._shard(there, name, 0)
        full: torch.Tensor | None = None
        for tp in reversed(range(self.manifest.sizes.tp)):  # where several hold a unit, the lowest rank's copy remains
            if not plan.layout.owned(tp) and (tp or plan.layout.size):
                continue
            shard = self._shard(there, name, tp)
            if full is None:
                full = torch.empty(plan.shape, dtype=shard.dtype, device="cpu")
            plan.layout.write(full, shard, tp)
        assert full is not None
        return full

    def _shard(self, part: Part, name: str, tp: int) -> torch.Tensor:
        file = part.holder(name, tp)
        return self._open(part, file).read(name, part.files[file].checksums[name])

    def close(self) -> None:
        """Close the files."""
        for reader in self._readers.values():
            reader.close()


def assign_verification(
    stored: Sequence[StoredShard], saved: MeshSizes, now: MeshSizes, rank: int
) -> list[StoredShard]:
    """Return the shards that ``rank`` verifies: all ranks together verify every stored byte once.

    On the same tensor-parallel size a shard goes to a rank that is going to read it, on any size all ranks verify about
    equally many bytes. Pure: every rank computes the same assignment.

    Args:
        stored: the shards of the checkpoint, which was saved on the mesh ``saved``.
        now: the mesh that loads it.
    """
    world = now.tp * now.pp * now.dp
    load = [0] * world
    own = []
    unassigned = []
    for item in sorted(stored, key=lambda one: (-one.bytes, one.file, one.name)):
        if saved.tp != now.tp or item.tp >= now.tp:
            unassigned.append(item)
            continue
        reader = min(range(item.tp, world, now.tp), key=lambda candidate: load[candidate])  # tp varies fastest
        load[reader] += item.bytes
        if reader == rank:
            own.append(item)
    heap = [(bytes, reader) for reader, bytes in enumerate(load)]
    heapq.heapify(heap)
    for item in unassigned:
        bytes, reader = heap[0]
        heapq.heapreplace(heap, (bytes + item.bytes, reader))
        if reader == rank:
            own.append(item)
    return own
