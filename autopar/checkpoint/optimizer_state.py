"""The state of an optimizer as tensors under canonical names and metadata, for any tensor-parallel size.

A state tensor is called ``{parameter}::{key}``: ``h.0.attn.c_attn.weight::exp_avg``. There are five kinds of state:

* **like** its parameter: it has the parameter's shape, and is sharded by the parameter's own layout.
* **whole**: of a parameter that is replicated, or stepped whole, of any shape; and counters of steps.
* **own**: any other tensor of a sharded parameter, such as Adafactor's row and column statistics: numbers about this
  rank's shard, that no other sharding has. ``{parameter}::{key}@tp{rank}``; it fits the same sharding only.
* **value**: a number, a text or None, which lies in the metadata (:mod:`autopar.checkpoint.optimizer_metadata`).
* **list**: its items are states of their own, ``{key}[0]`` and so on (SOAP's matrices).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.checkpoint.optimizer_metadata import COUNTERS, OptimizerMetadata, is_sharded
from autopar.checkpoint.optimizer_weights import as_stepped, state_device
from autopar.errors import CheckpointError
from autopar.layout import Layout
from autopar.plan.plan import Plan, TensorPlan
from autopar.storage.json_values import encode, encode_inline
from autopar.storage.safetensors_io import dtype_name, dtype_of

_ON_HOST = frozenset({"step", "mu_product"})  # where torch makes them, unless capturable or fused
_STATISTICS = frozenset({"row_var", "col_var"})  # may have the parameter's shape by chance, if that has a 1
_VALUES = (type(None), bool, int, float, str)
_ITEM = re.compile(r"(.+)\[(\d+)\]")  # of a list

_Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class OptimizerState:
    """One rank's state of an optimizer, to be saved.

    Attributes:
        tensors: name -> this rank's tensor, the optimizer's own and no copy.
        plans: name -> its full shape, its dtype and its layout.
        metadata: everything else, as JSON.
    """

    tensors: dict[str, torch.Tensor]
    plans: dict[str, TensorPlan]
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A tensor for the caller to fill: this rank's shard by ``layout``, or all of it if that is None."""

    tensor: torch.Tensor
    layout: Layout | None


@dataclass(frozen=True)
class Restoration:
    """A state that fits and waits for its tensors. Nothing has changed yet.

    Attributes:
        targets: saved name -> what to fill.
    """

    targets: dict[str, Target]
    _optimizer: Optimizer
    _options: list[dict[str, Any]]
    _state: list[tuple[nn.Parameter, dict[str, Any]]]
    _other: dict[Any, Any]

    @torch.no_grad()
    def finish(self) -> None:
        """Give the optimizer its state and options, once ``targets`` are filled. State that it had is dropped."""
        self._optimizer.state.clear()
        self._optimizer.state.update({parameter: dict(state) for parameter, state in self._state})
        self._optimizer.state.update(self._other)
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            for key, value in options.items():
                group[key] = new_option(group.get(key), value)


def take(optimizer: Optimizer, model: nn.Module, plan: Plan, tp_rank: int) -> OptimizerState:
    """Collect the optimizer's state of this rank.

    Args:
        model: the root model, or the stage of it that this rank holds.
        plan: of the whole model.

    Raises:
        CheckpointError: a parameter is not the model's, or a state cannot be saved (which one, and why).
    """
    title = _title(optimizer)
    _refuse_wrapper(optimizer, title)
    groups = named_groups(optimizer, model, plan)
    tensors: dict[str, torch.Tensor] = {}
    plans: dict[str, TensorPlan] = {}
    entries: dict[str, dict[str, Any]] = {}
    for name, parameter in (pair for group in groups for pair in group):
        due = as_stepped(optimizer, parameter, plan.tensors[name])
        for key, value in _flat(optimizer.state.get(parameter, {})):
            what = f"state {key!r} of {name}"
            entry: dict[str, Any] = {}
            if type(value) in _VALUES and isinstance(key, str):
                entry = {"kind": "value", "value": value}
            elif isinstance(value, list) and isinstance(key, str) and not isinstance(optimizer, torch.optim.LBFGS):
                entry = {"kind": "list", "value": len(value)}
            elif not isinstance(value, torch.Tensor) or not isinstance(key, str) or not alike(value, parameter):
                raise CheckpointError(
                    f"{title} keeps {what} as {_kind_name(value)}; for each parameter a checkpoint holds tensors, "
                    "numbers and lists of them only\n"
                    "  Save without this optimizer, or use one whose state has the parameters' shapes."
                )
            else:
                saved, entry = _describe(key, value, due, tp_rank, plan.shards, title)
                if saved.name in tensors:
                    raise CheckpointError(f"{title} has two states that would be called {saved.name}")
                tensors[saved.name], plans[saved.name] = value.detach(), saved
            entries.setdefault(name, {})[key] = entry
    metadata = {
        "class": title,
        "tp": plan.shards,
        "groups": [
            {"options": _options(group), "params": [name for name, _ in named]}
            for group, named in zip(optimizer.param_groups, groups, strict=True)
        ],
        "state": entries,
        "other": _other(optimizer, title),
    }
    return OptimizerState(tensors, plans, encode_inline(metadata, title))


