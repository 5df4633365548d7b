"""The state of an optimizer as tensors under canonical names and metadata, for any tensor-parallel size.

A state tensor is called ``{parameter}::{key}``: ``h.0.attn.c_attn.weight::exp_avg``. There are two kinds:

* **like** its parameter: it has the parameter's shape and layout.
* **whole**: of a parameter that is replicated, or stepped as a full tensor, of any shape; and single numbers.

Numbers, texts and None are in the metadata, and so are lists: the tensors in them (SOAP's matrices) are called
``{parameter}::{key}[0]`` and so on. The fp32 weight of a half-precision parameter, which ``initialize`` keeps in
``optimizer._autopar``, is a tensor ``{parameter}::master``: a run of any precision continues from the same numbers.
The rest is JSON, the same on all ranks with the same parameters:

    {"class": "torch.optim.adamw.AdamW", "masters": ["wte.weight", ...],
     "groups": [{"options": {"lr": 0.1, ...}, "params": ["wte.weight", ...]}, ...],
     "state": {"wte.weight": {"step": {"kind": "whole"}, "exp_avg": {"kind": "like"}}, ...},
     "other": {}}
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.checkpoint.format import Manifest, reason
from autopar.errors import CheckpointError, listed, nearest
from autopar.layout import Layout
from autopar.plan.plan import Plan, TensorPlan
from autopar.storage.json_values import decode, encode, encode_inline
from autopar.storage.safetensors_io import dtype_name, dtype_of

if TYPE_CHECKING:
    from autopar.data_parallel.optimizer import ParallelStep

LOSS_SCALE = "loss_scale"
COUNTERS = frozenset({"step", "eta", "mu", "mu_product"})  # 0-dim tensors that follow from the number of steps alone
_ON_HOST = frozenset({"step", "mu_product"})  # where torch makes them, unless capturable or fused
_VALUES = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class OptimizerState:
    """One rank's state of an optimizer, to be saved.

    Attributes:
        tensors: name -> this rank's tensor, no copy.
        plans: name -> its full shape, its dtype and its layout.
        metadata: The rest, as JSON.
    """

    tensors: dict[str, torch.Tensor]
    plans: dict[str, TensorPlan]
    metadata: dict[str, Any]


Targets = dict[str, tuple[torch.Tensor, Layout | None]]
"""Saved name -> the tensor to fill with this rank's shard by a layout, or with all if that is None."""


def take(optimizer: Optimizer, model: nn.Module, plan: Plan, tp_rank: int) -> OptimizerState:
    """Collect this rank's state of the optimizer of ``model``, which is the root model or this rank's stage of it.

    Raises:
        CheckpointError: A parameter is not the model's, or a state cannot be saved.
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
        if not isinstance(value, torch.Tensor) or not isinstance(key, str) or not alike(value, parameter):
            kind = "DTensor (fully_shard?)" if isinstance(value, DTensor) else type(value).__qualname__
            raise CheckpointError(
                f"{title} keeps state {key!r} of {name} as a {kind}; for each parameter a checkpoint holds "
                "tensors, numbers and lists of them only\n"
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
        raise CheckpointError(f"{next(iter(loose))} is a tensor that belongs to no parameter; it cannot be saved")
    masters = master_weights(optimizer, plan)
    for name, weight in masters.items():
        due = plan.tensors[name]
        keep(TensorPlan(master_name(name), due.shape, dtype_name(weight.dtype), due.layout), weight)
    metadata = {
        "class": title,
        "masters": list(masters),
        "groups": [
            {
                # the names of its parameters are saved in their canonical form anyway
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
    """Check that a saved state fits this optimizer, and allocate its tensors. Changes nothing.

    Args:
        plan: The plan of the full model for the tensor-parallel size now; the saved one may differ.
        metadata: The merged metadata of all ranks that saved.
        saved: Every optimizer tensor of the checkpoint, of all ranks.
        dtype_here: A function of name, parameter and saved dtype: the dtype of a state of the parameter's shape.

    Returns:
        The tensors to fill, and a function that then gives the optimizer this state instead of its own.

    Raises:
        CheckpointError: The metadata is damaged, or the state is another optimizer's.
    """
    title, groups = _title(optimizer), named_groups(optimizer, model, plan)
    before = OptimizerMetadata.parse(metadata)
    if before.title.rpartition(".")[2] != title.rpartition(".")[2]:  # its module may have moved
        raise CheckpointError(
            f"the checkpoint holds the state of {before.title}, the optimizer is {title}\n"
            f"  Make a {before.title.rpartition('.')[2]}, or load without optimizer."
        )
    before.check_groups(groups, set(parameters_by_name(model, plan)), plan, title)
    before.check_names(saved)
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

    for group, options in zip(groups, before.options, strict=True):
        on_host = not (options.get("capturable") or options.get("fused"))
        for name, parameter in group:
            if (theirs := before.state.get(name)) and keeps_state(optimizer, parameter):
                state[parameter] = {key: made(key, each, name, parameter, on_host) for key, each in theirs.items()}

    @torch.no_grad()
    def finish() -> None:
        optimizer.state.clear()
        optimizer.state.update({parameter: dict(mine) for parameter, mine in state.items()})
        optimizer.state.update(before.other)
        for group, options in zip(optimizer.param_groups, before.options, strict=True):
            for key, value in options.items():
                group[key] = new_option(group.get(key), value)

    return targets, finish


# -- reading an optimizer ----------------------------------------------------------------------------------------------


def _title(optimizer: Optimizer) -> str:
    """Return module and class. Raises CheckpointError for a wrapper, whose ``state`` is not the used one."""
    title = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer) and value.state is not optimizer.state:
            raise CheckpointError(
                f"{title} wraps a {type(value).__name__} (its attribute {name!r}) and does not hold its state itself\n"
                f"  Pass that one: optimizer=optimizer.{name}, where each rank holds all of it; or save without."
            )
    return title


def alike(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether a state that is not a single number is sharded over the replicas as its parameter is."""
    if isinstance(value, DTensor) or (isinstance(parameter, DTensor) and value.ndim):
        return (
            isinstance(value, DTensor)
            and isinstance(parameter, DTensor)
            and (value.shape, value.placements) == (parameter.shape, parameter.placements)
        )
    return True


