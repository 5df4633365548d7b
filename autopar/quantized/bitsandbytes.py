"""Weights of bitsandbytes: in 8 bit, or :mod:`in 4 bit <autopar.quantized.four_bit>`.

In 8 bit (Dettmers et al., "LLM.int8()", 2022) each output has one scale. The layer's inputs are quantized, too, with a
scale for each token, so ranks that have some of the inputs need the largest one of all (:meth:`EightBit.whole_rows`).

bitsandbytes is never imported here: a layer can only be its own where somebody else has imported it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autopar.foreign.modules import own_parameters
from autopar.layout import Layout
from autopar.quantized.four_bit import IN_4_BIT, FourBit, config_of, functional, with_memory
from autopar.quantized.stored import InFile, Kind, Part, Piece, ToFile

__all__ = ["KINDS", "LIBRARY", "EightBit", "FourBit", "find"]

LIBRARY = "bitsandbytes.nn.modules"  # imported by whoever has made such a layer
_PADDING = 4  # columns; the product of 8-bit matrices wants multiples of 4


def find(module: nn.Module) -> FourBit | EightBit | None:
    """Return the weight of a layer of bitsandbytes; None of any other layer."""
    library = sys.modules.get(LIBRARY)
    if library is None or not isinstance(module, library.Linear4bit | library.Linear8bitLt):
        return None
    weight: Any = own_parameters(module).get("weight")
    if isinstance(weight, library.Params4bit):
        return FourBit(module)
    quantized = isinstance(weight, library.Int8Params) and not weight.has_fp16_weights
    return EightBit(module) if quantized and (weight.is_meta or weight.dtype == torch.int8) else None


class EightBit:
    """The weight of a ``Linear8bitLt``. The shard of a rank that has some of the inputs has four columns more, of 0."""

    hidden: tuple[str, ...] = ("state",)
    dtype: torch.dtype | None = None
    format = "bitsandbytes int8"
    block: tuple[int, int] = (1, 1)

    def __init__(self, module: Any) -> None:
        self._module, self._weight = module, module.weight
        self.shape: tuple[int, int] = (module.weight.shape[0], min(module.weight.shape[1], module.in_features))
        self.pending = module.weight.is_meta

    @property
    def kind(self) -> Kind:
        """Return the form without the weight."""
        return KINDS["int8"]

    @property
    def _scales(self) -> torch.Tensor:
        held: torch.Tensor = self._module.state.SCB if self._weight.SCB is None else self._weight.SCB
        return held

    def pieces(self, layout: Layout | None = None) -> dict[str, Piece]:
        """Return numbers, ``[out, in]``, and scales, ``[out, 1]``."""
        numbers = self._weight.data[:, : self.shape[1]]
        return {"numbers": Piece(numbers, self.block), "scales": Piece(self._scales.view(-1, 1), (1, 0))}

    def open(
        self, small: Mapping[str, torch.Tensor], shape: tuple[int, int], layout: Layout | None
    ) -> dict[str, InFile]:
        """Return where numbers and scales lie."""
        self.shape = shape
        return {"numbers": InFile("weight", shape, self.block), "scales": InFile("SCB", (shape[0], 1), (1, 0))}

    def files(self, shape: tuple[int, int]) -> dict[str, ToFile]:
        """Return numbers, scales, and that rows are not tiled."""
        numbers, scales = self.pieces().values()
        row_major = ToFile(torch.tensor(0, dtype=torch.uint8))
        return {"weight": ToFile(*numbers), "SCB": ToFile(*scales, flat=1), "weight_format": row_major}

    def note(self, shape: tuple[int, int]) -> str:
        """Return "": all of it is in tensors."""
        return ""

    def take(self, tensors: dict[str, torch.Tensor], layout: Layout | None, rank: int) -> None:
        """Take the pieces of a shard."""
        rows, columns = self.shape if layout is None else layout.local_shape(self.shape, rank)
        self.put((rows, columns), tensors)

    def beside(self) -> dict[str, torch.Tensor]:
        """Return the scales."""
        return {} if self.pending else {"scales": self._scales}

    def put(self, shape: tuple[int, int], tensors: dict[str, torch.Tensor]) -> None:
        """Take numbers and scales of a weight of this shape."""
        numbers, state = tensors["numbers"], self._module.state
        if shape[1] < self.shape[1]:
            numbers = nn.functional.pad(numbers, (0, _PADDING))
        self._weight = with_memory(self._module, numbers)
        self._weight.data = numbers
        self._weight.CB = self._weight.SCB = None
        state.CB, state.SCB = numbers, tensors["scales"].reshape(-1)
        self.shape = shape

    def fill(self, values: torch.Tensor, part: Part) -> None:
        """Quantize a weight that is this rank's part of one that has no memory yet."""
        library, layout, shape = sys.modules[LIBRARY], part.layout, (values.shape[0], values.shape[1])
        values = values.to(torch.float16)
        if layout is not None and layout.dim == 1:  # the scale of an output is that of all its inputs
            most = part.largest(values.abs().amax(1, keepdim=True).float())
            values = torch.cat([values, most.to(values.dtype)], 1)
            self.shape = (shape[0], layout.size)
        numbers, scales, _ = functional().int8_vectorwise_quant(values)
        weight = library.Int8Params(numbers, requires_grad=False, has_fp16_weights=False)
        own_parameters(self._module)["weight"] = self._weight = weight
        self.pending = False
        self.put(shape, {"numbers": numbers[:, : shape[1]].contiguous(), "scales": scales})

    def keep_form(self, keep: bool) -> None:
        """Do nothing: it has one form."""

    def drop(self) -> None:
        """Free numbers and scales."""
        self._weight.data = self._weight.data.new_empty(0)
        self._weight.CB = self._weight.SCB = self._module.state.CB = self._module.state.SCB = None

    def dequantized(self) -> torch.Tensor:
        """Return the weight, ``[out, in]``, in fp32."""
        numbers = self._weight.data[:, : self.shape[1]]
        return numbers.float() * (self._scales.view(-1, 1) / 127.0)

    def whole_rows(self, x: torch.Tensor, largest: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return inputs of which each token has the scale that it has with all inputs, ``[..., in/tp + 4]``.

        Args:
            x: ``[..., in/tp]``; a token's scale is its largest number that counts as no outlier.
            largest: returns the largest numbers of all ranks.
        """
        size, threshold = x.detach().to(torch.float16).abs(), self._module.state.threshold
        if threshold > 0:
            size = size.masked_fill(size >= threshold, 0)
        most = largest(size.amax(-1, keepdim=True).float()).to(x.dtype)  # [..., 1]
        return torch.cat([x, most, most.new_zeros(*x.shape[:-1], _PADDING - 1)], -1)


def _eight_bit(shape: tuple[int, int], layout: Layout | None, rank: int) -> int:
    """Return the bytes of a shard: of numbers, of four columns more where inputs are cut, and of scales in fp32."""
    rows, columns = shape if layout is None else layout.local_shape(shape, rank)
    return rows * (columns + (_PADDING if columns < shape[1] else 0)) + 4 * rows


KINDS = {
    **IN_4_BIT,
    "int8": Kind(EightBit.format, EightBit.block, True, _eight_bit, functools.partial(config_of, load_in_8bit=True)),
}
"""The forms that a plan can be made for without any weights, by the name that a user gives them."""
