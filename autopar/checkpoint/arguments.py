"""The arguments of ``save_parallelized`` and ``from_parallelized``: read, checked, and compared between ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.checkpoint.format import parse_size
from autopar.checkpoint.offline.merge import check_format
from autopar.checkpoint.rotation import check_keep_last
from autopar.errors import CheckpointError

__all__ = ["Request", "absolute", "check_timeout", "patience", "same_call"]


@dataclass(frozen=True)
class Request:
    """The arguments of one save, resolved."""

    directory: str
    merge: bool
    max_shard_size: int
    format: str
    keep_last: int | None
    async_save: bool

    @classmethod
    def of(
        cls,
        directory: Callable[[], object],
        merge_checkpoints: object,
        max_shard_size: int | str,
        format: str,
        keep_last: int | None,
        async_save: object,
    ) -> Request:
        """Raises CheckpointError for arguments that make no sense."""
        path = absolute(directory())
        for name, value in (("merge_checkpoints", merge_checkpoints), ("async_save", async_save)):
            if type(value) is not bool:
                raise CheckpointError(f"{name}={value!r} must be True or False")
        check_format(format)
        if format != "safetensors" and not merge_checkpoints:
            raise CheckpointError(f"format={format!r} needs merge_checkpoints=True; shards are always safetensors")
        if keep_last is not None and merge_checkpoints:
            raise CheckpointError(
                "keep_last= needs merge_checkpoints=False: a merged folder looks like any model's, and only "
                "checkpoints that are certainly autopar's are deleted"
            )
        if keep_last is not None:
            check_keep_last(Path(path), keep_last)
        return cls(path, bool(merge_checkpoints), parse_size(max_shard_size), format, keep_last, bool(async_save))


def absolute(directory: object) -> str:
    """Absolute path. Raises CheckpointError unless ``directory`` is a path."""
    if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
        raise CheckpointError(f"directory={directory!r} must be a path")
    return os.path.abspath(os.fsdecode(directory))


def check_timeout(timeout: object) -> None:
    """Raise CheckpointError unless it is a positive number."""
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not timeout > 0:
        raise CheckpointError(f"timeout={timeout!r} must be a number of seconds above 0")


def patience(timeout: object) -> float:
    """The time-out for meeting; the default if it is not a positive number, which is then reported together."""
    ok = isinstance(timeout, int | float) and not isinstance(timeout, bool) and timeout > 0
    return float(timeout) if ok else 20.0  # type: ignore[arg-type]


def same_call(calls: list[dict[str, Any]]) -> None:
    """Raise CheckpointError if the ranks were not called alike."""
    for rank, call in enumerate(calls):
        for key, value in calls[0].items():
            if call.get(key) != value:
                raise CheckpointError(
                    f"ranks were called differently: {key} is {value!r} on rank 0 and {call.get(key)!r} on rank {rank}"
                )
