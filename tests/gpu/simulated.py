"""The device ``sim``: an accelerator as torch sees one, whose memory is the host's and whose kernels are the CPU's.

``start()`` makes it in this process, which keeps it: use it in ranks of its own. Tensors on it are torch's own and not
a subclass, so autograd runs their backward in a thread of its own, as on CUDA, and storages, views and ``.data`` work.
What goes wrong on an accelerator only goes wrong here too:

- an operation on a tensor of the device and one of the host (0-dimensional ones are allowed) raises as on CUDA;
- it has its own random generator;
- whatever would make the host wait on CUDA is noted with its place while :func:`~tests.gpu.host_waits.waits` looks.

Collectives go over gloo, on the same memory. Everything is done when it returns. What streams would do later is logged
while :func:`~tests.gpu.stream_order.orders` looks, and ``torch.ops.sim.memory()`` counts bytes and allocations.
"""

import functools
import hashlib
import os
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autopar.tools.compat.operators import Operator, operator_of
from tests.gpu.host_waits import INDEXED, note, tensors_in, waits_for
from tests.gpu.simulated_module import Stream, make_module
from tests.gpu.stream_order import Orders, is_view, running, uses_of, watch_works

NAME = "sim"
BACKEND = f"cpu:gloo,{NAME}:{NAME}gloo"

_SOURCE = Path(__file__).with_suffix(".cpp")
_C10D = [
    *("allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_", "allgather_coalesced_"),
    *("allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_", "broadcast_", "reduce_"),
    *("reduce_scatter_tensor_coalesced_", "gather_", "scatter_", "alltoall_", "alltoall_base_", "send", "recv_"),
    *("recv_any_source_", "barrier", "monitored_barrier_"),
]
_libraries: list[Any] = []  # what torch.library has registered ends with these


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
    torch._register_device_module(NAME, make_module(NAME))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    every, aten, c10d = (torch.library.Library(name, "IMPL") for name in ("_", "aten", "c10d"))
    every.fallback(_on_host, "PrivateUse1")  # torch.tensor(..., device=...) inside a dispatch mode does not find it
    aten.impl("_copy_from", functools.partial(_on_host, torch.ops.aten._copy_from.default), "PrivateUse1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that are overridden
        for name in _C10D:
            function = functools.partial(_on_host, getattr(torch.ops.c10d, name).default)
            c10d.impl(name, function, "PrivateUse1", allow_override=True)
    convolution = functools.partial(_on_host, torch.ops.aten.convolution.default)
    aten.impl("convolution_overrideable", convolution, "PrivateUse1")
    aten.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
    _libraries.extend((every, aten, c10d))
    torch.Tensor.record_stream = _record_stream  # type: ignore[assignment, method-assign]
    watch_works()
    torch.Tensor.data = property(torch._C.TensorBase.data.__get__, _set_data)  # type: ignore[assignment]
    torch._has_compatible_shallow_copy_type = _compatible  # type: ignore[assignment]
    dist.Backend.register_backend(f"{NAME}gloo", _gloo, devices=[NAME])
    return torch.device(NAME, 0)


@functools.cache
def _host_group(group: Any) -> Any:
    """Return a group that carries the host's tensors by what carries the device's in this one."""
    same = dist.ProcessGroup(group.rank(), group.size())
    backend = group._get_backend(torch.device(NAME))
    same._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    same._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return same


def _gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(dist.PrefixStore(NAME, store), rank, size, timeout)


def _set_data(x: torch.Tensor, data: torch.Tensor) -> None:
    if x.device.type != data.device.type and NAME in (x.device.type, data.device.type):
        torch.ops.sim.set_data(x, data)
    else:
        torch._C.TensorBase.data.__set__(x, data)


_torchs_compatible = torch._has_compatible_shallow_copy_type


def _compatible(input: torch.Tensor, from_: torch.Tensor) -> bool:
    return {input.device.type, from_.device.type} <= {"cpu", NAME} or _torchs_compatible(input, from_)


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
    waiting, log, given = waits_for(kind.name, args, kwargs), running(), (args, kwargs)
    if waiting:
        note(waiting)
    hosts: list[tuple[torch.Tensor, torch.Tensor]] = []
    if kind.draws and kwargs.get("generator") is None:
        kwargs = {**kwargs, "generator": torch.ops.sim.default_generator()}
    args, kwargs = _to_host(args, hosts), _to_host(kwargs, hosts)
    if any(isinstance(args[at], int | float) for at in kind.tensors if at < len(args)):
        args = tuple(
            torch.tensor(value) if at in kind.tensors and isinstance(value, int | float) else value
            for at, value in enumerate(args)
        )
    result = args[1].copy_(args[0]) if kind.name == "_copy_from" else op(*args, **kwargs)
    if kind.writes:
        for host, x in hosts:
            if host.shape != x.shape or host.data_ptr() != x.data_ptr():  # an out= that was too small
                x.resize_(host.shape)
                torch.ops.sim.on_host(x).copy_(host)
    result = given[0][1] if kind.name == "_copy_from" else _to_device(result, hosts)
    if log is not None:
        _tell(log, op, *given, result, waits=bool(waiting))
    return result


def _tell(log: Orders, op: Any, args: Any, kwargs: Any, result: Any, *, waits: bool) -> None:
    """Tell the log what an operation has done, on which stream."""
    name, line = op._schema.name.split("::")[1], torch.ops.sim.stream()
    collective = operator_of(op)
    if name == "_copy_from":
        log.copy(*args[:2], non_blocking=bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False)))
    elif collective is not None:
        _tell_collective(log, op, collective, args, result if isinstance(result, tuple) else (result,))
    elif not is_view(op):
        given = uses_of(op, args, kwargs)
        old = {x.data_ptr() for x, _ in given}
        uses = [(x, writes) for x, writes in given if x.device.type == NAME]
        log.issue(line, name, uses + [(x, True) for x in tensors_in(result) if x.data_ptr() not in old])
        if waits:
            log.host_waits(line)


def _tell_collective(log: Orders, op: Any, operator: Operator, args: Any, result: tuple[Any, ...]) -> None:
    uses = [(x, False) for x in tensors_in(args[operator.given])]
    if operator.kind != "send":
        uses += [(x, True) for x in tensors_in(args[operator.out])]
    names = [argument.name for argument in op._schema.arguments]
    at = names.index("async_op") if "async_op" in names else len(args)
    if at < len(args) and not args[at]:
        log.issue(torch.ops.sim.stream(), operator.kind, uses)
        return
    peer = f" with {args[operator.peer]}" if operator.tag >= 0 else ""  # messages of each pair have a stream
    where = f"nccl's stream of {dist.ProcessGroup.unbox(args[operator.group]).group_name}{peer}"
    log.collective(where, operator.kind, uses, dist.Work.unbox(result[-1]))


def _record_stream(x: torch.Tensor, stream: Stream) -> None:
    log = running()
    if log is not None:
        log.lend(x, stream.number)


def _convolution_backward(grad: Any, x: Any, weight: Any, *settings: Any) -> Any:
    *how, transposed, padding, groups, wanted = settings
    biases = [weight.shape[1] * groups if transposed else weight.shape[0]]
    backward = torch.ops.aten.convolution_backward.default
    return _on_host(backward, grad, x, weight, biases, *how, transposed, padding, groups, wanted)


def _check_places(op: Any, kind: _Kind, args: Any, kwargs: Any) -> None:
    if kind.name in INDEXED or kind.name.startswith("_copy_from"):  # indices may lie on the host
        return
    for x in tensors_in((args, kwargs)):
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