def prepare(
    optimizer: Optimizer,
    model: nn.Module,
    plan: Plan,
    tp_rank: int,
    metadata: Mapping[str, Any],
    saved: Mapping[str, TensorPlan],
    owns: Callable[[str], bool] = lambda name: True,
    dtype_here: Callable[[str, torch.Tensor, torch.dtype], torch.dtype] = lambda name, parameter, dtype: dtype,
) -> Restoration:
    """Check that a saved state fits this optimizer, and allocate its tensors. Changes nothing.

    Args:
        model: the root model, or the stage of it that this rank holds.
        plan: of the whole model, for the tensor-parallel size now; the saved one may differ.
        metadata: of all ranks that saved, merged.
        saved: every optimizer tensor of the checkpoint, of all ranks.
        owns: whether this rank keeps the state of a parameter, by canonical name (ZeRO-1).
        dtype_here: of a state that has the shape of a parameter, from the one that was saved.

    Raises:
        CheckpointError: the metadata is damaged, or the state is not that of this optimizer (what differs).
    """
    title = _title(optimizer)
    _refuse_wrapper(optimizer, title)
    groups = named_groups(optimizer, model, plan)
    before = OptimizerMetadata.parse(metadata)
    before.check_class(title)
    before.check_groups(groups, set(_named(model, plan).values()), plan, title)
    before.check_names(saved)
    targets: dict[str, Target] = {}
    state: list[tuple[nn.Parameter, dict[str, Any]]] = []
    for group, options in zip(groups, before.options, strict=True):
        for name, parameter in group:
            mine: dict[str, Any] = {}
            due = as_stepped(optimizer, parameter, plan.tensors[name])
            for key, entry in before.state.get(name, {}).items() if owns(name) else ():
                if entry.kind in ("value", "list"):
                    mine[key] = entry.value if entry.kind == "value" else [None] * entry.value
                    continue
                source = saved[entry.name(name, key, tp_rank)]
                shape, layout = entry.shape_on(tp_rank, key, source, due, before.tp, title)
                device = state_device(optimizer, parameter)
                if key in _ON_HOST and not (options.get("capturable") or options.get("fused")):
                    device = torch.device("cpu")
                dtype = _dtype(source) if entry.kind != "like" else dtype_here(name, parameter, _dtype(source))
                if entry.kind == "like" and isinstance(parameter, DTensor):
                    mine[key] = torch.empty_like(parameter.detach(), dtype=dtype)
                else:
                    mine[key] = torch.empty(shape, dtype=dtype, device=device)
                targets[source.name] = Target(mine[key], layout)
            if mine:
                state.append((parameter, _folded(mine)))
    return Restoration(targets, optimizer, before.options, state, before.other)


# -- reading an optimizer ----------------------------------------------------------------------------------------------


def _title(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _refuse_wrapper(optimizer: Optimizer, title: str) -> None:
    """Raise CheckpointError for an optimizer around another one, whose own ``state`` is not the one that is used."""
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer) and value.state is not optimizer.state:
            raise CheckpointError(
                f"{title} wraps a {type(value).__name__} (its attribute {name!r}) and does not hold its state itself\n"
                f"  Pass that one: optimizer=optimizer.{name}, where each rank holds all of it; or save without."
            )


def _kind_name(value: object) -> str:
    return "a DTensor (fully_shard?)" if isinstance(value, DTensor) else f"a {type(value).__qualname__}"


