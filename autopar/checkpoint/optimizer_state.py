"""The state of an optimizer as named tensors and JSON metadata, for any tensor-parallel size.

A state tensor is called ``{parameter}::{key}``: ``h.0.attn.c_attn.weight::exp_avg``. There are two kinds:

* ``like``: a tensor with the shape and layout of its parameter.
* ``whole``: a tensor that is saved in full: state of a replicated parameter or of one stepped as a full tensor (any
  shape), and 0-dim tensors.

The metadata holds numbers, texts, None, and lists; tensors in a list (SOAP's matrices) are called
``{parameter}::{key}[0]`` and so on. The fp32 weight of a half-precision parameter, which ``initialize`` keeps in
``optimizer._autopar``, is the tensor ``{parameter}::master``, so that a run of any precision continues from it.
The metadata is identical on all ranks with the same parameters:

    {"class": "torch.optim.adamw.AdamW", "masters": ["wte.weight", ...],
     "groups": [{"options": {"lr": 0.1, ...}, "params": ["wte.weight", ...]}, ...],
     "state": {"wte.weight": {"step": {"kind": "whole"}, "exp_avg": {"kind": "like"}}, ...},
     "other": {}}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.checkpoint.format import Manifest
from autopar.errors import CheckpointError, listed, nearest
from autopar.layout import Layout
from autopar.plan.plan import Plan, TensorPlan
from autopar.storage.json_values import decode, encode, encode_inline
from autopar.storage.safetensors_io import dtype_name, dtype_of

if TYPE_CHECKING:
    from autopar.data_parallel.optimizer import ParallelStep

LOSS_SCALE = "loss_scale"
COUNTERS = frozenset({"step", "eta", "mu", "mu_product"})  # 0-dim tensors that depend only on the number of steps
_ON_HOST = frozenset({"step", "mu_product"})  # torch makes them on the host, unless capturable or fused
_VALUES = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class OptimizerState:
    """One rank's state of an optimizer, to be saved.

    Attributes:
        tensors: Name -> this rank's tensor, not copied.
        plans: Name -> plan of the full tensor.
        metadata: The remaining state, as JSON.
    """

    tensors: dict[str, torch.Tensor]
    plans: dict[str, TensorPlan]
    metadata: dict[str, Any]


Targets = dict[str, tuple[torch.Tensor, Layout | None]]
"""Saved name -> the tensor to fill, and the layout of its shard (None: the full tensor)."""


def take(optimizer: Optimizer, model: nn.Module, plan: Plan, tp_rank: int) -> OptimizerState:
    """Collect this rank's state of an optimizer of ``model``.

    Raises:
        CheckpointError: A parameter does not belong to the model, or a state cannot be saved.
    """
    title, groups = _title(optimizer), named_groups(optimizer, model, plan)
    tensors: dict[str, torch.Tensor] = {}
    plans: dict[str, TensorPlan] = {}
    entries: dict[str, dict[str, Any]] = {}

    def keep(saved: TensorPlan, tensor: torch.Tensor) -> None:
        if saved.name in tensors:
            raise CheckpointError(f"{title} has two states that would be called {saved.name}")
        tensors[saved.name], plans[saved.name] = tensor.detach(), saved

    def entry(key: Any, value: Any, name: str, parameter: nn.Parameter) -> Any:
        if isinstance(key, str) and type(value) in _VALUES:
            return value
        if isinstance(key, str) and isinstance(value, list) and not isinstance(optimizer, torch.optim.LBFGS):
            return [entry(f"{key}[{index}]", item, name, parameter) for index, item in enumerate(value)]
        if not isinstance(value, torch.Tensor) or not isinstance(key, str) or not sharded_alike(value, parameter):
            kind = "DTensor (fully_shard?)" if isinstance(value, DTensor) else type(value).__qualname__
            raise CheckpointError(
                f"{title} keeps state {key!r} of {name} as a {kind}; expected a tensor, a number or a list of these\n"
                "  Save without this optimizer, or use one whose state has the parameters' shapes."
            )
        due = as_stepped(optimizer, parameter, plan.tensors[name])
        saved, described = _describe(key, value, due, tp_rank, plan.shards, title)
        keep(saved, value)
        return described

    for name, parameter in (pair for group in groups for pair in group):
        if state := optimizer.state.get(parameter):
            entries[name] = {key: entry(key, value, name, parameter) for key, value in state.items()}
    other = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    _, loose = encode(other, f"the state of {title}")
    if loose:
        raise CheckpointError(f"{next(iter(loose))} is a tensor that belongs to no parameter, which is not supported")
    masters = master_weights(optimizer, plan)
    for name, weight in masters.items():
        due = plan.tensors[name]
        keep(TensorPlan(master_name(name), due.shape, dtype_name(weight.dtype), due.layout), weight)
    metadata = {
        "class": title,
        "masters": list(masters),
        "groups": [
            {
                # "params" below holds the canonical names
                "options": {str(k): value for k, value in group.items() if k not in ("params", "param_names")},
                "params": [name for name, _ in named],
            }
            for group, named in zip(optimizer.param_groups, groups, strict=True)
        ],
        "state": entries,
        "other": other,
    }
    return OptimizerState(tensors, plans, encode_inline(metadata, title))


def prepare(
    optimizer: Optimizer,
    model: nn.Module,
    plan: Plan,
    tp_rank: int,
    metadata: Mapping[str, Any],
    saved: Mapping[str, TensorPlan],
    dtype_here: Callable[[str, torch.Tensor, torch.dtype], torch.dtype] = lambda name, parameter, dtype: dtype,
) -> tuple[Targets, Callable[[], None]]:
    """Check that a saved state fits this optimizer, and allocate its tensors. The optimizer does not change.

    Args:
        plan: The plan of the full model for the current tensor-parallel size; the saved size may differ.
        metadata: The merged metadata of all ranks of the save.
        saved: The plans of all optimizer tensors of the checkpoint.
        dtype_here: A function of name, parameter and saved dtype that returns the dtype of a state of kind ``like``.

    Returns:
        The tensors to fill, and a function that then replaces the optimizer's state with them.

    Raises:
        CheckpointError: The state belongs to another optimizer.
    """
    title, groups = _title(optimizer), named_groups(optimizer, model, plan)
    before = decoded(metadata, saved)
    then = before["class"].rpartition(".")[2]
    if then != title.rpartition(".")[2]:  # a class may move to another module
        raise CheckpointError(
            f"the checkpoint holds the state of {before['class']}; got a {title}\n"
            f"  Make a {then}, or load without optimizer=."
        )
    members = [group["params"] for group in before["groups"]]
    _check_groups(members, groups, set(parameters_by_name(model, plan)), plan, title)
    every = [group["options"] for group in before["groups"]]
    targets: Targets = {}
    step = step_of(optimizer)
    state: dict[nn.Parameter, dict[str, Any]] = {}

    def made(key: str, entry: Any, name: str, parameter: nn.Parameter, on_host: bool) -> Any:
        if isinstance(entry, list):
            return [made(f"{key}[{index}]", item, name, parameter, on_host) for index, item in enumerate(entry)]
        if not isinstance(entry, dict):
            return entry
        source, due = saved[f"{name}::{key}"], as_stepped(optimizer, parameter, plan.tensors[name])
        shape, layout = _form(entry["kind"], source, due, tp_rank, title)
        device = parameter.device if step is None or step.host is None else step.host  # maybe the CPU's memory
        dtype = dtype_of(source.dtype)
        if entry["kind"] == "like":
            dtype = dtype_here(name, parameter, dtype)
        if entry["kind"] == "like" and isinstance(parameter, DTensor):
            tensor = torch.empty_like(parameter.detach(), dtype=dtype)
        else:
            tensor = torch.empty(shape, dtype=dtype, device="cpu" if on_host and key in _ON_HOST else device)
        targets[source.name] = tensor, layout
        return tensor

    for group, options in zip(groups, every, strict=True):
        on_host = not (options.get("capturable") or options.get("fused"))
        for name, parameter in group:
            if (theirs := before["state"].get(name)) and keeps_state(optimizer, parameter):
                state[parameter] = {key: made(key, each, name, parameter, on_host) for key, each in theirs.items()}

    @torch.no_grad()
    def finish() -> None:
        optimizer.state.clear()
        optimizer.state.update({parameter: dict(mine) for parameter, mine in state.items()})
        optimizer.state.update(before["other"])
        for group, options in zip(optimizer.param_groups, every, strict=True):
            for key, value in options.items():
                group[key] = new_option(group.get(key), value)

    return targets, finish


# -- reading an optimizer ----------------------------------------------------------------------------------------------


def _title(optimizer: Optimizer) -> str:
    """Return the module and class. Raises CheckpointError for a wrapper, whose ``state`` is not the state in use."""
    title = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer) and value.state is not optimizer.state:
            raise CheckpointError(
                f"{title} wraps a {type(value).__name__} (attribute {name!r}), which holds the state\n"
                f"  Pass the wrapped optimizer: optimizer=optimizer.{name}, if each rank holds all of it; or save "
                "without optimizer=."
            )
    return title


def sharded_alike(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether a state, unless it is 0-dim, is sharded over the replicas like its parameter."""
    if isinstance(value, DTensor) or (isinstance(parameter, DTensor) and value.ndim):
        return (
            isinstance(value, DTensor)
            and isinstance(parameter, DTensor)
            and (value.shape, value.placements) == (parameter.shape, parameter.placements)
        )
    return True


