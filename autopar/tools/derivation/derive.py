"""Derive a policy from the structure of a model and one forward without data.

A shard may return the right shapes, but compute wrong values. For example, ``forward`` views features as
``(heads, -1)`` and no attribute divides ``heads``. Then the shard has four heads of half the width. The features of the
full model's tensors determine the shape of each tensor in a shard: every dim keeps the indices of the shard's units and
the indices without units. So :func:`check_units` compares the operators of one rank's shard, module by module.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from autopar.compat.tensors import own_modules, own_parameters, tree_leaves
from autopar.distributed.axis import Axis
from autopar.distributed.rng import kept
from autopar.dry_run.activation_tracking import MADE_BY
from autopar.dry_run.operators import ValuelessTracking, name_of
from autopar.dry_run.tensor_parallel import check_plan, check_plan_with, different_ranks, run
from autopar.errors import AutoparError, ConfigError, PolicyError, first_line
from autopar.plan.make_plan import make_plan
from autopar.plan.matching import join
from autopar.plan.plan import Plan
from autopar.policy.load import read_user_policy
from autopar.policy.match import config_of
from autopar.tensor_parallel.parallelize import apply
from autopar.tensor_parallel.regions import Region
from autopar.tensor_tracking import tensors_in
from autopar.tools.derivation.families import Family, Named, components, decide, families
from autopar.tools.derivation.feature_tracking import ACTIVATION, SHAPE_ONLY, FeatureTracking
from autopar.tools.derivation.policy_tree import marked, policy_tree, reached
from autopar.tools.derivation.trace import (
    BlockList,
    Decisions,
    Names,
    Trace,
    Traced,
    block_lists,
    running,
    trace,
    traced,
    underivable,
)

_NEVER = re.compile(
    r"head_dim|head_size$|head_width|kernel|chunk|rank|layer|state|hidden_size|d_model|experts|top_k|window"
)
_MOST = 5  # try all subsets for up to this many candidates of a module


@dataclass(frozen=True)
class Candidate:
    """An attribute whose value may be a count of units.

    Attributes:
        module: The path below the block, with ``*``.
        name: The name of the attribute; ``config.NAME`` for an attribute of the module's config.
        share: The value for the policy's section ``attributes``.
        wide: A flag, set if the attribute counts features instead of units.
    """

    module: str
    name: str
    share: Any
    wide: bool


def candidates(root: nn.Module, each: BlockList, named: list[Named], names: Names) -> dict[str, list[Candidate]]:
    """Return module -> candidates: attributes of modules in the blocks whose value equals a count of units."""
    found: dict[str, dict[str, Candidate]] = {}
    for block in each.blocks:
        live = [n for n in named if block in n.of_blocks and not n.gathered]
        for path, module in root.get_submodule(block).named_modules():
            full = join(block, path)
            inside = [n for n in live if any(m.path.startswith(f"{full}.") for m in n.of_blocks[block].members)]
            shown = names.below(block, full)
            for attribute, value in _integers(module):
                shares = (share for n in inside if (share := _share(value, n, block, attribute)) is not None)
                if (share := next(shares, None)) is not None:
                    found.setdefault(shown, {}).setdefault(attribute, Candidate(shown, attribute, *share))
    return {module: list(own.values()) for module, own in found.items()}


def _integers(module: nn.Module) -> Iterator[tuple[str, int]]:
    of_layer = own_parameters(module) and not own_modules(module)
    for name, value in () if of_layer else vars(module).items():
        if type(value) is int and value > 1 and not name.startswith("_") and not _NEVER.search(name):
            yield name, value
    for name, value in vars(config_of(module)).items() if "config" in vars(module) else ():
        if type(value) is int and value > 1 and "head" in name and "dim" not in name:
            yield f"config.{name}", value


def _share(value: int, named: Named, block: str, name: str) -> tuple[Any, bool] | None:
    family = named.of_blocks[block]
    count = len(family.units)
    if named.heads and value == named.ratio and ("group" in name or "rep" in name):
        return f"{named.heads} / {named.unit}", False
    if value == count * named.ratio and named.heads:
        return named.heads, False
    if value == count and not all(w == 1 for m in family.members for w in m.widths):
        return named.unit, False
    if named.heads and value == named.ratio:
        return f"{named.heads} / {named.unit}", False
    for member in family.members:
        total = count * sum(member.widths)
        if value == total and len(member.widths) > 1:
            return named.parts(member.widths), True
        if value in {count * w for w in member.widths}:
            widest = value == max(count * w for m in family.members for w in m.widths)
            wide = named.heads and widest and value % (count * named.ratio) == 0
            return (named.heads if wide else named.unit), True
    return None


def choices(own: list[Candidate]) -> Iterator[tuple[Candidate, ...]]:
    """Yield sets of attributes to divide: no attributes, counts, counts and widths, then all other subsets."""
    config = [c for c in own if c.name.startswith("config.")]
    own = [c for c in own if c not in config]
    counts, wide = [c for c in own if not c.wide], [c for c in own if c.wide]
    usual = [(), counts, counts + wide, wide, config, counts + config, counts + wide + config]
    rest = own if len(own) <= _MOST else []
    subsets = [s for size in range(1, len(rest) + 1) for s in itertools.combinations(rest, size)]
    options = [*map(tuple, usual), *subsets]
    yield from (option for place, option in enumerate(options) if option not in options[:place])


_SIZES = (2, 4)
_TRIES, _FEW_TRIES = 200, 6


@dataclass(frozen=True)
class Derived:
    """A derived policy.

    Attributes:
        tree: The policy as plain data, in the form of ``policies/README.md``.
        gathered: The sharded layers whose features are gathered, because the forward needs all features.
        replicated: The replicated layers, with ``*`` for the numbers of blocks.
        unseen: The lists of blocks that the forward did not reach. They stay replicated.
    """

    tree: dict[str, Any]
    gathered: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()


def derive(model: PreTrainedModel) -> Derived:
    """Derive the policy of a model: units and rules from a trace, attributes from dry runs. The model is only read.

    Raises:
        UnsupportedModelError: If the model does not run without data, or no layer can be sharded.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads are slow on a busy machine: 28 s instead of 0.2 s
    try:
        with kept():  # some models draw random numbers from numpy
            return _derive(model)
    finally:
        torch.set_num_threads(threads)


