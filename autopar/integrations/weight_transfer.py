"""Send a model's full weights to a serving engine in other processes: start, updates in buckets, finish.

The ranks gather one tensor after the other (:func:`autopar.hf_weights`), and only rank 0 calls the engine. An update
lists its tensors with dtypes and shapes, followed by their bytes in the same order. All ranks get the result of each
call before they gather the next tensor.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import struct
import urllib.parse
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from autopar import registry
from autopar.checkpoint.format import parse_size
from autopar.checkpoint.hf_weights import hf_weights
from autopar.distributed.agree import rank_zero
from autopar.distributed.digest import of_tensor
from autopar.errors import CheckpointError, first_line


class TensorInfo(NamedTuple):
    """A tensor in the list of an update; ``dtype`` is torch's name without ``torch.``, such as ``bfloat16``."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Engine(Protocol):
    """The interface of an engine, called on rank 0. Each method returns after the engine's answer, or raises."""

    address: str
    """Name of the engine in error messages."""

    def start(self) -> None:
        """Announce updates, so that the engine stops or accepts no new requests."""

    def update(self, tensors: Sequence[TensorInfo], data: bytearray) -> None:
        """Load tensors, whose bytes are concatenated in ``data``."""

    def finish(self) -> None:
        """Continue with the new weights after the last update."""

    def abandon(self) -> None:
        """End the updates after a failure; some weights are old and some are new."""


class HttpEngine:
    """An engine that answers HTTP: POST of ``start``, ``update``, ``finish`` and ``abandon`` below an address.

    The body of an update is the length of a JSON text in 8 bytes (little-endian), the text (a list of names, dtypes
    and shapes), and the packed bytes. Every status except 200 is an error, whose body the message quotes.

    Args:
        address: Base URL, ``http://host:port/path``.
        timeout: Time limit per request in seconds.
    """

    def __init__(self, address: str, timeout: float = 300.0) -> None:
        self.address, self.timeout = address.rstrip("/"), timeout

    def update(self, tensors: Sequence[TensorInfo], data: bytearray) -> None:
        text = json.dumps([one._asdict() for one in tensors]).encode()
        self._post("update", struct.pack("<Q", len(text)) + text, data)

    def _post(self, name: str, *parts: bytes | bytearray) -> None:
        place = urllib.parse.urlsplit(f"{self.address}/{name}")
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(sum(map(len, parts)))}
        with contextlib.closing(kinds[place.scheme](place.netloc, timeout=self.timeout)) as connection:
            connection.request("POST", place.path, iter(parts), headers)
            answer = connection.getresponse()
            text = answer.read(2000).decode(errors="replace")
        if answer.status != 200:
            raise CheckpointError(f"it answered {answer.status} {answer.reason}: {first_line(Exception(text))}")

    start = functools.partialmethod(_post, "start")
    finish = functools.partialmethod(_post, "finish")
    abandon = functools.partialmethod(_post, "abandon")


class WeightTransfer:
    """Transfers of a model's weights to one engine; created on every rank with the same arguments.

    Args:
        engine: Engine, used on rank 0 only.
        bucket_size: Largest size of an update in bytes, or text such as ``"512MB"``; a larger tensor is sent alone.
            Rank 0 holds one bucket and one tensor.
    """

    def __init__(self, engine: Engine, bucket_size: int | str = "512MB") -> None:
        self.engine, self.limit = engine, parse_size(bucket_size)
        self._sent: dict[str, int] = {}  # name -> digest of the tensor in the engine

    def send(self, model: nn.Module, *, only_changed: bool = False, adapters_only: bool = False) -> int:
        """Send the weights, and return the number of sent tensors; every rank must call it.

        Args:
            only_changed: True to skip tensors that have not changed since this object sent them.
            adapters_only: True to send only the adapters of a ``PeftModel``, by parameter names.

        Raises:
            CheckpointError: The engine does not answer, or answers with an error; on every rank. The next call sends
                all tensors.
        """
        mpu: Any = model.mpu
        before, self._sent = self._sent, {}
        bucket, now, count = _Bucket(keeps=mpu.rank == 0), dict(before), 0
        weights: Any
        if adapters_only:
            registry.need("peft", "adapters_only=True")
            from autopar.features.peft.saving import adapter_weights

            weights = adapter_weights(model)
        else:
            weights = hf_weights(model, bucket_size=self.limit)
        try:
            self._tell(mpu, "start")
            for name, tensor in weights:
                now[name] = of_tensor(tensor)
                if only_changed and before.get(name) == now[name]:
                    continue
                if bucket.size and bucket.size + tensor.nbytes > self.limit:
                    self._tell(mpu, "update", bucket)
                bucket.add(name, tensor)
                count += 1
            if bucket.size:
                self._tell(mpu, "update", bucket)
            self._tell(mpu, "finish")
        except BaseException:
            weights.close()
            if mpu.rank == 0:
                with contextlib.suppress(Exception):
                    self.engine.abandon()
            raise
        self._sent = now
        return count

    def _tell(self, mpu: Any, name: str, bucket: _Bucket | None = None) -> None:
        """Call a method of the engine on rank 0, raise its error on all ranks, and empty the bucket."""

        def call() -> None:
            try:
                getattr(self.engine, name)(*([] if bucket is None else (bucket.tensors, bucket.data)))
            except Exception as error:
                said = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
                raise CheckpointError(
                    f"the engine at {self.engine.address} rejected '{name}': {said}\n  Some of its weights may be old "
                    "and some new. Send all weights again, or restart it."
                ) from error

        rank_zero(mpu, call)
        if bucket is not None:
            bucket.clear()


class _Bucket:
    """The tensors of one update; every rank counts their bytes, but only rank 0 keeps them."""

    def __init__(self, *, keeps: bool) -> None:
        self.keeps = keeps
        self.clear()

    def clear(self) -> None:
        self.size, self.tensors, self.data = 0, list[TensorInfo](), bytearray()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.size += tensor.nbytes
        if self.keeps:
            self.tensors.append(TensorInfo(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
            self.data += tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