def named_groups(optimizer: Optimizer, model: nn.Module, plan: Plan) -> list[list[tuple[str, nn.Parameter]]]:
    """Return the named parameters of each group. Parameters of other stages, which are empty here, are left out."""
    canonical, parameters = plan.names, model.named_parameters(remove_duplicate=False)
    names = {id(parameter): canonical[name] for name, parameter in parameters if name in canonical}
    groups: list[list[tuple[str, nn.Parameter]]] = []
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names and parameter.numel():
                raise CheckpointError(
                    f"parameter {position} of group {index} of {_title(optimizer)}, of shape {list(parameter.shape)}, "
                    f"is not a parameter of this {type(model).__name__}\n"
                    "  Make the optimizer from this model's parameters, after the last one was replaced."
                )
        groups.append([(names[id(p)], p) for p in group["params"] if id(p) in names])
    return groups


def new_option(now: Any, saved: Any) -> Any:
    """Return the saved option. An existing tensor is filled in place, because a captured graph may refer to it."""
    if isinstance(now, torch.Tensor) and now.shape == (saved.shape if isinstance(saved, torch.Tensor) else ()):
        return now.copy_(saved) if isinstance(saved, torch.Tensor) else now.fill_(saved)
    return saved


def _describe(
    key: str, value: torch.Tensor, due: TensorPlan, tp_rank: int, tp: int, title: str
) -> tuple[TensorPlan, dict[str, Any]]:
    """Return the plan of a state tensor, and its entry in the metadata."""
    name, shape, dtype = f"{due.name}::{key}", tuple(value.shape), dtype_name(value.dtype)
    local = due.local_shape(tp_rank)
    if shape == () and (key in COUNTERS or local != ()):
        number = {} if key in COUNTERS else {"number": repr(value.item())}  # merge_metadata compares it between ranks
        return TensorPlan(name, shape, dtype), {"kind": "whole"} | number
    if shape == local:
        return TensorPlan(name, due.shape, dtype, due.layout), {"kind": "like"}
    if _is_sharded(due):
        raise CheckpointError(
            f"{title} has state {key!r} of {due.name} of shape {list(shape)}; expected the shape of the shard that "
            f"tensor-parallel rank {tp_rank} of {tp} holds, {list(local)}\n"
            "  Statistics of a shard fit no other sharding. Pass the optimizer to autopar.initialize(model, config,\n"
            "  optimizer=optimizer), which steps full parameters; or save without it."
        )
    return TensorPlan(name, shape, dtype), {"kind": "whole"}


