"""Whether a shard computes what the full model does with its units: the shapes of every operator, one by one.

Shards of all the right shapes at the end may be wrong inside: where ``forward`` views features as ``(heads, -1)`` and
nobody has divided ``heads``, four heads of half the width come out. The features of the full model's tensors say what
each tensor of a shard must look like: every dim keeps the places that belong to the shard's own units, or to none.
Operators are compared in order, module by module, on one rank's shard.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.distributed.axis import Axis
from autopar.dry_run.operators import SHAPE_ONLY, ValuelessTracking, name_of
from autopar.dry_run.tensor_parallel import different_ranks, run
from autopar.errors import PolicyError, first_line
from autopar.foreign.tensors import tree_leaves
from autopar.plan.plan import Plan
from autopar.tensor_parallel.parallelize import apply
from autopar.tensor_parallel.regions import Region
from autopar.tensor_tracking import tensors_in
from autopar.tools.derivation.feature_tracking import FeatureTracking
from autopar.tools.derivation.marks import ACTIVATION
from autopar.tools.derivation.trace import Decisions, Trace, Traced, trace

_COPIES = frozenset(("alias", "clone", "contiguous", "detach", "_to_copy", "lift_fresh", "view_as", "copy"))
_REPEATS = frozenset(("expand", "repeat", "repeat_interleave"))
_VIEWS = frozenset(("view", "_unsafe_view", "reshape", "_reshape_alias", "expand"))


@dataclass
class _Recorded:
    """The operators of a forward: the module of each call of one -> names, with the shapes of what they make."""

    calls: defaultdict[str, list[tuple[str, tuple[Any, ...]]]] = field(default_factory=lambda: defaultdict(list))

    def note(self, place: str, func: Any, args: Any, outputs: list[torch.Tensor], shapes: tuple[Any, ...]) -> None:
        """Note an operator that does more than copy."""
        name = name_of(func)
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        still = first is not None and len(outputs) == 1 and first.shape == outputs[0].shape
        if name not in _COPIES and not (still and name in _VIEWS):
            self.calls[place].append(("view" if name in _VIEWS else name.rstrip("_"), shapes))


def check_units(models: list[Traced], blocks: tuple[str, ...], decisions: Decisions, seen: Trace, plan: Plan) -> None:
    """Compare the operators of the first rank's shard, and of the last one's if it is another, with the full model's.

    Raises:
        PolicyError: the shard fails, or makes a tensor that does not hold its units.
    """
    if seen.in_training is None:
        seen.in_training = _in_training_alone(models, blocks, decisions, seen)
    for name in seen.in_training:
        raise PolicyError(f"{name} is multiplied outside of the forward of its layer, in training alone", plan.policy)
    ranks = {rank: (_own_units(seen, plan, rank), _Recorded()) for rank in different_ranks(plan)}
    repeated: Any = WeakTensorKeyDictionary()  # whole, once for each unit that there is

    def record(tracking: FeatureTracking, func: Any, args: Any, outputs: list[torch.Tensor]) -> None:
        place = tracking.stack[-1] if tracking.stack else ""
        given = list(tensors_in(args))
        more = name_of(func) in _REPEATS and outputs[0].numel() > given[0].numel()
        if more or any(x in repeated for x in given):
            repeated.update(dict.fromkeys((x for x in outputs if tracking.features_of(x) is None), True))
        for own, expected in ranks.values():
            shapes = tuple(None if x in repeated else _local(x, tracking, own) for x in outputs)
            expected.note(place, func, args, outputs, shapes)

    trace(models, blocks, decisions, seen, record)
    for rank, (_, expected) in ranks.items():
        actual = _run_shard(models, seen, plan, rank)
        for place, listed in expected.calls.items():
            _compare(place, listed, actual.calls.get(place, []), plan)


def _in_training_alone(models: list[Traced], blocks: tuple[str, ...], decisions: Decisions, seen: Trace) -> list[str]:
    """Return layers that are called in evaluation, and whose weights are used by themselves in training."""
    root = models[0].model.train()
    try:
        trained, usual = trace(models, blocks, decisions, seen).tracking, seen.tracking
    finally:
        root.eval()
    return sorted({*trained.bare_sinks, *trained.bare_sources} - {*usual.bare_sinks, *usual.bare_sources})


def _own_units(seen: Trace, plan: Plan, rank: int) -> torch.Tensor:
    """For each number whether it is a component of features that lie on a rank; one more for those of later ones."""
    tracking = seen.tracking
    found = []
    for source, first in tracking.first_of.items():
        layout = None if source in tracking.bare_sources else plan.tensors[plan.canonical(f"{source}.weight")].layout
        if layout is not None:
            found += [torch.arange(first + start, first + stop) for start, stop in layout.ranges(rank)]
    for name, dims in tracking.touched.items():
        layout = plan.tensors[plan.canonical(name)].layout
        if layout is None or layout.dim >= len(dims):
            continue
        for pairs in dims[layout.dim]:
            for start, stop in layout.ranges(rank):
                found.append(pairs[(pairs[:, 0] >= start) & (pairs[:, 0] < stop), 1])
    held = torch.zeros(tracking.components.count + 1, dtype=torch.bool)
    if found:
        held[tracking.components.of(torch.cat(found)).long()] = True
    return held


def _local(x: torch.Tensor, tracking: FeatureTracking, own: torch.Tensor) -> tuple[int, ...] | None:
    """The shape of a rank's part of a tensor; None if that cannot be said."""
    features, mark = tracking.features_of(x), tracking.mark_of(x)
    if features is None:
        return tuple(x.shape) if mark is not None and mark.kind >= ACTIVATION else None
    held = own.index_select(0, features.reshape(-1).clamp(max=len(own) - 1)).reshape(features.shape)
    none = features == 0
    if not bool(held.any()):
        return None
    shape = []
    for dim in range(held.ndim):
        rows, empty = (x.movedim(dim, 0).reshape(x.shape[dim], -1) for x in (held, none))
        shape.append(int((rows.any(1) | empty.all(1)).sum()))
    return tuple(shape)


