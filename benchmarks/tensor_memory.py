"""Memory by parts: which tensors are alive at the moment when most are, and what they are.

Every storage that an operation makes is followed until it is freed. A storage counts once, whichever tensors view it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PARTS = ("weights", "gradients", "optimizer", "logits", "activations")


class Peak(NamedTuple):
    """Bytes at the moment of the most, by part, and their sum."""

    parts: dict[str, int]
    total: int


class _Storage(NamedTuple):
    size: int
    logits: bool


class TensorMemory(TorchDispatchMode):
    """Follow the storages of this process's tensors.

    Args:
        model, optimizer: whose tensors are weights, gradients and optimizer state.
        widths: sizes of a last dim that make a tensor logits: the vocabulary, and a shard of it.
    """

    def __init__(self, model: Any, optimizer: Any = None, widths: Iterable[int] = ()) -> None:
        super().__init__()
        self.model, self.optimizer, self.widths = model, optimizer, frozenset(widths)
        self._alive: dict[int, _Storage] = {}
        self._known: dict[int, Any] = {}  # weak references, which call back
        self._now = self._most = 0
        self._at_most: tuple[dict[int, _Storage], dict[int, str]] = ({}, {})
        for tensor in [*model.parameters(), *model.buffers(), *_state(optimizer)]:
            self._add(tensor)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or not size:
            return
        logits = tensor.dim() > 1 and tensor.shape[-1] in self.widths and not isinstance(tensor, torch.nn.Parameter)
        self._alive[key] = _Storage(size, logits)
        self._known[key] = weakref.ref(storage, functools.partial(self._freed, key))
        self._now += size
        if self._now > self._most:
            self._most = self._now
            self._at_most = dict(self._alive), self._owners()

    def _freed(self, key: int, _: Any) -> None:
        self._now -= self._alive.pop(key).size
        del self._known[key]

    def _owners(self) -> dict[int, str]:
        """Which storages are weights, gradients and optimizer state now."""
        owners = {_key(tensor): "optimizer" for tensor in _state(self.optimizer)}
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                owners[_key(parameter.grad)] = "gradients"
            owners[_key(parameter)] = "weights"
        return owners | {_key(buffer): "weights" for buffer in self.model.buffers()}

    def peak(self) -> Peak:
        """Return what was alive when most was."""
        alive, owners = self._at_most
        parts = dict.fromkeys(PARTS, 0)
        for key, storage in alive.items():
            parts[owners.get(key, "logits" if storage.logits else "activations")] += storage.size
        return Peak(parts, sum(parts.values()))


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _state(optimizer: Any) -> Iterator[torch.Tensor]:
    """The tensors of an optimizer's state."""
    for entry in {} if optimizer is None else optimizer.state.values():
        yield from (value for value in entry.values() if isinstance(value, torch.Tensor))


def peak_of(work: Callable[[], Any], model: Any, optimizer: Any = None, widths: Iterable[int] = ()) -> Peak:
    """Run ``work``, and return its peak."""
    with TensorMemory(model, optimizer, widths) as memory:
        work()
    return memory.peak()
