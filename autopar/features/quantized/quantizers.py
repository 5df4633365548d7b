"""Models that transformers quantizes: methods that are refused, and the sources of packed weights in files.

Each rank reads its shard of the numbers and scales of quantized weights. transformers puts the tensors of a weight
together in one operation of each library. While a model is loaded lazily, a :class:`Collector` takes the place of that
operation and notes the tensors, after all renames. Weights in MXFP4 that become plain ones are read in shards, too
(:class:`Mxfp4`): transformers writes them into a full tensor, which lazy loading cannot follow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from transformers.integrations.mxfp4 import Mxfp4Dequantize, dequantize_convertops
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from autopar.compat.tensors import own_parameters
from autopar.compat.transformers import INITIALIZED
from autopar.deferred_init.files import set_source
from autopar.errors import CheckpointError, ConfigError
from autopar.features.quantized import torchao
from autopar.features.quantized.stored import Packed, QuantizedWeight
from autopar.storage.hugging_face import Sketch
from autopar.storage.lazy_tensor import Box, LazyTensor
from autopar.stored import stored_weight, stored_weights
from autopar.swap import NotCopied

_SHARDED = ("bitsandbytes", "torchao")


class Quantizers:
    """Quantized models of transformers."""

    @staticmethod
    def check(what: str, method: str) -> None:
        """Check that weights quantized by a method can be sharded.

        Raises:
            ConfigError: They cannot; with the argument that dequantizes where there is one.
        """
        if method in _SHARDED:
            return
        instead = (
            "Load the weights that were quantized: BitsAndBytesConfig and TorchAoConfig quantize them for autopar."
        )
        if kind := _with_argument(method):
            instead = f"from_pretrained(..., quantization_config={kind}(dequantize=True)) makes plain weights of them."
        raise ConfigError(f"{what} has weights quantized by {method}, which autopar does not shard.\n  {instead}")

    @staticmethod
    def check_config(what: str, text: bytes) -> None:
        """Check that a ``config.json`` is one of weights that are plain, or can be sharded or dequantized.

        Raises:
            ConfigError: They cannot.
        """
        try:
            method = json.loads(text)["quantization_config"]["quant_method"]
        except (ValueError, KeyError, TypeError):  # plain, or damaged: transformers says so
            return
        if not _with_argument(method):
            Quantizers.check(what, method)

    @staticmethod
    def read(original: Callable[..., Any], model: Any, config: Any) -> tuple[Callable[..., Any], Any]:
        """Return transformers' ``_load_pretrained_model`` and its config, for a quantized model without memory.

        Raises:
            ConfigError: It quantizes layers in a way that cannot be sharded.
        """
        quantizer = config.hf_quantizer
        if not quantizer.pre_quantized:
            torchao.prepare(model, quantizer)
        on_one = config.device_map is not None and len({*config.device_map.values()}) == 1  # transformers chooses it
        packed, device_map = quantizer.pre_quantized, None if on_one else config.device_map
        if packed:
            pending = [path for path, stored in stored_weights(model).items() if stored.pending]
            plain = {path: own_parameters(model.get_submodule(path))["weight"] for path in pending}
            original = functools.partial(_load_packed, original, quantizer, plain)
        return original, dataclasses.replace(config, hf_quantizer=quantizer if packed else None, device_map=device_map)

    @staticmethod
    def dequantize(original: Callable[..., Any]) -> Callable[..., Any]:
        """Return transformers' ``_load_pretrained_model`` for plain weights that are made of quantized ones."""

        def load(model: Any, tensors: Any, files: Any, config: Any, *rest: Any, **more: Any) -> Any:
            with _replaced(config, lambda one: isinstance(one, Mxfp4Dequantize), DequantizeMxfp4):
                return original(model, tensors, files, config, *rest, **more)

        return load


def _with_argument(method: str) -> str:
    """Return the name of the configuration class of a method whose weights transformers can dequantize; else ``""``."""
    kind = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    return kind.__name__ if kind is not None and "dequantize" in inspect.signature(kind).parameters else ""


def _load_packed(
    load: Any, quantizer: Any, plain: Any, model: Any, tensors: Any, files: Any, config: Any, *rest: Any, **more: Any
) -> Any:
    """Load a model, and collect the tensors of quantized weights instead of reading them."""
    found: dict[str, dict[str, LazyTensor]] = {}
    with _replaced(config, _quantizes, functools.partial(Collector, found=found)):
        info, index = load(model, tensors, files, config, *rest, **more)
    if not info.conversion_errors and (config.ignore_mismatched_sizes or not info.mismatched_keys):  # else an error
        _point_to_packed(model, quantizer, plain, found, str(config.pretrained_model_name_or_path))
    return info, index


