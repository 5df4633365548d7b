"""Quantized weights in files: folders of transformers, its quantization methods, and checkpoints.

Each rank reads its shard of the numbers and scales of quantized weights. transformers assembles the tensors of a weight
in one operation per library. During lazy loading, a :class:`Collector` replaces this operation and records the tensors,
after all renames. MXFP4 weights that become plain weights are read in shards too (:class:`Mxfp4`), because transformers
writes them into a full tensor, which lazy loading cannot track.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers.integrations.mxfp4 import Mxfp4Dequantize, convert_moe_packed_tensors
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from autopar.checkpoint.shards import ShardReader
from autopar.checkpoint.state import State
from autopar.compat.tensors import own_parameters
from autopar.compat.transformers import INITIALIZED
from autopar.deferred_init.files import set_source
from autopar.errors import CheckpointError, ConfigError
from autopar.features.quantized import torchao
from autopar.features.quantized.stored import Packed, QuantizedWeight
from autopar.plan.plan import Piece, TensorPlan
from autopar.storage.hugging_face import Sketch
from autopar.storage.lazy_tensor import Box, LazyTensor
from autopar.storage.safetensors_io import dtype_name
from autopar.stored import stored_weight, stored_weights
from autopar.swap import NotCopied

_SHARDED = ("bitsandbytes", "torchao")


class Quantizers:
    """Quantized models of transformers."""

    @staticmethod
    def check(what: str, method: str) -> None:
        """Raise ConfigError if weights quantized by ``method`` cannot be sharded; name an argument that dequantizes."""
        if method in _SHARDED:
            return
        instead = "Load the original weights, and quantize them with BitsAndBytesConfig or TorchAoConfig."
        if kind := _with_argument(method):
            instead = f"Dequantize them with from_pretrained(..., quantization_config={kind}(dequantize=True))."
        raise ConfigError(f"{what} has weights quantized by {method}, which autopar does not shard.\n  {instead}")

    @staticmethod
    def check_config(what: str, text: bytes) -> None:
        """Raise ConfigError if a ``config.json`` has quantized weights that cannot be sharded or dequantized."""
        try:
            method = json.loads(text)["quantization_config"]["quant_method"]
        except (ValueError, KeyError, TypeError):  # not quantized, or damaged, for which transformers raises
            return
        if not _with_argument(method):
            Quantizers.check(what, method)

    @staticmethod
    def read(original: Callable[..., Any], model: Any, config: Any) -> tuple[Callable[..., Any], Any]:
        """Return transformers' ``_load_pretrained_model`` and its config for a quantized model without memory."""
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
        """Return transformers' ``_load_pretrained_model`` for plain weights from quantized files."""

        def load(model: Any, tensors: Any, files: Any, config: Any, *rest: Any, **more: Any) -> Any:
            with _replaced(config, lambda one: isinstance(one, Mxfp4Dequantize), DequantizeMxfp4):
                return original(model, tensors, files, config, *rest, **more)

        return load


def _with_argument(method: str) -> str:
    """Return the name of a method's config class if transformers can dequantize its weights; else ``""``."""
    kind = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    return kind.__name__ if kind is not None and "dequantize" in inspect.signature(kind).parameters else ""


def _load_packed(
    load: Any, quantizer: Any, plain: Any, model: Any, tensors: Any, files: Any, config: Any, *rest: Any, **more: Any
) -> Any:
    """Load a model, and collect the tensors of quantized weights instead of reading them."""
    found: dict[str, dict[str, LazyTensor]] = {}
    with _replaced(config, lambda one: hasattr(one, "hf_quantizer"), functools.partial(Collector, found=found)):
        info, index = load(model, tensors, files, config, *rest, **more)
    if not info.conversion_errors and (config.ignore_mismatched_sizes or not info.mismatched_keys):  # else it raises
        _point_to_packed(model, quantizer, plain, found, str(config.pretrained_model_name_or_path))
    return info, index


@contextlib.contextmanager
def _replaced(config: Any, chosen: Callable[[Any], bool], stand_in: Callable[[Any], Any]) -> Iterator[None]:
    """Replace the chosen operations of transformers' conversions inside."""
    conversions = [one for one in config.weight_mapping or () if any(map(chosen, getattr(one, "operations", [])))]
    before = [one.operations for one in conversions]
    try:
        for conversion in conversions:
            conversion.operations = [stand_in(one) if chosen(one) else one for one in conversion.operations]
        yield
    finally:
        for conversion, operations in zip(conversions, before, strict=True):
            conversion.operations = operations


