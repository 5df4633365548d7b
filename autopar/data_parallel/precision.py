"""Half precision: conversion of a model, the optimizer's fp32 master weights, and the scale of the loss."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.compat.transformers import fp32_modules
from autopar.config import ParallelConfig
from autopar.distributed.axis import Axis
from autopar.distributed.failures import waiting
from autopar.distributed.gloo_collectives import all_reduce
from autopar.distributed.mesh import MPU

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MasterWeights:
    """The fp32 master weights of the half-precision parameters that this rank steps.

    If a half-precision value has changed (a loaded checkpoint), it replaces the fp32 weight at the next step.

    Args:
        device: The device of the fp32 weights; by default the device of each parameter.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._weights: dict[torch.Tensor, torch.Tensor] = {}

    def keep(self, parameter: torch.Tensor, weight: torch.Tensor) -> None:
        """Register the fp32 master weight of a half-precision parameter."""
        self._weights[parameter] = weight if self._device is None else weight.to(self._device)

    def of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the current fp32 weight of a half-precision parameter; None for other parameters."""
        if parameter.dtype not in DTYPES.values():
            return None
        weight = self._weights.get(parameter)
        value = parameter.detach() if self._device is None else parameter.detach().to(self._device)
        if weight is None or weight.device != value.device:
            weight = self._weights[parameter] = value.float()
            return weight
        rounded = weight.to(value.dtype)
        if value.device.type != "cpu" or not torch.equal(rounded, value):  # on a GPU the comparison would wait
            weight.copy_(torch.where(rounded == value, weight, value.float()))
        return weight


@torch.no_grad()
def to_half(
    model: nn.Module,
    inner: nn.Module,
    dtype: torch.dtype,
    masters: MasterWeights,
    keep: Callable[[nn.Parameter], bool],
) -> None:
    """Convert the floating-point parameters and persistent buffers of ``model`` to ``dtype``, in place.

    Parameters that the library of the model keeps in fp32 become fp32. Buffers that are not saved (rotary frequencies)
    do not change.

    Args:
        masters: The fp32 weights, which receive the unrounded values.
        keep: A function that returns whether this rank steps a parameter, and so needs its fp32 weight.
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
    if pipeline is not None:  # placeholders for the weights of other stages
        pipeline.released.halve(dtype, stays_fp32)