def _derive(model: PreTrainedModel) -> Derived:
    models = traced(model)
    if not models:
        main = getattr(model, "main_input_name", "of its class")
        raise underivable(model, f"no inputs are known for its forward (main_input_name is '{main}')")
    root: Any = models[0].model
    lists, blocks = block_lists(root)
    decisions, gathered, words = Decisions(), list[Family](), True
    while True:
        seen, decisions = decide(models, blocks, decisions)
        if not seen.runs:
            why = f" ({seen.failure})" if seen.failure else ""
            raise underivable(model, f"its forward does not run without data{why}")
        found, bad = families(seen, blocks)
        if not bad:
            taken = {member.path for family in found for member in family.members}
            gathered = [each for each in gathered if not taken & {member.path for member in each.members}]
            tree, named = policy_tree(root, lists, [*found, *gathered], seen, decisions, words=words)
            trial = _Trial(model, models, decisions, tree, lists, named, seen)
            refusal = trial.refused()
            if refusal is None:
                return _derived(trial, decisions, lists, seen)
            bad = refusal
            if words and trial.outside:  # outside of blocks: forward uses the word embeddings directly
                words = False
                continue
            every = [n for many in named for n in many]
            own = [n for n in every if any(set(family.columns) & set(bad) for family in n.of_blocks.values())]
            refused = [family for n in own for family in n.of_blocks.values()]
            if any(each.gathered for each in refused):
                gathered = [each for each in gathered if each not in refused]
                continue
            for each in refused:  # gather only linear layers with full inputs
                layers = [root.get_submodule(path) for path in each.columns]
                entered = any(seen.sources[path] for path in each.columns)
                if layers and not entered and all(isinstance(layer, nn.Linear | Conv1D) for layer in layers):
                    gathered.append(replace(each, gathered=True))
        names = set(map(seen.names, bad))
        if not names or names <= decisions.replicated:
            raise underivable(model, trial.reason if not bad else "no rule fits", by_hand=False)
        decisions = decisions.without(names)


