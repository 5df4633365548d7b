"""Derive a policy from the structure of a model and one forward of it without data."""

from __future__ import annotations

import inspect
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
from autopar.foreign.modules import own_modules
from autopar.plan.make_plan import make_plan
from autopar.plan.plan import Plan
from autopar.policy.described_model import base_of
from autopar.policy.load import read_user_policy
from autopar.tools.derivation.attributes import Candidate, candidates, choices
from autopar.tools.derivation.block_lists import BlockList, block_lists
from autopar.tools.derivation.decide import components, decide
from autopar.tools.derivation.decisions import Decisions, Names, Trace, underivable
from autopar.tools.derivation.families import Family, Named, families
from autopar.tools.derivation.policy_tree import marked, missing, policy_tree
from autopar.tools.derivation.trace import Traced, traced
from autopar.tools.derivation.unit_shapes import check_units

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
            gathered += [replace(each, gathered=True) for each in refused if _may_be_gathered(root, each, seen)]
        names = set(map(seen.names, bad))
        if not names or names <= decisions.whole:
            raise underivable(model, trial.reason if not bad else "no rule fits", by_hand=False)
        decisions = decisions.without(names)


def _may_be_gathered(root: nn.Module, family: Family, seen: Trace) -> bool:
    """Return whether a family holds linear layers alone that are called with whole inputs."""
    columns = family.columns
    plain = all(isinstance(root.get_submodule(path), nn.Linear | Conv1D) and not seen.sources[path] for path in columns)
    return bool(columns) and plain


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
            alike = max(_common(place, member.path) for member in family.members)
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


def _common(one: str, other: str) -> int:
    pairs = zip(one.split("."), other.split("."), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(one.count("."), other.count(".")) + 1)