def _named(model: nn.Module, plan: Plan) -> dict[int, str]:
    """Return ``id(parameter)`` -> canonical name, of the parameters that the plan knows."""
    canonical = plan.names
    parameters = model.named_parameters(remove_duplicate=False)
    return {id(parameter): canonical[name] for name, parameter in parameters if name in canonical}


def alike(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Tell whether a state that is not a single number is sharded over the replicas as its parameter is."""
    if isinstance(value, DTensor) or (isinstance(parameter, DTensor) and value.ndim):
        return (
            isinstance(value, DTensor)
            and isinstance(parameter, DTensor)
            and (value.shape, value.placements) == (parameter.shape, parameter.placements)
        )
    return True


def named_groups(optimizer: Optimizer, model: nn.Module, plan: Plan) -> list[_Named]:
    """Return the named parameters of each group, without those of other stages (empty here)."""
    names = _named(model, plan)
    groups: list[_Named] = []
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names and parameter.numel():
                raise CheckpointError(
                    f"parameter {position} of group {index} of {_title(optimizer)}, of shape {list(parameter.shape)}, "
                    f"is not a parameter of this {type(model).__name__}\n"
                    "  Only a model's own optimizer can be saved with it. Was the parameter replaced after the "
                    "optimizer was made?"
                )
        groups.append([(names[id(p)], p) for p in group["params"] if id(p) in names])
    return groups


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group; the names of its parameters are saved in their canonical form anyway."""
    return {str(key): value for key, value in group.items() if key not in ("params", "param_names")}


def new_option(now: Any, saved: Any) -> Any:
    """Return the saved option; a tensor that is there stays the same object, because a captured graph may hold it."""
    if isinstance(now, torch.Tensor) and now.shape == (saved.shape if isinstance(saved, torch.Tensor) else ()):
        return now.copy_(saved) if isinstance(saved, torch.Tensor) else now.fill_(saved)
    return saved


def _other(optimizer: Optimizer, title: str) -> dict[Any, Any]:
    """Return the state that belongs to no parameter. Raises CheckpointError if there are tensors in it."""
    other = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    _, tensors = encode(other, f"the state of {title}")
    if tensors:
        raise CheckpointError(f"{next(iter(tensors))} is a tensor that belongs to no parameter; it cannot be saved")
    return other


def _describe(
    key: str, value: torch.Tensor, due: TensorPlan, tp_rank: int, tp: int, title: str
) -> tuple[TensorPlan, dict[str, Any]]:
    """Return the plan of a state tensor with its name, and its entry in the metadata."""
    name, shape, dtype = f"{due.name}::{key}", tuple(value.shape), dtype_name(value.dtype)
    local = due.local_shape(tp_rank)
    if shape == () and key in COUNTERS:
        return TensorPlan(name, shape, dtype), {"kind": "whole"}
    if shape == local and key not in _STATISTICS:
        return TensorPlan(name, due.shape, dtype, due.layout), {"kind": "like"}
    if not is_sharded(due):
        return TensorPlan(name, shape, dtype), {"kind": "whole"}
    if shape == due.shape:
        raise CheckpointError(
            f"{title} has state {key!r} of {due.name} of shape {list(shape)}, as before the model was parallelized; "
            f"tensor-parallel rank {tp_rank} of {tp} holds {list(local)}\n"
            "  Make the optimizer after autopar.initialize."
        )
    assert due.layout is not None
    return TensorPlan(f"{name}@tp{tp_rank}", shape, dtype), {"kind": "own", "layout": due.layout.to_json()}


def _flat(state: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield each state, and the items of those that are lists behind them: ``Q``, ``Q[0]``, ``Q[1]``."""
    for key, value in state.items():
        yield key, value
        if isinstance(value, list):
            yield from _flat({f"{key}[{index}]": item for index, item in enumerate(value)})


def _folded(flat: dict[str, Any]) -> dict[str, Any]:
    """Put items into their lists again: the inverse of :func:`_flat`."""
    items = {key: match for key in flat if (match := _ITEM.fullmatch(key)) and isinstance(flat.get(match[1]), list)}
    for key, match in items.items():
        flat[match[1]][int(match[2])] = flat[key]
    return {key: value for key, value in flat.items() if key not in items}


def _dtype(source: TensorPlan) -> torch.dtype:
    try:
        return dtype_of(source.dtype)
    except ValueError as error:
        raise CheckpointError(f"{source.name} is damaged in the checkpoint: {error}") from error
