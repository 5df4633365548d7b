"""The quantized weights of a checkpoint: what stands for them, or digests, to be compared with the model at hand.

They are left out where adapters stand before them. Else they are a part of their own: bytes and scales as their library
has them in files, viewed with a dim for the outputs and one for the inputs.

A digest is a sum over the numbers of the whole weight, so it is the same on every mesh.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autopar.checkpoint.state import State
from autopar.distributed.digest import sum_of_elements
from autopar.errors import CheckpointError, listed
from autopar.plan.plan import Piece, TensorPlan
from autopar.quantized.layers import stored_weights
from autopar.storage.safetensors_io import dtype_name

if TYPE_CHECKING:
    from autopar.checkpoint.shards import Shards


@dataclass(frozen=True)
class QuantizedBase:
    """The quantized weights of a model.

    Attributes:
        name: where the model came from, as transformers notes it; ``""`` if it does not say.
        forms: name -> the form in which a weight is stored.
        digests: name -> digest of its numbers, as hexadecimal digits.
        notes: name -> what the head of a file says of it, where that is not in tensors.
    """

    name: str = ""
    forms: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, name: str, state: State, ranks: Sequence[Mapping[str, int]], notes: Mapping[str, str] | None = None
    ) -> QuantizedBase:
        """Add up the digests of all ranks."""
        digests = {name: f"{sum(rank.get(name, 0) for rank in ranks) % 2**64:016x}" for name in state.quantized}
        forms = {name: tensor.quantized for name, tensor in state.quantized.items()}
        return cls(name, forms, digests, notes or {})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> QuantizedBase:
        """Inverse of :meth:`to_json`. Raises ``ValueError``, ``KeyError`` or ``TypeError``."""
        weights = {str(name): (str(form), str(digest)) for name, (form, digest) in data["weights"].items()}
        forms, digests = ({name: pair[part] for name, pair in weights.items()} for part in (0, 1))
        notes = {str(name): str(note) for name, note in data.get("notes", {}).items()}
        return cls(str(data["name"]), forms, digests, notes)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        weights = {name: [self.forms[name], self.digests[name]] for name in self.forms}
        return {"name": self.name, "weights": weights} | ({"notes": dict(self.notes)} if self.notes else {})

    def __str__(self) -> str:
        forms = listed(sorted({*self.forms.values()}))
        return f"{self.name or 'a model without a name'} ({forms or 'not quantized'})"


def name_of(model: nn.Module, state: State) -> str:
    """Return where the model came from, as transformers notes it."""
    return str(getattr(getattr(model.get_submodule(state.hf_path), "config", None), "_name_or_path", ""))


@torch.no_grad()
def digests_here(model: nn.Module, state: State) -> dict[str, int]:
    """Digest what this rank holds of the quantized weights; of several ranks with the same, only the first does."""
    found, rank = {}, state.mpu.shards.rank
    for path, stored in stored_weights(model).items() if state.quantized else ():
        name = f"{path}.weight"
        layout = state.quantized[name].layout
        first = state.writes(name) and state.holders_of(name).rank == 0
        if first and layout is None and state.mpu.tp.rank == 0:
            found[name] = sum_of_elements(stored.dequantized())
        elif first and layout is not None:
            weight = stored.dequantized()
            parts = [weight.narrow(layout.dim, start, stop - start) for start, stop in layout.owned_local(rank)]
            found[name] = sum(sum_of_elements(part) for part in parts)
    return found


def base_tensors(model: nn.Module, state: State) -> tuple[dict[str, torch.Tensor], dict[str, TensorPlan]]:
    """Return what this rank writes of the quantized weights, and how all that it holds of them lies in files."""
    tensors: dict[str, torch.Tensor] = {}
    plans: dict[str, TensorPlan] = {}
    for path, stored in stored_weights(model).items() if state.quantized and not state.adapted else ():
        weight = state.quantized[f"{path}.weight"]
        layout = weight.layout if state.plan.shards > 1 else None
        first = state.writes(weight.name) and state.holders_of(weight.name).rank == 0
        saved = (weight.saved_as or weight.name).removesuffix("weight")
        for name, (tensor, block, flat) in stored.files((weight.shape[0], weight.shape[1])).items():
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
    return tensors, plans


def notes_of(model: nn.Module, state: State) -> dict[str, str]:
    """Return what the head of a file says of the quantized weights that are here."""
    found = {}
    for path, stored in stored_weights(model).items() if state.quantized and not state.adapted else ():
        rows, columns = state.quantized[f"{path}.weight"].shape
        found[f"{path}.weight"] = stored.note((rows, columns))
    return {name: note for name, note in found.items() if note}


def read_base(model: nn.Module, state: State, shards: Shards, *, check: bool = False) -> None:
    """Read this rank's parts of the quantized weights of a checkpoint, if that has them.

    Args:
        check: only look whether they fit.

    Raises:
        CheckpointError: they do not stand for weights of these shapes.
    """
    from autopar.storage.packed import open_packed, read_packed

    saved = shards.manifest.quantized
    for path, stored in stored_weights(model).items() if saved else ():
        weight, start = state.quantized[f"{path}.weight"], f"{path}."
        parts = {name[len(start) :]: shards.lazy(name, "base") for name in saved if name.startswith(start)}
        rows, columns = weight.shape
        layout = weight.layout if state.plan.shards > 1 else None
        try:
            if check:
                open_packed(stored, parts, (rows, columns), layout, state.mpu.device)
            else:
                read_packed(stored, parts, (rows, columns), layout, state.mpu.shards.rank, state.mpu.device)
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{shards.folder} does not hold {weight.name} as {stored.format}: {error}") from error


def warn_of_another(saved: QuantizedBase, here: QuantizedBase, folder: object) -> None:
    """Warn if the model at hand has other quantized weights than the one that was saved."""
    names = [*dict.fromkeys([*saved.digests, *here.digests])]
    other = [name for name in names if saved.digests.get(name) != here.digests.get(name)]
    if other:
        warnings.warn(
            f"{folder} was saved on another base model: {len(other)} of {len(names)} quantized weights differ, "
            f"{other[0]} first\n"
            f"  It was {saved}; this one is {here}.\n"
            "  Adapters fit the base that they were trained on. The same files, quantized by the same config and "
            "dtype, give the same weights.",
            stacklevel=5,
        )