def _derived(trial: _Trial, decisions: Decisions, lists: list[BlockList], seen: Trace) -> Derived:
    tree = trial.tree_with_attributes()
    names = re.findall(r"'([^']*)':", str(tree))
    if not any(kind in name for name in names for kind in ("column", "row", "sharded", "embedding")):
        why = "no two consecutive layers share units"
        raise underivable(trial.model, f"{why}, and no embedding has config.vocab_size rows", by_hand=False)
    ran = set(seen.order)
    unseen = tuple(each.path for each in lists if not ran & set(each.blocks))
    called = {seen.names(path) for path in ran}
    families = [family for many in trial.named for n in many if n.gathered for family in n.of_blocks.values()]
    gathered = {seen.names(m.path) for family in families for m in family.members if m.kind in ("column", "row")}
    left = decisions.replicated - gathered
    replicated = tuple(sorted(name for name in left if name in called or name.rpartition(".")[0] in called))
    return Derived(tree, tuple(sorted(gathered)), replicated, unseen)


@dataclass
class _Trial:
    """A policy, checked in dry runs with an increasing number of attributes.

    Attributes:
        reason: The error of the last failed dry run.
        outside: A flag, set if the error names no module in a block.
    """

    model: PreTrainedModel
    models: list[Traced]
    decisions: Decisions
    tree: dict[str, Any]
    lists: list[BlockList]
    named: list[list[Named]]
    seen: Trace
    reason: str = ""
    outside: bool = False
    chosen: dict[tuple[int, str], tuple[Candidate, ...]] = field(default_factory=dict)

    def refused(self) -> list[str] | None:
        """Find attributes with which the dry runs pass, or return the columns of the rejected family."""
        names: Names = self.seen.names
        own = {
            (tower, module): list(choices(listed))
            for tower, (each, many) in enumerate(zip(self.lists, self.named, strict=True))
            for module, listed in candidates(self.models[0].model, each, many, names).items()
        }
        self.chosen = dict.fromkeys(own, ())
        left = {group: options[1:] for group, options in own.items()}
        held: list[int] = []
        for size in _SIZES:
            passed = dict(self.chosen)
            for _ in range(_TRIES if size == _SIZES[0] else _FEW_TRIES):
                error = self._try(size)
                if error is None:
                    break
                self.reason = str(error)
                if isinstance(error, ConfigError) and size != _SIZES[0]:
                    break  # fewer units than ranks
                group = self._group_of(str(error), left)
                if group is None:
                    break
                self.chosen[group] = left[group].pop(0)
            if error is not None and size == _SIZES[0]:
                self.outside = not self._place(str(error))
                return self._columns_near(str(error))
            if error is not None or (self.chosen != passed and self._try(_SIZES[0]) is not None):
                self.chosen = passed  # correct for fewer ranks
            else:
                held.append(size)
        for group in list(self.chosen):  # drop attributes that equal a count only by chance
            for candidate in self.chosen[group]:
                before = self.chosen[group]
                self.chosen[group] = tuple(each for each in before if each is not candidate)
                if any(self._try(size) is not None for size in held):
                    self.chosen[group] = before
        return None

    def _try(self, size: int) -> AutoparError | None:
        try:
            plan = make_plan(self.model, read_user_policy(self.tree_with_attributes()), size)
            check_plan(self.model, "", plan)
            if size == _SIZES[0]:
                first, taken = self.models[0], inspect.signature(self.models[0].model.forward).parameters
                words = first.inputs.get("decoder_input_ids", first.inputs.get("input_ids"))
                rows = torch.empty(len(next(iter(first.inputs.values()))), dtype=torch.int64, device="meta")
                for labels in (words, rows) if not first.path and "labels" in taken else ():  # the loss may read sizes
                    given = {**first.inputs, "labels": labels}
                    if labels is not None and check_plan_with(self.model, plan, (), given):
                        break
                blocks = tuple(block for each in self.lists for block in each.blocks)
                check_units(self.models, blocks, self.decisions, self.seen, plan)
        except AutoparError as error:
            return error
        return None

    def tree_with_attributes(self) -> dict[str, Any]:
        """Return the policy with the chosen attributes."""
        towers = dict(self.tree.get("towers", {"": self.tree}))
        for number, (name, each) in enumerate(zip(list(towers), self.lists, strict=False)):
            chosen = [c for (tower, _), listed in self.chosen.items() if tower == number for c in listed]
            if attributes := {self._key(candidate, each): candidate.share for candidate in chosen}:
                towers[name] = {**towers[name], "blocks": {**towers[name]["blocks"], "attributes": attributes}}
        return {**self.tree, "towers": towers} if "towers" in self.tree else towers[""]

    def _key(self, candidate: Candidate, each: BlockList) -> str:
        """Return the key in the section ``attributes``, with ``?`` if some block lacks the module."""
        path = candidate.module
        blocks = [self.models[0].model.get_submodule(block) for block in each.blocks]
        found, lacking = reached(blocks, path)
        name = candidate.name.removeprefix("config.")
        holders: list[Any] = found if name == candidate.name else [getattr(module, "config", None) for module in found]
        try:
            everywhere = not lacking and all(type(getattr(holder, name, None)) is int for holder in holders)
        except RuntimeError:  # from transformers' configs of layers that differ
            everywhere = False
        return join(path, candidate.name) if everywhere else join(marked(path, lacking), f"{candidate.name}?")

    def _place(self, text: str) -> str:
        """Return the first path of an error message that is in a block, or ""."""
        root = self.models[0].model
        known = {path for path, _ in root.named_modules()} | {name for name, _ in root.named_parameters()}
        words = [word.strip(".,:'") for word in re.split(r"[\s]", text.partition(MADE_BY)[0])]
        return next((word for word in words if word in known and self.seen.names.block_of(word)), "")

    def _group_of(self, text: str, left: dict[tuple[int, str], list[Any]]) -> tuple[int, str] | None:
        """Return the module whose attributes to try next; None if there are no more attributes."""
        place = self._place(text)
        block = self.seen.names.block_of(place)
        shown = self.seen.names.below(block, place) if block is not None else ""

        def score(group: tuple[int, str]) -> int:
            alike = sum(1 for a, b in zip(shown.split("."), group[1].split("."), strict=False) if a == b)
            named = any(join(each.module, each.name) in text for each in self.chosen[group])
            return alike * 4 + 2 * shown.startswith(group[1]) + 8 * named

        fitting = (group for group in left if left[group] and (block is None or block in self.lists[group[0]].blocks))
        return max(fitting, key=score, default=None)

    def _columns_near(self, text: str) -> list[str]:
        """Return the columns of the families near the module that an error names; without a name, all columns."""
        place = self._place(text)
        block = self.seen.names.block_of(place)
        scored: list[tuple[int, list[str]]] = []
        for family in (n.of_blocks[block] for many in self.named for n in many if block in n.of_blocks):
            paths = [zip(place.split("."), member.path.split("."), strict=False) for member in family.members]
            alike = max(sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], path)) for path in paths)
            wanted = set(family.units)
            sources = [p for p in self.seen.tracking.first_of if wanted & set(components(self.seen, p).tolist())]
            scored.append((alike, family.columns if family.gathered else sources))
        most = max((score for score, _ in scored), default=0)
        near = [path for score, paths in scored if score == most for path in paths]
        return near if scored else list(self.seen.tracking.first_of)


