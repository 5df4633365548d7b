"""Convert Python values to JSON and back: numbers, text, containers, arrays and tensors, but no code.

Values without a JSON form become objects with the key ``"$"``: ``{"$": "tuple", "items": [1, 2]}``. Tensors are stored
outside of the JSON under the name of their place (``extra.ema['wte.weight']``), or as base64 if they are small.
``torch.save`` would not support numpy arrays, and would write the full storage of a view.
"""

from __future__ import annotations

import base64
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from autopar.compat.tensors import PLAIN
from autopar.errors import CheckpointError, type_and_text
from autopar.storage.safetensors_io import dtype_name, dtype_of

Json = Any
"""None, bool, int, finite float, str, and lists and str-keyed dicts of these."""

_TAG = "$"
_SCALARS = (type(None), bool, int, float, str)
_NUMPY = re.compile(r"[<>|][biufc][0-9]{1,2}")
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset, "Size": torch.Size}


def encode(value: object, where: str) -> tuple[Json, dict[str, torch.Tensor]]:
    """Return ``value`` as JSON, and its tensors (not copied) by place. :func:`decode` reverses it.

    Supported values are None, numbers, text, list, tuple, set, frozenset, dict, OrderedDict and Counter with scalar
    keys, tensors, arrays of numbers, ``torch.dtype`` and ``torch.Size``. Others raise CheckpointError with place and
    type. ``where`` is the name of the value in errors and in the names of its tensors, such as ``extra``.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _encode(value, where, tensors), tensors


def encode_inline(value: object, where: str) -> Json:
    """Encode with tensors as base64 in the JSON, for small tensors."""
    return _encode(value, where, None)


def inside(where: str, key: object) -> str:
    """Return the place of an element: ``where.key`` for an identifier, otherwise ``where['a key']`` or ``where[0]``."""
    return f"{where}.{key}" if isinstance(key, str) and key.isidentifier() else f"{where}[{key!r}]"


def _encode(value: object, where: str, tensors: dict[str, torch.Tensor] | None) -> Json:
    """Encode; tensors go into ``tensors``, or into the JSON if that is None."""
    kind = type(value)
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else {_TAG: "float", "value": str(value)}
    if kind in _SCALARS:
        return value
    if isinstance(value, dict) and kind in _MAPPINGS.values():
        for key in value:
            if type(key) not in _SCALARS:
                raise CheckpointError(f"{where} has the key {key!r} of type {type(key).__name__}; keys must be scalars")
        values = {key: _encode(item, inside(where, key), tensors) for key, item in value.items()}
        if kind is dict and _TAG not in values and all(isinstance(key, str) for key in values):
            return values
        pairs = [[_encode(key, where, tensors), item] for key, item in values.items()]
        return {_TAG: kind.__name__, "items": pairs}
    if isinstance(value, list | tuple | set | frozenset) and (kind is list or kind in _SEQUENCES.values()):
        items = [_encode(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]
        if isinstance(value, set | frozenset):
            items.sort(key=repr)  # so that equal sets give equal files
        return items if kind is list else {_TAG: kind.__name__, "items": items}
    if isinstance(value, torch.Tensor) and kind in PLAIN:
        return _encode_tensor(value.detach(), where, tensors)
    if isinstance(value, torch.dtype):
        return {_TAG: "dtype", "name": dtype_name(value)}
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and kind is np.ndarray):
        array = np.asarray(value)
        if not _NUMPY.fullmatch(array.dtype.str):
            raise CheckpointError(f"{where} must be a numpy array of numbers, got dtype {array.dtype}")
        tag = "array" if kind is np.ndarray else "scalar"
        return {_TAG: tag, "dtype": array.dtype.str, "shape": list(array.shape), "data": _text(array.tobytes())}
    raise CheckpointError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint does not support\n"
        "  Leave it out, or convert it to numbers, text, lists, tuples, dicts, sets, tensors or arrays of numbers.\n"
        "  Nothing is pickled."
    )


def _encode_tensor(value: torch.Tensor, where: str, tensors: dict[str, torch.Tensor] | None) -> Json:
    try:
        dtype_of(dtype_name(value.dtype))
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from error
    if value.layout != torch.strided or value.device.type == "meta":
        what = "on the meta device" if value.device.type == "meta" else f"of layout {value.layout}"
        raise CheckpointError(f"{where} must be a dense tensor with values, got a tensor {what}")
    value = value.detach().resolve_conj().resolve_neg()  # a file has no conjugate and negative bits
    if tensors is not None:
        if where in tensors:
            raise CheckpointError(f"two tensors would be called {where}")
        tensors[where] = value
        return {_TAG: "tensor", "name": where}
    data = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {_TAG: "tensor", "dtype": dtype_name(value.dtype), "shape": list(value.shape), "data": _text(data)}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def decode(data: Json, tensors: Mapping[str, torch.Tensor] | None = None, where: str = "the value") -> Any:
    """Reverse :func:`encode` (with its tensors) or :func:`encode_inline`.

    Raises CheckpointError for data that they cannot return.
    """
    try:
        return _decode(data, tensors or {})
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"{where} is damaged in the checkpoint: {type_and_text(error, 200)}") from error


def _decode(data: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(data, list):
        return [_decode(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    if _TAG not in data:
        return {key: _decode(item, tensors) for key, item in data.items()}
    tag = data[_TAG]
    if tag == "float":
        return float(data["value"])
    if tag == "dtype":
        dtype = getattr(torch, data["name"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{data['name']!r} is not a dtype")
        return dtype
    if tag == "tensor" and "name" in data:
        return tensors[data["name"]]
    if tag in ("tensor", "array", "scalar"):
        return _unpack(data)
    if tag in _MAPPINGS:
        return _MAPPINGS[tag]({_decode(key, tensors): _decode(value, tensors) for key, value in data["items"]})
    return _SEQUENCES[tag](_decode(data["items"], tensors))


def _unpack(data: dict[str, Json]) -> Any:
    """Decode a tensor, an array or a numpy scalar from the bytes in the JSON."""
    raw = base64.b64decode(data["data"], validate=True)
    if data[_TAG] == "tensor":
        dtype = dtype_of(data["dtype"])
        flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return flat.reshape(data["shape"])
    array = np.frombuffer(raw, np.dtype(data["dtype"])).reshape(data["shape"]).copy()
    return array[()] if data[_TAG] == "scalar" else array
