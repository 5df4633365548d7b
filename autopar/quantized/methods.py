"""Models that transformers has quantized, by the method that it names: sharded, plain weights again, or refused."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from autopar.errors import ConfigError

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