@contextlib.contextmanager
def _replaced(config: Any, chosen: Callable[[Any], bool], stand_in: Callable[[Any], Any]) -> Iterator[None]:
    """Replace the chosen operations of transformers' conversions inside of ``with``."""
    conversions = [one for one in config.weight_mapping or () if any(map(chosen, getattr(one, "operations", [])))]
    before = [one.operations for one in conversions]
    try:
        for conversion in conversions:
            conversion.operations = [stand_in(one) if chosen(one) else one for one in conversion.operations]
        yield
    finally:
        for conversion, operations in zip(conversions, before, strict=True):
            conversion.operations = operations


def _quantizes(operation: Any) -> bool:
    return hasattr(operation, "hf_quantizer")


class Collector(NotCopied):
    """Stands for the operation of transformers that makes a quantized weight.

    Attributes:
        found: name of the weight -> its tensors.
    """

    def __init__(self, operation: Any, found: dict[str, dict[str, LazyTensor]]) -> None:
        self.hf_quantizer = operation.hf_quantizer  # by which transformers knows that no dtype is changed before it
        self.found = found

    def convert(self, tensors: dict[str, Any], full_layer_name: str, **_: Any) -> dict[str, Any]:
        """Note what a weight is made of, and give its numbers back; a plain one is given back as it is."""
        parts = {name: one[0] if isinstance(one, list) else one for name, one in tensors.items()}
        if len(parts) == 1:
            return parts if "weight" in parts else {full_layer_name: next(iter(parts.values()))}
        self.found[full_layer_name] = {name: sketch.lazy for name, sketch in parts.items()}
        return {full_layer_name: parts.get("weight", next(iter(parts.values())))}


class DequantizeMxfp4(NotCopied):
    """Stands for the operation of transformers that makes plain weights of experts in MXFP4."""

    def __init__(self, operation: Any) -> None:
        self.hf_quantizer = operation.hf_quantizer  # as Collector's

    def convert(self, tensors: dict[str, Any], model: Any, full_layer_name: str, **_: Any) -> dict[str, Any]:
        """Return the plain weight, to be read in ranges."""
        parts = {name.rpartition("_")[2]: one[0] if isinstance(one, list) else one for name, one in tensors.items()}
        made = Mxfp4(parts["blocks"].lazy, parts["scales"].lazy, model.get_parameter(full_layer_name).dtype)
        return {full_layer_name: Sketch(made)}


class Mxfp4(LazyTensor):
    """Plain experts, ``[experts, inputs, outputs]``, of those in MXFP4: a scale for each block of inputs of an output.

    Args:
        blocks: Two numbers a byte, ``[experts, outputs, blocks, bytes]``.
        scales: Exponents, ``[experts, outputs, blocks]``.
    """

    def __init__(self, blocks: LazyTensor, scales: LazyTensor, dtype: torch.dtype) -> None:
        experts, outputs, count, size = blocks.shape
        super().__init__((experts, count * size * 2, outputs), dtype, [blocks, scales])

    def read_into(self, out: torch.Tensor, box: Box) -> None:
        (blocks, scales), (experts, (low, high), outputs) = self.bases, box
        each = 2 * blocks.shape[-1]
        start, stop = low // each, -(-high // each)
        for place, expert in enumerate(range(*experts)):  # one at a time: numbers take four times their memory
            mine = ((expert, expert + 1), outputs, (start, stop))
            packed = blocks.read((*mine, (0, blocks.shape[-1])))
            plain = dequantize_convertops(packed, scales.read(mine), self.dtype)[0]
            out[place].copy_(plain[low - start * each : high - start * each])


def _point_to_packed(
    model: Any, quantizer: Any, plain: Mapping[str, Any], found: Mapping[str, Mapping[str, LazyTensor]], folder: str
) -> None:
    """Give the quantized layers of a model without memory their library's weights, and these their places in files.

    Args:
        plain: weights by the path of their layer that the library made before anything was loaded.
        found: tensors by the name of their weight, as :class:`Collector` finds them.

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
            weight = torchao.empty_weight(quantizer, name, like)
        vars(weight).update({INITIALIZED: True})
        own_parameters(module)["weight"] = weight
        stored = stored_weight(module)
        assert isinstance(stored, QuantizedWeight)
        set_source(module, "weight", Packed(weight.shape, weight.dtype, parts))
        try:
            stored.located(parts, (module.out_features, module.in_features), None, torch.device("cpu"))
        except (ValueError, KeyError, AssertionError) as error:
            raise CheckpointError(f"{folder} does not hold {name} as {stored.kind.form}: {error}") from error