def named_groups(optimizer: Optimizer, model: nn.Module, plan: Plan) -> list[list[tuple[str, nn.Parameter]]]:
    """Return the named parameters of each group, without those of other stages (empty here)."""
    canonical, parameters = plan.names, model.named_parameters(remove_duplicate=False)
    names = {id(parameter): canonical[name] for name, parameter in parameters if name in canonical}
    groups: list[list[tuple[str, nn.Parameter]]] = []
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


def new_option(now: Any, saved: Any) -> Any:
    """Return the saved option; a tensor that is there stays the same object, because a captured graph may hold it."""
    if isinstance(now, torch.Tensor) and now.shape == (saved.shape if isinstance(saved, torch.Tensor) else ()):
        return now.copy_(saved) if isinstance(saved, torch.Tensor) else now.fill_(saved)
    return saved


def _describe(
    key: str, value: torch.Tensor, due: TensorPlan, tp_rank: int, tp: int, title: str
) -> tuple[TensorPlan, dict[str, Any]]:
    """Return the plan of a state tensor with its name, and its entry in the metadata."""
    name, shape, dtype = f"{due.name}::{key}", tuple(value.shape), dtype_name(value.dtype)
    local = due.local_shape(tp_rank)
    if shape == () and (key in COUNTERS or local != ()):
        number = {} if key in COUNTERS else {"number": repr(value.item())}  # ranks that differ are refused
        return TensorPlan(name, shape, dtype), {"kind": "whole"} | number
    if shape == local:
        return TensorPlan(name, due.shape, dtype, due.layout), {"kind": "like"}
    if _is_sharded(due):
        raise CheckpointError(
            f"{title} has state {key!r} of {due.name} of shape {list(shape)}; the parameter has {list(due.shape)}, of "
            f"which tensor-parallel rank {tp_rank} of {tp} holds {list(local)}\n"
            "  Statistics of a shard fit no other sharding. Give the optimizer to autopar.initialize(model, config,\n"
            "  optimizer=optimizer), which steps whole parameters; or save without it."
        )
    return TensorPlan(name, shape, dtype), {"kind": "whole"}


# -- metadata ----------------------------------------------------------------------------------------------------------


def _tensors_of(entry: Any, name: str) -> Iterator[str]:
    """Yield the names of the tensors of one state. Raises ``ValueError`` if it is malformed."""
    if isinstance(entry, list):
        for index, item in enumerate(entry):
            yield from _tensors_of(item, f"{name}[{index}]")
    elif isinstance(entry, dict) and entry.get("kind") in ("like", "whole"):
        yield name
    elif type(entry) not in _VALUES:
        raise ValueError(f"{name} is {entry!r}")


