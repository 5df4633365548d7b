"""Convert the state of a parallelized model and its optimizer to DTensors, for ``torch.distributed.checkpoint``.

``Shard(dim)`` of a DTensor is one range, as ``torch.chunk`` splits. A layout with the same ranges becomes an ordinary
DTensor. For other layouts (a fused ``q | k | v``, heads that do not divide, replicated KV heads) the local tensor is a
:class:`_RangesShard`, which implements torch's protocol to write and read several ranges.

The optimizer's entries have the names of ``get_optimizer_state_dict`` with ``flatten_optimizer_state_dict=True``, so
that no rank needs parameters of other stages: ``state.{parameter}.{key}`` and ``param_groups.{parameter}.{option}``.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from autopar.checkpoint.optimizer_state import COUNTERS, keeps_state, named_groups, new_option, step_of, take, unwrapped
from autopar.checkpoint.state import local_tensors, state_of
from autopar.compat.tensors import TO_COPY, disabled_torch_function, wrapper_subclass
from autopar.errors import CheckpointError, listed
from autopar.layout import Layout, Range

_aten = torch.ops.aten
_INSTEAD = "  Use model.save_parallelized(dir, optimizer=optimizer) and model.from_parallelized."
_START = {"step": 0.0, "mu_product": 1.0, "mu": 1.0}  # counters before the first step; eta starts at lr
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def to_dtensor_state_dict(model: nn.Module, *, aliases: bool = False) -> dict[str, DTensor]:
    """Return the tensors of a parallelized model as DTensors, under the names of the reference model's state dict.

    ``torch.distributed.checkpoint.save`` and ``async_save`` write full logical tensors: the result loads on any number
    of ranks, and ``dcp_to_torch_save`` turns it into the reference model's state dict. The values share memory with the
    model, so ``load`` into the dict fills the model in place (with an optimizer: :func:`to_dtensor_training_state`)::

        state = to_dtensor_state_dict(model)
        torch.distributed.checkpoint.load(state, checkpoint_id="folder")

    Evenly sharded tensors are ordinary ``Shard(dim)``. The remaining tensors (fused projections, heads that do not
    divide, replicated KV heads) support only saving and loading; other operations, ``full_tensor()`` included, raise.
    torch's ``HuggingFaceStorageWriter`` silently writes wrong values for shards of several ranges. For files in Hugging
    Face's form use ``save_parallelized(..., merge_checkpoints=True)``.

    Args:
        aliases: True to list tied tensors under each of their names, as ``model.state_dict()`` does; by default under
            the name that ``save_pretrained`` keeps.

    Raises:
        CheckpointError: The model is not parallelized, or has changed since.
    """
    state = state_of(model)
    mesh, rank = state.mpu.shards_mesh, state.mpu.shards.rank
    result: dict[str, DTensor] = {}
    for name, tensor in local_tensors(model).items():
        plan = state.plan.tensors[name]
        result[name] = as_dtensor(tensor.detach(), plan.shape, plan.layout, mesh, rank)
        if aliases:
            result |= dict.fromkeys(plan.aliases, result[name])
    return result


def as_dtensor(
    local: torch.Tensor, shape: Sequence[int], layout: Layout | None, mesh: DeviceMesh, rank: int
) -> DTensor:
    if layout is None:
        return DTensor.from_local(local, mesh, [Replicate()], run_check=False)
    if not is_even_shard(layout):
        local = _RangesShard(local, layout, rank)
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(layout.dim)], run_check=False, shape=torch.Size(shape), stride=stride)


def is_even_shard(layout: Layout) -> bool:
    """Return whether every rank holds the range of DTensor's ``Shard(dim)``."""
    size, each = layout.size, -(-layout.size // layout.axis_size)
    bounds = [min(rank * each, size) for rank in range(layout.axis_size + 1)]
    due = [((start, stop),) if start < stop else () for start, stop in itertools.pairwise(bounds)]
    return due == [layout.ranges(rank) for rank in range(layout.axis_size)]


def disjoint_ranges(layout: Layout, rank: int) -> tuple[Range, ...]:
    """Split :meth:`Layout.ranges` so that any two ranges of any two ranks are equal or disjoint.

    ``torch.distributed.checkpoint`` writes equal ranges once, and raises if ranges overlap otherwise.
    """
    bounds = sorted({bound for r in range(layout.axis_size) for held in layout.ranges(r) for bound in held})
    return tuple(
        part
        for start, stop in layout.ranges(rank)
        for part in itertools.pairwise([start, *(bound for bound in bounds if start < bound < stop), stop])
    )


class _RangesShard(torch.Tensor):
    """A shard of several ranges of the stored tensor, with its memory and torch's ``_Checkpointable`` protocol."""

    _local: torch.Tensor
    _layout: Layout
    _rank: int

    @staticmethod
    def __new__(cls, local: torch.Tensor, layout: Layout, rank: int) -> _RangesShard:
        """Wrap ``local``; nothing is copied."""
        shard = wrapper_subclass(cls, local.shape, strides=local.stride(), dtype=local.dtype, device=local.device)
        shard._local, shard._layout, shard._rank = local, layout, rank
        return shard

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._layout}, {self._rank}, {self._local!r})"

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> _RangesShard:
        """Support only the operations that making the DTensor and copying it to the host (``async_save``) need."""
        operation, options = func.overloadpacket, dict(kwargs or {})
        if isinstance(args[0], _RangesShard):
            self = args[0]
            if operation in (_aten.detach, _aten.alias, _aten.clone, TO_COPY):
                return cls(func(self._local, *args[1:], **options), self._layout, self._rank)
            if operation is _aten.view and tuple(args[1]) == tuple(self.shape):
                return cls(self._local.view_as(self._local), self._layout, self._rank)
            if operation is _aten.new_empty:  # DTensor queries the size of its local shard
                return cls(torch.empty_like(self._local, **options), self._layout, self._rank)
        raise CheckpointError(
            f"{operation} is not supported on a DTensor of a fused, uneven or replicated layout: it only saves and "
            "loads with torch.distributed.checkpoint\n"
            "  For full tensors use save_parallelized(..., merge_checkpoints=True), or dcp_to_torch_save afterwards."
        )

    def _chunks(self) -> list[tuple[ChunkStorageMetadata, torch.Tensor]]:
        """Return each range: its place in the stored tensor, and a view of the memory."""
        dim, result, offset = self._layout.dim, [], 0
        for start, stop in disjoint_ranges(self._layout, self._rank):
            view = self._local.narrow(dim, offset, stop - start)
            place = [0] * view.ndim
            place[dim] = start
            result.append((ChunkStorageMetadata(offsets=torch.Size(place), sizes=view.shape), view))
            offset += stop - start
        return result

    def __create_write_items__(self, fqn: str, object: torch.Tensor) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=object.size()),
            )
            for chunk, _ in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in self._chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for chunk, view in self._chunks():
            if chunk.offsets == index.offset:
                return view
        raise ValueError(f"{index.fqn} has no range at {index.offset} on rank {self._rank}")