class _ShardRecorder(ValuelessTracking):
    def __init__(self, recorded: _Recorded) -> None:
        super().__init__()
        self.recorded, self.stack, self.suspended = recorded, list[str](), 0

    def track(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not self.suspended and name_of(func) not in SHAPE_ONLY:
            outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            shapes = tuple(tuple(x.shape) for x in outputs)
            self.recorded.note(self.stack[-1] if self.stack else "", func, args, outputs, shapes)


def _run_shard(models: list[Traced], seen: Trace, plan: Plan, rank: int) -> _Recorded:
    shard: Any = copy.deepcopy(models[0].model)
    region = Region(Axis("tp", None, range(plan.tp), rank))
    apply(shard, plan, region.axis, region)
    recorded = _Recorded()
    mode = _ShardRecorder(recorded)
    for path, module in shard.named_modules():
        _follow(path, module, mode, path in seen.suspended)
    for path, inputs in seen.runs:
        model: nn.Module = shard.get_submodule(path)
        try:
            with mode:
                run(model, (), inputs)
        except Exception as error:
            place = mode.stack[-1] if mode.stack else path
            raise PolicyError(
                f"the shard of one of {plan.tp} ranks fails in {place or 'the model'}, where the full model does not: "
                f"{first_line(error)}",
                plan.policy,
            ) from error
    return recorded


def _follow(path: str, module: nn.Module, mode: _ShardRecorder, suspended: bool) -> None:
    def before(*_: Any) -> None:
        mode.stack.append(path)
        mode.suspended += suspended

    def after(*_: Any) -> None:
        mode.stack.pop()
        mode.suspended -= suspended

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def _compare(place: str, plain: list[tuple[str, Any]], shard: list[tuple[str, Any]], plan: Plan) -> None:
    names, others = [name for name, _ in plain], [name for name, _ in shard]
    pairs = list(zip(range(len(names)), range(len(names)), strict=True))
    if names != others:  # a step that is left out where there is one unit
        blocks = SequenceMatcher(None, names, others, autojunk=False).get_matching_blocks()
        pairs = [(block.a + n, block.b + n) for block in blocks for n in range(block.size)]
    for one, other in pairs:
        for wanted, made in zip(plain[one][1], shard[other][1], strict=False):
            if wanted is not None and wanted != made:
                raise PolicyError(
                    f"in {place or 'the model'} {plain[one][0]} makes {list(made)} of a shard, whose units are "
                    f"{list(wanted)} of the full model's: a number of units may not be scaled (attributes)",
                    plan.policy,
                )
