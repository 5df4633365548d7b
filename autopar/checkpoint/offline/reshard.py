"""Write the shards of another mesh: one process, one tensor at a time, no model code."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autopar.checkpoint.format import PARTS, Manifest, versions
from autopar.checkpoint.offline.output import copy_small_files, output_folder, progress_bar
from autopar.checkpoint.shard_index import FileRecord, Part, shard_name
from autopar.checkpoint.shards import Shards
from autopar.checkpoint.staging import Staging
from autopar.distributed.mesh_sizes import MeshSizes
from autopar.errors import CheckpointError
from autopar.layout import Layout
from autopar.plan.matching import rows_of
from autopar.plan.plan import TensorPlan
from autopar.policy.load import own_policies
from autopar.policy.schema import HIDDEN, Policy, UnitSpec
from autopar.storage.files import file_checksum
from autopar.storage.safetensors_io import SafetensorsWriter, dtype_of, nbytes

_OWN = re.compile(r"::.*@tp(\d+)$")


def reshard_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    tp: int,
    pp: int = 1,
    optimizer: bool = True,
    force: bool = False,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Write the shards of a mesh of ``tp`` x ``pp``; state of the optimizer included.

    Loading does not need this: ``from_parallelized`` reads the shards of any mesh. It saves each rank from opening
    files that it needs a part of only. Each kind of unit is sharded by itself: where query heads are uneven, a rank may
    still find one of its heads in its neighbour's file.

    Args:
        source: folder that ``save_parallelized`` wrote.
        destination: folder to make; it appears when it is whole.
        tp, pp: sizes of the new mesh.
        optimizer: take the optimizer's state along, if there is one.
        force: replace a checkpoint in ``destination``; other files there are kept.
        progress: show a progress bar; by default on a terminal.

    Returns:
        ``{"destination": str, "files": {name: bytes}, "tensors": int, "parameters": int}``

    Raises:
        CheckpointError: the source is incomplete or damaged, the model cannot run with these sizes, the destination
            cannot be written, or a state of the optimizer belongs to one tensor-parallel size (Adafactor's statistics).
    """
    check_sizes(tp, pp)
    folder = Path(source)
    with Shards(folder, PARTS) as shards:
        shards.verify_along()
        old = shards.manifest
        check_fits(old, tp, pp)
        parts = {name: part for name, part in old.parts.items() if optimizer or name != "optimizer"}
        training = {k: v for k, v in old.training.items() if optimizer or k != "optimizer"}
        _refuse_own_statistics(parts, old.sizes.tp, tp)
        bytes_of = {part: {k: _bytes(t) for k, t in parts[part].tensors.items()} for part in parts}
        stages = stages_by_size(bytes_of["model"], pp)
        total = sum(sum(sizes.values()) for sizes in bytes_of.values())
        written: dict[str, Part] = {}
        with output_folder("reshard", folder, destination, force) as staging:
            with progress_bar("resharding", total, progress) as bar:
                for name, part in parts.items():
                    plans = {key: _reshard(tensor, tp) for key, tensor in part.tensors.items()}
                    where = {key: stages.get(key.partition("::")[0], 0) for key in plans}

                    def read(key: str, part: str = name) -> torch.Tensor:
                        bar.update(bytes_of[part][key])
                        return shards.whole(key, part)

                    written[name] = write_part(staging, name, plans, read, (tp, pp), where)
            manifest = replace(old, save_id=staging.id, sizes=MeshSizes(tp, pp, 1), cp=1, tp=0, parts=written,
                               training=training, versions=versions(), along={})  # fmt: skip
            return write_manifest(staging, manifest, folder)


def _bytes(tensor: TensorPlan) -> int:
    return nbytes(dtype_of(tensor.dtype), tensor.shape)


def stages_by_size(sizes: Mapping[str, int], pp: int) -> dict[str, int]:
    """Assign each tensor to a stage's file: blocks stay together, in order, about equally many bytes in each stage.

    Loading reads any tensor from any file, so this decides only which files a rank opens.

    Args:
        sizes: tensor name -> bytes, in state-dict order.
        pp: number of stages.
    """
    blocks: dict[str, int] = {}
    block_of = {}
    for name, size in sizes.items():
        found = re.match(r"(.*?\.\d+)\.", name)
        block_of[name] = found[1] if found else name
        blocks[block_of[name]] = blocks.get(block_of[name], 0) + size
    total = sum(blocks.values())
    stage, reached = {}, 0
    for block, size in blocks.items():
        middle = reached + size / 2
        stage[block] = min(pp - 1, int(pp * middle / total)) if total else 0
        reached += size
    return {name: stage[block] for name, block in block_of.items()}


