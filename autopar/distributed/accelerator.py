"""The accelerator of this process: what torch finds beside the CPU that has a collective backend of its own.

CUDA has nccl, XPU xccl; devices that torch learns of from elsewhere register theirs. MPS has gloo: it is none.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Accelerator", "accelerator", "device_of_numbers"]

_OF_THE_HOST = ("gloo", "mpi", "ucc", "fake", "undefined", None)  # backends whose tensors are the CPU's


class Accelerator:
    """A kind of device, by torch's names.

    Attributes:
        type: ``cuda``, ``xpu`` and the like.
        backend: of its collectives: ``nccl``, ``xccl``.
        module: ``torch.cuda`` or its like: devices, generators, streams.
    """

    def __init__(self, type: str, backend: str) -> None:
        self.type, self.backend = type, backend
        self.module: Any = torch.get_device_module(type)

    @property
    def device(self) -> torch.device:
        """The current device of this process."""
        return torch.device(self.type, self.module.current_device())

    @property
    def in_use(self) -> bool:
        """Whether this process has used it so far."""
        return bool(self.module.is_initialized())

    def backend_of(self, group: dist.ProcessGroup | None = None) -> str | None:
        """Return what carries the accelerator's tensors in a group (by default the world); None if the host does."""
        entries = (entry.partition(":") for entry in str(dist.get_backend_config(group)).split(","))
        backend = {type: name for type, _, name in entries}.get(self.type)
        return None if backend in _OF_THE_HOST else backend

    def seeded(self, seed: int) -> torch.Tensor:
        """Return the state of a generator right after seeding."""
        return torch.Generator(self.type).manual_seed(seed).get_state()


def accelerator() -> Accelerator | None:
    """Return the accelerator, None on a machine that has none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return None
    backend = dist.Backend.default_device_backend_map.get(found.type)
    return None if backend is None or backend in _OF_THE_HOST else Accelerator(found.type, backend)


def device_of_numbers(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return where numbers of the host travel in a group: on the CPU if they can, so that nobody waits for a device."""
    found = accelerator()
    on_host = found is None or "cpu:" in str(dist.get_backend_config(group))
    return torch.device("cpu") if found is None or on_host else found.device