def _replace(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the value of a parameter, and convert its gradient to the new dtype."""
    gradient, parameter.grad = parameter.grad, None
    parameter.data = value
    if gradient is not None:
        parameter.grad = gradient.to(value.dtype)


@torch.no_grad()
def to_fp32(model: nn.Module, weights: Mapping[int, torch.Tensor | None]) -> None:
    """Convert half-precision parameters and buffers of ``model`` to fp32 in place; ``weights``: id -> master weight."""
    for parameter in model.parameters():
        if parameter.dtype in DTYPES.values():
            weight = weights.get(id(parameter))
            _replace(parameter, (parameter.data if weight is None else weight).to(parameter.device, torch.float32))
    for buffer in model.buffers():
        if buffer.dtype in DTYPES.values():
            buffer.data = buffer.data.float()


@contextmanager
def fp32_gradients(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Accumulate gradients of half-precision parameters in fp32 inside the block. Existing gradients are converted.

    The gradients stay fp32 after the block. A new gradient then has the parameter's dtype again.
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
    """Return a function that checks whether the model's library keeps the parameter of a name in fp32."""
    names = fp32_modules(inner, strict=True)
    if dtype == torch.float16:
        names |= fp32_modules(inner, strict=False)
    if not names:
        return lambda name: False
    listed = "|".join(re.escape(name).replace(r"\*", r"[^.]*") for name in sorted(names))
    pattern = re.compile(rf"(?:^|\.)(?:{listed})(?:\.|$)")
    return lambda name: pattern.search(name) is not None


# -- fp16: the scale of the loss, and the agreement of all ranks on an overflow ----------------------------------------


class LossScale:
    """The factor of the loss before the backward, so that small gradients do not underflow in fp16.

    From the ``hysteresis``-th overflow on, each overflow multiplies the scale by ``backoff_factor``, down to
    ``min_scale``. ``growth_interval`` steps without an overflow multiply it by ``growth_factor``, up to ``max_scale``.
    """

    def __init__(self, config: ParallelConfig) -> None:
        self._config = config
        self.scale, self.min_scale, self.max_scale = config.initial_scale, config.min_scale, config.max_scale
        self.steps, self.chances = 0, config.hysteresis  # steps since the last overflow
        self.skipped = 0  # skipped steps in total

    def update(self, overflow: bool) -> None:
        """Adapt the scale after a step, or after a step that was skipped because of an ``overflow``."""
        if overflow:
            self.steps, self.skipped = 0, self.skipped + 1
            self.chances = max(self.chances - 1, 0)
            if self.chances == 0:
                self.scale = max(self.scale * self._config.backoff_factor, self.min_scale)
            return
        self.steps += 1
        if self.steps == self._config.growth_interval:
            self.steps, self.chances = 0, self._config.hysteresis
            self.scale = min(self.scale * self._config.growth_factor, self.max_scale)

    def limit(self, largest: float) -> None:
        """Keep the scale at or below ``largest`` from now on."""
        self.scale, self.min_scale, self.max_scale = (
            min(value, largest) for value in (self.scale, self.min_scale, self.max_scale)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"scale": self.scale, "steps": self.steps, "chances": self.chances, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from :meth:`state_dict`."""
        self.scale, self.steps, self.chances = float(state["scale"]), int(state["steps"]), int(state["chances"])
        self.skipped = int(state.get("skipped", 0))  # missing in old checkpoints


def not_finite(tensors: list[torch.Tensor]) -> torch.Tensor | bool:
    """Return whether a tensor is not finite, as a tensor on the first one's device, so that the host does not wait."""
    norms = [torch.linalg.vector_norm(tensor, torch.inf).float() for tensor in tensors if tensor.numel()]
    return bool(norms) and ~torch.isfinite(torch.stack([norm.to(norms[0].device) for norm in norms])).all()


def agree_on_found(found: dict[torch.device, torch.Tensor], axis: Axis, device: torch.device) -> None:
    """Replace the overflow flags of torch's scaler by their maximum over the ranks of the axis, in place.

    Args:
        found: Device -> 1.0 if gradients there are not finite, otherwise 0.0.
        device: The device of collectives.
    """
    flags = [value.to(device).view(1) for value in found.values()]
    flag = torch.stack(flags).amax(0) if flags else torch.zeros(1, device=device)
    if axis.size > 1:
        all_reduce(flag, op=dist.ReduceOp.MAX, group=axis.group)
    found.setdefault(device, flag)  # torch's scaler requires one, also on a rank without gradients
    for value in found.values():
        value.copy_(flag.view(value.shape))


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for a parallelized model: an overflow on one rank skips the step on all of them.

    Use it as torch's: ``scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()``.

    Args:
        mpu: The mesh, ``model.mpu``. All ranks of a model replica agree on an overflow.
        device: ``cuda`` or ``cpu``; by default the device of ``mpu``.
        kwargs: The arguments of ``torch.amp.GradScaler``.
    """

    def __init__(self, mpu: MPU, device: str | None = None, **kwargs: Any) -> None:
        super().__init__(device or mpu.device.type, **kwargs)
        self._mpu = mpu

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._unscale_grads_(*args, **kwargs)  # device -> 1.0 if its gradients are not finite
        reduces = getattr(getattr(args[0], "_autopar", None), "reduces", False)  # each gradient is on one replica
        with waiting(self._mpu, "autopar.GradScaler", self._mpu.model.ranks):
            for axis in (self._mpu.model, self._mpu.dp_cp)[: 1 + reduces]:
                agree_on_found(found, axis, self._mpu.device)
        return found
