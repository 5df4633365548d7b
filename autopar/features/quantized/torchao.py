"""Weights of torchao, int8 and float8 weight-only: numbers of 8 bits, and scales per row or per group of inputs.

The parameter is a tensor subclass of torchao with the shape and the dtype of the weight; numbers and scales are its
attributes. Shards are slices of such a tensor. With sharded outputs they are exact to the bit; with sharded inputs the
scales of rows are replicated.

This module never imports torchao: only code that has imported torchao can create its weights.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopar.compat.tensors import own_parameters
from autopar.errors import ConfigError
from autopar.features.quantized.stored import InFile, Piece, QuantizedWeight, largest
from autopar.layout import Layout
from autopar.stored import Kind

LIBRARY = "torchao.utils"  # imported by code that has created such a layer
_FORMATS = {"Int8Tensor": "torchao int8", "Float8Tensor": "torchao float8"}
_STEP = "_autopar_step"  # attribute of a layer whose weight does not show its step
_OF_INPUTS = ("act_quant_kwargs", "act_quant_scale", "act_quant_zero_point", "act_pre_scale")


def find(module: nn.Module) -> EightBitTensor | None:
    """Return the weight of a torchao layer, or None; raise ConfigError for a form that cannot be sharded."""
    library: Any = sys.modules.get(LIBRARY)
    weight = own_parameters(module).get("weight")
    if library is None or not isinstance(weight, library.TorchAOBaseTensor):
        return None
    kind, layer = type(weight).__name__, type(module).__name__
    inputs = any(getattr(weight, name, None) is not None for name in _OF_INPUTS)
    if kind not in _FORMATS or inputs or not isinstance(module, nn.Linear):
        raise ConfigError(
            f"torchao's {kind}{' with quantized inputs' * inputs} is not supported as the weight of a {layer}\n"
            "  Use Int8WeightOnlyConfig or Float8WeightOnlyConfig on linear layers."
        )
    return EightBitTensor(module)


def prepare(model: nn.Module, quantizer: Any) -> None:
    """Create the weights that transformers' ``quantizer`` would create, in a model without memory.

    Raises:
        ConfigError: The quantizer has different settings per layer, or quantizes a copy of the embedding.
    """
    settings = quantizer.quantization_config
    library: Any = sys.modules.get("torchao.quantization")
    if library is None or settings.quant_method != "torchao":
        return
    how = settings.get_apply_tensor_subclass()
    if isinstance(how, library.FqnToConfig) or settings.untie_embedding_weights:
        raise ConfigError(
            "TorchAoConfig with FqnToConfig or untie_embedding_weights is not supported with lazy loading\n"
            "  Load the model with transformers' from_pretrained."
        )
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and quantizer.param_needs_quantization(model, f"{path}.weight"):
            library.quantize_(module, how)


def empty_weight(quantizer: Any, name: str, parts: Mapping[str, torch.Tensor]) -> nn.Parameter:
    """Return the weight without memory for the given parts in a torchao file."""
    library: Any = importlib.import_module("torchao.prototype.safetensors.safetensors_support")
    path = name.rpartition(".")[0]
    held = {f"{path}.{key}": part for key, part in parts.items()}
    note = {name: quantizer.metadata[name], "tensor_names": json.dumps([name])}
    weights, _ = library.unflatten_tensor_state_dict(held, note)
    return nn.Parameter(weights[name], requires_grad=False)


class EightBitTensor(QuantizedWeight):
    """An ``Int8Tensor`` or a ``Float8Tensor`` as the weight of a linear layer."""

    def __init__(self, module: Any) -> None:
        self._module, self._weight = module, module.weight
        self.dtype = module.weight.dtype
        self.shape = tuple(module.weight.qdata.shape)
        self.block = (max(self._step[0], 1), max(self._step[1], 1))
        self.pending = module.weight.is_meta
        widths = [x.element_size() for name, x in self._held().items() if name != "qdata"]
        nbytes = functools.partial(_nbytes, step=self._step, beside=sum(widths))
        self.kind = Kind(_FORMATS[type(module.weight).__name__], self.block, False, nbytes)

    @property
    def _step(self) -> tuple[int, int]:
        """Number of outputs and of inputs per scale; 0 means all."""
        known: tuple[int, int] | None = vars(self._module).get(_STEP)
        return _step_of(self._weight) if known is None else known

    def pieces(self, layout: Layout | None = None) -> dict[str, Piece]:
        """Return numbers, ``[out, in]``, and scales and zero points, ``[out, 1]`` if each row has one."""
        return {name: Piece(x, (1, 1) if name == "qdata" else self._step) for name, x in self._held().items()}

    def open(
        self, small: Mapping[str, torch.Tensor], shape: tuple[int, int], layout: Layout | None
    ) -> dict[str, InFile]:
        self.shape = shape
        blocks = {name: (1, 1) if name == "qdata" else self._step for name in self._held()}
        sizes = {
            name: tuple(n // size if size else 1 for n, size in zip(shape, block, strict=True))
            for name, block in blocks.items()
        }
        return {name: InFile(f"_weight_{name}", sizes[name], block) for name, block in blocks.items()}

    def files(self, shape: tuple[int, int]) -> dict[str, Piece]:
        return {f"_weight_{name}": piece for name, piece in self.pieces().items()}

    def note(self, shape: tuple[int, int]) -> str:
        """Return class and settings of the weight in torchao's file format."""
        library: Any = importlib.import_module("torchao.prototype.safetensors.safetensors_utils")
        _, settings = self._weight.__tensor_flatten__()
        block = [size or every for size, every in zip(self._step, shape, strict=True)]
        full = type(self._weight).__tensor_unflatten__(self._held(), settings | {"block_size": block}, None, None)
        return json.dumps(full, cls=library.TensorSubclassAttributeJSONEncoder)

    def _held(self) -> dict[str, torch.Tensor]:
        names, _ = self._weight.__tensor_flatten__()
        return {name: getattr(self._weight, name) for name in names}

    def beside(self) -> dict[str, torch.Tensor]:
        """Return all tensors by their names in torchao."""
        return {} if self.pending else self._held()

    def put(self, shape: tuple[int, int], tensors: dict[str, torch.Tensor]) -> None:
        """Set the tensors of a weight of this shape."""
        weight, step = self._weight, self._step
        block = [size or all_of_it for size, all_of_it in zip(step, shape, strict=True)]
        _, settings = weight.__tensor_flatten__()
        made = type(weight).__tensor_unflatten__(tensors, settings | {"block_size": block}, None, None)
        if weight.is_meta and not made.is_meta:
            self._weight = weight = nn.Parameter(made, requires_grad=False)
            own_parameters(self._module)["weight"] = weight
        else:
            weight.data = made
        for name, tensor in tensors.items():  # ``.data =`` changes only the shape
            setattr(weight, name, tensor)
        weight.block_size, self.shape = block, shape
        vars(self._module).pop(_STEP, None)
        if _step_of(weight) != step:  # a single local group of inputs looks like a full row
            vars(self._module)[_STEP] = step

    def fill(self, values: torch.Tensor, layout: Layout | None, axis: Any) -> None:
        library, step = sys.modules["torchao.quantization"], self._step
        shape, kind = (values.shape[0], values.shape[1]), type(self._weight)
        if layout is not None and step[layout.dim] == 0:  # a scale also covers the numbers of other ranks
            dims = [dim for dim in (0, 1) if step[dim] == 0]
            most = largest(values.abs().amax(dims, keepdim=True).float(), axis).to(values.dtype)
            values = torch.cat([values, most.expand_as(values.narrow(layout.dim, 0, 1))], layout.dim)
        how = {"granularity": library.PerGroup(step[1]) if step[1] else library.PerRow()}
        if step == (0, 0):
            how = {"granularity": library.PerTensor()}
        if kind is library.Float8Tensor:
            how["float8_dtype"] = self._weight.qdata.dtype
        self._weight = nn.Parameter(kind.from_hp(values, **how), requires_grad=False)
        own_parameters(self._module)["weight"] = self._weight
        self.pending = False
        self.put(shape, self._held() | {"qdata": self._weight.qdata[: shape[0], : shape[1]].contiguous()})

    def check_dtype(self, path: str, dtype: torch.dtype) -> None:
        """Raise ConfigError if the weight was quantized from another dtype, which torchao keeps."""
        if self.dtype != dtype:
            raise ConfigError(
                f"the weight of {path} ({self.kind.form}) must be quantized from precision.dtype {dtype}, got "
                f"{self.dtype}\n  Load the model with dtype={dtype}."
            )

    def drop(self) -> None:
        self.put((0, 0), {name: x.new_empty(0, 0) for name, x in self._held().items()})

    def dequantized(self) -> torch.Tensor:
        return self._weight.dequantize()


def _nbytes(shape: tuple[int, int], layout: Layout | None, rank: int, *, step: tuple[int, int], beside: int) -> int:
    """Return the bytes of a shard: its numbers, and ``beside`` bytes per scale."""
    rows, columns = shape if layout is None else layout.local_shape(shape, rank)
    scales = (rows // step[0] if step[0] else 1) * (columns // step[1] if step[1] else 1)
    return rows * columns + scales * beside


def _step_of(weight: Any) -> tuple[int, int]:
    rows, columns = (0 if n == 1 else size for n, size in zip(weight.scale.shape, weight.block_size, strict=True))
    return rows, columns
