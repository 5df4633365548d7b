"""Save a parallelized model: every rank writes its shards, rank 0 the rest; the folder appears whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from autopar.adapters import check_merged
from autopar.checkpoint.arguments import SaveRequest, check_same_call, check_timeout, timeout_or_default
from autopar.checkpoint.extra import check_extra, merged_names
from autopar.checkpoint.format import SHARDED_EXTRA, Manifest, versions
from autopar.checkpoint.offline.merge import write_merged
from autopar.checkpoint.optimizer_metadata import OptimizerMetadata, merge_metadata
from autopar.checkpoint.optimizer_weights import states_only
from autopar.checkpoint.quantized_base import QuantizedBase, digests_here, name_of
from autopar.checkpoint.rotation import next_order, place_in_series, rotate, series_of
from autopar.checkpoint.shard_index import FileRecord, Part, shard_name
from autopar.checkpoint.shards import Shards
from autopar.checkpoint.snapshot import Snapshot, check_replicas, digest_parameters, snapshot
from autopar.checkpoint.staging import Staging, fsync_files
from autopar.checkpoint.state import State, config_writer, state_of
from autopar.distributed.agree import Ranks, all_ranks, barrier, rank_zero
from autopar.errors import CheckpointError, listed
from autopar.foreign.c10d import in_fake_world
from autopar.plan.plan import TensorPlan
from autopar.storage.files import file_checksum
from autopar.storage.safetensors_io import SafetensorsWriter

Made = TypeVar("Made")

_SHARDS = ".shards"  # inside the temporary folder, while merging


def save(
    model: nn.Module,
    arguments: Mapping[str, Any],
    timeout: float,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
) -> None:
    """See :func:`autopar.checkpoint.methods.save_parallelized`. ``arguments`` are those of :meth:`SaveRequest.of`."""
    state = state_of(model)
    mpu = state.mpu

    def prepare() -> tuple[dict[str, Any], Writer, Snapshot]:
        request = SaveRequest.of(**arguments)
        training = {"optimizer": optimizer, "lr_scheduler": lr_scheduler, "extra": extra}
        given = [name for name, value in training.items() if value is not None]
        if request.merge and given:
            raise CheckpointError(
                f"{given[0]}= cannot be saved with merge_checkpoints=True: a Hugging Face checkpoint has no place for "
                "it. Save shards, and merge them with `autopar merge` where the model alone is needed."
            )
        if request.merge:
            state.check_whole("merge_checkpoints=True", quantized=True)
            check_merged(model)
        if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
            raise CheckpointError(f"tokenizer= must have save_pretrained, which a {type(tokenizer).__name__} has not")
        local = snapshot(model, optimizer, lr_scheduler, extra)
        model_id = f"{state.plan.model_type} {len(state.plan.tensors)} tensors, mesh {tuple(mpu.sizes)}"
        call = {"model": model_id, "saved with": given, **asdict(request)}
        local = replace(local, report={**local.report, "base": digests_here(model, state)})
        return call, Writer(model, state, request, tokenizer), local

    writer, local = prepare_alike(model, timeout, prepare)
    if local.fsdp:
        local = _on_all(mpu, partial(local.gathered, state))
    if not writer.request.async_save or in_fake_world():
        writer.run(mpu, local)
        return
    copied = _on_all(mpu, local.copied)
    writer.stage(mpu)  # a folder that cannot be written is reported now, by this call
    state.background.start(mpu, copied, writer.run)


def prepare_alike(
    model: nn.Module, timeout: float, prepare: Callable[[], tuple[dict[str, Any], Made, Snapshot]]
) -> tuple[Made, Snapshot]:
    """Prepare a save on each rank, and check that the ranks were called alike and hold the same. Collective.

    Args:
        prepare: returns the arguments of the call, what is going to write, and this rank's snapshot.

    Raises:
        CheckpointError: the same on every rank; nothing is changed.
    """
    state = state_of(model)
    state.background.wait()
    barrier(state.mpu, "save_parallelized", timeout_or_default(timeout))
    prepared: list[tuple[Made, Snapshot]] = []

    def check() -> dict[str, Any]:
        check_timeout(timeout)
        call, writer, local = prepare()
        prepared.append((writer, local))
        checked = getattr(getattr(vars(model).get("_autopar"), "config", None), "consistency_check", True)
        digests = digest_parameters(model, state.plan) if checked else {}
        own = None if local.extra is None else local.extra.digests(state.plan, checked)
        return {"call": {"function": "save_parallelized", **call}, "digests": digests, "extra": own}

    def compare(ranks: list[dict[str, Any]]) -> None:
        check_same_call([rank.get("call", rank) for rank in ranks])  # one of them may load
        ((_, local),) = prepared
        check_replicas([rank["digests"] for rank in ranks], state.plan, state.mpu.places(), local.fsdp)
        if local.extra is not None:
            check_extra([rank["extra"] for rank in ranks], state, local.fsdp)

    all_ranks(state.mpu, check, check=compare)
    return prepared[0]


def _on_all(peers: Ranks, make: Callable[[], Snapshot]) -> Snapshot:
    """Make a snapshot on each rank. A rank whose memory does not suffice stops all of them."""
    made: list[Snapshot] = []
    all_ranks(peers, lambda: made.append(make()))
    return made[0]


class Writer:
    """Write one save after all checks; can run in the background. Files are touched in methods of their own."""

    def __init__(self, model: nn.Module, state: State, request: SaveRequest, tokenizer: Any) -> None:
        self.state, self.request, self.tokenizer = state, request, tokenizer
        self.write_config, self.base_name = config_writer(model), name_of(model, state)
        self.staging: Staging | None = None
        self.staged: tuple[Path, str] | None = None  # the folder to write into, the id of the save

    def _untouched(self) -> str:
        if self.staging is not None and self.staging.committed:
            return f"{self.staging.target} is written and whole."
        return f"Nothing was written to {self.request.directory}; a checkpoint that was there is untouched."

    def _doubt(self) -> str:
        if self.state.mpu.rank == 0:
            return self._untouched()
        return f"{self.request.directory} holds the previous or the new checkpoint, whole."

    def stage(self, peers: Ranks) -> tuple[Path, str]:
        """Make the temporary folder. Collective."""
        folder, save_id = rank_zero(peers, self.make_folder, self._untouched)
        self.staged = Path(folder), save_id
        return self.staged

    def run(self, peers: Ranks, local: Snapshot) -> None:
        """Write, and put the folder in its place. Collective."""
        try:
            folder, save_id = self.staged or self.stage(peers)
            reports = all_ranks(peers, lambda: self.write_shards(local, folder, save_id), self._untouched)
            rank_zero(peers, lambda: self.finish(folder, save_id, reports), self._doubt)
        finally:
            if self.staging is not None:
                self.staging.discard()

    def make_folder(self) -> list[str]:
        """Make the temporary folder, on rank 0; return its path and the id of the save."""
        self.staging = Staging(Path(self.request.directory))
        if self.request.merge:
            (self.staging.temp / _SHARDS).mkdir()
        return [str(self.staging.temp / _SHARDS if self.request.merge else self.staging.temp), self.staging.id]

    def write_shards(self, local: Snapshot, folder: Path, save_id: str) -> dict[str, Any]:
        """Write this rank's files; return its report for the manifest."""
        return _write(local, self.state, folder, save_id)

    def finish(self, folder: Path, save_id: str, reports: list[dict[str, Any]]) -> None:
        """Write on rank 0 what there is once, and put the folder in its place."""
        assert self.staging is not None
        temp = self.staging.temp
        known = {path.name for path in temp.iterdir()}
        self.write_config(temp)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(temp)
        written = (path for path in temp.iterdir() if path.is_file() and path.name not in known)
        along = {path.name: file_checksum(path) for path in written}
        order = next_order(self.staging.target)
        resumed_from = self.state.resumed_from.get(series_of(self.staging.target) or "", 0)
        manifest = _manifest(self.state, save_id, reports, along)
        notes = {name: note for report in reports for name, note in report["base notes"].items()}
        base = QuantizedBase.of(self.base_name, self.state, [report["base"] for report in reports], notes)
        follows = resumed_from if resumed_from < order else 0
        replace(manifest, order=order, follows=follows, base=base).write(folder)
        if self.request.merge:
            with Shards(folder) as shards:
                size, format = self.request.max_shard_size, self.request.format
                write_merged(shards, temp, size, format, progress=False, verify=False)  # written a moment ago
            shutil.rmtree(folder)
        fsync_files(temp)
        self.staging.commit()
        if not self.request.merge:
            self.state.resumed_from.update(place_in_series(self.staging.target, order))
        if self.request.keep_last is not None:
            rotate(self.staging.target, self.request.keep_last)


