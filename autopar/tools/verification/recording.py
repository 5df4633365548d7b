"""Record the inputs, outputs and gradients of each module in a forward, and the collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.compat.tensors import PLAIN
from autopar.distributed.axis import Axis
from autopar.distributed.digest import leaves
from autopar.pipeline_parallel.outputs import complete
from autopar.tensor_tracking import TensorTracking, tensors_in
from autopar.tools.derivation.trace import hooked
from autopar.tools.verification.report import Traffic


@dataclass
class ModuleCall:
    """The arguments (``input``) or results (``output``) of one call of a module, and their gradients, by name.

    ``call``: the number of earlier calls; ``readers``: name of an output -> paths of the modules that read it.
    """

    path: str
    kind: str
    call: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    readers: dict[str, list[str]] = field(default_factory=dict)


class Recording:
    """The recorded calls of one model: :attr:`entries`, in order."""

    def __init__(self) -> None:
        self.entries: list[ModuleCall] = []
        self._calls: Counter[tuple[str, str]] = Counter()
        self._made: dict[int, tuple[ModuleCall, str]] = {}  # id of a tensor -> call and name that returned it
        self._alive: list[Any] = []  # so that no id is reused

    def note(self, path: str, kind: str, values: Any) -> None:
        """Record arguments or results of a module."""
        call, self._calls[path, kind] = self._calls[path, kind], self._calls[path, kind] + 1
        entry = ModuleCall(path, kind, call)
        self.entries.append(entry)
        for name, value in leaves(values):
            if not isinstance(value, torch.Tensor) or value.is_meta:
                continue
            self._alive.append(value)
            made = self._made.get(id(value))
            if kind == "input" and made is not None:  # compared as an output
                source, output = made
                source.readers.setdefault(output, []).append(path)
                continue
            if kind == "output" and made is None:
                self._made[id(value)] = (entry, name)
            with torch.no_grad():
                entry.tensors[name] = value.detach().clone()
            if value.requires_grad and type(value) in PLAIN and made is None:

                def keep(gradient: torch.Tensor, name: str = name) -> None:
                    entry.gradients[name] = gradient.detach().clone()

                value.register_hook(keep)


@contextmanager
def recorded(model: nn.Module) -> Iterator[Recording]:
    """Record all module calls inside the block, except recomputation in a backward."""
    recording = Recording()

    def before(path: str, args: Any, kwargs: Any) -> None:
        recording.note(path, "input", {**{str(place): value for place, value in enumerate(args)}, **kwargs})

    def after(path: str, output: Any) -> None:
        recording.note(path, "output", {"": output} if isinstance(output, torch.Tensor) else complete(output))

    with hooked(model, before, after):
        yield recording


class Collective(NamedTuple):
    """A collective: its name, the number of elements that a rank sends, and the dtype."""

    name: str
    elements: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The bytes that a rank sends."""
        return self.elements * self.dtype.itemsize


class _Recorder(TensorTracking):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Collective] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.note(function.__name__.partition(".")[0].strip("_"), (args,))
        return function(*args, **(kwargs or {}))

    def note(self, name: str, args: Any) -> None:
        """Record a call. The smallest tensor is the rank's contribution."""
        if tensors := list(tensors_in(args)):
            own = min(tensors, key=torch.Tensor.numel)
            self.found.append(Collective(name, own.numel(), own.dtype))


@contextmanager
def recording_of(*axes: Axis) -> Iterator[list[Collective]]:
    """Record the collectives inside the block, over torch's process groups and the shared memory of ``axes``."""
    transports = [axis.transport for axis in axes if axis.transport is not None]
    with _Recorder() as recorder:

        def run(plain: Any, name: str, *args: Any) -> bool:
            done: bool = plain(name, *args)
            if done:
                recorder.note(name, args)
            return done

        for transport in transports:
            transport.run = partial(run, transport.run)
        try:
            yield recorder.found
        finally:
            for transport in transports:
                del transport.run


_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send", "receive")


def counted(collectives: Sequence[Collective]) -> tuple[Traffic, ...]:
    """Return the traffic by kind, the largest first. Received messages count on the sender's rank."""
    calls, sizes = Counter[str](), Counter[str]()
    for each in collectives:
        name = each.name.replace("_", "").replace("recv", "receive")  # names of torch and of the transport
        kind = next((kind for kind in _KINDS if name.startswith(kind.replace("-", ""))), each.name)
        calls[kind] += 1
        sizes[kind] += each.bytes
    return tuple(Traffic(kind, calls[kind], size) for kind, size in sizes.most_common() if kind != "receive")
