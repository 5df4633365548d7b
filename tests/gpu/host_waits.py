"""Where the host would wait for an accelerator: noted by the kernels of the simulated device, with the place."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from autopar.tools.rehearsal import trace

_HERE = str(Path(__file__).parent / "simulated")
_LOG = str(Path(__file__).parent / "stream_order")
_SKIPPED = (str(Path(torch.__file__).parent), _HERE, __file__, _LOG, trace.__file__, "<", threading.__file__)
_BY_VALUES = {  # what comes back to the host, or the size of a result, follows from values
    *("nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount"),
    *("equal", "_local_scalar_dense", "is_nonzero"),
}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_watching: list[list["Wait"]] = []


class Wait(NamedTuple):
    """Where the host has waited for the device."""

    what: str
    place: str  # innermost frame outside of torch: file, line and function
    stack: tuple[str, ...]

    @property
    def own(self) -> bool:
        """Whether autopar has asked for it, not the model's code."""
        return "/autopar/" in self.place

    @property
    def function(self) -> str:
        """File and function, without the line."""
        file, _, function = self.place.rpartition(" ")
        return f"{Path(file.rpartition(':')[0]).name} {function}"


@contextmanager
def waits() -> Iterator[list[Wait]]:
    """Collect what makes the host wait for the device, in all threads of the process."""
    found: list[Wait] = []
    _watching.append(found)
    try:
        yield found
    finally:
        _watching[:] = [other for other in _watching if other is not found]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)


def waits_for(name: str, args: Any, kwargs: Any) -> str:
    """Return what of an operation of torch makes the host wait on CUDA; empty where nothing does."""
    if name in _BY_VALUES or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        return name
    if name == "_copy_from":
        ends = [x.device.type for x in args[:2]]
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return f"copy from {ends[0]} to {ends[1]}" if ends[0] != ends[1] and blocking and args[0].numel() else ""
    if name in INDEXED:
        indices = list(tensors_in(args[1]))
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            return "index by a mask"
        if any(index.device.type == "cpu" for index in indices):
            return "index by a tensor of the host"
    return ""


def note(what: str) -> None:
    """Note that the host waits here."""
    if not _watching:
        return
    stack = stack_here()
    for found in _watching:
        found.append(Wait(what, stack[0], stack))


def stack_here() -> tuple[str, ...]:
    """Return file, line and function of the frames outside of torch, the innermost first."""
    stack: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_SKIPPED):
            stack.append(f"{code.co_filename}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return tuple(stack) or ("autograd",)
