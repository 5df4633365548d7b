"""The quantized weights of a checkpoint, left out under adapters, else a separate part.

The part holds bytes and scales as their library writes them, viewed with a dim for the outputs and one for the inputs.
A rank reads its shard of each.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from autopar.checkpoint.shards import Shards
from autopar.checkpoint.state import State
from autopar.errors import CheckpointError
from autopar.plan.plan import Piece, TensorPlan
from autopar.storage.safetensors_io import dtype_name
from autopar.stored import stored_weights


class Base:
    """The part ``base`` of a checkpoint."""

    @staticmethod
    def collect(model: nn.Module, state: State) -> tuple[list[tuple[str, TensorPlan, torch.Tensor]], dict[str, str]]:
        """Return weight, plan and tensor of each piece on this rank, and notes for the heads of files."""
        tensors: list[tuple[str, TensorPlan, torch.Tensor]] = []
        notes: dict[str, str] = {}
        found: dict[str, Any] = {**stored_weights(model)}
        for path, stored in found.items():
            weight = state.quantized[f"{path}.weight"]
            form = (weight.shape[0], weight.shape[1])
            layout = weight.layout if state.plan.shards > 1 else None
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
                plan = TensorPlan(full, tuple(whole), dtype_name(tensor.dtype), cut, pieces=pieces)
                tensors.append((weight.name, plan, tensor))
        return tensors, notes

    @staticmethod
    def restore(model: nn.Module, state: State, shards: Shards, *, check: bool = False) -> None:
        """Read this rank's shards of quantized weights, or only ``check`` that they fit, else raise CheckpointError."""
        saved = shards.manifest.quantized
        found: dict[str, Any] = {**stored_weights(model)}
        for path, stored in found.items():
            weight, start = state.quantized[f"{path}.weight"], f"{path}."
            parts = {name[len(start) :]: shards.lazy(name, "base") for name in saved if name.startswith(start)}
            layout = weight.layout if state.plan.shards > 1 else None
            shape = (weight.shape[0], weight.shape[1])
            try:
                if check:
                    stored.located(parts, shape, layout, state.mpu.device)
                else:
                    stored.read(parts, shape, layout, state.mpu)
            except (ValueError, KeyError) as error:
                raise CheckpointError(
                    f"{shards.folder} does not hold {weight.name} as {stored.kind.form}: {error}"
                ) from error