class Collector(NotCopied):
    """Replacement for transformers' operation that creates a quantized weight; records the tensors in ``found``."""

    def __init__(self, operation: Any, found: dict[str, dict[str, LazyTensor]]) -> None:
        self.hf_quantizer = operation.hf_quantizer  # with it transformers changes no dtype before the operation
        self.found = found

    def convert(self, tensors: dict[str, Any], full_layer_name: str, **_: Any) -> dict[str, Any]:
        """Record the tensors of a weight, and return its numbers; return an unquantized weight unchanged."""
        parts = {name: one[0] if isinstance(one, list) else one for name, one in tensors.items()}
        if len(parts) == 1:
            return parts if "weight" in parts else {full_layer_name: next(iter(parts.values()))}
        self.found[full_layer_name] = {name: sketch.lazy for name, sketch in parts.items()}
        return {full_layer_name: parts.get("weight", next(iter(parts.values())))}


class DequantizeMxfp4(NotCopied):
    """Replacement for the operation of transformers that dequantizes experts in MXFP4."""

    def __init__(self, operation: Any) -> None:
        self.hf_quantizer = operation.hf_quantizer  # as in Collector

    def convert(self, tensors: dict[str, Any], model: Any, full_layer_name: str, **_: Any) -> dict[str, Any]:
        """Return the plain weight as a lazy tensor that is read in ranges."""
        parts = {name.rpartition("_")[2]: one[0] if isinstance(one, list) else one for name, one in tensors.items()}
        made = Mxfp4(parts["blocks"].lazy, parts["scales"].lazy, model.get_parameter(full_layer_name).dtype)
        return {full_layer_name: Sketch(made)}


class Mxfp4(LazyTensor):
    """Plain weights of experts in MXFP4, ``[experts, inputs, outputs]``; each block of inputs of an output has a scale.

    Args:
        blocks: Two numbers per byte, ``[experts, outputs, blocks, bytes]``.
        scales: Exponents, ``[experts, outputs, blocks]``.
    """

    def __init__(self, blocks: LazyTensor, scales: LazyTensor, dtype: torch.dtype) -> None:
        if tuple(scales.shape) != tuple(blocks.shape[:-1]):
            raise ValueError(f"scales {list(scales.shape)} do not fit blocks {list(blocks.shape)}")
        experts, outputs, count, size = blocks.shape
        super().__init__((experts, count * size * 2, outputs), dtype, [blocks, scales])

    def read_into(self, out: torch.Tensor, box: Box) -> None:
        (blocks, scales), (experts, (low, high), outputs) = self.bases, box
        each = 2 * blocks.shape[-1]
        start, stop = low // each, -(-high // each)
        for place, expert in enumerate(range(*experts)):  # one at a time, since plain numbers take 4x the memory
            mine = ((expert, expert + 1), outputs, (start, stop))
            packed = blocks.read((*mine, (0, blocks.shape[-1])))
            plain = convert_moe_packed_tensors(packed, scales.read(mine), dtype=self.dtype)[0]
            out[place].copy_(plain[low - start * each : high - start * each])


def _point_to_packed(
    model: Any, quantizer: Any, plain: Mapping[str, Any], found: Mapping[str, Mapping[str, LazyTensor]], folder: str
) -> None:
    """Set the library's weights in quantized layers without memory, with their places in files.

    Args:
        plain: Path of a layer -> weight that the library created before loading.
        found: Name of a weight -> its tensors, from :class:`Collector`.

    Raises:
        CheckpointError: A weight lacks its scales, or its scales have a wrong shape.
    """
    lacking = [path for path in plain if f"{path}.weight" not in found]
    if lacking:
        raise CheckpointError(
            f"{folder} does not hold the scales of {len(lacking)} weights that are quantized according to its config, "
            f"such as {lacking[0]}.weight"
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


class Base:
    """The part ``base`` of a checkpoint, with bytes and scales in their library's format.

    Tensors are viewed with one dim for the outputs and one for the inputs. Saves of adapters only omit this part.
    """

    @staticmethod
    def collect(model: nn.Module, state: State) -> tuple[list[tuple[str, TensorPlan, torch.Tensor]], dict[str, str]]:
        """Return weight name, plan and tensor of each local piece, and notes for file headers."""
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
                shape = list(tensor.shape)
                if cut is not None:
                    shape[cut.dim] = cut.size
                count = math.prod(shape)
                sizes = ((count, 1) if flat == 2 else (count,)) if flat else tuple(shape)
                steps = tuple(torch.empty(sizes, device="meta").stride())
                pieces = (Piece(f"{saved}{name}", sizes, steps, 0),)
                full = f"{path}.{name}"
                plan = TensorPlan(full, tuple(shape), dtype_name(tensor.dtype), cut, pieces=pieces)
                tensors.append((weight.name, plan, tensor))
        return tensors, notes

    @staticmethod
    def restore(model: nn.Module, state: State, shards: ShardReader, *, check: bool = False) -> None:
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
