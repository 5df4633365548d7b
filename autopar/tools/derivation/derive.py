"""Derive a policy from the structure of a model and one forward of it without data."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from autopar.distributed.rng import kept
from autopar.dry_run.activation_tracking import MADE_BY
from autopar.dry_run.tensor_parallel import check_plan, check_plan_with
from autopar.errors import AutoparError, ConfigError
from autopar.foreign.tensors import own_modules, own_parameters
from autopar.plan.make_plan import make_plan
from autopar.plan.plan import Plan
from autopar.policy.load import read_user_policy
from autopar.policy.match import base_of, config_of
from autopar.tools.derivation.block_lists import BlockList, block_lists
from autopar.tools.derivation.decide import components, decide
from autopar.tools.derivation.families import Family, Named, families
from autopar.tools.derivation.policy_tree import marked, missing, policy_tree
from autopar.tools.derivation.trace import Decisions, Names, Trace, Traced, traced, underivable
from autopar.tools.derivation.unit_shapes import check_units

_NEVER = re.compile(
    r"head_dim|head_size$|head_width|kernel|chunk|rank|layer|state|hidden_size|d_model|experts|top_k|window"
)
_MOST = 5  # candidates of one module of which all subsets are tried


@dataclass(frozen=True)
class Candidate:
    """An attribute that may be a count of units.

    Attributes:
        module: path below the block, with ``*``.
        name: of the attribute; ``config.NAME`` for one of the module's config.
        share: how a policy writes it.
        wide: it counts features, not units.
    """

    module: str
    name: str
    share: Any
    wide: bool

    @property
    def key(self) -> str:
        """The entry under ``attributes``."""
        return ".".join(part for part in (self.module, self.name) if part)


def candidates(root: nn.Module, each: BlockList, named: list[Named], names: Names) -> dict[str, list[Candidate]]:
    """Return the attributes of modules in the blocks that have the value of some count: module -> candidates."""
    found: dict[str, dict[str, Candidate]] = {}
    values: dict[str, set[int]] = {}
    for block in each.blocks:
        length = len(block.split("."))
        for path, module in root.get_submodule(block).named_modules():
            full = f"{block}.{path}" if path else block
            live = [n for n in named if block in n.of_blocks and not n.gathered]  # which lie in the module
            families = [n for n in live if any(m.path.startswith(full + ".") for m in n.of_blocks[block].members)]
            shown = ".".join(names(full).split(".")[length:])
            for attribute, value in _integers(module):
                key = f"{shown}.{attribute}"
                shares = [share for n in families if (share := _share(value, n, block, attribute)) is not None]
                if shares:
                    values.setdefault(key, set()).add(value)
                    found.setdefault(shown, {}).setdefault(attribute, Candidate(shown, attribute, *shares[0]))
    return {module: list(own.values()) for module, own in found.items()}


def _integers(module: nn.Module) -> Iterator[tuple[str, int]]:
    for name, value in vars(module).items() if own_modules(module) or not own_parameters(module) else ():
        if type(value) is int and value > 1 and not name.startswith("_") and not _NEVER.search(name):
            yield name, value
    if "config" in vars(module):
        for name, value in vars(config_of(module)).items():
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
            wide = (
                named.heads
                and value % (count * named.ratio) == 0
                and value == max(count * w for m in family.members for w in m.widths)
            )
            return (named.heads if wide else named.unit), True
    return None


def choices(own: list[Candidate]) -> Iterator[tuple[Candidate, ...]]:
    """Yield sets of attributes to divide: none, counts, counts and widths, then all others."""
    config = [c for c in own if c.name.startswith("config.")]
    own = [c for c in own if c not in config]
    counts = [c for c in own if not c.wide]
    wide = [c for c in own if c.wide]
    tried: list[tuple[Candidate, ...]] = []
    usual = [
        (),
        tuple(counts),
        tuple(counts + wide),
        tuple(wide),
        tuple(config),
        tuple(counts + config),
        tuple(counts + wide + config),
    ]
    rest = own if len(own) <= _MOST else []
    subsets = [s for size in range(1, len(rest) + 1) for s in itertools.combinations(rest, size)]
    for choice in (*usual, *subsets):
        if choice not in tried:
            tried.append(choice)
            yield choice


_SIZES = (2, 4)
_TRIES, _FEW_TRIES = 200, 6


@dataclass(frozen=True)
class Derived:
    """A derived policy.

    Attributes:
        tree: the policy as plain data, in the form of ``policies/README.md``.
        gathered: layers that are sharded, and whose features are gathered for a forward that wants all of them.
        whole: layers that could not be sharded, with ``*`` for the numbers of blocks.
        unseen: lists of blocks that the forward did not reach; they stay whole.
    """

    tree: dict[str, Any]
    gathered: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()


def derive(model: PreTrainedModel) -> Derived:
    """Derive the policy of a model: units and rules by a trace, attributes by dry runs. The model is only read.

    Raises:
        UnsupportedModelError: the model does not run without data, or nothing of it can be sharded; says why.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of small tables: on a busy machine more of them wait for each other, 28 s for 0.2 s
    try:
        with kept():  # some models draw from numpy
            return _derive(model)
    finally:
        torch.set_num_threads(threads)


