"""The device ``sim``: an accelerator as torch sees one, whose memory is the host's and whose kernels are the CPU's.

``start()`` makes it in this process, which keeps it: use it in ranks of its own. Tensors on it are torch's own and not
a subclass, so autograd runs their backward in a thread of its own, as on CUDA, and storages, views and ``.data`` work.
What goes wrong on an accelerator only goes wrong here too:

- an operation on a tensor of the device and one of the host (0-dimensional ones are allowed) raises as on CUDA;
- it has its own random generator;
- whatever would make the host wait on CUDA is noted with its place while :func:`waits` looks.

Collectives go over gloo, on the same memory. There are no streams: everything is done when it returns.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

NAME = "sim"
BACKEND = f"cpu:gloo,{NAME}:{NAME}gloo"

_SOURCE = Path(__file__).with_suffix(".cpp")
_SKIPPED = (str(Path(torch.__file__).parent), str(Path(__file__)), "<", str(Path(threading.__file__).parent / "thr"))
_SIZES_FROM_VALUES = {
    *("nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount"),
    *("equal", "_local_scalar_dense", "is_nonzero"),
}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_C10D = [
    *("allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_", "allgather_coalesced_"),
    *("allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_", "broadcast_", "reduce_"),
    *("reduce_scatter_tensor_coalesced_", "gather_", "scatter_", "alltoall_", "alltoall_base_", "send", "recv_"),
    *("recv_any_source_", "barrier", "monitored_barrier_"),
]
_libraries: list[Any] = []  # what torch.library has registered ends with these
_watching: list[list[Wait]] = []


class Wait(NamedTuple):
    """Where the host has waited for the device."""

    what: str
    place: str
    stack: tuple[str, ...]


@contextmanager
def waits() -> Iterator[list[Wait]]:
    """Collect what makes the host wait for the device, in all threads of the process."""
    found: list[Wait] = []
    _watching.append(found)
    try:
        yield found
    finally:
        _watching.remove(found)


def compiled() -> Path:
    """Compile the part in C++, once for each source and torch; raises FileNotFoundError without a g++."""
    text = _SOURCE.read_bytes() + torch.__version__.encode()
    library = Path(tempfile.gettempdir()) / f"autopar-simulated-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not library.exists():
        root = Path(torch.__file__).parent
        headers = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
        own = library.with_suffix(f".{os.getpid()}")
        command = ["g++", "-O0", "-std=c++20", "-fPIC", "-shared", "-w", *headers, str(_SOURCE), f"-L{root / 'lib'}"]
        subprocess.run([*command, "-ltorch", "-ltorch_cpu", "-lc10", "-o", str(own)], check=True, capture_output=True)
        own.replace(library)
    return library


@functools.cache
def start() -> torch.device:
    """Make the device in this process."""
    torch.ops.load_library(str(compiled()))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    every, aten, c10d = (torch.library.Library(name, "IMPL") for name in ("_", "aten", "c10d"))
    every.fallback(_on_host, "PrivateUse1")  # torch.tensor(..., device=...) inside a dispatch mode does not find it
    aten.impl("_copy_from", functools.partial(_on_host, torch.ops.aten._copy_from.default), "PrivateUse1")
    for name in _C10D:
        function = functools.partial(_on_host, getattr(torch.ops.c10d, name).default)
        c10d.impl(name, function, "PrivateUse1", allow_override=True)
    _libraries.extend((every, aten, c10d))
    torch.Tensor.data = property(torch._C.TensorBase.data.__get__, _set_data)  # type: ignore[assignment]
    torch._has_compatible_shallow_copy_type = _compatible  # type: ignore[assignment]
    dist.Backend.register_backend(f"{NAME}gloo", _gloo, devices=[NAME])
    return torch.device(NAME, 0)


@functools.cache
def _host_group(group: Any) -> Any:
    """Return a group that carries the host's tensors by what carries the device's in this one."""
    same = dist.ProcessGroup(group.rank(), group.size())
    backend = group._get_backend(torch.device(NAME))
    same._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return same


def _gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(dist.PrefixStore(NAME, store), rank, size, timeout)


# -- Tensor.data from one device to the other: torch allows it for CPU and CUDA, not for devices from elsewhere ----------


def _set_data(x: torch.Tensor, data: torch.Tensor) -> None:
    if x.device.type != data.device.type and NAME in (x.device.type, data.device.type):
        torch.ops.sim.set_data(x, data)
    else:
        torch._C.TensorBase.data.__set__(x, data)


_torchs_compatible = torch._has_compatible_shallow_copy_type


def _compatible(input: torch.Tensor, from_: torch.Tensor) -> bool:
    return {input.device.type, from_.device.type} <= {"cpu", NAME} or _torchs_compatible(input, from_)


# -- kernels -----------------------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    name: str
    writes: bool
    draws: bool
    tensors: frozenset[int]  # positions of arguments that are tensors: torch gives numbers there as numbers


@functools.cache
def _kind(op: Any) -> _Kind:
    arguments = op._schema.arguments
    writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in arguments)
    draws = any(argument.name == "generator" for argument in arguments)
    tensors = frozenset(at for at, argument in enumerate(arguments) if str(argument.type) == "Tensor")
    return _Kind(op._schema.name.split("::")[1], writes, draws, tensors)


def _on_host(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on the memory of its tensors, by the kernel of the CPU."""
    kind = _kind(op)
    _check_places(op, kind, args, kwargs)
    waiting = _waits_for(kind, args, kwargs)
    if waiting:
        _note(waiting)
    hosts: list[tuple[torch.Tensor, torch.Tensor]] = []
    if kind.draws and kwargs.get("generator") is None:
        kwargs = {**kwargs, "generator": torch.ops.sim.default_generator()}
    args, kwargs = _to_host(args, hosts), _to_host(kwargs, hosts)
    if any(isinstance(args[at], int | float) for at in kind.tensors if at < len(args)):
        args = tuple(
            torch.tensor(value) if at in kind.tensors and isinstance(value, int | float) else value
            for at, value in enumerate(args)
        )
    result = _copy(*args, **kwargs) if kind.name == "_copy_from" else op(*args, **kwargs)
    if kind.writes:
        for host, x in hosts:
            if host.shape != x.shape or host.data_ptr() != x.data_ptr():  # an out= that was too small
                x.resize_(host.shape)
                torch.ops.sim.on_host(x).copy_(host)
    return _to_device(result, hosts)