def _reshard(tensor: TensorPlan, tp: int) -> TensorPlan:
    """Plan the same units over ``tp`` ranks. With fewer units than ranks several ranks hold the same one."""
    if tensor.layout is None:
        return tensor
    return replace(tensor, layout=Layout.of(tensor.layout.dim, [block.over(tp) for block in tensor.layout.blocks]))


def _refuse_own_statistics(parts: Mapping[str, Part], before: int, tp: int) -> None:
    tensors = parts["optimizer"].tensors if "optimizer" in parts else {}
    own = [name for name in tensors if _OWN.search(name)]
    if own and before != tp:
        raise CheckpointError(
            f"the optimizer's {own[0]} (and {len(own) - 1} more) are statistics of one rank's shard at "
            f"tensor_parallel_size={before}; they cannot be resharded for {tp}\n"
            "  Pass optimizer=False (--no-optimizer) to leave the optimizer's state out."
        )


def write_part(
    staging: Staging,
    part: str,
    plans: Mapping[str, TensorPlan],
    read: Callable[[str], torch.Tensor],
    mesh: tuple[int, int],
    stages: Mapping[str, int],
) -> Part:
    """Write all shard files of a part side by side; each tensor is read once, and whole for this moment only.

    Args:
        plans: layouts for the new mesh.
        read: the whole tensor of a name.
        mesh: ``(tp, pp)``.
        stages: name -> stage.
    """
    tp, pp = mesh
    _allow_open_files(tp * pp)
    places = [(t, p) for p in range(pp) for t in range(tp)]
    if part == "extra":  # most have one file
        places = [(t, p) for t, p in places if any(stages[k] == p and _holds(k, plan, t) for k, plan in plans.items())]
    with ExitStack() as stack:
        writers = {}
        for t, p in places:
            name = shard_name(part, t, p)
            specs = {
                key: (dtype_of(plan.dtype), plan.local_shape(t))
                for key, plan in plans.items()
                if stages[key] == p and _holds(key, plan, t)
            }
            metadata = {"format": "pt", "autopar_save_id": staging.id, "autopar_file": name}
            writers[t, p] = stack.enter_context(SafetensorsWriter(staging.temp / name, specs, metadata, align=64))
        for key in SafetensorsWriter.sorted_names({k: dtype_of(plan.dtype) for k, plan in plans.items()}):
            full, plan = read(key), plans[key]
            for t in range(tp):
                if (t, stages[key]) in writers and _holds(key, plan, t):
                    shard = full if plan.layout is None else plan.layout.shard(full, t)
                    writers[t, stages[key]].write(key, shard)
    records = {}
    for (t, p), writer in writers.items():
        size = writer.path.stat().st_size
        records[writer.path.name] = FileRecord(t, p, None, size, writer.header, writer.checksums)
    return Part(part, plans, records)


def _allow_open_files(count: int) -> None:
    """Raise the process's limit of open files if need be, or CheckpointError if that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + 256
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise CheckpointError(
            f"{count} shard files are written side by side, this process may open {hard} files\n"
            f"  Raise the limit (ulimit -n {needed}), or write fewer shards."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _holds(key: str, plan: TensorPlan, t: int) -> bool:
    """Tell whether the file of tensor-parallel rank ``t`` holds a shard of the tensor."""
    if plan.layout is not None:
        return True
    own = _OWN.search(key)
    return t == (int(own[1]) if own else 0)


def write_manifest(
    staging: Staging, manifest: Manifest, source: Path, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Copy the small files of ``source``, write the manifest, and return the report of the command."""
    copy_small_files(source, staging.temp, dtype)
    saved = [name for name in ("config.json", "generation_config.json") if (staging.temp / name).is_file()]
    manifest = replace(manifest, along={name: file_checksum(staging.temp / name) for name in saved})
    manifest.check()
    manifest.write(staging.temp)
    return {
        "destination": str(staging.target),
        "files": {name: record.bytes for name, record in manifest.files.items()},
        "tensors": len(manifest.tensors),
        "parameters": manifest.total_parameters(),
    }