def _derive(model: PreTrainedModel) -> Derived:
    models = traced(model)
    if not models:
        raise underivable(model, f"no inputs are known for its forward (main_input_name is '{model.main_input_name}')")
    root: Any = models[0].model
    base_path, _ = base_of(root)
    lists = [each for each in block_lists(root) if not base_path or each.path.startswith(f"{base_path}.")]
    blocks = tuple(block for each in lists for block in each.blocks)
    decisions, gathered, words = Decisions(), list[Family](), True
    while True:
        seen, decisions = decide(models, blocks, decisions)
        if not seen.ran:
            why = f" ({seen.failure})" if seen.failure else ""
            raise underivable(model, f"its forward does not run without data{why}")
        found, bad = families(seen, blocks)
        if not bad:
            taken = {member.path for family in found for member in family.members}
            gathered = [each for each in gathered if not taken & {member.path for member in each.members}]
            tree, named = policy_tree(root, lists, [*found, *gathered], seen, decisions, words=words)
            trial = _Trial(model, models, decisions, tree, lists, named, seen)
            bad = trial.refused()
            if trial.passed:
                return _derived(trial, decisions, lists, seen)
            if words and trial.outside:  # of blocks: tables of words that forward does not only look up
                words = False
                continue
            refused = trial.families_of(bad)
            if any(each.gathered for each in refused):
                gathered = [each for each in gathered if each not in refused]
                continue
            for each in refused:  # of linear layers alone that are called with whole inputs
                layers = [root.get_submodule(path) for path in each.columns]
                entered = any(seen.sources[path] for path in each.columns)
                if layers and not entered and all(isinstance(layer, nn.Linear | Conv1D) for layer in layers):
                    gathered.append(replace(each, gathered=True))
        names = set(map(seen.names, bad))
        if not names or names <= decisions.whole:
            raise underivable(model, trial.reason if not bad else "no rule fits", by_hand=False)
        decisions = decisions.without(names)


def _derived(trial: _Trial, decisions: Decisions, lists: list[BlockList], seen: Trace) -> Derived:
    tree = trial.tree_with(trial.chosen)
    if not any(kind in text for text in _leaves(tree) for kind in ("column", "row", "sharded", "embedding")):
        why = (
            "no layers follow one another so that units of the first meet those of the second, and no table has "
            "config.vocab_size rows"
        )
        raise underivable(trial.model, why, by_hand=False)
    ran = set(seen.order)
    unseen = tuple(each.path for each in lists if not ran & set(each.blocks))
    called = {seen.names(path) for path in ran}
    families = [family for many in trial.named for n in many if n.gathered for family in n.of_blocks.values()]
    gathered = {seen.names(m.path) for family in families for m in family.members if m.kind in ("column", "row")}
    left = decisions.whole - gathered
    whole = tuple(sorted(name for name in left if name in called or name.rpartition(".")[0] in called))
    return Derived(tree, tuple(sorted(gathered)), whole, unseen)


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, below in value.items():
            yield str(name)
            yield from _leaves(below)


