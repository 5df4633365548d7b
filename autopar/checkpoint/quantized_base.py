"""The quantized weights of a checkpoint: the tensors that stand for them.

They are left out where adapters stand before them. Else they are a separate part: bytes and scales as their library
has them in files, viewed with a dim for the outputs and one for the inputs. A rank reads its part of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from autopar.checkpoint.shards import Shards
from autopar.checkpoint.state import State
from autopar.errors import CheckpointError
from autopar.layout import Layout
from autopar.plan.plan import Piece, TensorPlan
from autopar.quantized.layers import stored_weights
from autopar.quantized.stored import StoredWeight
from autopar.storage.lazy_tensor import Box, LazyTensor, read_shard, reshaped
from autopar.storage.safetensors_io import dtype_name

_LARGE = ("absmax", "SCB", "qdata", "scale", "zero_point", "weight")  # ends of names of what has several entries


def base_tensors(
    model: nn.Module, state: State
) -> tuple[dict[str, torch.Tensor], dict[str, TensorPlan], dict[str, str]]:
    """Return what this rank writes of the quantized weights; how all that it holds lies in files; notes for heads."""
    tensors: dict[str, torch.Tensor] = {}
    plans: dict[str, TensorPlan] = {}
    notes: dict[str, str] = {}
    for path, stored in stored_weights(model).items() if state.quantized and not state.adapted else ():
        weight = state.quantized[f"{path}.weight"]
        form = (weight.shape[0], weight.shape[1])
        layout = weight.layout if state.plan.shards > 1 else None
        first = state.writes(weight.name) and state.holders_of(weight.name).rank == 0
        saved = (weight.saved_as or weight.name).removesuffix("weight")
        if note := stored.note(form):
            notes[weight.name] = note
        for name, (tensor, block, flat) in stored.files(form).items():
            step = 0 if layout is None else block[layout.dim]
            cut = layout.in_steps(step) if layout is not None and step else None
            whole = list(tensor.shape)
            if cut is not None:
                whole[cut.dim] = cut.size
            count = math.prod(whole)
            sizes = ((count, 1) if flat == 2 else (count,)) if flat else tuple(whole)
            steps = tuple(torch.empty(sizes, device="meta").stride())
            pieces = (Piece(f"{saved}{name}", sizes, steps, 0),)
            full = f"{path}.{name}"
            plans[full] = TensorPlan(full, tuple(whole), dtype_name(tensor.dtype), cut, pieces=pieces)
            if first and (cut is not None or state.mpu.tp.rank == 0):
                tensors[full] = tensor
    return tensors, plans, notes


def read_base(model: nn.Module, state: State, shards: Shards, *, check: bool = False) -> None:
    """Read this rank's parts of the quantized weights of a checkpoint, if that has them; or only check that they fit.

    Raises:
        CheckpointError: they do not stand for weights of these shapes.
    """
    saved = shards.manifest.quantized
    for path, stored in stored_weights(model).items() if saved else ():
        weight, start = state.quantized[f"{path}.weight"], f"{path}."
        parts = {name[len(start) :]: shards.lazy(name, "base") for name in saved if name.startswith(start)}
        layout = weight.layout if state.plan.shards > 1 else None
        form = (stored, parts, (weight.shape[0], weight.shape[1]), layout)
        try:
            if check:
                open_packed(*form, state.mpu.device)
            else:
                read_packed(*form, state.mpu.shards.rank, state.mpu.device)
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{shards.folder} does not hold {weight.name} as {stored.format}: {error}") from error


# -- weights that lie in files as several tensors ----------------------------------------------------------------------


class Packed(LazyTensor):
    """A weight that lies in files as several tensors.

    Attributes:
        parts: by their names after the path of the layer.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, parts: Mapping[str, LazyTensor]) -> None:
        super().__init__(shape, dtype, parts.values())
        self.parts = parts

    def read_into(self, out: torch.Tensor, box: Box) -> None:
        raise CheckpointError("quantized numbers alone are no weight")


def open_packed(
    stored: StoredWeight,
    parts: Mapping[str, LazyTensor],
    shape: tuple[int, int],
    layout: Layout | None,
    device: torch.device,
) -> dict[str, tuple[LazyTensor, tuple[int, int]]]:
    """Return the pieces of a weight as they lie in files, and what one entry of them stands for along each dim.

    Args:
        parts: all tensors of the weight, by their names after the path of the layer.
        shape: of the whole weight.

    Raises:
        ValueError, KeyError: they do not stand for a weight of this shape.
    """
    small = {name: part.read().to(device) for name, part in parts.items() if not name.endswith(_LARGE)}
    found = {}
    for piece, (name, form, block) in stored.open(small, shape, layout).items():
        lazy = parts[name]
        sizes = lazy.shape if form == (-1,) else form
        if math.prod(sizes) != math.prod(lazy.shape):
            raise ValueError(f"{name} has shape {list(lazy.shape)}, a weight of {list(shape)} needs {list(sizes)}")
        viewed = lazy if lazy.shape == tuple(sizes) or not any(block) else reshaped(lazy, sizes)
        if viewed is None:
            raise ValueError(f"{name} is computed of other tensors")
        found[piece] = (viewed, block)
    return found


def read_packed(
    stored: StoredWeight,
    parts: Mapping[str, LazyTensor],
    shape: tuple[int, int],
    layout: Layout | None,
    rank: int,
    device: torch.device,
) -> None:
    """Read the shard of ``rank`` of a quantized weight, all of it if the layout is None or for one rank."""
    layout = None if layout is None or layout.axis_size == 1 else layout
    tensors = {}
    for name, (lazy, block) in open_packed(stored, parts, shape, layout, device).items():
        step = 0 if layout is None else block[layout.dim]
        cut = layout.in_steps(step) if layout is not None and step else None
        due = lazy.shape if cut is None else cut.local_shape(lazy.shape, rank)
        tensors[name] = torch.empty(due, dtype=lazy.dtype, device=device)
        read_shard(lazy, cut, rank, tensors[name])
    stored.take(tensors, layout, rank)
