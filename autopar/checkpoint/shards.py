"""Read, verify and write the shard files of a checkpoint."""

from __future__ import annotations

import math
import os
import resource
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from autopar.checkpoint.format import PARTS, WEIGHTS, FileRecord, Manifest, PartFiles, shard_name
from autopar.checkpoint.staging import MANIFEST
from autopar.errors import CheckpointError
from autopar.layout import Layout, Range, replica_rows
from autopar.plan.plan import TensorPlan
from autopar.storage.files import Closing, RangeFile, file_checksum
from autopar.storage.lazy_tensor import Box, InMemory, Joined, LazyTensor, full_box, lazy_shard, narrowed
from autopar.storage.progress import progress_bar
from autopar.storage.safetensors_io import SafetensorsReader, SafetensorsWriter, Spec, dtype_of, nbytes

if TYPE_CHECKING:
    from autopar.distributed.mesh import MPU


class ShardReader(Closing):
    """A context manager for the shard files of one checkpoint, which opens each file at its first use.

    Args:
        folder: The folder of the checkpoint.
        parts: The parts to use. Presence and size of their files are checked at once.

    Raises:
        CheckpointError: A file is missing, truncated or renamed, belongs to another save, or differs from the manifest.
    """

    def __init__(self, folder: Path, parts: Iterable[str] = WEIGHTS) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder)
        self._readers: dict[str, SafetensorsReader] = {}
        self._lock = threading.Lock()  # several threads read weights
        used = [self.manifest.parts[name] for name in parts if name in self.manifest.parts]
        files = [(part, name, record) for part in used for name, record in part.files.items()]
        missing = [name for _, name, _ in files if not (folder / name).is_file()]
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise CheckpointError(
                f"{folder} is incomplete: {len(files) - len(missing)} of {len(files)} shards found, "
                f"{missing[0]} is missing{more}.\n  Copy the file from the node that wrote it, or save again."
            )
        needed = len(self.manifest.files) + 256  # many ranks write more files than a process may open by default
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if resource.RLIM_INFINITY != soft < needed:
            limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        for part, name, record in files:
            if (folder / name).stat().st_size != record.bytes:
                self._open(part, name)

    def _open(self, part: PartFiles, name: str) -> SafetensorsReader:
        with self._lock:
            if name not in self._readers:
                self._readers[name] = self._opened(part, name)
            return self._readers[name]

    def _opened(self, part: PartFiles, name: str) -> SafetensorsReader:
        path, record, save_id = self.folder / name, part.files[name], self.manifest.save_id
        actual = path.stat().st_size if path.is_file() else 0
        truncated = f"{path} is truncated or overwritten: expected {record.bytes} bytes, got {actual}"
        try:
            reader = SafetensorsReader(path)
        except CheckpointError as error:
            if actual != record.bytes:
                raise CheckpointError(truncated) from error
            raise
        found, own = reader.metadata.get("autopar_save_id"), reader.metadata.get("autopar_file")
        wrong = ""
        if found != save_id:
            wrong = f"{path} belongs to another save: expected id {save_id} ({MANIFEST}), got {found}\n"
            wrong += "  Copy the files of one save into the folder."
        elif own != path.name:
            wrong = f"{path} was saved as {own} and then copied or renamed"
        elif reader.header != record.header:
            wrong = f"{path} is damaged: the checksum of its header differs from {MANIFEST}"
        elif actual != record.bytes:
            wrong = truncated
        if wrong:
            raise CheckpointError(wrong)
        return reader

    def stored(self, parts: Iterable[str]) -> Iterator[tuple[int, str, str, PartFiles]]:
        """Yield ``(bytes, file, tensor, part)`` for each tensor in the files of some parts."""
        for part in (self.manifest.parts[name] for name in parts if name in self.manifest.parts):
            for file, record in part.files.items():
                for name in record.checksums:
                    yield nbytes(dtype_of(part.tensors[name].dtype), record.shape(part.tensors[name])), file, name, part

    def verify(self, part: PartFiles, file: str, name: str) -> None:
        """Raise CheckpointError if the checksum of a tensor in a file differs from the manifest."""
        self._open(part, file).verify(name, part.files[file].checksums[name])

    def verify_share(self, parts: Iterable[str], rank: int = 0, world: int = 1, progress: bool | None = None) -> None:
        """Verify every ``world``-th tensor, starting at ``rank``, in decreasing order of size."""
        share = sorted(self.stored(parts), key=lambda one: (-one[0], *one[1:3]))[rank::world]
        with progress_bar("checking", sum(size for size, *_ in share), progress) as bar:
            for size, file, name, part in share:
                self.verify(part, file, name)
                bar.update(size)

    def verify_along(self, names: Iterable[str] | None = None) -> None:
        """Raise CheckpointError if a small file of the save is missing or changed."""
        for name in self.manifest.along if names is None else names:
            if not (path := self.folder / name).is_file():
                raise CheckpointError(f"{self.folder} is incomplete: {name} is missing")
            if file_checksum(path) != self.manifest.along[name]:
                raise CheckpointError(
                    f"{path} was changed after the save: its checksum differs from {MANIFEST}\n"
                    "  If you edited it on purpose, pass verify=False (--no-verify)."
                )

    def lazy(self, name: str, part: str = "model") -> LazyTensor:
        """Return the full tensor as a lazy tensor. Checksums are not verified.

        Reading raises CheckpointError for a file that differs from the manifest.
        """
        there, plan = self.manifest.parts[part], self.manifest.parts[part].tensors[name]
        if not math.prod(plan.shape):
            return InMemory(torch.empty(plan.shape, dtype=dtype_of(plan.dtype)))

        def shard(tp: int) -> LazyTensor:
            files = [file for _, _, file in there.pieces(name, tp)]
            rows = [_Rows(there.files[file].shape(plan), plan, partial(self._open, there, file)) for file in files]
            return rows[0] if len(rows) == 1 else Joined(rows, 0)

        if (layout := plan.layout) is None:
            return shard(0)
        pieces: list[tuple[int, LazyTensor]] = []
        for tp in filter(layout.owned, range(self.manifest.sizes.tp)):
            held = shard(tp)
            for (start, _), (low, high) in zip(layout.owned(tp), layout.owned_local(tp), strict=True):
                pieces.append((start, narrowed(held, layout.dim, low, high)))
        ordered = [piece for _, piece in sorted(pieces, key=lambda pair: pair[0])]
        return ordered[0] if len(ordered) == 1 else Joined(ordered, layout.dim)

    @torch.no_grad()
    def read_shard(self, name: str, part: str, layout: Layout | None, mpu: MPU, out: torch.Tensor) -> None:
        """Read this rank's shard of a tensor by ``layout`` into ``out``; for a DTensor only its local rows."""
        from torch.distributed.tensor import DTensor  # takes half a second, which commands on checkpoints do not need

        shard = lazy_shard(self.lazy(name, part), layout, mpu.shards.rank)
        shard.check_shape(out)
        box = full_box(shard.shape)
        if isinstance(out, DTensor):
            axis = mpu.fsdp if out.device_mesh.size() == mpu.dp_cp.size else mpu.copies
            box = (replica_rows(out.shape[0], axis.rank, axis.size), *box[1:])
            out = out.to_local()
        shard.read_into(out, box)

    def close(self) -> None:
        """Close the files."""
        for reader in self._readers.values():
            reader.close()


