"""The metadata of a saved optimizer, beside its tensors: JSON, the same on all ranks with the same parameters.

    {"class": "torch.optim.adamw.AdamW", "tp": 2,
     "groups": [{"options": {"lr": 0.1, ...}, "params": ["wte.weight", ...]}, ...],
     "state": {"wte.weight": {"step": {"kind": "whole"}, "exp_avg": {"kind": "like"}}, ...},
     "other": {}}

The kinds of state are those of :mod:`autopar.checkpoint.optimizer_state`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.errors import CheckpointError, listed, nearest
from autopar.layout import Layout
from autopar.plan.plan import Plan, TensorPlan
from autopar.storage.json_values import decode

# 0-dim tensors that follow from the number of steps alone, so all ranks have the same. Others (the RMS of a parameter)
# may be statistics.
_LONGEST = 100_000  # of a list
COUNTERS = frozenset({"step", "eta", "mu", "mu_product"})


@dataclass(frozen=True)
class StateEntry:
    """One state of one parameter: its kind, the parameter's layout if that is ``own``, its value or length if any."""

    kind: str
    layout: Layout | None
    value: Any

    @classmethod
    def parse(cls, data: Mapping[str, Any], where: str, tp: int) -> StateEntry:
        """Check one. Raises ``KeyError``, ``TypeError``, ``AttributeError`` or ``ValueError`` on malformed data."""
        kind = data["kind"]
        if kind not in ("like", "whole", "own", "value", "list"):
            raise ValueError(f"{where} is of kind {kind!r}")
        layout = Layout.from_json(data["layout"]) if kind == "own" else None
        if layout is not None and layout.axis_size != tp:
            raise ValueError(f"{where} is sharded over {layout.axis_size} ranks, the rest over {tp}")
        value: Any = data["value"] if kind in ("value", "list") else None
        if kind == "list" and not 0 <= int(value) < _LONGEST:
            raise ValueError(f"{where} is a list of {value}")
        return cls(kind, layout, value)

    def name(self, parameter: str, key: str, tp_rank: int) -> str:
        """Return the name of its tensor."""
        return f"{parameter}::{key}" + (f"@tp{tp_rank}" if self.kind == "own" else "")

    def shape_on(
        self, tp_rank: int, key: str, source: TensorPlan, due: TensorPlan, saved_tp: int, title: str
    ) -> tuple[tuple[int, ...], Layout | None]:
        """Return local shape and layout of this state, saved as ``source``, of the parameter ``due``.

        Raises:
            CheckpointError: it was saved for another sharding and cannot be resharded.
        """
        tp = due.layout.axis_size if due.layout is not None else 1
        what = f"state {key!r} of {due.name} in {title}"
        if self.kind == "like" and source.shape != due.shape:
            raise CheckpointError(
                f"{source.name} has shape {list(source.shape)} in the checkpoint, {due.name} has {list(due.shape)}"
            )
        if self.kind == "like":
            return due.local_shape(tp_rank), due.layout
        if self.kind == "own" and not _same(self.layout, due.layout):
            raise CheckpointError(
                f"{what} was saved with tensor_parallel_size={saved_tp}, the model runs with "
                f"tensor_parallel_size={tp}"
                + (" and shards the parameter differently" if saved_tp == tp else "")
                + "\n  It is statistics of each rank's shard of the parameter and does not become that of other "
                "shards.\n"
                f"  Use tensor_parallel_size={saved_tp} and the policy of the checkpoint, or load without optimizer."
            )
        if self.kind == "whole" and is_sharded(due) and not (source.shape == () and key in COUNTERS):
            raise CheckpointError(
                f"{what} was saved of the whole parameter with tensor_parallel_size={saved_tp}, the model runs with "
                f"tensor_parallel_size={tp}, which shards the parameter\n"
                "  It is statistics of all of it and does not become that of shards.\n"
                "  Give the optimizer to autopar.initialize(model, config, optimizer=optimizer), which steps whole\n"
                f"  parameters then; or use tensor_parallel_size={saved_tp}, or load without optimizer."
            )
        return source.shape, None


def is_sharded(due: TensorPlan) -> bool:
    """Tell whether several ranks hold different parts of a tensor."""
    layout = due.layout
    return layout is not None and any(layout.ranges(rank) != layout.ranges(0) for rank in range(layout.axis_size))


def _same(one: Layout | None, other: Layout | None) -> bool:
    if one is None or other is None or one.dim != other.dim or one.axis_size != other.axis_size:
        return False
    return all(one.ranges(rank) == other.ranges(rank) for rank in range(one.axis_size))