def _form(
    kind: str, source: TensorPlan, due: TensorPlan, tp_rank: int, title: str
) -> tuple[tuple[int, ...], Layout | None]:
    """Return local shape and layout of a state, saved as ``source``, of the parameter ``due``.

    Raises CheckpointError if it was saved for another shape, or of the full parameter, which is sharded now.
    """
    if kind == "like":
        if source.shape != due.shape:
            raise CheckpointError(
                f"{source.name} has shape {list(source.shape)} in the checkpoint, {due.name} has {list(due.shape)}"
            )
        return due.local_shape(tp_rank), due.layout
    if _is_sharded(due) and source.shape != ():
        raise CheckpointError(
            f"{source.name} of {title} was saved of the whole parameter, which is sharded now\n"
            "  Statistics of all of it fit no shard. Give the optimizer to autopar.initialize(model, config,\n"
            "  optimizer=optimizer), which steps whole parameters; or load without it."
        )
    return source.shape, None


def _is_sharded(due: TensorPlan) -> bool:
    """Return whether several ranks hold different shards of a tensor."""
    layout = due.layout
    return layout is not None and len({layout.ranges(rank) for rank in range(layout.axis_size)}) > 1


@dataclass(frozen=True)
class OptimizerMetadata:
    """The decoded metadata.

    Attributes:
        title: Module and class of the optimizer.
        members: The names of each group's parameters.
        options: The options of each group.
        state: Parameter -> key -> a value, a list, or the kind of a tensor.
        tensors: The names of the tensors, fp32 weights included.
        other: The state that belongs to no parameter.
    """

    title: str
    members: list[list[str]]
    options: list[dict[str, Any]]
    state: dict[str, dict[str, Any]]
    tensors: set[str]
    other: dict[Any, Any]

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> OptimizerMetadata:
        """Decode and check. Raises CheckpointError if it is damaged."""
        try:
            data = decode(data, where="the optimizer")
            masters = [str(name) for name in data["masters"]]
            state = {str(name): dict(keys) for name, keys in data["state"].items()}
            states = ((f"{name}::{key}", entry) for name, keys in state.items() for key, entry in keys.items())
            parsed = cls(
                title=str(data["class"]),
                members=[[str(name) for name in group["params"]] for group in data["groups"]],
                options=[dict(group["options"]) for group in data["groups"]],
                state=state,
                tensors={tensor for name, entry in states for tensor in _tensors_of(entry, name)}
                | set(map(master_name, masters)),
                other=dict(data["other"]),
            )
            names = [name for group in parsed.members for name in group]
            if len(set(names)) != len(names) or not {*state, *masters} <= set(names):
                raise ValueError("its groups do not have each parameter once")
            if any("params" in options for options in parsed.options):
                raise ValueError("'params' is no option")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError, CheckpointError) as error:
            raise CheckpointError(
                f"the state of the optimizer in the checkpoint is damaged: {reason(error)}"
            ) from error
        return parsed

    def check_groups(
        self, groups: Sequence[Sequence[tuple[str, nn.Parameter]]], here: set[str], plan: Plan, title: str
    ) -> None:
        """Raise CheckpointError unless each parameter of ``groups`` is in the group in which it was, in any order.

        ``here`` are the names of the parameters of this rank's model; those of other stages are not compared.
        """
        same = "\n  Make the same groups as in the run that saved it."
        if len(self.members) != len(groups):
            raise CheckpointError(
                f"the checkpoint holds {len(self.members)} parameter groups of the optimizer, this {title} has "
                f"{len(groups)}{same}"
            )
        then = {name: index for index, names in enumerate(self.members) for name in names}
        now = {name: index for index, group in enumerate(groups) for name, _ in group}
        for name, index in now.items():
            if then.get(name) != index:
                saved = f"in group {then[name]}" if name in then else f"in none.{nearest(name, then)}"
                raise CheckpointError(
                    f"{name} is in parameter group {index} of this {title}; it was saved {saved}{same}"
                )
        missing = [name for name in then if name not in now and (name in here or name not in plan.tensors)]
        if missing:
            raise CheckpointError(
                f"{len(missing)} of the {len(then)} parameters in the optimizer that was saved are not in this "
                f"{title}: {listed(missing)}"
            )

    def check_names(self, saved: Mapping[str, TensorPlan]) -> None:
        """Raise CheckpointError unless the checkpoint has exactly the tensors that the metadata names."""
        missing, unexpected = sorted(self.tensors - {*saved}), [name for name in saved if name not in self.tensors]
        if missing or unexpected:
            raise CheckpointError(
                f"the optimizer in the checkpoint is damaged: {len(missing)} of {len(self.tensors)} tensors are "
                f"missing, {len(unexpected)} unexpected"
                + (f"\n  Missing: {listed(missing)}." if missing else "")
                + (f"\n  Unexpected: {listed(unexpected)}." if unexpected else "")
            )