class _Rows(LazyTensor):
    """Rows of a shard in one file, opened at the first read: most ranks need only a few of the files."""

    def __init__(self, shape: tuple[int, ...], plan: TensorPlan, open_file: Callable[[], SafetensorsReader]) -> None:
        super().__init__(shape, dtype_of(plan.dtype))
        self._stored = cache(lambda: open_file().lazy(plan.name))

    def files(self) -> Iterator[RangeFile]:
        """Yield the file, if it has been read."""
        if self._stored.cache_info().currsize:
            yield from self._stored().files()

    def read_into(self, out: torch.Tensor, box: Box) -> None:
        self._stored().read_into(out, box)


def write_shard(
    folder: Path,
    save_id: str,
    part: str,
    place: tuple[int, int, int],
    specs: Mapping[str, Spec],
    tensor: Callable[[str], torch.Tensor],
    bar: Any,
    rows: Mapping[str, Range] = MappingProxyType({}),
) -> FileRecord:
    """Write the shard file of the rank at ``place``. Raises CheckpointError if the file cannot be written.

    Args:
        place: The coordinates ``(tp, pp, dp)`` of the rank.
        tensor: A function that returns a tensor by name, called once per tensor in the order of the file.
        bar: A progress bar over bytes.
        rows: Name -> rows of the shard, for tensors of which the file holds only some rows.
    """
    path = folder / shard_name(part, *place)
    metadata = {"format": "pt", "autopar_save_id": save_id, "autopar_file": path.name}
    try:
        with SafetensorsWriter(path, specs, metadata) as writer:
            for name in writer.order:
                writer.write(name, held := tensor(name))
                bar.update(held.nbytes)
        return FileRecord(*place, path.stat().st_size, writer.header, writer.checksums, rows)
    except OSError as error:
        raise CheckpointError(f"cannot write {path.name} into {folder}: {error.strerror or error}") from error


def check_checkpoint(directory: str | os.PathLike[str], *, progress: bool | None = None) -> dict[str, Any]:
    """Check that a checkpoint has exactly the saved files, with the saved bytes.

    Args:
        directory: The folder that ``save_parallelized``, ``split`` or ``reshard`` wrote.
        progress: True to show a progress bar; by default on a terminal.

    Returns:
        ``{"directory": str, "files": int, "tensors": int, "bytes": int, "problems": [str]}``

    Raises:
        CheckpointError: The folder has no readable manifest.
    """
    folder = Path(directory)
    problems: list[str] = []

    def passes(check: Callable[..., object], *what: Any) -> bool:
        try:
            check(*what)
        except CheckpointError as error:
            problems.append(str(error))
            return False
        return True

    with ShardReader(folder, ()) as shards:
        manifest = shards.manifest
        known = manifest.files
        present = dict.fromkeys(name for name in known if (folder / name).is_file())
        problems += [f"{folder / name} is missing" for name in known if name not in present]
        for name in manifest.along:
            passes(shards.verify_along, [name])
        parts = {name: part for part in manifest.parts.values() for name in part.files}
        intact = {name for name in present if passes(shards._open, parts[name], name)}
        stored = [shard for shard in shards.stored(PARTS) if shard[1] in present]
        total = sum(size for size, *_ in stored)
        with progress_bar("checking", total, progress) as bar:
            for size, file, name, part in stored:
                if file in intact:
                    passes(shards.verify, part, file, name)
                bar.update(size)
    strange = (path for path in sorted(folder.glob("*-tp*-pp*.safetensors")) if path.name not in known)
    problems += [f"{path} does not belong to this checkpoint" for path in strange]
    return {
        "directory": str(folder),
        "files": len(known),
        "tensors": sum(len(part.tensors) for part in manifest.parts.values()),
        "bytes": total,
        "problems": problems,
    }