def _write(local: Snapshot, state: State, folder: Path, save_id: str) -> dict[str, Any]:
    """Write this rank's files; returns its report for the manifest."""
    mpu = state.mpu
    written = {}
    for part, tensors in local.tensors.items():
        if not tensors and (mpu.dp_cp.rank != 0 or part in ("base", "extra")):
            continue
        dp = mpu.copies.rank if part == "optimizer" and local.by_replica else None
        if not folder.is_dir() and mpu.rank == 0:
            raise CheckpointError(f"{folder} was removed by another program while this save was writing into it")
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder.parent} is not the same folder on all ranks: rank {mpu.rank} does not see rank 0's files "
                "there\n  Save to a file system that all nodes share."
            )
        record = write_shard(folder, save_id, part, (mpu.shards.rank, mpu.pp.rank, dp), tensors)
        written[part] = record.to_json()
    return {**local.report, "files": written}


def write_shard(
    folder: Path, save_id: str, part: str, place: tuple[int, int, int | None], tensors: Mapping[str, torch.Tensor]
) -> FileRecord:
    """Write one shard file of rank ``(tp, pp, dp)``. Raises CheckpointError if that is not possible."""
    path = folder / shard_name(part, *place)
    metadata = {"format": "pt", "autopar_save_id": save_id, "autopar_file": path.name}
    specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    try:
        with SafetensorsWriter(path, specs, metadata, align=64) as writer:
            for name in writer.order:
                writer.write(name, tensors[name])
        return FileRecord(*place, path.stat().st_size, writer.header, writer.checksums)
    except OSError as error:
        raise CheckpointError(f"cannot write {path.name} into {folder}: {error.strerror or error}") from error


