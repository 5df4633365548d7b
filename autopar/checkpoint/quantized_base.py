"""The quantized weights that a checkpoint leaves out: their digests, to be compared with those of the model at hand.

A digest is a sum over the numbers of the whole weight, so it is the same on every mesh.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar.checkpoint.state import State, listed
from autopar.distributed.digest import sum_of_elements
from autopar.quantized.layers import stored_weights

__all__ = ["QuantizedBase", "digests_here", "name_of", "warn_of_another"]


@dataclass(frozen=True)
class QuantizedBase:
    """The quantized weights of a model.

    Attributes:
        name: where the model came from, as transformers notes it; ``""`` if it does not say.
        forms: name -> the form in which a weight is stored.
        digests: name -> digest of its numbers, as hexadecimal digits.
    """

    name: str = ""
    forms: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, state: State, ranks: Sequence[Mapping[str, int]]) -> QuantizedBase:
        """Add up the digests of all ranks."""
        digests = {name: f"{sum(rank.get(name, 0) for rank in ranks) % 2**64:016x}" for name in state.quantized}
        forms = {name: tensor.quantized for name, tensor in state.quantized.items()}
        return cls(name, forms, digests)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> QuantizedBase:
        """Inverse of :meth:`to_json`. Raises ``ValueError``, ``KeyError`` or ``TypeError``."""
        weights = {str(name): (str(form), str(digest)) for name, (form, digest) in data["weights"].items()}
        forms, digests = ({name: pair[part] for name, pair in weights.items()} for part in (0, 1))
        return cls(str(data["name"]), forms, digests)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"name": self.name, "weights": {name: [self.forms[name], self.digests[name]] for name in self.forms}}

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
