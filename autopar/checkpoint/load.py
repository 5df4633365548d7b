"""Load a sharded checkpoint into a parallelized model, in place. Everything is checked before anything is changed."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.checkpoint.agree import meet, together
from autopar.checkpoint.format import MANIFEST, Manifest, sizes_text
from autopar.checkpoint.safetensors_stream import dtype_name, dtype_of
from autopar.checkpoint.save import absolute, check_timeout, patience, same_call
from autopar.checkpoint.shards import Shards
from autopar.checkpoint.state import State, listed, local_tensors, state_of
from autopar.errors import CheckpointError, nearest
from autopar.layout import Layout

__all__ = ["load"]


def load(model: nn.Module, directory: str | os.PathLike[str], timeout: float) -> None:
    """See :func:`autopar.checkpoint.attach.from_parallelized`."""
    state = state_of(model)
    mpu = state.mpu
    meet(mpu, "from_parallelized", patience(timeout))
    t, p = mpu.tp.rank, mpu.pp.rank
    shards: Shards | None = None
    tensors: dict[str, torch.Tensor] = {}

    def check() -> dict[str, Any]:
        nonlocal shards, tensors
        check_timeout(timeout)
        folder = Path(absolute(directory))
        _check_mesh(Manifest.read(folder), state, folder)
        shards = Shards(folder, which={(0, p), (t, p)})
        tensors = local_tensors(model)
        _check_model(shards.manifest, state, tensors, folder)
        for name in tensors:
            shards.verify(name, t, p)
        return {
            "function": "from_parallelized",
            "directory": str(folder),
            "the id of the checkpoint": shards.manifest.save_id,
        }

    def fill() -> None:
        assert shards is not None
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(shards.local(name, t, p))

    try:
        together(mpu, check, check=same_call)
        together(mpu, fill, lambda: "The model is partly loaded.")
        assert shards is not None
        _warn_of_casts(shards.manifest, tensors)
    finally:
        if shards is not None:
            shards.close()


def _check_mesh(manifest: Manifest, state: State, folder: Path) -> None:
    ours = state.mpu.sizes
    if (manifest.sizes.tp, manifest.sizes.pp) != (ours.tp, ours.pp):
        raise CheckpointError(
            f"{folder} was saved with {sizes_text(manifest.sizes)}; this model runs with {sizes_text(ours)}\n"
            "  This version cannot load into another mesh. Run `autopar merge SRC DST`, load DST with from_pretrained "
            "and call autopar.initialize."
        )


def _check_model(manifest: Manifest, state: State, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Raise CheckpointError unless the checkpoint holds exactly the model's tensors, laid out the same way."""
    saved, plan = manifest.tensors, state.plan
    missing = [name for name in plan.tensors if name not in saved]
    unexpected = [name for name in saved if name not in plan.tensors]
    if missing or unexpected:
        raise CheckpointError(
            f"{folder} does not hold this model's tensors: {len(missing)} missing, {len(unexpected)} unexpected\n"
            + (f"  Missing in the checkpoint: {listed(missing)}.{nearest(missing[0], unexpected)}\n" if missing else "")
            + (f"  Unexpected: {listed(unexpected)}.\n" if unexpected else "")
            + f"  It holds a {manifest.model_type!r} model, this one is {plan.model_type!r}."
        )
    for name, mine in plan.tensors.items():
        theirs = saved[name]
        if theirs.shape != mine.shape:
            raise CheckpointError(
                f"{name} has shape {list(theirs.shape)} in {folder} and {list(mine.shape)} in the model"
            )
        if not _same_layout(theirs.layout, mine.layout):
            raise CheckpointError(
                f"{name} is shared out differently in {folder} than in the model: another policy was used\n"
                f"  Policy {manifest.policy} in {MANIFEST}, {plan.policy} now. "
                "Run `autopar merge SRC DST` and load DST with from_pretrained."
            )
    for name, tensor in tensors.items():
        dtype = dtype_of(saved[name].dtype)
        if dtype != tensor.dtype and not (dtype.is_floating_point and tensor.is_floating_point()):
            raise CheckpointError(
                f"{name} is {saved[name].dtype} in {folder} and {dtype_name(tensor.dtype)} in the model"
            )
    gone = [name for name in tensors if name not in manifest.on_stage(state.mpu.pp.rank)]
    if gone:
        raise CheckpointError(f"stage {state.mpu.pp.rank} has {listed(gone)}, in {folder} another stage has it")


def _same_layout(one: Layout | None, other: Layout | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dim == other.dim and all(one.ranges(t) == other.ranges(t) for t in range(one.axis_size))


def _warn_of_casts(manifest: Manifest, tensors: dict[str, torch.Tensor]) -> None:
    cast = [name for name, tensor in tensors.items() if manifest.tensors[name].dtype != dtype_name(tensor.dtype)]
    if cast:
        warnings.warn(
            f"{len(cast)} tensors were converted on loading, {cast[0]} from {manifest.tensors[cast[0]].dtype} "
            f"to {dtype_name(tensors[cast[0]].dtype)}",
            stacklevel=4,
        )