def merge_metadata(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the metadata of all ranks: stages hold other parameters, ZeRO replicas other states.

    Raises CheckpointError if they differ in the class, an option, or the state of one parameter.
    """
    first = ranks[0]
    members = [dict.fromkeys(group["params"]) for group in first["groups"]]
    state: dict[str, Any] = dict(first["state"])

    def compare(what: str, one: Any, other: Any, rank: int) -> None:
        if one != other:
            raise CheckpointError(
                f"ranks have different optimizers: {what} is {one!r} on the first and {other!r} on number {rank}"
            )

    for rank, other in enumerate(ranks[1:], 1):
        for key in ("class", "other"):
            compare(key, first[key], other[key], rank)
        # A stage without parameters in a group has an empty group in its place.
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


def step_of(optimizer: torch.optim.Optimizer | None) -> ParallelStep | None:
    """Return the object that ``initialize`` leaves on an optimizer; None without it."""
    return getattr(optimizer, "_autopar", None)


def keeps_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Return whether this rank keeps the optimizer's state of a parameter."""
    step = step_of(optimizer)
    return step is None or step.keeps_state(parameter)


def as_stepped(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, due: TensorPlan) -> TensorPlan:
    """Return the plan of the tensor that the optimizer steps for a parameter: without layout, if it steps full ones."""
    step = step_of(optimizer)
    return due if step is None or parameter not in step.whole else replace(due, layout=None)


def parameters_by_name(model: nn.Module, plan: Plan) -> dict[str, nn.Parameter]:
    """Return this rank's parameters by their canonical names, those that the plan knows."""
    canonical = plan.names
    parameters = model.named_parameters(remove_duplicate=False)
    return {canonical[name]: parameter for name, parameter in parameters if name in canonical}


def master_name(parameter: str) -> str:
    """Return the name of a parameter's fp32 weight in a checkpoint."""
    return f"{parameter}::master"


def master_weights(optimizer: torch.optim.Optimizer, plan: Plan) -> dict[str, torch.Tensor]:
    """Return this rank's fp32 master weights, no copies, by the parameter's canonical name."""
    step = step_of(optimizer)
    if step is None or step.masters is None:
        return {}
    step.update()
    held = {name: step.master(p) for p, name in step.names.items() if p.requires_grad and step.owns(p)}
    return {plan.canonical(name): weight for name, weight in held.items() if weight is not None}


class TrainingWeights:
    """The saved tensors that fill the weights of a model in training, whatever precision either has.

    Making it checks the checkpoint and changes nothing.

    Args:
        optimizer: The optimizer to load; None loads the model alone.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, manifest: Manifest) -> None:
        self._manifest, self._step = manifest, step_of(optimizer)
        try:
            masters = () if optimizer is None else manifest.training["optimizer"]["masters"]
            self._saved = {str(name): master_name(name) for name in masters}
            for parameter, name in self._saved.items():
                tensor, due = manifest.parts["optimizer"].tensors[name], manifest.tensors[parameter]
                if due.shape != tensor.shape or tensor.dtype != "float32":
                    raise ValueError(
                        f"{name} is {tensor.dtype} {list(tensor.shape)}, {parameter} has {list(due.shape)}"
                    )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"the state of the optimizer in the checkpoint is damaged: {reason(error)}"
            ) from error
        scale = None if self._step is None else self._step.scale
        self._scale = None if scale is None else manifest.training.get(LOSS_SCALE)
        if scale is not None and self._scale is not None:
            try:
                copy.copy(scale).load_state_dict(self._scale)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise CheckpointError(f"the loss scale in the checkpoint is damaged: {error!r}") from error

    def source(self, name: str, dtype: torch.dtype) -> tuple[str, str]:
        """Return the tensor and the part from which a model's tensor of ``dtype`` is read: the most precise one.

        If the checkpoint has the model's tensor in that dtype, these are its own bits.
        """
        same = self._manifest.tensors[name].dtype == dtype_name(dtype)
        return (name, "model") if same or name not in self._saved else (self._saved[name], "optimizer")

    def keeps_all(self, name: str, dtype: torch.dtype) -> bool:
        """Return whether training continues with every bit, though the model's tensor has another dtype."""
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
        """Return the dtype of a state of its parameter's shape: the stepped weight's if it was saved in that."""
        return self._now(name, parameter.dtype) if saved == self._then(name) else saved

    def finish(self) -> None:
        """Restore the loss scale, if both runs have one."""
        if self._scale is not None and self._step is not None and self._step.scale is not None:
            self._step.scale.load_state_dict(self._scale)
            self._step.publish()