# -- metadata ----------------------------------------------------------------------------------------------------------


def _tensors_of(entry: Any, name: str) -> Iterator[str]:
    """Yield the names of the tensors of one state."""
    if isinstance(entry, list):
        for index, item in enumerate(entry):
            yield from _tensors_of(item, f"{name}[{index}]")
    elif isinstance(entry, dict):
        yield name


def _form(
    kind: str, source: TensorPlan, due: TensorPlan, tp_rank: int, title: str
) -> tuple[tuple[int, ...], Layout | None]:
    """Return the local shape and layout of a state of the parameter ``due`` that was saved as ``source``.

    Raises CheckpointError if its shape differs, or if it is state of a full parameter that is sharded now.
    """
    if kind == "like":
        if source.shape != due.shape:
            raise CheckpointError(
                f"{source.name} has shape {list(source.shape)} in the checkpoint, {due.name} has {list(due.shape)}"
            )
        return due.local_shape(tp_rank), due.layout
    if _is_sharded(due) and source.shape != ():
        raise CheckpointError(
            f"{source.name} of {title} was saved for the full parameter, which is sharded now\n"
            "  Statistics of a full parameter fit no shard. Pass the optimizer to autopar.initialize(model, config,\n"
            "  optimizer=optimizer), which steps full parameters; or load without it."
        )
    return source.shape, None


