"""Numbers of DTensors under ZeRO's stages 2 and 3, which user code reads or draws.

A norm or a sum of a DTensor has a sum over the ranks still pending. torch does it when another operation needs the
result, but ``.item()`` returns this rank's share: another number on each. Here it returns the full number, for
parameters that FSDP2 shards for a parallelized model and for results of them; other DTensors are left to torch.

A tensor that replaces such a parameter by ``.data`` would be lost: a DTensor does not compute with it.

Random numbers for such a parameter are drawn for the full tensor, and a rank keeps its rows: under one seed they equal
the draws of one process. (On the CPU torch would draw the same numbers for the rows of each rank.)

``torch.autograd.grad`` does not reach such parameters: FSDP2 computes with gathered ones, and frees them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.distributed.tensor import DTensor

from autopar.call_site import place_of_user
from autopar.compat.c10d import gathered_parameters
from autopar.compat.patches import patch_entry, patch_member, patch_setter
from autopar.compat.tensors import ITEM, RANDOM, name_of_operator, operators_of_dtensors
from autopar.data_parallel.fully_sharded import FullySharded
from autopar.distributed.agree import meet
from autopar.errors import ConfigError
from autopar.guards.step import listeners
from autopar.layout import replica_rows

_ADVICE = (
    "A norm or a sum of a parameter under zero.stage 2 and 3 is that of all replicas' shards, and takes all of them:\n"
    "  read it on all (if rank == 0: around the print, not around .item()), or read parameter.to_local(), the shard."
)


def install() -> None:
    """Patch torch's functions of DTensors."""
    table, kind = operators_of_dtensors(), "torch.distributed.tensor.DTensor"
    patch_entry(table, f"{kind}.item", ITEM, _read)
    for operator in RANDOM:
        patch_entry(table, f"{kind}.{name_of_operator(operator)}", operator, _draw)
    patch_setter(DTensor, "data", _assign)
    patch_member(torch.autograd, "grad", _grad)


@torch.no_grad()
def _read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the number in ``args[0]``."""
    tensor: DTensor = args[0]
    if all(placement.is_replicate() for placement in tensor.placements):
        return func(tensor.to_local())
    model, axis = _model_of(tensor)
    if model is None:
        return func(tensor.to_local())
    place = place_of_user()
    if place not in model.read:
        what = f"a number of a tensor that replicas share (line {place[1]})"
        meet(axis, what, axis.read_timeout, _ADVICE)
        model.read.add(place)
    with model.failures.blame("reading a number of a tensor that replicas share (FSDP2)", axis.ranks):
        return func(tensor.full_tensor())


@torch.no_grad()
def _draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return ``args[0]``, or a tensor like it, with numbers drawn for the full tensor."""
    tensor: DTensor = args[0]
    local, mesh, last = tensor.to_local(), tensor.device_mesh, tensor.device_mesh.ndim - 1
    in_place = name_of_operator(func).endswith("_")
    if _model_of(tensor)[0] is None or not tensor.placements[last].is_shard(0):
        table = operators_of_dtensors()
        ours = table.pop(func)
        try:
            return func(*args, **kwargs)
        finally:
            table[func] = ours
    whole = func(torch.empty(tensor.shape, dtype=local.dtype, device=local.device), *args[1:], **kwargs)
    start, stop = replica_rows(tensor.shape[0], mesh.get_local_rank(last), mesh.size(last))
    rows = whole[start:stop].clone()
    if in_place:
        local.copy_(rows)
        return tensor
    like: Any = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(rows, mesh, tensor.placements, **like)


def _assign(plain: Any, tensor: DTensor, value: Any) -> None:
    """Write ``value`` into ``tensor``, which FSDP2 shards, for ``tensor.data = value``."""
    if _model_of(tensor)[0] is None or not isinstance(value, torch.Tensor):
        plain(tensor, value)
        return
    alike = isinstance(value, DTensor) and value.device_mesh == tensor.device_mesh
    if not alike or value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise ConfigError(
            f"parameter.data = {type(value).__name__} of {tuple(value.shape)} in {value.dtype}: with zero.stage 2 and "
            f"3 it is a DTensor of {tuple(tensor.shape)} in {tensor.dtype},\n  and torch would go on with the old one. "
            "Write p.data.copy_(distribute_tensor(full, p.device_mesh, p.placements))."
        )
    with torch.no_grad():
        tensor.data.copy_(value)


def _grad(plain: Any, outputs: Any, inputs: Any, *args: Any, **how: Any) -> Any:
    """The body of ``torch.autograd.grad``: raise for sharded parameters."""
    listed = [inputs] if isinstance(inputs, torch.Tensor | GradientEdge) else list(inputs)
    sharded = [each for each in listed if isinstance(each, DTensor) and _model_of(each)[0] is not None]
    gathered = [id(each) for each in listed] if how.get("create_graph") else []
    found: Any = ()
    if not any(gathered_parameters(model.model).intersection(gathered) for model in listeners(FullySharded)):
        try:
            found = plain(outputs, listed, *args, **how)
        except RuntimeError as error:
            if not sharded or "appears to not have been used in the graph" not in str(error):
                raise
        if not sharded or any(gradient is not None for gradient in found):
            return found
    raise ConfigError(
        "torch.autograd.grad(loss, parameters) is not supported with zero.stage 2 and 3: torch's FSDP2 computes with "
        "gathered weights,\n  whose gradients come into parameter.grad, and frees them. Use loss.backward() and "
        "parameter.grad; for create_graph=True zero.stage 1, or tensor_parallel_size."
    )


def _model_of(tensor: DTensor) -> tuple[FullySharded | None, Any]:
    """Return the model with parameters on the tensor's mesh, and the axis of its ranks."""
    for model in listeners(FullySharded):
        axis = model.axis_of(tensor.device_mesh)
        if axis is not None:
            return model, axis
    return None, None
