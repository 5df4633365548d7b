"""Open the shard files of a checkpoint and check that they are what the manifest says, before anything is used."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import torch

from autopar.checkpoint.format import MANIFEST, Manifest, shard_name, sizes_text
from autopar.checkpoint.safetensors_stream import SafetensorsReader, dtype_name
from autopar.errors import CheckpointError

__all__ = ["Shards"]


class Shards:
    """The shard files of one checkpoint; a context manager.

    Args:
        folder: of the checkpoint.
        which: ``(t, p)`` of the shards to open; all by default. Presence and size of the others are checked too.

    Attributes:
        manifest: the checkpoint's.

    Raises:
        CheckpointError: for a file that is missing, truncated, swapped, of another save, or holds something else.
    """

    def __init__(self, folder: Path, which: Iterable[tuple[int, int]] | None = None) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder)
        wanted = None if which is None else set(which)
        self._readers: dict[str, SafetensorsReader] = {}
        self._stack = ExitStack()
        self._check_presence()
        try:
            for t, p, name in self.manifest.shards:
                actual, expected = (folder / name).stat().st_size, self.manifest.files[name].bytes
                if actual != expected or wanted is None or (t, p) in wanted:
                    self._open(t, p, actual, expected)
        except BaseException:
            self.close()
            raise

    def _check_presence(self) -> None:
        manifest = self.manifest
        absent = [(t, p, name) for t, p, name in manifest.shards if not (self.folder / name).is_file()]
        if not absent:
            return
        total = manifest.sizes.tp * manifest.sizes.pp
        t, p, name = absent[0]
        rank = p * manifest.sizes.dp * manifest.sizes.tp + t
        more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
        raise CheckpointError(
            f"{self.folder} is incomplete: {total - len(absent)} of {total} shards found, {name} is missing{more}.\n"
            f"  It was saved with {sizes_text(manifest.sizes)} ({self.folder / MANIFEST}).\n"
            f"  Copy the file from the node that ran rank {rank}, or save again."
        )

    def _open(self, t: int, p: int, actual: int, expected: int) -> None:
        name = shard_name(t, p)
        path = self.folder / name
        try:
            reader = self._stack.enter_context(SafetensorsReader(path))
        except CheckpointError as error:
            if actual != expected:
                raise CheckpointError(
                    f"{path} is truncated or overwritten: it has {actual} bytes, it was saved with {expected}"
                ) from error
            raise
        found = tuple(reader.metadata.get(f"autopar_{key}") for key in ("save_id", "tp", "pp"))
        if found[0] != self.manifest.save_id:
            raise CheckpointError(
                f"{path} belongs to another save: its id is {found[0]}, {MANIFEST} says {self.manifest.save_id}\n"
                "  Files of two saves were mixed in one folder."
            )
        if found[1:] != (str(t), str(p)):
            raise CheckpointError(
                f"{path} is the shard of tensor-parallel rank {found[1]}, stage {found[2]}: "
                f"{shard_name(int(found[1] or 0), int(found[2] or 0))} was copied or renamed to it"
            )
        if actual != expected:
            raise CheckpointError(
                f"{path} is truncated or overwritten: it has {actual} bytes, it was saved with {expected}"
            )
        self._check_entries(reader, t, name)
        self._readers[name] = reader

    def _check_entries(self, reader: SafetensorsReader, t: int, name: str) -> None:
        expected = self.manifest.files[name].checksums
        if set(reader.entries) != set(expected):
            odd = sorted(set(reader.entries) ^ set(expected))
            raise CheckpointError(f"{reader.path} does not hold what {MANIFEST} says; they differ in {odd[0]}")
        for key, entry in reader.entries.items():
            plan = self.manifest.tensors[key]
            due = plan.local_shape(t)
            if entry.shape != due or dtype_name(entry.dtype) != plan.dtype:
                raise CheckpointError(
                    f"{reader.path} holds {key} as {dtype_name(entry.dtype)} {list(entry.shape)}, "
                    f"{MANIFEST} says {plan.dtype} {list(due)}"
                )

    def owner(self, name: str, t: int, p: int) -> tuple[SafetensorsReader, int]:
        """The open file that has the shard of rank ``t`` of stage ``p``, and the shard's checksum."""
        file = shard_name(t if self.manifest.tensors[name].layout is not None else 0, p)
        return self._readers[file], self.manifest.files[file].checksums[name]

    def local(self, name: str, t: int, p: int) -> torch.Tensor:
        """The shard of ``name`` that rank ``t`` of stage ``p`` holds, checksum verified."""
        reader, checksum = self.owner(name, t, p)
        return reader.read(name, checksum)

    def verify(self, name: str, t: int, p: int) -> None:
        """Raise CheckpointError if the bytes of that shard are not those that were saved."""
        reader, checksum = self.owner(name, t, p)
        reader.verify(name, checksum)

    def whole(self, name: str) -> torch.Tensor:
        """The whole tensor, assembled from all shards; one shard is in memory at a time."""
        plan = self.manifest.tensors[name]
        p = self.manifest.stage_of(name)
        if plan.layout is None:
            return self.local(name, 0, p)
        full: torch.Tensor | None = None
        for t in reversed(range(self.manifest.sizes.tp)):  # a lower rank has the last word where several hold a unit
            shard = self.local(name, t, p)
            if full is None:
                full = torch.empty(plan.shape, dtype=shard.dtype)
            plan.layout.write(full, shard, t)
        assert full is not None
        return full

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