def _is_sharded(due: TensorPlan) -> bool:
    """Return whether several ranks hold different shards of a tensor."""
    layout = due.layout
    return layout is not None and len({layout.ranges(rank) for rank in range(layout.axis_size)}) > 1


def _check_groups(
    members: Sequence[Sequence[str]],
    groups: Sequence[Sequence[tuple[str, nn.Parameter]]],
    here: set[str],
    plan: Plan,
    title: str,
) -> None:
    """Raise CheckpointError unless each parameter is in the same group as in the save, in any order.

    Args:
        members: The names of each saved group's parameters.
        here: The names of the parameters of this rank's model. Parameters of other stages are not compared.
    """
    same = "\n  Make the same groups as in the run that saved it."
    if len(members) != len(groups):
        raise CheckpointError(
            f"the checkpoint holds {len(members)} parameter groups of the optimizer; this {title} has "
            f"{len(groups)}{same}"
        )
    then = {name: index for index, names in enumerate(members) for name in names}
    now = {name: index for index, group in enumerate(groups) for name, _ in group}
    for name, index in now.items():
        if then.get(name) != index:
            saved = f"in group {then[name]}" if name in then else f"in no group.{nearest(name, then)}"
            raise CheckpointError(f"{name} is in parameter group {index} of this {title}; it was saved {saved}{same}")
    missing = [name for name in then if name not in now and (name in here or name not in plan.tensors)]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of the {len(then)} parameters of the saved optimizer are missing in this "
            f"{title}: {listed(missing)}"
        )


def decoded(data: Mapping[str, Any], saved: Mapping[str, TensorPlan]) -> dict[str, Any]:
    """Decode the metadata. Raises CheckpointError unless ``saved`` are exactly the tensors that it names."""
    found: dict[str, Any] = decode(data, where="the optimizer")
    states = ((f"{name}::{key}", entry) for name, keys in found["state"].items() for key, entry in keys.items())
    due = {tensor for name, entry in states for tensor in _tensors_of(entry, name)}
    due |= set(map(master_name, found["masters"]))
    missing, unexpected = sorted(due - {*saved}), [name for name in saved if name not in due]
    if missing or unexpected:
        raise CheckpointError(
            f"the optimizer in the checkpoint is damaged: {len(missing)} of {len(due)} tensors are missing, "
            f"{len(unexpected)} unexpected"
            + (f"\n  Missing: {listed(missing)}." if missing else "")
            + (f"\n  Unexpected: {listed(unexpected)}." if unexpected else "")
        )
    return found


