"""The quantized layers of a model, plain stand-ins for planning, and quantization methods that are refused."""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from autopar.errors import ConfigError
from autopar.foreign.tensors import own_parameters
from autopar.quantized import bitsandbytes, torchao
from autopar.quantized.stored import Kind, StoredWeight

_FORMATS: dict[str, Callable[[nn.Module], StoredWeight | None]] = {
    bitsandbytes.LIBRARY: bitsandbytes.find,
    torchao.LIBRARY: torchao.find,
}
KINDS: dict[str, Kind] = {**bitsandbytes.KINDS}


def stored_weight(module: nn.Module) -> StoredWeight | None:
    """Return the quantized weight of a layer; None of a plain one."""
    return next(filter(None, (find(module) for find in _loaded())), None)


def _loaded() -> list[Callable[[nn.Module], StoredWeight | None]]:
    return [find for library, find in _FORMATS.items() if library in sys.modules]


def stored_weights(model: nn.Module) -> dict[str, StoredWeight]:
    """Return the quantized weights of ``model``, by the path of their layer."""
    if not _loaded():
        return {}
    found = ((path, stored_weight(module)) for path, module in model.named_modules())
    return {path: stored for path, stored in found if stored is not None}


def keep_form(model: nn.Module, keep: bool) -> None:
    """Keep evaluation from storing quantized weights in another form, or let it again."""
    for stored in stored_weights(model).values():
        stored.keep_form(keep)


@contextlib.contextmanager
def form_kept(model: nn.Module) -> Iterator[None]:
    """Keep evaluation inside of ``with`` from storing quantized weights in another form."""
    keep_form(model, keep=True)
    try:
        yield
    finally:
        keep_form(model, keep=False)


class StandIn(nn.Parameter):
    """Stands for a quantized weight while a plan is made: of its shape, without memory.

    Attributes:
        kind: its form.
    """

    kind: Kind


def stand_in(shape: tuple[int, int], dtype: torch.dtype, kind: Kind) -> StandIn:
    """Return what stands for a weight of this shape."""
    made = StandIn(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
    made.kind = kind
    return made


def block_of(model: nn.Module) -> int:
    """Return how many inputs of quantized weights lie on one rank together, inside of :func:`as_plain`."""
    return max((p.kind.block[1] for p in model.parameters() if isinstance(p, StandIn)), default=1)


def without_memory(model: nn.Module) -> set[int]:
    """Return the ids of parameters that look like weights and have no memory of their own."""
    held = ((model.get_submodule(path), stored) for path, stored in stored_weights(model).items())
    return {id(own_parameters(module)["weight"]) for module, stored in held if stored.dtype is not None}


def check_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Check that quantized weights multiply with inputs of a dtype.

    Raises:
        ConfigError: some are quantized from another one, which their library does not change.
    """
    for path, stored in stored_weights(model).items():
        if stored.dtype not in (None, dtype):
            raise ConfigError(
                f"precision.dtype is {dtype}, and the weight of {path} ({stored.format}) was quantized as one of "
                f"{stored.dtype}, which stays.\n  Load the model with dtype={dtype}."
            )


@contextlib.contextmanager
def as_plain(model: nn.Module) -> Iterator[None]:
    """Show the quantized layers of ``model`` as ``nn.Linear`` inside of ``with``, with weights that have no memory."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    found: list[tuple[Any, type, nn.Parameter, dict[str, Any]]] = []
    try:
        for path, stored in stored_weights(model).items():
            module = model.get_submodule(path)
            hidden = {name: vars(module).pop(name) for name in stored.hidden if name in vars(module)}
            found.append((module, type(module), own_parameters(module)["weight"], hidden))
            own_parameters(module)["weight"] = stand_in(stored.shape, dtype, stored.kind)
            module.__class__ = nn.Linear
        yield
    finally:
        for module, kind, weight, hidden in found:
            module.__class__ = kind
            own_parameters(module)["weight"] = weight
            vars(module).update(hidden)


_SHARDED = ("bitsandbytes", "torchao")


def dequantizes(quantizer: Any) -> bool:
    """Return whether transformers turns the quantized weights of files into plain ones while it loads them."""
    return bool(quantizer.pre_quantized and getattr(quantizer.quantization_config, "dequantize", False))


def check_quantizer(what: str, quantizer: Any) -> None:
    """Check that a model is quantized in a form that can be sharded, or not any more.

    Args:
        quantizer: transformers' object that quantized it; None of a plain model.

    Raises:
        ConfigError: it is not; with the argument that dequantizes where there is one.
    """
    if quantizer is not None and not dequantizes(quantizer):
        _check(what, str(getattr(quantizer.quantization_config.quant_method, "value", "")))


def check_folder(folder: Path) -> None:
    """Check that the weights in a folder are plain, or in a form that can be sharded or dequantized.

    Raises:
        ConfigError: they are not. Without this, transformers would ask for a package to be installed first.
    """
    path = folder / "config.json"
    if not path.is_file():  # a named pipe might be read forever
        return
    try:
        method = json.loads(path.read_text())["quantization_config"]["quant_method"]
    except (OSError, ValueError, KeyError, TypeError):  # plain, a name on the hub, or damaged: transformers says so
        return
    if not _with_argument(method):
        _check(str(folder), method)


def _check(what: str, method: str) -> None:
    if method in _SHARDED:
        return
    instead = "Load the weights that were quantized: BitsAndBytesConfig and TorchAoConfig quantize them for autopar."
    if kind := _with_argument(method):
        instead = f"from_pretrained(..., quantization_config={kind}(dequantize=True)) makes plain weights of them."
    raise ConfigError(f"{what} has weights quantized by {method}, which autopar does not shard.\n  {instead}")


def _with_argument(method: str) -> str:
    """Return the name of the configuration class of a method whose weights transformers can dequantize; else ``""``."""
    kind = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    return kind.__name__ if kind is not None and "dequantize" in inspect.signature(kind).parameters else ""
