"""Half-precision parameters, and the fp32 weights that the optimizer works on instead of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from autopar.foreign.transformers import fp32_modules

__all__ = ["DTYPES", "MasterWeights", "fp32_gradients", "keeps_fp32", "to_fp32", "to_half"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MasterWeights:
    """The fp32 master weight of each half-precision parameter that this rank steps.

    A parameter whose half-precision value was changed by somebody else (a loaded checkpoint) wins: what differs from
    the rounded fp32 weight is taken over at the next step.
    """

    def __init__(self) -> None:
        self._weights: dict[torch.Tensor, torch.Tensor] = {}

    def keep(self, parameter: torch.Tensor, weight: torch.Tensor) -> None:
        """Register the fp32 master weight of a half-precision parameter."""
        self._weights[parameter] = weight

    def of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the fp32 weight of ``parameter`` as it is at this moment; None if that is not half-precision.

        Made from the parameter if there was none (it was on the meta device).
        """
        if parameter.dtype not in DTYPES.values():
            return None
        weight = self._weights.get(parameter)
        value = parameter.detach()
        if weight is None or weight.device != value.device:
            weight = self._weights[parameter] = value.float()
        else:
            weight.copy_(torch.where(weight.to(value.dtype) == value, weight, value.float()))
        return weight


@torch.no_grad()
def to_half(
    model: nn.Module,
    inner: nn.Module,
    dtype: torch.dtype,
    masters: MasterWeights,
    keep: Callable[[nn.Parameter], bool],
) -> None:
    """Turn the floating parameters and saved buffers of ``model`` into ``dtype``, in place; ``id(parameter)`` stays.

    What transformers keeps in fp32 when it loads the model in that dtype stays or becomes fp32, and so do buffers that
    are not saved (rotary frequencies).

    Args:
        masters: gets the fp32 weights, unrounded.
        keep: whether this rank steps a parameter, and so needs its fp32 weight.
    """
    stays_fp32 = keeps_fp32(inner, dtype)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        value = parameter.data
        _replace(parameter, value.float() if stays_fp32(name) else value.to(dtype))
        if parameter.dtype == dtype and not value.is_meta and keep(parameter):
            masters.keep(parameter, value.float() if value.dtype != torch.float32 else value)
    saved = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point() and not stays_fp32(name):
            buffer.data = buffer.data.to(dtype)
    pipeline = vars(model).get("_autopar_pipeline")
    if pipeline is not None:  # what stands for the weights of other stages
        pipeline.released.halve(dtype, stays_fp32)


def _replace(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Give a parameter another value, and its gradient that one's dtype."""
    gradient, parameter.grad = parameter.grad, None
    parameter.data = value
    if gradient is not None:
        parameter.grad = gradient.to(value.dtype)


@torch.no_grad()
def to_fp32(model: nn.Module, weights: Mapping[int, torch.Tensor | None]) -> None:
    """Turn half-precision parameters and buffers of ``model`` into fp32, in place.

    Args:
        weights: ``id(parameter)`` -> its master weight; what has none becomes fp32 as it is.
    """
    for parameter in model.parameters():
        if parameter.dtype in DTYPES.values():
            weight = weights.get(id(parameter))
            _replace(parameter, parameter.data.float() if weight is None else weight)
    for buffer in model.buffers():
        if buffer.dtype in DTYPES.values():
            buffer.data = buffer.data.float()


@contextmanager
def fp32_gradients(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Accumulate gradients of half-precision parameters in fp32 inside, on those that are there too; they stay fp32.

    Afterwards a gradient may have any dtype: without one, torch makes the next one in the parameter's.
    """
    half = [p for p in parameters if p.requires_grad and p.dtype in DTYPES.values()]
    for parameter in half:
        gradient, parameter.grad = parameter.grad, None
        parameter.grad_dtype = torch.float32
        if gradient is not None:
            parameter.grad = gradient.float()
    try:
        yield
    finally:
        for parameter in half:
            parameter.grad_dtype = None


def keeps_fp32(inner: nn.Module, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return whether transformers keeps a parameter of a name in fp32."""
    if not isinstance(inner, PreTrainedModel):
        return lambda name: False
    names = fp32_modules(inner, strict=True)
    if dtype == torch.float16:
        names |= fp32_modules(inner, strict=False)
    if not names:
        return lambda name: False
    listed = "|".join(re.escape(name).replace(r"\*", r"[^.]*") for name in sorted(names))
    pattern = re.compile(rf"(?:^|\.)(?:{listed})(?:\.|$)")
    return lambda name: pattern.search(name) is not None