def _manifest(state: State, save_id: str, reports: list[dict[str, Any]], along: Mapping[str, str]) -> Manifest:
    """Make the manifest from the reports of all ranks. Raises CheckpointError if they do not fit together."""
    dtypes: dict[str, str] = {}
    files: dict[str, dict[str, FileRecord]] = {}
    for rank, report in enumerate(reports):
        for name, dtype in report["dtypes"].items():
            if dtypes.setdefault(name, dtype) != dtype:
                raise CheckpointError(f"{name} is {dtypes[name]} on one rank and {dtype} on rank {rank}")
        for part, entry in report["files"].items():
            record = FileRecord.from_json(entry)
            files.setdefault(part, {})[shard_name(part, record.tp, record.pp, record.dp)] = record
    missing = [name for name in state.plan.tensors if name not in dtypes]
    if missing:
        raise CheckpointError(f"no stage holds {listed(missing)}")
    model = {name: replace(tensor, dtype=dtypes[name]) for name, tensor in state.plan.tensors.items()}
    parts = {"model": Part("model", model, files["model"])}
    if "base" in files:
        plans = {n: TensorPlan.from_json(n, plan) for report in reports for n, plan in report["base plans"].items()}
        parts["base"] = Part("base", plans, files["base"])
    training = dict(reports[0]["training"])
    if reports[0]["optimizer"] is not None:
        parts["optimizer"], training["optimizer"] = _optimizer_part(reports, files.get("optimizer", {}))
    if "extra" in files:
        plans = {n: TensorPlan.from_json(n, plan) for report in reports for n, plan in report["extra"].items()}
        parts["extra"] = Part("extra", plans, files["extra"])
    if sharded := merged_names([report["sharded extra"] for report in reports]):
        training[SHARDED_EXTRA] = sharded
    if reports[0]["random"]:
        training["random_states"] = [report["random"] for report in reports]
    manifest = Manifest(
        save_id=save_id,
        sizes=state.mpu.saved_sizes,
        cp=state.mpu.sizes.cp,
        tp=state.plan.tp,
        model_type=state.plan.model_type,
        policy=state.plan.policy,
        hf_prefix=state.hf_prefix,
        parts=parts,
        parameters=frozenset(name for report in reports for name in report["parameters"]),
        along=along,
        training=training,
        versions=versions(),
    )
    try:
        manifest.check()
    except ValueError as error:  # a defect of ours, but never one that ends in a checkpoint that cannot be read
        raise CheckpointError(f"the shards do not fit together: {error}") from error
    return manifest


def _optimizer_part(reports: list[dict[str, Any]], files: Mapping[str, FileRecord]) -> tuple[Part, dict[str, Any]]:
    """Merge what all ranks have of the optimizer: its part of the manifest, and its metadata."""
    plans: dict[str, TensorPlan] = {}
    for report in reports:
        for name, entry in report["plans"].items():
            plan = TensorPlan.from_json(name, entry)
            if plans.setdefault(name, plan) != plan:
                raise CheckpointError(f"the optimizer's {name} differs between ranks in shape or dtype")
    merged = merge_metadata([report["optimizer"] for report in reports])
    metadata = OptimizerMetadata.parse(merged)
    metadata.check_names(states_only(plans, metadata))  # nothing is saved that could not be loaded
    return Part("optimizer", plans, files), merged
