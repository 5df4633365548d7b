"""Save a parallelized model. Every rank writes its tensors, without gathering ([Note: checkpoints]).

Ranks that hold the same tensors compare them. In the same exchange rank 0 assigns each of them an equal number of rows
to write (:func:`shares`).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar import registry
from autopar.checkpoint import random_states
from autopar.checkpoint.arguments import SaveRequest, check_same_call, seconds
from autopar.checkpoint.extra import Extra, check_extra, check_replicas
from autopar.checkpoint.format import PARTS, FileRecord, Manifest, PartFiles, QuantizedBase, shard_name, versions
from autopar.checkpoint.offline import write_merged
from autopar.checkpoint.optimizer_state import (
    LOSS_SCALE,
    OptimizerState,
    decoded,
    merge_metadata,
    parameters_by_name,
    step_of,
    take,
    unwrapped,
)
from autopar.checkpoint.rotation import next_order, rotate
from autopar.checkpoint.shards import ShardReader, write_shard
from autopar.checkpoint.staging import Staging, fsync, fsync_files
from autopar.checkpoint.state import State, config_writer, local_tensors, state_of
from autopar.compat.c10d import in_fake_world
from autopar.compat.tensors import local_part, tree_map
from autopar.distributed.agree import Ranks, all_ranks, barrier, deal, rank_zero
from autopar.distributed.digest import sum_of_bits
from autopar.errors import CheckpointError
from autopar.layout import Range, even_shards, replica_rows
from autopar.plan.plan import TensorPlan
from autopar.storage.files import checksum, file_checksum
from autopar.storage.json_values import encode
from autopar.storage.progress import progress_bar
from autopar.storage.safetensors_io import dtype_name

Made = TypeVar("Made")

_SHARDS = ".shards"  # inside the temporary folder, while merging
LEAST = 64 << 20  # bytes per rank; for smaller checkpoints, fewer ranks write


def save(
    model: nn.Module,
    arguments: Mapping[str, Any],
    timeout: float,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
) -> None:
    """See :func:`autopar.checkpoint.methods.save_parallelized`. ``arguments`` are the arguments of SaveRequest."""
    state = state_of(model)
    mpu = state.mpu

    def prepare() -> tuple[dict[str, Any], Writer, Snapshot]:
        request = SaveRequest(**arguments)
        training = {"optimizer": optimizer, "lr_scheduler": lr_scheduler, "extra": extra}
        given = [name for name, value in training.items() if value is not None]
        if request.merge_checkpoints and given:
            raise CheckpointError(
                f"{given[0]}= is not supported with merge_checkpoints=True: a Hugging Face checkpoint cannot hold it\n"
                "  Save shards, and merge them with `autopar merge` where you need only the model."
            )
        if request.merge_checkpoints:
            state.check_whole("merge_checkpoints=True", quantized=True)
            for check in state.before_merge:
                check(model)
        if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
            raise CheckpointError(f"tokenizer must have a save_pretrained method; got {type(tokenizer).__name__}")
        local = snapshot(model, optimizer, lr_scheduler, extra)
        model_id = f"{state.plan.model_type} {len(state.plan.tensors)} tensors, mesh {tuple(mpu.sizes)}"
        call = {"model": model_id, "saved with": given, **asdict(request)}
        return call, Writer(model, state, request, tokenizer), local

    writer, local = prepare_alike(model, timeout, prepare)
    if not writer.request.async_save or in_fake_world():
        writer.run(mpu, local)
        return
    copied: list[Snapshot] = []
    all_ranks(mpu, lambda: copied.append(local.copied()))  # a rank without enough memory stops all ranks
    writer.stage(mpu)  # so that this call, not the next one, reports a folder that cannot be written
    state.background.start(mpu, copied[0], writer.run)


def prepare_alike(
    model: nn.Module, timeout: float, prepare: Callable[[], tuple[dict[str, Any], Made, Snapshot]]
) -> tuple[Made, Snapshot]:
    """Check that all ranks make the same call and hold the same values; assign the rows to write. Collective.

    Args:
        prepare: A function that returns the arguments of the call, the object that writes, and this rank's snapshot.

    Raises:
        CheckpointError: The ranks differ. The error is identical on all ranks, and nothing has changed.
    """
    state = state_of(model)
    state.background.wait()
    barrier(state.mpu, "save_parallelized", seconds(timeout, 20.0))  # check() reports a wrong timeout, on all ranks
    prepared: list[tuple[Made, Snapshot]] = []

    def check() -> dict[str, Any]:
        seconds(timeout)
        call, writer, local = prepare()
        prepared.append((writer, local))
        checked = getattr(getattr(vars(model).get("_autopar"), "config", None), "consistency_check", True)
        digests: dict[str, tuple[str, int]] = {}  # canonical name -> dtype and digest
        for name, parameter in model.named_parameters() if checked else ():
            if name in state.plan.names and not parameter.is_meta:
                shard = local_part(parameter.detach())
                digests[state.plan.names[name]] = str(shard.dtype), int(sum_of_bits(shard))
        own = None if local.extra is None else local.extra.digests(state.plan, checked)
        call = {"function": "save_parallelized", **call}
        return {"call": call, "digests": digests, "extra": own, "held": local.sizes()}

    def compare(ranks: list[dict[str, Any]]) -> list[dict[str, Range]]:
        check_same_call([rank.get("call", rank) for rank in ranks])  # a rank may call from_parallelized instead
        ((_, local),) = prepared
        rows = state.mpu.fsdp.size if local.fsdp else None
        check_replicas([rank["digests"] for rank in ranks], state.plan, state.mpu.places(), rows)
        if local.extra is not None:
            check_extra([rank["extra"] for rank in ranks], state, rows)
        return shares([rank["held"] for rank in ranks])

    mine = deal(state.mpu, check, compare)
    ((made, local),) = prepared
    return made, local.cut({} if in_fake_world() else mine)  # in a rehearsal other ranks' sets are included


def shares(held: Sequence[Mapping[str, list[Any]]]) -> list[dict[str, Range]]:
    """Assign the bytes of each set to the ranks that hold it, evenly. Few ranks write a small model.

    Args:
        held: The sets of tensors (:attr:`Snapshot.sets`) of each rank: key -> bytes and digest of the set.

    Returns:
        For each rank, key of a set -> the bytes ``[start, stop)`` that the rank writes.
    """
    first: dict[str, list[Any]] = {}
    ranks: dict[str, list[int]] = {}
    for rank, theirs in enumerate(held):
        for key, described in theirs.items():
            if first.setdefault(key, described) == described:  # otherwise it holds fewer tensors than the first rank
                ranks.setdefault(key, []).append(rank)
    used = min(1.0, sum(size for size, _ in first.values()) / (LEAST * len(held)))
    result = [dict[str, Range]() for _ in held]
    for key, holders in ranks.items():
        writers = holders[: max(1, math.ceil(used * len(holders)))]
        for rank, (start, stop) in zip(writers, even_shards(first[key][0], len(writers)), strict=True):
            if start < stop:
                result[rank][key] = start, stop
    return result


class Writer:
    """Write one save after all checks, possibly in the background."""

    def __init__(self, model: nn.Module, state: State, request: SaveRequest, tokenizer: Any) -> None:
        self.state, self.request, self.tokenizer = state, request, tokenizer
        self.write_config, hf_model = config_writer(model), model.get_submodule(state.hf_path)
        self.base_name = str(getattr(getattr(hf_model, "config", None), "_name_or_path", ""))
        self.staging: Staging | None = None
        self.staged: tuple[Path, str] | None = None  # the folder to write into, the id of the save
        self.progress = False if request.async_save else None  # no bar between the lines of a running training

    def _left(self, *, finishing: bool = False) -> str:
        """Return the state of the folder after a failed save, for the error."""
        if self.staging is not None and self.staging.committed:
            return f"{self.staging.target} is written and complete."
        if finishing and self.state.mpu.rank != 0:
            return f"{self.request.directory} holds the previous or the new checkpoint, complete."
        return f"Nothing was written to {self.request.directory}; an earlier checkpoint there is unchanged."

    def stage(self, peers: Ranks) -> tuple[Path, str]:
        """Make the temporary folder. Collective."""
        folder, save_id = rank_zero(peers, self.make_folder, self._left)
        self.staged = Path(folder), save_id
        return self.staged

    def run(self, peers: Ranks, local: Snapshot) -> None:
        """Write the files, and rename the folder into place. Collective."""
        try:
            folder, save_id = self.staged or self.stage(peers)
            reports = all_ranks(peers, lambda: self.write_shards(local, folder, save_id), self._left)
            rank_zero(peers, lambda: self.finish(folder, save_id, reports), partial(self._left, finishing=True))
        finally:
            if self.staging is not None:
                self.staging.discard()

    def make_folder(self) -> list[str]:
        """Make the temporary folder on rank 0; return its path and the id of the save."""
        self.staging = Staging(Path(self.request.directory))
        folder = self.staging.temp / (_SHARDS if self.request.merge_checkpoints else "")
        if self.request.merge_checkpoints:
            folder.mkdir()
        return [str(folder), self.staging.id]

    def write_shards(self, local: Snapshot, folder: Path, save_id: str) -> dict[str, Any]:
        """Write this rank's files; return its report for the manifest."""
        mpu, written = self.state.mpu, {}
        place = (mpu.shards.rank, mpu.pp.rank, mpu.copies.rank)
        total = sum(tensor.nbytes for tensors in local.tensors.values() for tensor in tensors.values())
        with progress_bar("saving", total, self.progress) as bar:
            for part, tensors in local.tensors.items():
                if not tensors and (mpu.rank != 0 or part in ("base", "extra")):
                    continue
                if not folder.is_dir():
                    raise CheckpointError(
                        f"rank {mpu.rank} does not see the folder {folder} that rank 0 made\n"
                        "  Save to a file system that all nodes share."
                    )
                specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
                record = write_shard(folder, save_id, part, place, specs, tensors.__getitem__, bar, local.rows[part])
                written[part] = record.to_json()
        for part in written:  # after all writes, so that the disk works on the first file during the last write
            name = shard_name(part, *place)
            try:
                fsync(folder / name)
            except OSError as error:
                raise CheckpointError(f"cannot write {name} into {folder}: {error.strerror or error}") from error
        return {**local.report, "files": written}

    def finish(self, folder: Path, save_id: str, reports: list[dict[str, Any]]) -> None:
        """Write the manifest and the small files on rank 0, and rename the folder into place."""
        assert self.staging is not None
        temp = self.staging.temp
        known = {path.name for path in temp.iterdir()}
        self.write_config(temp)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(temp)
        written = (path for path in temp.iterdir() if path.is_file() and path.name not in known)
        along = {path.name: file_checksum(path) for path in written}
        order, manifest = next_order(self.staging.target), _manifest(self.state, save_id, reports, along)
        notes = {name: note for report in reports for name, note in report["base notes"].items()}
        forms = {name: tensor.quantized for name, tensor in self.state.quantized.items()}
        replace(manifest, order=order, base=QuantizedBase(self.base_name, forms, notes)).write(folder)
        if self.request.merge_checkpoints:
            with ShardReader(folder) as shards:
                write_merged(shards, temp, self.request.max_shard_size, self.request.format, self.progress)
            shutil.rmtree(folder)
        fsync_files(temp)
        self.staging.commit()
        if self.request.keep_last is not None:
            rotate(self.staging.target, self.request.keep_last)