_COPIES = frozenset(("alias", "clone", "contiguous", "detach", "_to_copy", "lift_fresh", "view_as", "copy"))
_REPEATS = frozenset(("expand", "repeat", "repeat_interleave"))
_VIEWS = frozenset(("view", "_unsafe_view", "reshape", "_reshape_alias", "expand"))

_Calls = defaultdict[str, list[tuple[str, tuple[Any, ...]]]]
"""Path of a module -> the operators of its forward, with the shapes of their outputs."""


def _note(calls: _Calls, stack: list[str], func: Any, args: Any, outputs: list[Any], shapes: tuple[Any, ...]) -> None:
    """Record an operator of the last module in ``stack``, except copies."""
    name = name_of(func)
    first = args[0] if args and isinstance(args[0], torch.Tensor) else None
    still = first is not None and len(outputs) == 1 and first.shape == outputs[0].shape
    if name not in _COPIES and not (still and name in _VIEWS):
        calls[stack[-1] if stack else ""].append(("view" if name in _VIEWS else name.rstrip("_"), shapes))


def check_units(models: list[Traced], blocks: tuple[str, ...], decisions: Decisions, seen: Trace, plan: Plan) -> None:
    """Compare the operators of the shards of different ranks with the full model.

    Raises:
        PolicyError: If a shard fails, or computes a tensor with the wrong units.
    """
    if seen.in_training is None:
        root = models[0].model.train()
        try:
            trained, usual = trace(models, blocks, decisions, seen).tracking, seen.tracking
        finally:
            root.eval()
        seen.in_training = sorted(
            {*trained.bare_sinks, *trained.bare_sources} - {*usual.bare_sinks, *usual.bare_sources}
        )
    for name in seen.in_training:
        raise PolicyError(f"{name} is multiplied outside of its layer's forward, but only in training", plan.policy)
    ranks = {rank: (_own_units(seen, plan, rank), _Calls(list)) for rank in different_ranks(plan)}
    repeated: Any = WeakTensorKeyDictionary()  # replicated tensors, repeated once per unit

    def record(tracking: FeatureTracking, func: Any, args: Any, outputs: list[torch.Tensor]) -> None:
        given = list(tensors_in(args))
        more = name_of(func) in _REPEATS and outputs[0].numel() > given[0].numel()
        if more or any(x in repeated for x in given):
            repeated.update(dict.fromkeys((x for x in outputs if tracking.features_of(x) is None), True))
        for own, expected in ranks.values():
            shapes = tuple(None if x in repeated else _local(x, tracking, own) for x in outputs)
            _note(expected, tracking.stack, func, args, outputs, shapes)

    trace(models, blocks, decisions, seen, record)
    for rank, (_, expected) in ranks.items():
        actual = _run_shard(models, seen, plan, rank)
        for place, calls in expected.items():
            _compare(place, calls, actual.get(place, []), plan)


