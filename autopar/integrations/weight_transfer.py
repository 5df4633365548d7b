"""Send a model's whole weights to a serving engine that runs in other processes: start, updates in buckets, finish.

The ranks gather one tensor after the other (:func:`autopar.hf_weights`), and rank 0 alone speaks to the engine. An
update names its tensors first, with dtypes and shapes, and has their bytes behind that, in the same order. All ranks
learn the engine's answer to each call before they gather the next tensor.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import struct
import urllib.parse
from collections.abc import Iterator, Sequence
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
    """A tensor as an update announces it before its bytes.

    Attributes:
        dtype: torch's name without the module: ``bfloat16``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class Engine(Protocol):
    """The engine's side. Rank 0 calls it; each method returns when the engine has answered, and raises if it cannot."""

    address: str
    """Names the engine in errors."""

    def start(self) -> None:
        """Announce updates: an engine stops, or takes no new requests."""

    def update(self, tensors: Sequence[TensorInfo], data: bytearray) -> None:
        """Load tensors, whose bytes lie one after the other in ``data``."""

    def finish(self) -> None:
        """All updates are sent: go on with the new weights."""

    def abandon(self) -> None:
        """No more updates come, as something failed: the weights are part old and part new."""


class HttpEngine:
    """An engine that answers HTTP: POST of ``start``, ``update``, ``finish`` and ``abandon`` below an address.

    The body of an update is the length of a JSON text in 8 bytes (little-endian), the text (a list of names, dtypes
    and shapes), and the packed bytes. Every answer but one of status 200 is an error; its body is quoted.

    Args:
        address: ``http://host:port/path``.
        timeout: seconds that the engine has for an answer.
    """

    def __init__(self, address: str, timeout: float = 300.0) -> None:
        self.address, self.timeout = address.rstrip("/"), timeout

    def start(self) -> None:
        """POST ``start``."""
        self._post("start", b"")

    def update(self, tensors: Sequence[TensorInfo], data: bytearray) -> None:
        """POST ``update`` with the tensors."""
        text = json.dumps([one._asdict() for one in tensors]).encode()
        self._post("update", struct.pack("<Q", len(text)) + text, data)

    def finish(self) -> None:
        """POST ``finish``."""
        self._post("finish", b"")

    def abandon(self) -> None:
        """POST ``abandon``."""
        self._post("abandon", b"")

    def _post(self, name: str, *parts: bytes | bytearray) -> None:
        place = urllib.parse.urlsplit(f"{self.address}/{name}")
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        connection = kinds[place.scheme](place.netloc, timeout=self.timeout)
        try:
            connection.putrequest("POST", place.path)
            connection.putheader("Content-Type", "application/octet-stream")
            connection.putheader("Content-Length", str(sum(map(len, parts))))
            connection.endheaders()
            for part in parts:
                connection.send(part)
            answer = connection.getresponse()
            text = answer.read(2000).decode(errors="replace")
        finally:
            connection.close()
        if answer.status != 200:
            raise CheckpointError(f"it answered {answer.status} {answer.reason}: {first_line(Exception(text))}")


class WeightTransfer:
    """Weights on their way to one engine, as often as they change. Made on every rank, with the same arguments.

    Args:
        engine: used on rank 0 alone.
        bucket_size: bytes of an update; a tensor that is larger goes by itself. Rank 0 holds one bucket and one tensor.
    """

    def __init__(self, engine: Engine, bucket_size: int | str = "512MB") -> None:
        self.engine, self.limit = engine, parse_size(bucket_size)
        self._sent: dict[str, int] = {}  # name -> digest of what the engine has

    def send(self, model: nn.Module, *, only_changed: bool = False, adapters_only: bool = False) -> int:
        """Send the weights; return how many tensors were sent. Every rank calls it.

        Args:
            only_changed: leave out tensors that are as they were when this object has sent them.
            adapters_only: send the adapters of a ``PeftModel``, named as its parameters, and no other weights.

        Raises:
            CheckpointError: on every rank: the engine does not answer, or answers an error. The next call sends all.
        """
        mpu: Any = model.mpu
        before, self._sent = self._sent, {}
        bucket, now, count = _Bucket(keeps=mpu.rank == 0), dict(before), 0
        weights: Any = _adapter_weights(model) if adapters_only else hf_weights(model, bucket_size=self.limit)
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
        """Call a method of the engine on rank 0; all ranks learn how it went. Empties the bucket."""

        def call() -> None:
            try:
                getattr(self.engine, name)(*([] if bucket is None else (bucket.tensors, bucket.data)))
            except Exception as error:
                said = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
                raise CheckpointError(
                    f"the engine at {self.engine.address} did not take '{name}': {said}\n  Its weights may be part old "
                    "and part new. Send all of them again, or start it anew."
                ) from error

        rank_zero(mpu, call)
        if bucket is not None:
            bucket.clear()


def _adapter_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    registry.need("peft", "adapters_only=True")
    from autopar.features.peft.saving import adapter_weights

    return adapter_weights(model)


class _Bucket:
    """Tensors of one update; every rank counts their bytes, and one keeps them."""

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