def _manifest(state: State, save_id: str, reports: list[dict[str, Any]], along: Mapping[str, str]) -> Manifest:
    """Make the manifest from the reports of all ranks. Raises CheckpointError if they contradict each other."""
    dtypes: dict[str, str] = {}
    files: dict[str, dict[str, FileRecord]] = {}
    for rank, report in enumerate(reports):
        for name, dtype in report["dtypes"].items():
            if dtypes.setdefault(name, dtype) != dtype:
                raise CheckpointError(f"{name} is {dtypes[name]} on one rank and {dtype} on rank {rank}")
        for part, entry in report["files"].items():
            record = FileRecord.from_json(entry)
            files.setdefault(part, {})[shard_name(part, record.tp, record.pp, record.dp)] = record
    model = {name: replace(tensor, dtype=dtypes.get(name, tensor.dtype)) for name, tensor in state.plan.tensors.items()}
    parts = {"model": PartFiles("model", model, files["model"])}
    training = dict(reports[0]["training"])
    for part in ("base", "optimizer", "extra"):
        plans: dict[str, TensorPlan] = {}
        for name, entry in ((n, entry) for report in reports for n, entry in report["plans"][part].items()):
            plan = TensorPlan.from_json(name, entry)
            if plans.setdefault(name, plan) != plan:
                raise CheckpointError(f"{name} of the {part} must have the same shape and dtype on all ranks")
        if part not in files and not plans:
            continue
        parts[part] = PartFiles(part, dict(sorted(plans.items())), files.get(part, {}))  # empty tensors have no file
        if part == "optimizer":
            training[part] = merge_metadata([report["optimizer"] for report in reports])
            decoded(training[part], plans)  # raises unless the save can be loaded
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
    except ValueError as error:  # a bug of autopar must not leave a checkpoint that cannot be read
        raise CheckpointError(f"the shards do not fit together: {error}") from error
    return manifest