def _own_units(seen: Trace, plan: Plan, rank: int) -> torch.Tensor:
    """Return for each component whether a rank has its features. The last item is for later components."""
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
    """Return the shape of a rank's shard of a tensor; None if it is unknown."""
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
    def __init__(self, stack: list[str], suspended: set[str]) -> None:
        super().__init__()
        self.calls, self._stack, self._suspended = _Calls(list), stack, suspended

    def track(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self._suspended.isdisjoint(self._stack) and name_of(func) not in SHAPE_ONLY:
            outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            shapes = tuple(tuple(x.shape) for x in outputs)
            _note(self.calls, self._stack, func, args, outputs, shapes)


def _run_shard(models: list[Traced], seen: Trace, plan: Plan, rank: int) -> _Calls:
    shard: Any = copy.deepcopy(models[0].model)
    region = Region(Axis("tp", None, range(plan.tp), rank))
    apply(shard, plan, region.axis, region)
    with running(shard) as stack:
        mode = _ShardRecorder(stack, seen.suspended)
        for path, inputs in seen.runs:
            try:
                with mode:
                    run(shard.get_submodule(path), (), inputs)
            except Exception as error:
                place = stack[-1] if stack else path
                raise PolicyError(
                    f"the shard of one of {plan.tp} ranks fails in {place or 'the model'}, where the full model does "
                    f"not: {first_line(error)}",
                    plan.policy,
                ) from error
    return mode.calls


def _compare(place: str, plain: list[tuple[str, Any]], shard: list[tuple[str, Any]], plan: Plan) -> None:
    names, others = [name for name, _ in plain], [name for name, _ in shard]
    pairs = [(number, number) for number in range(len(names))]
    if names != others:  # an operator is skipped if there is only one unit
        blocks = SequenceMatcher(None, names, others, autojunk=False).get_matching_blocks()
        pairs = [(block.a + n, block.b + n) for block in blocks for n in range(block.size)]
    for one, other in pairs:
        for wanted, made in zip(plain[one][1], shard[other][1], strict=False):
            if wanted is not None and wanted != made:
                raise PolicyError(
                    f"in {place or 'the model'} {plain[one][0]} returns shape {list(made)} in a shard, expected "
                    f"{list(wanted)}: a number of units may not be scaled (attributes)",
                    plan.policy,
                )
