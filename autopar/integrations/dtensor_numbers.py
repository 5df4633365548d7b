"""Reads, random draws, ``.data`` and ``autograd.grad`` of DTensors with ZeRO stages 2 and 3.

These patches apply to parameters that FSDP2 shards for a parallelized model, and to results computed from them; other
DTensors keep torch's behavior.

* A norm or a sum of a DTensor has a pending sum over ranks. torch completes it when an operation needs the result, but
  ``.item()`` returns the local part, which differs between ranks. Here it returns the full number.
* An assignment to ``.data`` would have no effect on the DTensor, so its values are copied.
* Random numbers are drawn for the full tensor, and each rank keeps its rows. Under one seed they equal the draws of a
  single process. (On the CPU torch would draw the same numbers for the rows of each rank.)
* ``torch.autograd.grad`` cannot reach such parameters, because FSDP2 computes with gathered weights and frees them.
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
    "With zero.stage 2 and 3, reading a norm or a sum of a parameter needs all replicas: put `if rank == 0:` around\n"
    "  the print, not around .item(). Or read the local shard, parameter.to_local()."
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
    model, axis = _model_of(tensor)
    if model is None or all(placement.is_replicate() for placement in tensor.placements):
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
    full = func(torch.empty(tensor.shape, dtype=local.dtype, device=local.device), *args[1:], **kwargs)
    start, stop = replica_rows(tensor.shape[0], mesh.get_local_rank(last), mesh.size(last))
    rows = full[start:stop].clone()
    if in_place:
        local.copy_(rows)
        return tensor
    like: Any = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(rows, mesh, tensor.placements, **like)


def _assign(plain: Any, tensor: DTensor, value: Any) -> None:
    """Copy ``value`` into ``tensor`` for ``tensor.data = value``, if FSDP2 shards it."""
    if _model_of(tensor)[0] is None or not isinstance(value, torch.Tensor):
        plain(tensor, value)
        return
    same_mesh = isinstance(value, DTensor) and value.device_mesh == tensor.device_mesh
    if not same_mesh or value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise ConfigError(
            f"parameter.data with zero.stage 2 and 3 must be a DTensor of {tuple(tensor.shape)} in {tensor.dtype}, got "
            f"{type(value).__name__} of {tuple(value.shape)} in {value.dtype}\n"
            "  Write p.data.copy_(distribute_tensor(full, p.device_mesh, p.placements))."
        )
    with torch.no_grad():
        tensor.data.copy_(value)


def _grad(plain: Any, outputs: Any, inputs: Any, *args: Any, **how: Any) -> Any:
    """Replace ``torch.autograd.grad``: raise ConfigError for sharded parameters."""
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
        "torch.autograd.grad(loss, parameters) is not supported with zero.stage 2 and 3, where FSDP2 computes with "
        "gathered weights\n  Use loss.backward() and parameter.grad; for create_graph=True use zero.stage 1 or "
        "tensor_parallel_size."
    )


def _model_of(tensor: DTensor) -> tuple[FullySharded | None, Any]:
    """Return the model whose parameters are on the mesh of ``tensor``, and the axis of the mesh; else None, None."""
    for model in listeners(FullySharded):
        axis = model.axis_of(tensor.device_mesh)
        if axis is not None:
            return model, axis
    return None, None
