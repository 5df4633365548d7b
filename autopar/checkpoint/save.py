"""Save a parallelized model: every rank writes its shard, rank 0 the rest; the folder appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from autopar.checkpoint.agree import first, meet, together
from autopar.checkpoint.folder import Staging, fsync_files
from autopar.checkpoint.format import FileRecord, Manifest, parse_size, shard_name, versions
from autopar.checkpoint.merge import check_format, write_merged
from autopar.checkpoint.safetensors_stream import SafetensorsWriter, dtype_name
from autopar.checkpoint.shards import Shards
from autopar.checkpoint.state import State, listed, local_tensors, state_of, write_config
from autopar.errors import CheckpointError

__all__ = ["same_call", "save"]

_SHARDS = ".shards"  # inside the temporary folder, while merging


@dataclass(frozen=True)
class Request:
    """The arguments of one call, resolved."""

    directory: str
    merge: bool
    max_shard_size: int
    format: str

    @classmethod
    def of(cls, directory: object, merge: object, max_shard_size: int | str, format: str) -> Request:
        """Raises CheckpointError for arguments that make no sense."""
        if type(merge) is not bool:
            raise CheckpointError(f"merge_checkpoints={merge!r} must be True or False")
        check_format(format)
        if format != "safetensors" and not merge:
            raise CheckpointError(f"format={format!r} needs merge_checkpoints=True; shards are always safetensors")
        return cls(absolute(directory), merge, parse_size(max_shard_size), format)


def absolute(directory: object) -> str:
    """Absolute path. Raises CheckpointError unless ``directory`` is a path."""
    if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
        raise CheckpointError(f"directory={directory!r} must be a path")
    return os.path.abspath(os.fsdecode(directory))


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


def check_timeout(timeout: object) -> None:
    """Raise CheckpointError unless it is a positive number."""
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not timeout > 0:
        raise CheckpointError(f"timeout={timeout!r} must be a number of seconds above 0")


def save(
    model: nn.Module,
    directory: str | os.PathLike[str],
    merge_checkpoints: bool,
    max_shard_size: int | str,
    format: str,
    timeout: float,
) -> None:
    """See :func:`autopar.checkpoint.attach.save_parallelized`."""
    state = state_of(model)
    mpu = state.mpu
    meet(mpu, "save_parallelized", patience(timeout))
    request: Request | None = None

    def check() -> dict[str, Any]:
        nonlocal request
        check_timeout(timeout)
        request = Request.of(directory, merge_checkpoints, max_shard_size, format)
        local_tensors(model)
        model_id = f"{state.plan.model_type} {len(state.plan.tensors)} tensors, mesh {tuple(mpu.sizes)}"
        return {"function": "save_parallelized", "model": model_id, **vars(request)}

    together(mpu, check, check=same_call)
    assert request is not None
    staging: Staging | None = None

    def untouched() -> str:
        if staging is not None and staging.committed:
            return f"{staging.target} is written and whole."
        return f"Nothing was written to {request.directory}; a checkpoint that was there is untouched."

    def doubt() -> str:
        return untouched() if mpu.rank == 0 else f"{request.directory} holds the previous or the new checkpoint, whole."

    def prepare() -> list[str]:
        nonlocal staging
        staging = Staging(Path(request.directory))
        if request.merge:
            (staging.temp / _SHARDS).mkdir()
        return [str(staging.temp / _SHARDS if request.merge else staging.temp), staging.id]

    try:
        folder, save_id = first(mpu, prepare, untouched)
        reports = together(mpu, lambda: _write_shard(model, Path(folder), save_id), untouched)

        def finish() -> None:
            assert staging is not None
            manifest = _manifest(model, save_id, reports)
            write_config(model, staging.temp)
            manifest.write(Path(folder))
            if request.merge:
                _merge(staging.temp, request)
            fsync_files(staging.temp)
            staging.commit()

        first(mpu, finish, doubt)
    finally:
        if staging is not None:
            staging.discard()


def _merge(temp: Path, request: Request) -> None:
    with Shards(temp / _SHARDS) as shards:
        write_merged(shards, temp, request.max_shard_size, request.format, progress=False)
    shutil.rmtree(temp / _SHARDS)


def _write_shard(model: nn.Module, folder: Path, save_id: str) -> dict[str, Any] | None:
    """Write this rank's file, if its replica is the one that writes; what to say about it in the manifest."""
    mpu = state_of(model).mpu
    if mpu.dp.rank != 0:
        return None
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder.parent} is not the same folder on all ranks: rank {mpu.rank} does not see rank 0's files there\n"
            "  Save to a file system that all nodes share."
        )
    plan = state_of(model).plan
    tensors = local_tensors(model)
    mine = {name: t for name, t in tensors.items() if mpu.tp.rank == 0 or plan.tensors[name].layout is not None}
    path = folder / shard_name(mpu.tp.rank, mpu.pp.rank)
    metadata = {
        "format": "pt",
        "autopar_save_id": save_id,
        "autopar_tp": str(mpu.tp.rank),
        "autopar_pp": str(mpu.pp.rank),
    }
    try:
        with SafetensorsWriter(path, {n: (t.dtype, tuple(t.shape)) for n, t in mine.items()}, metadata) as writer:
            for name in writer.order:
                writer.write(name, mine[name])
    except OSError as error:
        raise CheckpointError(f"cannot write {path.name} into {folder}: {error.strerror or error}") from error
    return {
        "file": path.name,
        "bytes": path.stat().st_size,
        "crc32": writer.checksums,
        "dtypes": {name: dtype_name(tensor.dtype) for name, tensor in tensors.items()},
        "parameters": [name for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)],
    }


def _manifest(model: nn.Module, save_id: str, reports: list[dict[str, Any] | None]) -> Manifest:
    """The manifest, from the reports of all ranks. Raises CheckpointError if they do not fit together."""
    state: State = state_of(model)
    dtypes: dict[str, str] = {}
    for rank, report in enumerate(reports):
        for name, dtype in (report or {"dtypes": {}})["dtypes"].items():
            if dtypes.setdefault(name, dtype) != dtype:
                raise CheckpointError(f"{name} is {dtypes[name]} on one rank and {dtype} on rank {rank}")
    absent = [name for name in state.plan.tensors if name not in dtypes]
    if absent:
        raise CheckpointError(f"no stage holds {listed(absent)}")
    written: list[Mapping[str, Any]] = [report for report in reports if report is not None]
    manifest = Manifest(
        save_id=save_id,
        sizes=state.mpu.sizes,
        model_type=state.plan.model_type,
        policy=state.plan.policy,
        hf_prefix=state.hf_prefix,
        tensors={name: replace(tensor, dtype=dtypes[name]) for name, tensor in state.plan.tensors.items()},
        parameters=frozenset(name for report in written for name in report["parameters"]),
        files={report["file"]: FileRecord(report["bytes"], report["crc32"]) for report in written},
        versions=versions(),
    )
    try:
        manifest.check()
    except ValueError as error:  # a defect of ours, but never one that ends in a checkpoint that cannot be read
        raise CheckpointError(f"the shards do not fit together: {error}") from error
    return manifest
