"""Weights of bitsandbytes in 8 bit, and in 4 bit, also with quantized scales.

In 8 bit (Dettmers et al., "LLM.int8()", 2022) each output has one scale. The layer also quantizes its inputs, with one
scale per token, so with sharded inputs the ranks need the largest scale of all (:meth:`EightBit.gathered_rows`).

In 4 bit (NF4 and FP4; Dettmers et al., "QLoRA", 2023) a block of 64 numbers along the inputs has one scale, and two
numbers share a byte. Scales may be quantized too, in groups of 256 with one scale each. If ranks cannot hold full
groups, their scales are dequantized: the weight stays identical to the bit. The quantized codes stay in main memory,
to restore the full weight.

This module never imports bitsandbytes: only code that has imported bitsandbytes can create its layers.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from autopar.compat.tensors import own_parameters
from autopar.distributed.axis import Axis
from autopar.distributed.collectives import all_gather
from autopar.errors import ConfigError
from autopar.features.quantized.stored import InFile, Piece, QuantizedWeight, RowParallelStored, largest
from autopar.layout import Layout
from autopar.stored import Kind

_BLOCK = 64  # numbers that share a scale
_GROUP = 256  # scales that are quantized together
_CODES = "_autopar_codes"  # attribute of a state: the state with quantized scales, for a shard with partial groups
_IN_FILES = {"bytes": "weight", "scales": "weight.absmax", "groups": "weight.nested_absmax"}


def functional() -> Any:
    """Return the functions of bitsandbytes."""
    return sys.modules["bitsandbytes.functional"]


def with_memory(module: nn.Module, data: torch.Tensor) -> Any:
    """Return the weight of a layer; a new object if it had no memory."""
    weight: Any = own_parameters(module)["weight"]
    if weight.is_meta and not data.is_meta:
        made = type(weight)(data, requires_grad=False)
        vars(made).update(vars(weight))
        own_parameters(module)["weight"] = weight = made
    return weight


class FourBit(QuantizedWeight):
    """The weight of a ``Linear4bit``."""

    hidden = ("quant_state",)

    def __init__(self, module: Any) -> None:
        self._module, self._weight = module, module.weight
        self._opened: Any = None  # the state in a file, without its scales
        state = getattr(module.weight, "quant_state", None) or module.quant_state
        if state is None and not module.weight.is_meta:
            raise ConfigError("a Linear4bit must be quantized before initialize\n  Move the model to a device first.")
        if module.weight.quant_storage != torch.uint8:
            raise ConfigError(
                f"bnb_4bit_quant_storage must be torch.uint8, its default, got {module.weight.quant_storage}\n"
                "  Remove it; quantized weights in a folder must be quantized again."
            )
        if getattr(state, "packing_format_for_cpu", False):
            raise ConfigError(
                "a Linear4bit must not be evaluated before initialize, since bitsandbytes then packs its weight\n"
                "  Load the model again, and call autopar.initialize before evaluating it."
            )
        nested = module.weight.compress_statistics if state is None else state.nested
        shape = module.weight.shape if state is None else state.shape
        self.shape, self.block = (shape[0], shape[1]), (1, module.weight.blocksize)
        self.kind = KINDS[f"{module.weight.quant_type}{'-double' * nested}"]
        self.pending = state is None

    @property
    def _state(self) -> Any:
        return self._opened or getattr(self._weight, "quant_state", None) or self._module.quant_state

    def pieces(self, layout: Layout | None = None) -> dict[str, Piece]:
        """Return bytes, ``[out, in/64, 32]``, scales, ``[out, in/64]``, and the groups of quantized scales."""
        state = self._state
        quantized = vars(state).get(_CODES) or state
        held = {"weight": self._weight.data, "weight.absmax": quantized.absmax.to(self._weight.device)}
        if quantized.nested:
            held["weight.nested_absmax"] = quantized.state2.absmax
        places = self._places(layout, full_groups=quantized is state)
        return {name: Piece(held[place.name].view(place.shape), place.block) for name, place in places.items()}

    def _places(self, layout: Layout | None, *, full_groups: bool = True) -> dict[str, InFile]:
        (rows, columns), state = self.shape, self._state
        blocks, width = columns // state.blocksize, state.blocksize
        found = {"bytes": InFile("weight", (rows, blocks, width // 2), self.block)}
        scales = InFile("weight.absmax", (rows, blocks), self.block)
        if not (state.nested or not full_groups):
            return found | {"scales": scales}
        groups = _groups(rows, blocks, width)
        if full_groups and groups is not None and (layout is None or _divides(groups[1], layout)):
            return found | {"scales": scales, "groups": InFile("weight.nested_absmax", *groups)}
        every = InFile("weight.nested_absmax", (-1,), (0, 0))
        return found | {"scales" if layout is None else "codes": scales, "groups": every}

    def open(
        self, small: Mapping[str, torch.Tensor], shape: tuple[int, int], layout: Layout | None
    ) -> dict[str, InFile]:
        """Return the places of bytes and scales, and read the small tensors."""
        unread = {name: torch.empty(0) for name in ("absmax", "nested_absmax") if f"weight.{name}" not in small}
        if "weight.nested_quant_map" not in small:
            del unread["nested_absmax"]
        self._opened = state = functional().QuantState.from_dict({**small, **unread}, small["weight.quant_map"].device)
        self.shape, count = shape, -(-shape[0] * shape[1] // state.blocksize)
        if tuple(state.shape) != shape:
            raise ValueError(f"expected shape {list(shape)}, as in the model, got {list(state.shape)}")
        if layout is not None:
            return self._places(layout)
        found = {"bytes": InFile("weight", (-(-shape[0] * shape[1] // 2), 1), (0, 0))}
        found["scales"] = InFile("weight.absmax", (count,), (0, 0))
        if state.nested:
            found["groups"] = InFile("weight.nested_absmax", (-(-count // state.state2.blocksize),), (0, 0))
        return found

    def files(self, shape: tuple[int, int]) -> dict[str, Piece]:
        """Return bytes, scales, groups, and the other tensors of the full weight's state."""
        state, found = vars(self._state).get(_CODES) or self._state, {"weight": Piece(self._weight.data)}
        if shape[1] % state.blocksize == 0:
            pieces = self.pieces().items()
            found = {_IN_FILES[name]: piece._replace(flat=1 + (name == "bytes")) for name, piece in pieces}
        full = copy.copy(state)
        full.shape = torch.Size(shape)
        rest = full.as_dict(packed=True).items()
        return found | {f"weight.{name}": Piece(tensor) for name, tensor in rest if f"weight.{name}" not in found}

    def take(self, tensors: dict[str, torch.Tensor], layout: Layout | None, rank: int) -> None:
        """Set the pieces of a shard; scales whose groups span several ranks are dequantized."""
        if layout is not None and "codes" in tensors:
            state, blocks, codes = self._state, self.shape[1] // self._state.blocksize, tensors["codes"]
            places = [torch.arange(count, device=codes.device) for count in (self.shape[0], blocks)]
            held = Layout(0, layout.in_steps(self.block[layout.dim]).blocks)
            places[layout.dim] = held.shard(places[layout.dim], rank)
            group = (places[0][:, None] * blocks + places[1]) // state.state2.blocksize  # [out, in/64] of the shard
            numbers = state.state2.code[codes.int()] * tensors["groups"].reshape(-1)[group] + state.offset
            tensors = tensors | {"scales": numbers}
        super().take(tensors, layout, rank)

    def beside(self) -> dict[str, torch.Tensor]:
        """Return the scales, with groups and mean if the scales are quantized."""
        if self.pending:
            return {}
        state = self._state
        found = {"scales": state.absmax}
        return found | {"groups": state.state2.absmax, "mean": state.offset} if state.nested else found

    def put(self, shape: tuple[int, int], tensors: dict[str, torch.Tensor]) -> None:
        """Set bytes, scales and groups of a weight of this shape."""
        old, library = self._state, functional()
        quantized, state2 = vars(old).get(_CODES) or old, None
        if "groups" in tensors:
            kept = quantized.state2
            state2 = library.QuantState(
                tensors["groups"].reshape(-1), code=kept.code, blocksize=kept.blocksize, dtype=kept.dtype
            )

        def made(scales: torch.Tensor, state2: Any) -> Any:
            return library.QuantState(
                scales.reshape(-1),
                shape=torch.Size(shape),
                code=old.code,
                blocksize=old.blocksize,
                quant_type=old.quant_type,
                dtype=old.dtype,
                offset=None if state2 is None else quantized.offset,
                state2=state2,
            )

        codes = tensors.get("codes")
        state = made(tensors["scales"], state2 if codes is None else None)
        if codes is not None:
            vars(state)[_CODES] = made(codes.cpu(), state2)
        self._weight = with_memory(self._module, tensors["bytes"])
        self._weight.data = tensors["bytes"].reshape(-1, 1)
        self._weight.bnb_quantized, self._weight.blocksize = True, state.blocksize
        self._weight.module = self._module  # in a copied model it still is the original layer
        self._weight.quant_state = self._module.quant_state = state
        self._weight.compress_statistics, self._weight.quant_type = state.nested, state.quant_type
        self.shape, self._opened = shape, None

    def keep_form(self, keep: bool) -> None:
        """Prevent evaluation on CPUs with AVX512-BF16 from packing the weight, which would block gradients."""
        may = getattr(sys.modules["bitsandbytes.nn.modules"], "has_avx512bf16", bool)
        self._module.support_avx512bf16_for_cpu = not keep and may()

    def fill(self, values: torch.Tensor, layout: Layout | None, axis: Any) -> None:
        library, then = sys.modules["bitsandbytes.nn.modules"], self._weight
        nested = then.compress_statistics and layout is not None
        weight = library.Params4bit(
            values,
            requires_grad=False,
            blocksize=then.blocksize,
            compress_statistics=then.compress_statistics and not nested,
            quant_type=then.quant_type,
            quant_storage=then.quant_storage,
            module=self._module,
        ).to(values.device)
        own_parameters(self._module)["weight"] = self._weight = weight
        self.pending, self.shape = False, (values.shape[0], values.shape[1])
        if nested:
            self._nest(layout, axis)

    def _nest(self, layout: Any, axis: Any) -> None:
        """Quantize the scales with the statistics of the full weight."""
        state, (rows, columns) = self._state, self.shape
        blocks, steps = columns // state.blocksize, layout.in_steps(self.block[layout.dim])
        scales = all_gather(state.absmax.view(rows, blocks), axis, steps)  # [out, in/64] of the full weight
        mean = scales.mean()
        codes, state2 = functional().quantize_blockwise(scales.reshape(-1) - mean, blocksize=_GROUP)
        state.nested, state.state2, state.offset = True, state2, mean
        self.shape = (scales.shape[0], scales.shape[1] * state.blocksize)
        held = {"scales": codes, "codes": codes, "groups": state2.absmax}
        tensors = {"bytes": self._weight.data}
        for name, place in self._places(layout).items():
            if name in held:
                step = place.block[layout.dim]
                tensor = held[name].view(place.shape)
                tensors[name] = layout.in_steps(step).shard(tensor, axis.rank) if step else tensor
        self.take(tensors, layout, axis.rank)

    def drop(self) -> None:
        self._weight.data = self._weight.data.new_empty(0)
        self._weight.quant_state = self._module.quant_state = None

    def dequantized(self) -> torch.Tensor:
        return functional().dequantize_4bit(self._weight.data, self._state)