@dataclass
class _Trial:
    """A policy tried in dry runs, with more and more attributes.

    Attributes:
        passed: whether it holds on the fewest ranks; ``reason``: why not; ``outside``: what fails lies in no block.
    """

    model: PreTrainedModel
    models: list[Traced]
    decisions: Decisions
    tree: dict[str, Any]
    lists: list[BlockList]
    named: list[list[Named]]
    seen: Trace
    reason: str = ""
    passed: bool = False
    outside: bool = False
    chosen: dict[tuple[int, str], tuple[Candidate, ...]] = field(default_factory=dict)

    @property
    def root(self) -> nn.Module:
        """The model on the meta device."""
        return self.models[0].model

    def refused(self) -> list[str]:
        """Find attributes with which the dry runs pass; else return the columns of the family that is refused."""
        names: Names = self.seen.names
        own = {
            (tower, module): list(choices(listed))
            for tower, (each, many) in enumerate(zip(self.lists, self.named, strict=True))
            for module, listed in candidates(self.root, each, many, names).items()
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
                    break  # fewer units than that
                group = self._group_of(str(error), left)
                if group is None:
                    break
                self.chosen[group] = left[group].pop(0)
            if error is not None and size == _SIZES[0]:
                self.outside = not self._place(str(error))
                return self._columns_near(str(error))
            if error is not None or (self.chosen != passed and self._try(_SIZES[0]) is not None):
                self.chosen = passed  # right for fewer ranks
            else:
                held.append(size)
        self._leave_out_idle(held)
        self.passed = True
        return []

    def _leave_out_idle(self, sizes: list[int]) -> None:
        """Divide no attribute that the dry runs do without: a number that only has the value of a count is a number."""
        for group in list(self.chosen):
            for candidate in self.chosen[group]:
                before = self.chosen[group]
                self.chosen[group] = tuple(each for each in before if each is not candidate)
                if any(self._try(size) is not None for size in sizes):
                    self.chosen[group] = before

    def families_of(self, columns: list[str]) -> list[Family]:
        """Return the families of all blocks that have these columns in one of them."""
        every = [n for many in self.named for n in many]
        own = [n for n in every if any(set(family.columns) & set(columns) for family in n.of_blocks.values())]
        return [family for n in own for family in n.of_blocks.values()]

    def _try(self, size: int) -> AutoparError | None:
        try:
            plan = make_plan(self.model, read_user_policy(self.tree_with(self.chosen)), size)
            check_plan(self.model, "", plan)
            if size == _SIZES[0]:
                self._check_loss(plan)
                blocks = tuple(block for each in self.lists for block in each.blocks)
                check_units(self.models, blocks, self.decisions, self.seen, plan)
        except AutoparError as error:
            return error
        return None

    def _check_loss(self, plan: Plan) -> None:
        """Run the model with labels, too: its loss may read sizes that nothing else reads."""
        first = self.models[0]
        if first.path or "labels" not in inspect.signature(first.model.forward).parameters:
            return
        words = first.inputs.get("decoder_input_ids", first.inputs.get("input_ids"))
        classes = torch.empty(len(next(iter(first.inputs.values()))), dtype=torch.int64, device="meta")
        for labels in (classes,) if words is None else (words, classes):
            if check_plan_with(self.model, plan, (), {**first.inputs, "labels": labels}):
                return

    def tree_with(self, chosen: dict[tuple[int, str], tuple[Candidate, ...]]) -> dict[str, Any]:
        """Return the policy with attributes."""
        tree = {**self.tree}
        towers = dict(tree["towers"]) if "towers" in tree else {"": tree}
        for number, name in enumerate(list(towers) if self.lists else []):
            attributes = {}
            for (tower, _), listed in chosen.items():
                for candidate in listed if tower == number else ():
                    attributes[self._key(candidate, self.lists[number])] = candidate.share
            if attributes:
                towers[name] = {**towers[name], "blocks": {**towers[name]["blocks"], "attributes": attributes}}
        return {**tree, "towers": towers} if "towers" in tree else towers[""]

    def _key(self, candidate: Candidate, each: BlockList) -> str:
        """The entry under ``attributes``, with marks for what some blocks lack."""
        path = candidate.module
        blocks = [self.root.get_submodule(block) for block in each.blocks]
        lacking = {p for block in blocks for p in missing(block, path)} if path else set()
        shown = marked(path, lacking) if path else ""
        everywhere = not lacking and all(_has(block, path, candidate.name) for block in blocks)
        return candidate.key if everywhere else ".".join(part for part in (shown, candidate.name + "?") if part)

    def _place(self, text: str) -> str:
        """The first path in an error that is one of the model's."""
        known = {path for path, _ in self.root.named_modules()} | {name for name, _ in self.root.named_parameters()}
        words = [word.strip(".,:'") for word in re.split(r"[\s]", text.partition(MADE_BY)[0])]
        return next((word for word in words if word in known and self.seen.names.block_of(word)), "")

    def _group_of(self, text: str, left: dict[tuple[int, str], list[Any]]) -> tuple[int, str] | None:
        """The module of which other attributes are tried next."""
        place = self._place(text)
        block = self.seen.names.block_of(place) if place else None
        best: tuple[int, tuple[int, str]] | None = None
        for group, options in left.items():
            tower, module = group
            if not options or (block is not None and block not in self.lists[tower].blocks):
                continue
            shown = ".".join(self.seen.names(place).split(".")[len(block.split(".")) :]) if block is not None else ""
            alike = sum(1 for a, b in zip(shown.split("."), module.split("."), strict=False) if a == b)
            named = any(candidate.key in text for candidate in self.chosen[group])
            score = alike * 4 + 2 * (shown.startswith(module)) + 8 * named
            if best is None or score > best[0]:
                best = score, group
        return None if best is None else best[1]

    def _columns_near(self, text: str) -> list[str]:
        """The columns of the families in the module that an error names; of all, if it names none."""
        place = self._place(text)
        block = self.seen.names.block_of(place) if place else None
        scored: list[tuple[int, list[str]]] = []
        for family in (n.of_blocks[block] for many in self.named for n in many if block in n.of_blocks):
            paths = [zip(place.split("."), member.path.split("."), strict=False) for member in family.members]
            alike = max(sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], path)) for path in paths)
            wanted = set(family.units)
            sources = [p for p in self.seen.tracking.first_of if wanted & set(components(self.seen, p).tolist())]
            scored.append((alike, family.columns if family.gathered else sources))
        if scored:
            most = max(score for score, _ in scored)
            return [path for score, paths in scored if score == most for path in paths]
        return list(self.seen.tracking.first_of)


def _has(block: nn.Module, path: str, name: str) -> bool:
    """Return whether all modules of a block at a path with ``*`` have an integer of that name (``config.NAME``)."""
    found = [block]
    for part in path.split(".") if path else ():
        found = [m for one in found for n, m in own_modules(one).items() if part in ("*", n) and m is not None]
    last = name.removeprefix("config.")
    holders = found if name == last else [getattr(m, "config", None) for m in found]
    return all(type(getattr(holder, last, None)) is int for holder in holders)
