"""Send the first rank's batch to the other ranks of a tensor-parallel group.

After Megatron-LM ``megatron/core/tensor_parallel/data.py``. Three things differ: the first rank's data is checked
*before* the first collective, so bad data is one error on all ranks, where Megatron's peers wait forever; tensors may
have any number of dims; each key may have its own dtype. Tensors travel as bytes: gloo has no float8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from autopar.distributed import collectives
from autopar.distributed.axis import Group, axis_of, device_of
from autopar.errors import ConfigError, nearest

Dtypes = torch.dtype | Mapping[Any, torch.dtype]


Spec = tuple[int | str, torch.dtype, tuple[int, ...]]
"""Key, dtype and shape of a tensor to receive."""


def broadcast_data(
    keys: Iterable[int | str], data: Mapping[Any, Any] | None, dtype: Dtypes, group: Group
) -> dict[int | str, torch.Tensor]:
    """Broadcast the tensors of the first rank of ``group`` to all of its ranks.

    Args:
        keys: Keys of ``data`` to send, int or str. Those of the first rank are used.
        data: The batch on the first rank, on any device. It is ignored on the other ranks.
        dtype: The dtype of every tensor, or a mapping with each key's.
        group: A process group or an MPU (its tensor-parallel group).

    Returns:
        ``{key: tensor}`` in the order of the keys, Replicate over the group, on its device (nccl: this rank's GPU).
        Copies with the first rank's shapes, detached from autograd.

    Raises:
        ConfigError: On the first rank ``data`` is not a mapping, a key is missing, or a value is not a dense tensor of
            its dtype. Lists all problems, on every rank of the group.
    """
    axis = axis_of(group)
    device = device_of(axis)
    specs: list[Spec] = []
    problems: list[str] = []
    if axis.rank == 0:
        try:
            specs, problems = _inspect(keys, data, dtype)
        except Exception as error:  # whatever it is, the others must not wait
            problems = [f"{type(error).__name__}: {error}"]
    if axis.size > 1:
        checked: list[Any] = [(specs, problems)]
        dist.broadcast_object_list(checked, group_src=0, group=axis.group)
        specs, problems = checked[0]
    if problems:
        origin = f"\n(the data of global rank {axis.ranks[0]}, the first of global ranks {list(axis.ranks)})"
        raise ConfigError("broadcast_data: " + "\n".join(problems) + origin, problems)
    received = {}
    for key, kind, shape in specs:
        x = torch.empty(shape, dtype=kind, device=device)
        if axis.rank == 0:
            assert data is not None
            x.copy_(data[key].detach())
        if x.numel():
            collectives.broadcast(x.view(-1).view(torch.uint8), axis)
        received[key] = x
    return received


def _inspect(keys: Any, data: Any, dtype: Any) -> tuple[list[Spec], list[str]]:
    """Return the metadata of the tensors to send, and all problems."""
    if isinstance(keys, (str, int)) or not isinstance(keys, Iterable):
        return [], [f"keys must be a list of keys, not {keys!r}"]
    if not isinstance(data, Mapping):
        return [], [f"data must be a mapping of keys to tensors, not {type(data).__name__}"]
    specs: list[Spec] = []
    problems: list[str] = []
    for key in dict.fromkeys(keys):
        wanted = dtype.get(key) if isinstance(dtype, Mapping) else dtype
        value: Any = data[key] if key in data else None  # noqa: SIM401  # what reading it raises is the error
        dense = isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta
        if not isinstance(key, (int, str)):
            problems.append(f"a key must be an int or a str, not {key!r}")
        elif not isinstance(wanted, torch.dtype):
            problems.append(f"the dtype of key {key!r} must be a torch.dtype, not {wanted!r}")
        elif key not in data:
            held = ", ".join(map(repr, data)) or "no key at all"
            problems.append(f"key {key!r} is missing; the data has {held}.{nearest(str(key), map(str, data))}")
        elif not dense or value.is_quantized or value.dtype != wanted:
            found = f"{value.dtype}, {value.layout}" if isinstance(value, torch.Tensor) else type(value).__name__
            problems.append(f"data[{key!r}] must be a dense tensor of {wanted} with storage, not {found}")
        else:
            specs.append((key, value.dtype, tuple(value.shape)))
    return specs, problems
