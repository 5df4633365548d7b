"""``torch.sim``: what torch asks of the module of a device, for the simulated one."""

from __future__ import annotations

from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch

from tests.gpu.host_waits import note


class _Stream:
    """A stream or an event: what is asked of it is done already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.priority = 0

    def wait_stream(self, other: _Stream) -> None: ...

    def wait_event(self, event: _Stream) -> None: ...

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or _Stream()

    def record(self, stream: _Stream | None = None) -> None: ...

    def wait(self, stream: _Stream | None = None) -> None: ...

    def synchronize(self) -> None:
        note("synchronize")

    def query(self) -> bool:
        return True


def make_module(name: str) -> ModuleType:
    """Make the module; the device is there already."""
    module = ModuleType(f"torch.{name}")
    generator = torch.ops.sim.default_generator()

    def seed(value: int) -> None:
        generator.manual_seed(value)

    def get_state(device: Any = None) -> torch.Tensor:
        return generator.get_state()

    def set_state(state: torch.Tensor, device: Any = None) -> None:
        generator.set_state(state)

    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: note("synchronize"),
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": lambda device=None: _Stream(),
        "stream": lambda stream: nullcontext(),
        "manual_seed": seed,
        "manual_seed_all": seed,
        "get_rng_state": get_state,
        "set_rng_state": set_state,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "default_generators": (generator,),
    }
    vars(module).update(functions)
    return module