# -- the optimizer -----------------------------------------------------------------------------------------------------


class OptimizerDTensors(dict[str, Any]):
    """Flat name -> this rank's state. ``torch.distributed.checkpoint.load`` restores the options automatically."""

    def __init__(self, entries: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(entries)
        self._of = model, optimizer

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as a plain dict, without the model."""
        return dict, (), None, None, iter(self.items())

    def state_dict(self) -> dict[str, Any]:
        """Return the entries; torch calls it."""
        return dict(self)

    def load_state_dict(self, entries: Mapping[str, Any]) -> None:
        """Load the entries that torch has read; torch calls it."""
        self.update(entries)
        load_dtensor_state_dict(*self._of, {"optim": entries})


def to_dtensor_training_state(
    model: nn.Module, optimizer: Optimizer, aliases: bool = False
) -> dict[str, dict[str, Any]]:
    """Return ``{"model": ..., "optim": ...}`` for ``torch.distributed.checkpoint.save``, ``async_save`` and ``load``.

    Tensors share memory with the model and the optimizer, so loading fills both in place, on any mesh::

        torch.distributed.checkpoint.load(to_dtensor_training_state(model, optimizer), checkpoint_id="folder")

    An optimizer without state gets the state of a step with zero gradients, with counters at 0. With ZeRO-1 a rank has
    the entries of the parameters that it owns. torch stores options (``lr``) as pickles: load only trusted folders.

    Args:
        optimizer: An optimizer of the model's parameters, made after ``initialize`` or passed to it.
        aliases: See :func:`to_dtensor_state_dict`.

    Raises:
        CheckpointError: The precision keeps fp32 weights, the state holds statistics of a shard (Adafactor), the
            weights are sharded over the replicas, or the optimizer has other parameters. Nothing has changed.
    """
    state = state_of(model)
    weights, optimizer = to_dtensor_state_dict(model, aliases=aliases), unwrapped(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise CheckpointError(f"optimizer={optimizer!r} must be a torch.optim.Optimizer")
    step = step_of(optimizer)
    if step is not None and (step.masters is not None or step.scale is not None or step.host is not None):
        raise CheckpointError(
            "to_dtensor_training_state does not support precision.dtype bf16 or fp16 (fp32 weights, a loss scale) or "
            f"zero.optimizer_offload.\n{_INSTEAD}"
        )
    groups = named_groups(optimizer, model, state.plan)
    made: dict[torch.Tensor, dict[str, Any]] = {}  # without communication and without hooks
    for group, named in zip(optimizer.param_groups, groups, strict=True):
        for name, parameter in named:
            if isinstance(parameter, DTensor):
                raise CheckpointError(
                    f"to_dtensor_training_state does not support {name}, sharded over the replicas.\n{_INSTEAD}"
                )
            if parameter.requires_grad and not optimizer.state.get(parameter) and keeps_state(optimizer, parameter):
                first = _first_state(optimizer, group, parameter)
                made |= {parameter: first} if first else {}
    optimizer.state.update(made)
    mesh, rank = state.mpu.shards_mesh, state.mpu.shards.rank
    taken = take(optimizer, model, state.plan, rank)
    if taken.metadata["other"]:
        raise CheckpointError(f"{type(optimizer).__name__} keeps state that belongs to no parameter.\n{_INSTEAD}")
    entries: dict[str, Any] = {}
    for name, tensor in taken.tensors.items():
        of, _, key = name.partition("::")
        due = taken.plans[name]  # a 0-dim tensor may be on the host
        entries[f"state.{of}.{key}"] = as_dtensor(tensor, due.shape, due.layout, mesh, rank) if tensor.ndim else tensor
    for group, named in zip(optimizer.param_groups, groups, strict=True):
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        for name, parameter in named:
            plain = {k: v for k, v in optimizer.state.get(parameter, {}).items() if not isinstance(v, torch.Tensor)}
            entries |= {f"state.{name}.{key}": value for key, value in plain.items()}
            entries |= {f"param_groups.{name}.{key}": value for key, value in options.items()}
    return {"model": dict(weights), "optim": OptimizerDTensors(entries, model, optimizer)}


def _first_state(optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """Return the optimizer's state for a parameter of zeros after a step with zero gradients."""
    step = step_of(optimizer)
    shape = parameter.shape if step is None else step.whole.get(parameter, parameter.shape)
    zeros = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=parameter.device))
    zeros.grad = torch.zeros_like(zeros)
    twin: Any = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    for hooks in _HOOKS:
        setattr(twin, hooks, OrderedDict())
    twin.param_groups, twin.state = [{**group, "params": [zeros]}], defaultdict(dict)
    type(optimizer).step(twin)
    made: dict[str, Any] = twin.state.get(zeros, {})
    for key, value in made.items():
        if key in COUNTERS and isinstance(value, torch.Tensor) and value.ndim == 0:
            value.fill_(_START.get(key, group["lr"]))
    return made