def merge_metadata(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the metadata of all ranks: each stage has its own parameters, each ZeRO-1 replica its own states.

    Raises CheckpointError if ranks differ in the class, an option, or the state of one parameter.
    """
    first = ranks[0]
    members = [dict.fromkeys(group["params"]) for group in first["groups"]]
    state: dict[str, Any] = dict(first["state"])

    def compare(what: str, one: Any, other: Any, rank: int) -> None:
        if one != other:
            raise CheckpointError(
                f"ranks have different optimizers: {what} is {one!r} on rank 0 and {other!r} on rank {rank}"
            )

    for rank, other in enumerate(ranks[1:], 1):
        for key in ("class", "other"):
            compare(key, first[key], other[key], rank)
        # A stage without parameters of a group has an empty group there.
        compare("the number of parameter groups", len(members), len(other["groups"]), rank)
        for index, (mine, theirs) in enumerate(zip(first["groups"], other["groups"], strict=True)):
            for key in {**mine["options"], **theirs["options"]}:
                one, two = (group["options"].get(key, "missing") for group in (mine, theirs))
                compare(f"{key} of parameter group {index}", one, two, rank)
            members[index].update(dict.fromkeys(theirs["params"]))
        for name, entries in other["state"].items():
            for key in {**state.setdefault(name, entries), **entries}:
                compare(f"state {key!r} of {name}", state[name].get(key, "missing"), entries.get(key, "missing"), rank)
    masters = [*dict.fromkeys(name for rank in ranks for name in rank["masters"])]
    groups = [{**group, "params": [*names]} for group, names in zip(first["groups"], members, strict=True)]
    return {**first, "masters": masters, "groups": groups, "state": state}


# -- the state next to torch's: fp32 weights, a loss scale, owners of ZeRO-1 -------------------------------------------


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside a wrapper that shares its state and its groups (accelerate's), or ``optimizer``."""
    inner: Any = getattr(optimizer, "optimizer", None)
    if not isinstance(optimizer, Optimizer) or not isinstance(inner, Optimizer):
        return optimizer
    shared = inner.state is optimizer.state and inner.param_groups is optimizer.param_groups
    return inner if shared else optimizer


def step_of(optimizer: torch.optim.Optimizer | None) -> ParallelStep | None:
    """Return the ParallelStep that ``initialize`` attached to an optimizer, or None."""
    return getattr(optimizer, "_autopar", None)


def keeps_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Return whether this rank keeps the optimizer's state of a parameter."""
    step = step_of(optimizer)
    return step is None or step.keeps_state(parameter)


def as_stepped(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, due: TensorPlan) -> TensorPlan:
    """Return the plan of the tensor that the optimizer steps for a parameter; a full tensor has no layout."""
    step = step_of(optimizer)
    return due if step is None or parameter not in step.whole else replace(due, layout=None)


def parameters_by_name(model: nn.Module, plan: Plan) -> dict[str, nn.Parameter]:
    """Return the parameters of this rank that the plan contains, by canonical name."""
    canonical = plan.names
    parameters = model.named_parameters(remove_duplicate=False)
    return {canonical[name]: parameter for name, parameter in parameters if name in canonical}


def master_name(parameter: str) -> str:
    """Return the name of a parameter's fp32 weight in a checkpoint."""
    return f"{parameter}::master"


def master_weights(optimizer: torch.optim.Optimizer, plan: Plan) -> dict[str, torch.Tensor]:
    """Return this rank's fp32 master weights, not copied, by the parameter's canonical name."""
    step = step_of(optimizer)
    if step is None or step.masters is None:
        return {}
    step.update()
    held = {name: step.master(p) for p, name in step.names.items() if p.requires_grad and step.owns(p)}
    return {plan.canonical(name): weight for name, weight in held.items() if weight is not None}


class TrainingWeights:
    """Choose the saved tensors that fill the weights of a model in training, for any two precisions.

    Args:
        optimizer: The optimizer to load; None loads the model alone.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, manifest: Manifest) -> None:
        self._manifest, self._step = manifest, step_of(optimizer)
        masters = () if optimizer is None else manifest.training["optimizer"]["masters"]
        self._saved = {name: master_name(name) for name in masters}
        scale = None if self._step is None else self._step.scale
        self._scale = None if scale is None else manifest.training.get(LOSS_SCALE)

    def source(self, name: str, dtype: torch.dtype) -> tuple[str, str]:
        """Return the name and the part of the saved tensor that fills a model's tensor of ``dtype``.

        It is the model's saved tensor if its dtype is the same, otherwise the fp32 weight if there is one.
        """
        same = self._manifest.tensors[name].dtype == dtype_name(dtype)
        return (name, "model") if same or name not in self._saved else (self._saved[name], "optimizer")

    def keeps_all(self, name: str, dtype: torch.dtype) -> bool:
        """Return whether training continues without rounding, although the model's tensor has another dtype."""
        return self._now(name, dtype) == self._then(name)

    def drops(self, name: str, dtype: torch.dtype) -> bool:
        """Return whether training continues without the fp32 weight in the checkpoint."""
        return name in self._saved and self._now(name, dtype) != torch.float32

    def _now(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the tensor that the optimizer steps for a parameter of ``dtype``."""
        half = dtype in (torch.bfloat16, torch.float16)
        return torch.float32 if half and self._step is not None and self._step.masters is not None else dtype

    def _then(self, name: str) -> torch.dtype:
        return torch.float32 if name in self._saved else dtype_of(self._manifest.tensors[name].dtype)

    def state_dtype(self, name: str, parameter: torch.Tensor, saved: torch.dtype) -> torch.dtype:
        """Return the dtype of a state of kind ``like``: the stepped weight's dtype if both were saved in one dtype."""
        return self._now(name, parameter.dtype) if saved == self._then(name) else saved

    def finish(self) -> None:
        """Restore the loss scale, if both runs have one."""
        if self._scale is not None and self._step is not None and self._step.scale is not None:
            self._step.scale.load_state_dict(self._scale)
            self._step.publish()
