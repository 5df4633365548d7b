"""Memory by parts: which tensors are alive at the moment when most are, and what they are.

Every storage that an operation makes is followed until it is freed. A storage counts once, whichever tensors view it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PARTS = ("weights", "gradients", "optimizer", "logits", "activations")


class Peak(NamedTuple):
    """Bytes at the moment of the most, by part, and their sum."""

    parts: dict[str, int]
    total: int


class TensorMemory(TorchDispatchMode):
    """Follow the storages of this process's tensors.

    Args:
        model, optimizer: whose tensors are weights, gradients and optimizer state.
        widths: sizes of a last dim that make a tensor logits: the vocabulary, and a shard of it.
    """

    def __init__(self, model: Any, optimizer: Any = None, widths: Iterable[int] = ()) -> None:
        super().__init__()
        self.model, self.optimizer, self.widths = model, optimizer, frozenset(widths)
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._logits: set[int] = set()
        self._most = 0
        self._at_most: tuple[dict[int, int], dict[int, str]] = ({}, {})
        for tensor in [*model.parameters(), *model.buffers(), *_state(optimizer), *_stepped(optimizer)]:
            self._add(tensor)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves((result, args)):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        sizes = {key: held.nbytes() for key, known in self._alive.items() if (held := known()) is not None}
        if sum(sizes.values()) > self._most:  # FSDP frees storages that it keeps, and fills them again
            self._most, self._at_most = sum(sizes.values()), (sizes, self._owners())
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        tensor = _local(tensor)
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, functools.partial(self._freed, key))
            if tensor.dim() > 1 and tensor.shape[-1] in self.widths and not isinstance(tensor, torch.nn.Parameter):
                self._logits.add(key)

    def _freed(self, key: int, _: Any) -> None:
        self._alive.pop(key, None)
        self._logits.discard(key)

    def _owners(self) -> dict[int, str]:
        """Which storages are weights, gradients, optimizer state and logits now."""
        owners = dict.fromkeys(self._logits, "logits") | {_key(each): "optimizer" for each in _state(self.optimizer)}
        for parameter in (*self.model.parameters(), *_stepped(self.optimizer)):
            if parameter.grad is not None:
                owners[_key(parameter.grad)] = "gradients"
            owners[_key(parameter)] = "weights"
        return owners | {_key(buffer): "weights" for buffer in self.model.buffers()}

    def peak(self) -> Peak:
        """Return what was alive when most was."""
        alive, owners = self._at_most
        parts = dict.fromkeys(PARTS, 0)
        for key, size in alive.items():
            parts[owners.get(key, "activations")] += size
        return Peak(parts, sum(parts.values()))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _stepped(optimizer: Any) -> Iterator[torch.Tensor]:
    """The parameters of an optimizer: with FSDP the shards, also while the model has whole ones."""
    for group in () if optimizer is None else optimizer.param_groups:
        yield from group["params"]


def _key(tensor: torch.Tensor) -> int:
    return _local(tensor).untyped_storage()._cdata


def _state(optimizer: Any) -> Iterator[torch.Tensor]:
    """The tensors of an optimizer's state."""
    for entry in {} if optimizer is None else optimizer.state.values():
        yield from (value for value in entry.values() if isinstance(value, torch.Tensor))


def peak_of(work: Callable[[], Any], model: Any, optimizer: Any = None, widths: Iterable[int] = ()) -> Peak:
    """Run ``work``, and return its peak."""
    with TensorMemory(model, optimizer, widths) as memory:
        work()
    return memory.peak()