@dataclass(frozen=True)
class OptimizerMetadata:
    """The metadata, decoded.

    Attributes:
        title: module and class of the optimizer.
        tp: tensor-parallel size.
        members: the names of each group's parameters.
        options: of each group.
        state: parameter -> key -> :class:`StateEntry`.
        other: state that belongs to no parameter.
    """

    title: str
    tp: int
    members: list[list[str]]
    options: list[dict[str, Any]]
    state: dict[str, dict[str, StateEntry]]
    other: dict[Any, Any]

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> OptimizerMetadata:
        """Decode and check. Raises CheckpointError if it is damaged."""
        try:
            data = decode(data, where="the optimizer")
            tp = int(data["tp"])
            parsed = cls(
                title=str(data["class"]),
                tp=tp,
                members=[[str(name) for name in group["params"]] for group in data["groups"]],
                options=[dict(group["options"]) for group in data["groups"]],
                state={
                    str(name): {str(key): StateEntry.parse(entry, f"{name}::{key}", tp) for key, entry in keys.items()}
                    for name, keys in data["state"].items()
                },
                other=dict(data["other"]),
            )
            names = [name for group in parsed.members for name in group]
            if len(set(names)) != len(names) or not set(parsed.state) <= set(names):
                raise ValueError("its groups do not have each parameter once")
            if any("params" in options for options in parsed.options):
                raise ValueError("'params' is no option")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError, CheckpointError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(f"the state of the optimizer in the checkpoint is damaged: {why}") from error
        return parsed

    def check_class(self, title: str) -> None:
        """Raise CheckpointError unless the optimizer is of the same class; its module may have moved."""
        if self.title.rpartition(".")[2] != title.rpartition(".")[2]:
            raise CheckpointError(
                f"the checkpoint holds the state of {self.title}, the optimizer is {title}\n"
                f"  Make a {self.title.rpartition('.')[2]}, or load without optimizer."
            )

    def check_groups(
        self, groups: Sequence[Sequence[tuple[str, nn.Parameter]]], here: set[str], plan: Plan, title: str
    ) -> None:
        """Raise CheckpointError unless each parameter is in the group in which it was.

        Their order in a group decides nothing. Parameters of other stages are not compared.

        Args:
            groups: the optimizer's, with names.
            here: names of the parameters of this rank's model.
        """
        if len(self.members) != len(groups):
            raise CheckpointError(
                f"the checkpoint holds {len(self.members)} parameter groups of the optimizer, this {title} has "
                f"{len(groups)}\n  Make the same groups as in the run that saved it."
            )
        then = {name: index for index, names in enumerate(self.members) for name in names}
        now = {name: index for index, group in enumerate(groups) for name, _ in group}
        for name, index in now.items():
            if name not in then:
                raise CheckpointError(
                    f"{name} is in parameter group {index} of this {title} and in none of the "
                    f"{len(self.members)} that were saved." + nearest(name, then)
                )
            if then[name] != index:
                raise CheckpointError(
                    f"{name} is in parameter group {index} of this {title}; it was saved in group {then[name]}\n"
                    "  Make the same groups as in the run that saved it."
                )
        missing = [name for name in then if name not in now and (name in here or name not in plan.tensors)]
        if missing:
            raise CheckpointError(
                f"{len(missing)} of the {len(then)} parameters in the optimizer that was saved are not in this "
                f"{title}: {listed(missing)}"
            )

    def check_names(self, saved: Mapping[str, TensorPlan]) -> None:
        """Raise CheckpointError unless the checkpoint has the tensors that the metadata names, and no others."""
        due = {
            entry.name(name, key, rank)
            for name, keys in self.state.items()
            for key, entry in keys.items()
            if entry.kind not in ("value", "list")
            for rank in range(self.tp if entry.kind == "own" else 1)
        }
        missing, unexpected = sorted(due - set(saved)), [name for name in saved if name not in due]
        if missing or unexpected:
            raise CheckpointError(
                f"the state of the optimizer in the checkpoint is damaged: {len(missing)} of {len(due)} tensors are "
                f"missing, {len(unexpected)} unexpected"
                + (f"\n  Missing: {listed(missing)}." if missing else "")
                + (f"\n  Unexpected: {listed(unexpected)}." if unexpected else "")
            )


def merge_metadata(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the metadata of all ranks: stages hold other parameters, ZeRO replicas other states.

    Raises:
        CheckpointError: they contradict each other: another class, other options, or another state of one parameter.
    """
    first = ranks[0]
    groups = [{"options": group["options"], "params": dict.fromkeys(group["params"])} for group in first["groups"]]
    state: dict[str, Any] = dict(first["state"])
    for rank, other in enumerate(ranks[1:], 1):
        for key in ("class", "tp", "other"):
            if other[key] != first[key]:
                raise CheckpointError(
                    f"ranks have different optimizers: {key} is {first[key]!r} on the first and {other[key]!r} on "
                    f"number {rank}"
                )
        if len(other["groups"]) != len(groups):
            raise CheckpointError(
                f"ranks have different optimizers: the first has {len(groups)} parameter groups, number {rank} has "
                f"{len(other['groups'])}\n  A stage without parameters in a group needs an empty group in its place."
            )
        for index, (mine, theirs) in enumerate(zip(groups, other["groups"], strict=True)):
            one, two = mine["options"], theirs["options"]
            for key in {**one, **two}:
                if key not in one or key not in two or one[key] != two[key]:
                    raise CheckpointError(
                        f"ranks have different optimizers: {key} of parameter group {index} is {one.get(key)!r} on the "
                        f"first, {two.get(key)!r} on number {rank}"
                    )
            mine["params"].update(dict.fromkeys(theirs["params"]))
        for name, entries in other["state"].items():
            if state.setdefault(name, entries) != entries:
                keys = [key for key in {**state[name], **entries} if state[name].get(key) != entries.get(key)]
                raise CheckpointError(
                    f"ranks have different states of {name}: {keys[0]!r} is {state[name].get(keys[0])} on one and "
                    f"{entries.get(keys[0])} on number {rank}"
                )
    return {**first, "groups": [{**group, "params": list(group["params"])} for group in groups], "state": state}