@torch.no_grad()
def load_dtensor_state_dict(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Set the optimizer's options and plain values from a loaded dict of :func:`to_dtensor_training_state`.

    ``torch.distributed.checkpoint.load(state)`` calls it; call it yourself if the dict is inside another dict.

    Raises:
        CheckpointError: Parameters of one group were saved with different options. Nothing has changed.
    """
    plan, entries = state_of(model).plan, state["optim"]
    options: list[dict[str, Any]] = []
    values: list[tuple[nn.Parameter, str, Any]] = []
    for group, named in zip(optimizer.param_groups, named_groups(optimizer, model, plan), strict=True):
        found: dict[str, Any] = {}
        for name, parameter in named:
            for key in group:
                entry = f"param_groups.{name}.{key}"
                if entry in entries and bool(found.setdefault(key, entries[entry]) != entries[entry]):
                    raise CheckpointError(
                        f"{listed([other for other, _ in named])} are one group of this optimizer, but were saved with "
                        f"different options: {key} is {found[key]!r} and {entries[entry]!r}\n"
                        "  Make the same groups as in the run that saved it."
                    )
            for key, now in optimizer.state.get(parameter, {}).items():
                entry = f"state.{name}.{key}"
                if not isinstance(now, torch.Tensor) and entry in entries:
                    values.append((parameter, key, entries[entry]))
        options.append(found)
    for group, found in zip(optimizer.param_groups, options, strict=True):
        for key, value in found.items():
            group[key] = new_option(group.get(key), value)
    for parameter, key, value in values:
        optimizer.state[parameter][key] = value