# -- sizes that a checkpoint's model can run with, by its manifest and policy ------------------------------------------


MOST = 4096  # files that are open at once are bounded by this


def check_sizes(tp: int, pp: int) -> None:
    """Raise CheckpointError unless both sizes can be made."""
    for name, size in (("--tp", tp), ("--pp", pp)):
        if not 1 <= size <= MOST:
            raise CheckpointError(f"{name} {size} must be between 1 and {MOST}")
    if tp * pp > MOST:
        raise CheckpointError(f"--tp {tp} x --pp {pp} = {tp * pp} files are more than {MOST}")


def check_fits(manifest: Manifest, tp: int, pp: int) -> None:
    """Check that the model can run with these sizes. Nothing is known of a user's own policy.

    Raises:
        CheckpointError: fewer units than ranks, which several ranks cannot share, or fewer blocks than stages; says the
            largest size that fits.
    """
    counted = _counted(manifest.tensors) if tp > 1 else {}
    if pp == 1 and all(count >= tp for count, _ in counted.values()):
        return
    policy = own_policies().get(manifest.policy)
    if policy is None:
        return
    limits = {unit: found for unit, found in counted.items() if not _may_be_fewer(unit, policy)}
    few = next(((unit, count, where) for unit, (count, where) in limits.items() if count < tp), None)
    if few is not None:
        unit, count, where = few
        raise CheckpointError(
            f"--tp {tp} does not fit this {manifest.model_type} model: {count} {unit} cannot be sharded over {tp} "
            f"ranks.\n  They lie in {where}.\n"
            f"  Largest size that fits this model: {min(n for n, _ in limits.values())}."
        )
    check_blocks(policy, manifest.tensors, manifest.model_type, pp)


def check_blocks(policy: Policy, names: Iterable[str], model_type: str, pp: int) -> None:
    """Raise CheckpointError if there are more stages than blocks; says how many there are."""
    places = [rf"(?:.*\.)?{_pattern(tower.blocks_path)}\.(\w+)\." for tower in policy.towers if tower.blocks_path]
    pattern = re.compile(f"({'|'.join(places)})" if places else "(?!)")
    count = len({found[1] for name in names if (found := pattern.match(name))})
    if 1 < count < pp:  # a single one may be called several times
        raise CheckpointError(
            f"--pp {pp} does not fit this {model_type} model: {count} blocks cannot be split into {pp} stages.\n"
            f"  Largest number of stages that fits this model: {count}."
        )


def _pattern(path: str) -> str:
    """Return the path of a list of blocks as a regular expression."""
    return r"\.".join(r"\w+" if segment == "*" else re.escape(segment.removesuffix("?")) for segment in path.split("."))


def _counted(tensors: Mapping[str, TensorPlan]) -> dict[str, tuple[int, str]]:
    """Return unit -> the smallest number of them in a tensor, and which one that is."""
    counted: dict[str, tuple[int, str]] = {}
    for name, tensor in tensors.items():
        for block in tensor.layout.blocks if tensor.layout is not None else ():
            if block.unit not in counted or block.count < counted[block.unit][0]:
                counted[block.unit] = block.count, name
    return counted


def _may_be_fewer(unit: str, policy: Policy) -> bool:
    """Tell whether there may be fewer of a unit than ranks: several hold the same one, or it is whole or a row."""
    if unit == HIDDEN or unit in rows_of(policy):
        return True
    tables: list[Mapping[str, UnitSpec]] = [*(tower.units for tower in policy.towers), policy.units]
    return all(_is_shared(unit, table) for table in tables if unit in table)  # of a model inside nothing is known


def _is_shared(unit: str, table: Mapping[str, UnitSpec]) -> bool:
    spec: UnitSpec | None = table[unit]
    if spec is not None and spec.replicate:
        return True
    while spec is not None:
        if spec.or_whole:
            return True
        spec = table.get(spec.follows) if spec.follows is not None else None
    return False