# -- one rank's tensors, collected and checked before anything is written ----------------------------------------------


class Held(NamedTuple):
    """A tensor that this rank holds, or some rows of a shard (FSDP2).

    Attributes:
        plan: The plan of the full tensor.
        tensor: The live tensor; with FSDP2 this rank's rows.
        first: The index of the first of these rows in the shard.
        rows: The number of rows of the shard; 1 for a 0-dim tensor.
    """

    part: str
    plan: TensorPlan
    tensor: torch.Tensor
    first: int
    rows: int


@dataclass(frozen=True)
class Snapshot:
    """One rank's contribution to a checkpoint.

    Attributes:
        sets: This rank's tensors, grouped by the ranks that hold the same tensors.
        report: The facts for the manifest, as JSON: dtypes and parameter names of the model's tensors, plans of the
            other parts, the optimizer's metadata, the scheduler, the user's data, the random state.
        extra: The user's data on this rank.
        fsdp: True if the model's tensors are sharded over the replicas; identical on all ranks.
        tensors: Part -> name -> the rows that this rank writes; set by :meth:`cut`.
        rows: Part -> name -> the range of these rows in the shard; absent if this rank writes the full shard.
    """

    sets: Mapping[str, Sequence[Held]]
    report: Mapping[str, Any]
    extra: Extra | None
    fsdp: bool
    tensors: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    rows: Mapping[str, Mapping[str, Range]] = field(default_factory=dict)

    def sizes(self) -> dict[str, list[Any]]:
        """Return the bytes of each set, and a digest of its names, shapes and dtypes, for :func:`shares`."""
        found: dict[str, list[Any]] = {}
        for key, held in self.sets.items():
            facts = [(h.part, h.plan.name, h.tensor.shape, h.tensor.dtype) for h in held]
            found[key] = [sum(h.tensor.nbytes for h in held), checksum(str(facts).encode())]
        return found

    def cut(self, spans: Mapping[str, Range]) -> Snapshot:
        """Return a snapshot of only the rows that begin in these bytes of the sets."""
        tensors: dict[str, dict[str, torch.Tensor]] = {"model": {}, "base": {}, "extra": {}}
        tensors |= {"optimizer": {}} if self.report["optimizer"] is not None else {}
        plans = {part: dict(empty) for part, empty in self.report["plans"].items()}
        rows: dict[str, dict[str, Range]] = {part: {} for part in PARTS}
        for key, span in spans.items():
            at = 0
            for part, plan, tensor, first, count in self.sets[key]:
                here = tensor.shape[0] if tensor.ndim else 1
                low, high = (min(max(-((at - edge) * here // tensor.nbytes), 0), here) for edge in span)
                at += tensor.nbytes
                if low == high:
                    continue
                tensors[part][plan.name] = tensor if high - low == here else tensor[low:high]
                if high - low < count:
                    rows[part][plan.name] = first + low, first + high
                if part != "model" and first + low == 0:
                    plans[part][plan.name] = plan.to_json()
        return replace(self, sets={}, tensors=tensors, rows=rows, report={**self.report, "plans": plans})

    def copied(self) -> Snapshot:
        """Copy the tensors to host memory, so that training can continue during the save."""
        return replace(self, tensors=tree_map(lambda tensor: tensor.detach().to("cpu", copy=True), self.tensors))


def snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
) -> Snapshot:
    """Collect the live tensors of this rank, without communication.

    Raises:
        CheckpointError: The model has changed since it was parallelized, or a value cannot be saved.
    """
    state, optimizer = state_of(model), unwrapped(optimizer)
    plan, mpu = state.plan, state.mpu
    local = local_tensors(model, fsdp=True)
    sets: dict[str, list[Held]] = {}
    plans: dict[str, dict[str, Any]] = {part: {} for part in PARTS}

    def hold(part: str, due: TensorPlan, tensor: torch.Tensor, of: str, shards: Any = None, only: Any = None) -> None:
        """Add a tensor of the weight ``of`` to the set of the ranks that hold it, unless it is empty.

        ``shards``: ranks of ``mpu.shards`` that hold it, if not given by the layout; ``only``: replicas, if not all.
        """
        count, first = tensor.shape[0] if tensor.ndim else 1, 0
        if isinstance(tensor, DTensor):
            axis = state.rows_of(of)
            first, _ = replica_rows(count, axis.rank, axis.size)
            only = axis.rank, axis.size
        if shards is None:
            shards = None if due.layout is None else due.layout.holders[mpu.shards.rank]
        tensor = local_part(tensor.detach())
        if tensor.numel():
            key = str((shards, only, tuple(state.holders.get(of, (mpu.pp.rank,)))))
            sets.setdefault(key, []).append(Held(part, due, tensor, first, count))
        elif not math.prod(due.shape):
            plans[part][due.name] = due.to_json()  # an empty tensor is in no file

    for name, due, tensor, only in _of_model(local, state):
        hold("model", due, tensor, name, only=only)
    base_notes: dict[str, str] = {}
    if state.quantized and not state.adapted:
        base, base_notes = registry.entry("parts", "base").collect(model, state)
        for of, due, tensor in base:
            hold("base", due, tensor, of)
    metadata = None
    training: dict[str, Any] = {}
    loose: dict[str, torch.Tensor] = {}
    if optimizer is not None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise CheckpointError(f"optimizer={optimizer!r} must be a torch.optim.Optimizer")
        step = step_of(optimizer)
        if step is not None and step.scale is not None:
            training[LOSS_SCALE] = dict(step.scale.state_dict())
        taken = take(optimizer, model, plan, mpu.shards.rank)
        metadata = taken.metadata
        for of, due, tensor, shards, only in _of_optimizer(optimizer, model, state, taken):
            hold("optimizer", due, tensor, of, shards, only)
    if lr_scheduler is not None:
        if not hasattr(lr_scheduler, "state_dict"):
            raise CheckpointError(f"lr_scheduler={lr_scheduler!r} must have a state_dict method")
        value = {"class": type(lr_scheduler).__name__, "state": lr_scheduler.state_dict()}
        training["lr_scheduler"], loose = encode(value, "lr_scheduler")
    own = None if extra is None else Extra.of(extra, plan, local)
    if own is not None:
        training["extra"], loose = own.value, {**loose, **own.loose}
    for name, tensor in loose.items() if mpu.rank == 0 else ():
        hold("extra", TensorPlan(name, tuple(tensor.shape), dtype_name(tensor.dtype)), tensor, "", only="rank 0")
    for name, tensor, due in own.tensors(plan) if own is not None else ():
        hold("extra", due, tensor, name)
    resumable = optimizer is not None or lr_scheduler is not None
    place = {"tp": mpu.tp.rank, "pp": mpu.pp.rank, "dp": mpu.dp.rank, "cp": mpu.cp.rank}
    report = {
        "dtypes": {name: dtype_name(tensor.dtype) for name, tensor in local.items()},
        "parameters": [name for name, tensor in local.items() if isinstance(tensor, nn.Parameter)],
        "plans": plans,
        "base notes": base_notes,
        "optimizer": metadata,
        "training": training if mpu.rank == 0 else {},
        "random": {**place, "state": random_states.take(mpu.random_tracker)} if resumable else None,
    }
    return Snapshot(sets, report, own, any(isinstance(tensor, DTensor) for tensor in local.values()))


def _of_model(
    local: Mapping[str, torch.Tensor], state: State
) -> Iterator[tuple[str, TensorPlan, torch.Tensor, str | None]]:
    """Yield ``(name, plan, tensor, replica)`` for the tensors of the part ``model``; replica is None for all."""
    mpu = state.mpu
    for name, tensor in local.items():
        due, trained = state.plan.tensors[name], isinstance(tensor, nn.Parameter)
        replicas = mpu.copies if name in state.plan.experts else mpu.dp_cp
        first = replicas.rank == 0 and (due.layout is not None or mpu.shards.rank == 0)
        if mpu.pp.rank not in state.holders.get(name, (mpu.pp.rank,)):
            continue  # a buffer outside of the blocks, which an earlier stage writes
        if trained or first:  # each replica has its own buffers
            yield name, due, tensor, None if trained else "first"


def _of_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, state: State, taken: OptimizerState
) -> Iterator[tuple[str, TensorPlan, torch.Tensor, Any, Any]]:
    """Yield ``(weight, plan, tensor, shards, only)`` for the optimizer's state that this rank keeps (see ``hold``)."""
    plan, mpu = state.plan, state.mpu
    parameters, step = parameters_by_name(model, plan), step_of(optimizer)
    for name, tensor in taken.tensors.items():
        of, due = name.partition("::")[0], taken.plans[name]
        weight, layout, shards = parameters[of], plan.tensors[of].layout, None
        owner = None if step is None else step.owner(weight)
        only: Any = None if step is None or owner is None else (owner, step.axis_of(weight).size)
        if step is not None and not (step.owns if due.layout is not None else step.keeps_state)(weight):
            continue
        if due.layout is None and step is not None and weight in step.whole:
            only = only, step.whole.writer(weight)
        elif due.layout is None and layout is not None:  # a number: on every rank that holds some of the parameter
            shards = tuple(rank for rank in range(layout.axis_size) if layout.local_size(rank))
            if mpu.shards.rank not in shards:
                continue
        if only is not None and mpu.pp.rank != min(state.holders.get(of, (mpu.pp.rank,))):
            continue  # each stage has an owner of a tied weight; the first stage writes
        yield of, due, tensor, shards, only