def _groups(rows: int, blocks: int, width: int) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return shape and block of the groups of ``[rows, blocks]`` scales; None if some groups are not rectangular."""
    if blocks % _GROUP == 0:
        return (rows, blocks // _GROUP), (1, _GROUP * width)
    if _GROUP % blocks == 0 and rows * blocks % _GROUP == 0:
        return (rows * blocks // _GROUP, 1), (_GROUP // blocks, blocks * width)
    return None


def _four_bit(shape: tuple[int, int], layout: Layout | None, rank: int, *, nested: bool) -> int:
    """Return the bytes of a shard: 4-bit numbers, and scales in fp32 or quantized (with groups and mean)."""
    rows, columns = shape if layout is None else layout.local_shape(shape, rank)
    packed, scales = -(-rows * columns // 2), -(-rows * columns // _BLOCK)
    if not nested:
        return packed + 4 * scales
    if layout is None:
        return packed + scales + 4 * -(-scales // _GROUP) + 4
    groups = _groups(shape[0], shape[1] // _BLOCK, _BLOCK)
    if groups is None or not _divides(groups[1], layout):
        return packed + 4 * scales
    held, step = list(groups[0]), groups[1][layout.dim]
    held[layout.dim] = layout.in_steps(step).local_size(rank)
    return packed + scales + 4 * held[0] * held[1] + 4


def _divides(block: tuple[int, int], layout: Layout) -> bool:
    try:
        layout.in_steps(block[layout.dim])
    except ValueError:
        return False
    return True


def _kind_of(name: str, nested: bool) -> Kind:
    how = {"load_in_4bit": True, "bnb_4bit_quant_type": name, "bnb_4bit_use_double_quant": nested}
    form = f"bitsandbytes {name}{' with quantized scales' * nested}"
    nbytes, config = functools.partial(_four_bit, nested=nested), functools.partial(BitsAndBytesConfig, **how)
    return Kind(form, (1, _BLOCK), False, nbytes, config)


LIBRARY = "bitsandbytes.nn.modules"  # imported by code that has created such a layer
_PADDING = 4  # columns; the product of 8-bit matrices needs multiples of 4


def find(module: nn.Module) -> FourBit | EightBit | None:
    """Return the weight of a layer of bitsandbytes; None for any other layer."""
    library = sys.modules.get(LIBRARY)
    if library is None or not isinstance(module, library.Linear4bit | library.Linear8bitLt):
        return None
    weight: Any = own_parameters(module).get("weight")
    if isinstance(weight, library.Params4bit):
        return FourBit(module)
    quantized = isinstance(weight, library.Int8Params) and not weight.has_fp16_weights
    return EightBit(module) if quantized and (weight.is_meta or weight.dtype == torch.int8) else None


class EightBit(QuantizedWeight):
    """The weight of a ``Linear8bitLt``. A shard of the inputs has four additional columns of zeros."""

    hidden = ("state",)

    def __init__(self, module: Any) -> None:
        self._module, self._weight = module, module.weight
        self.shape = (module.weight.shape[0], min(module.weight.shape[1], module.in_features))
        self.pending, self.kind = module.weight.is_meta, KINDS["int8"]

    @property
    def _scales(self) -> torch.Tensor:
        return self._module.state.SCB if self._weight.SCB is None else self._weight.SCB

    def pieces(self, layout: Layout | None = None) -> dict[str, Piece]:
        """Return numbers, ``[out, in]``, and scales, ``[out, 1]``."""
        numbers = self._weight.data[:, : self.shape[1]]
        return {"numbers": Piece(numbers, self.block), "scales": Piece(self._scales.view(-1, 1), (1, 0))}

    def open(
        self, small: Mapping[str, torch.Tensor], shape: tuple[int, int], layout: Layout | None
    ) -> dict[str, InFile]:
        self.shape = shape
        return {"numbers": InFile("weight", shape, self.block), "scales": InFile("SCB", (shape[0], 1), (1, 0))}

    def files(self, shape: tuple[int, int]) -> dict[str, Piece]:
        """Return numbers, scales, and the code of the row-major format."""
        numbers, scales = self.pieces().values()
        row_major = Piece(torch.tensor(0, dtype=torch.uint8))
        return {"weight": numbers, "SCB": scales._replace(flat=1), "weight_format": row_major}

    def layer_class(self, rule: str) -> Any:
        return RowParallelEightBit if rule == "row" else super().layer_class(rule)

    def beside(self) -> dict[str, torch.Tensor]:
        return {} if self.pending else {"scales": self._scales}

    def put(self, shape: tuple[int, int], tensors: dict[str, torch.Tensor]) -> None:
        """Set numbers and scales of a weight of this shape."""
        numbers, state = tensors["numbers"], self._module.state
        if shape[1] < self.shape[1]:
            numbers = nn.functional.pad(numbers, (0, _PADDING))
        self._weight = with_memory(self._module, numbers)
        self._weight.data = numbers
        self._weight.CB = self._weight.SCB = None
        state.CB, state.SCB = numbers, tensors["scales"].reshape(-1)
        self.shape = shape

    def fill(self, values: torch.Tensor, layout: Layout | None, axis: Any) -> None:
        shape = (values.shape[0], values.shape[1])
        values = values.to(torch.float16)
        if layout is not None and layout.dim == 1:  # the scale of an output covers the inputs of all ranks
            most = largest(values.abs().amax(1, keepdim=True).float(), axis)
            values = torch.cat([values, most.to(values.dtype)], 1)
            self.shape = (shape[0], layout.size)
        numbers, scales, _ = functional().int8_vectorwise_quant(values)
        weight = sys.modules[LIBRARY].Int8Params(numbers, requires_grad=False, has_fp16_weights=False)
        own_parameters(self._module)["weight"] = self._weight = weight
        self.pending = False
        self.put(shape, {"numbers": numbers[:, : shape[1]].contiguous(), "scales": scales})

    def drop(self) -> None:
        self._weight.data = self._weight.data.new_empty(0)
        self._weight.CB = self._weight.SCB = self._module.state.CB = self._module.state.SCB = None

    def dequantized(self) -> torch.Tensor:
        """Return the weight, ``[out, in]``, in fp32."""
        numbers = self._weight.data[:, : self.shape[1]]
        return numbers.float() * (self._scales.view(-1, 1) / 127.0)

    def gathered_rows(self, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        """Return ``x`` with additional columns, ``[..., in/tp + 4]``, so that tokens get the scale of all their inputs.

        Args:
            x: Local inputs, ``[..., in/tp]``; the scale of a token is its largest number below the outliers.
            axis: Axis over which the inputs are sharded.
        """
        size, threshold = x.detach().to(torch.float16).abs(), self._module.state.threshold
        if threshold > 0:
            size = size.masked_fill(size >= threshold, 0)
        most = largest(size.amax(-1, keepdim=True).float(), axis).to(x.dtype)  # [..., 1]
        return torch.cat([x, most, most.new_zeros(*x.shape[:-1], _PADDING - 1)], -1)


class RowParallelEightBit(RowParallelStored):
    """A layer that quantizes its sharded inputs, with the scale of each token over all inputs."""

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = super()._multiply(EightBit(self).gathered_rows(x, self.tp), weight, bias)
        # On a GPU it is a view from bitsandbytes' autograd function, which must not be summed in place.
        return y.clone() if y.requires_grad else y


def _eight_bit(shape: tuple[int, int], layout: Layout | None, rank: int) -> int:
    """Return the bytes of a shard: numbers, four additional columns for sharded inputs, and scales in fp32."""
    rows, columns = shape if layout is None else layout.local_shape(shape, rank)
    return rows * (columns + (_PADDING if columns < shape[1] else 0)) + 4 * rows


_FOUR = {f"{name}{'-double' * nested}": _kind_of(name, nested) for name in ("nf4", "fp4") for nested in (False, True)}
_INT8 = functools.partial(BitsAndBytesConfig, load_in_8bit=True)
KINDS = {**_FOUR, "int8": Kind("bitsandbytes int8", EightBit.block, True, _eight_bit, _INT8)}
"""Name of a form in commands -> form, to plan a model without weights."""