def _copy(source: torch.Tensor, out: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return out.copy_(source)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)


def _check_places(op: Any, kind: _Kind, args: Any, kwargs: Any) -> None:
    if kind.name in _INDEXED or kind.name.startswith("_copy_from"):  # indices may lie on the host
        return
    for x in _tensors((args, kwargs)):
        if x.device.type != NAME and x.dim():
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{NAME}:0 and {x.device}! (in {op})"
            )


def _to_host(value: Any, hosts: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type != NAME:
            return value
        host = torch.ops.sim.on_host(value)
        hosts.append((host, value))
        return host
    if isinstance(value, list | tuple):
        return type(value)(_to_host(one, hosts) for one in value)
    if isinstance(value, dict):
        return {name: _to_host(one, hosts) for name, one in value.items()}
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    if isinstance(value, torch.Generator) and value.device.type == NAME:
        return torch.ops.sim.host_generator(value)
    if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
        return _host_group(dist.ProcessGroup.unbox(value)).boxed()
    return value


def _to_device(value: Any, hosts: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if isinstance(value, torch.Tensor):
        for host, x in hosts:
            if host is value:
                return x
        return torch.ops.sim.on_device(value)
    if isinstance(value, list | tuple):
        return type(value)(_to_device(one, hosts) for one in value)
    return value


# -- waiting -----------------------------------------------------------------------------------------------------------


def _waits_for(kind: _Kind, args: Any, kwargs: Any) -> str:
    """What of an operation makes the host wait on CUDA; empty where nothing does."""
    if kind.name in _SIZES_FROM_VALUES:
        return kind.name
    if kind.name == "repeat_interleave" and kwargs.get("output_size") is None:
        return kind.name
    if kind.name == "_copy_from":
        ends = [x.device.type for x in args[:2]]
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return f"copy from {ends[0]} to {ends[1]}" if ends[0] != ends[1] and blocking and args[0].numel() else ""
    if kind.name in _INDEXED:
        indices = list(_tensors(args[1]))
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            return "index by a mask"
        if any(index.device.type != NAME for index in indices):
            return "index by a tensor of the host"
    return ""


def _note(what: str) -> None:
    if not _watching:
        return
    stack: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_SKIPPED):
            stack.append(f"{code.co_filename}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    wait = Wait(what, stack[0] if stack else "autograd", tuple(stack))
    for found in _watching:
        found.append(wait)


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
        _note("synchronize")

    def query(self) -> bool:
        return True


def _module() -> ModuleType:
    """``torch.sim``."""
    module = ModuleType(f"torch.{NAME}")
    generator = torch.ops.sim.default_generator()

    def seed(value: int) -> None:
        generator.manual_seed(value)

    def get_state(device: Any = NAME) -> torch.Tensor:
        return generator.get_state()

    def set_state(state: torch.Tensor, device: Any = NAME) -> None:
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
        "synchronize": lambda device=None: _note("synchronize"),
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
    for name, function in functions.items():
        setattr(module, name, function)
    return module
