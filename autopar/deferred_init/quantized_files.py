"""Quantized weights in the files of a checkpoint: each rank reads its part of the numbers and of the scales.

transformers puts the tensors of a weight together in one operation of each library. While a model is loaded lazily, a
:class:`Collector` takes that operation's place and notes which they are, after all renames.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from autopar.checkpoint.quantized_base import Packed, open_packed
from autopar.deferred_init.sources import set_source
from autopar.errors import CheckpointError
from autopar.foreign.modules import own_parameters
from autopar.foreign.transformers import INITIALIZED
from autopar.quantized.layers import empty_weight, stored_weight
from autopar.storage.lazy_tensor import LazyTensor


class Collector:
    """Stands for the operation of transformers that makes a quantized weight.

    Attributes:
        found: name of the weight -> its tensors.
    """

    def __init__(self, operation: Any) -> None:
        self.hf_quantizer = operation.hf_quantizer  # by which transformers knows that no dtype is changed before it
        self.found: dict[str, dict[str, LazyTensor]] = {}

    def __deepcopy__(self, memo: Any) -> Collector:
        return self

    def convert(self, tensors: dict[str, Any], full_layer_name: str, **_: Any) -> dict[str, Any]:
        """Note what a weight is made of, and give its numbers back; a plain one is given back as it is."""
        parts = {name: one[0] if isinstance(one, list) else one for name, one in tensors.items()}
        if len(parts) == 1:
            return parts if "weight" in parts else {full_layer_name: next(iter(parts.values()))}
        self.found[full_layer_name] = {name: sketch.lazy for name, sketch in parts.items()}
        return {full_layer_name: parts.get("weight", next(iter(parts.values())))}


@contextlib.contextmanager
def collected(conversions: Sequence[Any] | None) -> Iterator[dict[str, dict[str, LazyTensor]]]:
    """Collect the tensors of quantized weights inside of ``with`` instead of reading them."""
    found: dict[str, dict[str, LazyTensor]] = {}
    before: list[tuple[Any, list[Any]]] = []
    try:
        for conversion in conversions or ():
            operations = getattr(conversion, "operations", [])
            if any(hasattr(operation, "hf_quantizer") for operation in operations):
                before.append((conversion, operations))
                conversion.operations = [Collector(one) if hasattr(one, "hf_quantizer") else one for one in operations]
        yield found
        for conversion, _ in before:
            for one in conversion.operations:
                found.update(getattr(one, "found", {}))
    finally:
        for conversion, operations in before:
            conversion.operations = operations


def point_to_packed(
    model: Any, quantizer: Any, plain: Mapping[str, Any], found: Mapping[str, Mapping[str, LazyTensor]], folder: str
) -> None:
    """Give the quantized layers of a model without memory their library's weights, and these their places in files.

    Args:
        plain: weights by the path of their layer that the library made before anything was loaded.
        found: as :func:`collected` gives it.

    Raises:
        CheckpointError: a weight lacks its scales, or has them for another shape.
    """
    lacking = [path for path in plain if f"{path}.weight" not in found]
    if lacking:
        raise CheckpointError(
            f"{folder} does not hold the scales of {len(lacking)} weights that its config says are quantized, "
            f"{lacking[0]}.weight first"
        )
    for name, parts in found.items():
        path = name.rpartition(".")[0]
        module = model.get_submodule(path)
        weight = plain.get(path)
        if weight is None:
            like = {key: torch.empty(part.shape, dtype=part.dtype, device="meta") for key, part in parts.items()}
            weight = empty_weight(quantizer, name, like)
        vars(weight).update({INITIALIZED: True})
        own_parameters(module)["weight"] = weight
        stored = stored_weight(module)
        assert stored is not None
        packed = Packed(weight.shape, weight.dtype, parts)
        set_source(module, "weight", packed)
        try:
            open_packed(stored, parts, (module.out_features, module.in_features), None, torch.device("cpu"))
        except (ValueError, KeyError, AssertionError) as error:
            raise CheckpointError(f"{folder} does not hold {name} as {stored.format}: {error}") from error
