"""The dry run of sequence parallelism: which modules of a model's blocks work on rows of the sequence.

The shard of one rank runs on the meta device with rows between its regions, as it will, and every operation on rows is
looked at. Where one mixes rows, or shapes do not fit, the innermost module around it is made whole (it computes with
whole sequences, as without sequence parallelism), then what is around that; where that is the block itself, the model
is refused. Parameters that rows were computed with have their gradients summed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from autopar.adapters import enable_all, saved_copies, tuner_layers
from autopar.distributed.axis import Axis
from autopar.distributed.rng import kept
from autopar.dry_run.activation_tracking import (
    ActivationTracking,
    SampleRows,
    SequenceTracking,
    note_given,
    note_inputs,
    note_modules,
    tracking_hooks,
)
from autopar.dry_run.inputs import meta_copy, sample_inputs
from autopar.dry_run.row_tracking import RowTracking, prime_beside
from autopar.dry_run.tensor_parallel import below, different_ranks, run, shapes_of
from autopar.errors import ConfigError, first_line
from autopar.plan.blocks import dropped_blocks, lies_in
from autopar.plan.matching import around
from autopar.plan.plan import ModulePlan, Plan
from autopar.plan.stages import StagePlan
from autopar.tensor_parallel import parallelize, sequence_parallel
from autopar.tensor_parallel.attentions import gather_hidden_states
from autopar.tensor_parallel.regions import Region
from autopar.tensor_parallel.sequence_parallel import SequencePlan


def plan_sequence(
    model: nn.Module, prefix: str, plan: Plan, stages: StagePlan, *, routers: bool = True
) -> SequencePlan:
    """Find out what of each block can work on rows of the sequence. The model is only read.

    Args:
        model: the Hugging Face model, not yet sharded.
        prefix: its path in the plan's names.
        routers: also try the model with its routers' outputs, which a forward may ask for; False: if its config does.

    Raises:
        ConfigError: sequence parallelism does not fit the model; says where, and why.
    """
    lists = _lists_of_blocks(stages)
    if not lists:
        raise _refused(model, f"the policy {plan.policy} names no blocks, at whose boundary sequences are sharded")
    if not isinstance(model, PreTrainedModel):
        raise _refused(model, "a module without a config has no dry run before its first forward")
    dropped = dropped_blocks(model)
    if dropped:
        raise _refused(model, f"{dropped} leaves out blocks, and the last of them makes sequences whole")
    with kept():
        return _Rehearsal(model, prefix, plan, lists, routers).plan()


def _refused(model: nn.Module, reason: str) -> ConfigError:
    return ConfigError(
        f"sequence_parallel does not fit {type(model).__name__}: {reason}.\n"
        "  Leave it out: tensor parallelism alone keeps whole sequences between the regions."
    )


class _Rehearsal:
    """Runs of the shards of one model, with one choice of whole modules after the other."""

    def __init__(
        self, model: PreTrainedModel, prefix: str, plan: Plan, lists: Sequence[Sequence[str]], try_routers: bool
    ) -> None:
        self.try_routers = try_routers
        self.model, self.prefix, self.full = model, prefix, plan
        start = f"{prefix}." if prefix else ""
        self.start, self.tp = start, plan.tp
        self.plan_inside = below(plan, prefix)
        self.lists = tuple(tuple(path.removeprefix(start) for path in blocks) for blocks in lists)
        self.blocks = [path for blocks in self.lists for path in blocks]
        self.batch = 3 if self.tp != 3 else 2  # no multiple of the ranks
        self.prime = 0
        self.routers = False  # whether the model returns what its routers make
        self.kinds = {path: type(module) for path, module in model.named_modules(remove_duplicate=False)}

    def plan(self) -> SequencePlan:
        """Return what was found out, with a sequence as long as the model takes if it fits with no other."""
        longest = _longest(self.model, self.lists)
        inside = nn.ModuleList([self.model.get_submodule(path) for path in self.blocks])
        problem = _refused(self.model, f"no length of a sequence up to {longest} tells its rows from other sizes")
        for limit in dict.fromkeys((None, longest)):
            prime = prime_beside(inside, self.tp, limit)
            if prime not in (None, self.prime):
                self.prime, self.routers = prime, False
                try:
                    return self._plan()
                except ConfigError as error:
                    problem = error
        raise problem

    def _plan(self) -> SequencePlan:
        expected = self._expected()
        entries, wholes = _entries_of(self.plan_inside, self.blocks, dict(_wrapped(self.model)))
        wholes |= self._drawn_for_samples()
        entries = _outermost(entries, wholes)
        inputs: tuple[str, ...] = ()
        while True:
            chosen = SequencePlan(self.lists, tuple(sorted(entries)), tuple(sorted(wholes)), inputs)
            try:
                found = [self._run(chosen, rank, expected) for rank in different_ranks(self.plan_inside)]
            except _Problem as problem:
                place = self._larger(problem.path, entries, wholes)
                if place is None and problem.inputs and not inputs:
                    inputs = problem.inputs
                    continue
                if place is None:
                    raise _refused(self.model, problem.text) from None
                block = self._block_of(place)
                own = place.removeprefix(f"{block}.")
                alike = {f"{b}.{own}" for b in self.blocks if self.kinds.get(f"{b}.{own}") is self.kinds[place]}
                wholes = _outermost(wholes | alike)
                entries = _outermost(entries, wholes)
                continue
            idle = self._idle(found[0], entries | wholes)
            if not idle:
                break
            wholes = _outermost(wholes | idle)
            entries = _outermost(entries, wholes)
        if wholes.issuperset(self.blocks):
            raise _refused(self.model, "none of its blocks ran with rows of a sequence")
        chosen = replace(chosen, parameters=found[0].parameters, seen=found[0].seen, given=found[0].given)
        return self._full(replace(chosen, routers_whole=self._routers_are_whole(chosen)))

    def _drawn_for_samples(self) -> set[str]:
        """Return modules that draw one number for a sample, not for a row: whether to drop its path around a layer."""
        inside = (
            (path, self.model.get_submodule(path)) for path in self.kinds if path and self._block_of(path) != path
        )
        named = {path for path, module in inside if self._block_of(path) and vars(module).get("drop_prob")}
        return _outermost(named)

    def _routers_are_whole(self, chosen: SequencePlan) -> bool:
        """Check whether the model can return its routers' logits; ConfigError if it does and routers work on rows."""
        name = "output_router_logits"
        owners = {id(m.config): m.config for m in self.model.modules() if isinstance(m, PreTrainedModel)}.values()
        asked = any(getattr(config, name, False) for config in owners)
        if not (asked or (self.try_routers and any(hasattr(config, name) for config in owners))):
            return True
        self.routers = True
        try:
            self._run(chosen, 0, self._expected())
        except (_Problem, ConfigError) as problem:
            if asked:
                raise _refused(self.model, f"{name}=True: {str(problem).splitlines()[0]}") from None
            return False
        return True

    def _larger(self, path: str, entries: set[str], wholes: set[str]) -> str | None:
        """Return the next module to be made whole, around what failed; None if that is a block, or none."""
        block = self._block_of(path)
        while block and path != block:
            inside_whole = any(lies_in(path, w) for w in wholes)
            inside_entry = any(path.startswith(f"{e}.") for e in entries)
            if not (inside_whole or inside_entry):
                return path
            path = path.rpartition(".")[0]
        return None

    def _idle(self, found: _Found, known: set[str]) -> set[str]:
        """Return modules of which nothing was seen: blocks, and modules in blocks, that did not run with rows."""
        idle = {block for block in self.blocks if block not in found.worked}
        for block in self.blocks:
            ran = found.ran[block]
            above = {name[:end] for name in ran for end, letter in enumerate(name) if letter == "."}
            start = f"{block}."
            idle |= {path for path in self.kinds if path.startswith(start) and path not in ran and path not in above}
        return {path for path in _outermost(idle) if not any(lies_in(path, k) for k in known)}

    def _block_of(self, path: str) -> str:
        return next((block for block in self.blocks if lies_in(path, block)), "")

    def _inputs(self) -> dict[str, Any]:
        try:
            return sample_inputs(self.model, self.batch, self.tp * self.prime)
        except ValueError as error:
            raise _refused(self.model, f"the dry run has {error}") from None

    def _copy(self) -> PreTrainedModel:
        copied = meta_copy(self.model)
        enable_all(copied)
        for module in copied.modules():
            if isinstance(module, PreTrainedModel) and hasattr(module.config, "output_router_logits"):
                module.config.output_router_logits = self.routers
        return copied

    def _expected(self) -> list[tuple[int, ...]]:
        plain = self._copy()
        try:
            with ActivationTracking():
                return shapes_of(run(plain, (), self._inputs()))
        except ConfigError:
            raise
        except Exception as error:
            reason = f"it does not run without data, so nothing is known of its blocks ({first_line(error)})"
            raise _refused(self.model, reason) from None

    def _run(self, chosen: SequencePlan, rank: int, expected: list[tuple[int, ...]]) -> _Found:
        """Run the shard of a rank. Raises _Problem."""
        shard = self._copy()
        region = Region(Axis("tp", None, range(self.tp), rank))
        parallelize.apply(shard, self.plan_inside, region.axis, region)
        sequence_parallel.apply(shard, chosen, region, functools.partial(SampleRows, self.batch, self.tp * self.prime))
        stack: list[str] = []
        rows = RowTracking(self.prime, self.tp)
        tracking = SequenceTracking(rows, self.blocks, stack)
        for name, parameter in shard.named_parameters():
            if self.plan_inside.tensors[self.plan_inside.canonical(name)].layout is None:
                tracking.mark_parameter(name, parameter)
            else:
                tracking.mark_sharded(parameter)
        inputs = self._inputs()
        tracking.mark_inputs(inputs)
        region.tracking = tracking
        hooks = list(tracking_hooks(shard, self.plan_inside, tracking, stack))
        ran: dict[str, set[str]] = {block: set() for block in self.blocks}
        beside: set[str] = set()
        given: set[str] = set()
        hooks += list(note_modules(shard, ran, tracking))
        blocks = [shard.get_submodule(path) for path in self.blocks]
        hooks += list(note_inputs(blocks, self.tp * self.prime, beside, given))
        seen: set[str] = set()
        hooks += [
            module.register_forward_hook(lambda _, args, out: gather_hidden_states(out, region))
            for module in shard.modules()
            if isinstance(module, PreTrainedModel)
        ]
        hooks += [
            module.register_forward_pre_hook(functools.partial(note_given, seen), with_kwargs=True)
            for module in shard.modules()
            if isinstance(module, PreTrainedModel)
        ]
        try:
            with tracking:
                out = run(shard, (), inputs)
        except Exception as error:
            at = stack[-1] if stack else ""
            raise _Problem(at, f"{first_line(error)}, in {self.start}{at}", tuple(sorted(beside))) from error
        finally:
            for hook in hooks:
                hook.remove()
        if rows.holds_rows(out) or shapes_of(out) != expected:
            raise _Problem("", f"its outputs have shapes {shapes_of(out)}, those of the full model {expected}")
        named = {block: self._parameters(block, names, tracking, ran) for block, names in tracking.on_rows.items()}
        return _Found(named, tracking.worked, ran, tuple(sorted(seen)), tuple(sorted(given)))

    def _parameters(
        self, block: str, names: set[str], tracking: SequenceTracking, ran: dict[str, set[str]]
    ) -> tuple[str, ...]:
        for name in sorted(names):
            owner = name.rpartition(".")[0]
            if name in tracking.on_whole:
                raise _Problem(owner, f"{self.start}{name} works on rows and on whole sequences")
            if owner not in ran[block]:
                raise _Problem("", f"rows of {self.start}{block} meet what was made of {self.start}{name} outside")
        return tuple(sorted(names | self._copies_of(names)))

    def _copies_of(self, names: set[str]) -> set[str]:
        """Return the parameters of modules that may run in place of those that ran (``modules_to_save``)."""
        found = set[str]()
        for path, module in self.model.named_modules():
            copies = saved_copies(module)
            starts = [f"{path}.{inside}." for inside, _ in copies]
            own = {name.removeprefix(start) for start in starts for name in names if name.startswith(start)}
            inside = [
                (start, dict(copied.named_parameters())) for start, (_, copied) in zip(starts, copies, strict=True)
            ]
            found |= {start + name for start, parameters in inside for name in own & parameters.keys()}
        return found

    def _full(self, found: SequencePlan) -> SequencePlan:
        """With names from the root."""

        def named(paths: Sequence[str]) -> tuple[str, ...]:
            return tuple(f"{self.start}{path}" for path in paths)

        return SequencePlan(
            tuple(named(blocks) for blocks in found.lists),
            named(found.entries),
            named(found.wholes),
            found.inputs,
            found.seen,
            found.given,
            found.routers_whole,
            {f"{self.start}{block}": named(names) for block, names in found.parameters.items()},
        )


def _lists_of_blocks(stages: StagePlan) -> tuple[tuple[str, ...], ...]:
    """Return the blocks of a model by lists: of an encoder-decoder model the encoder's and the decoder's."""
    at = stages.encoder
    found = (stages.elements,) if at is None else (stages.elements[:at], stages.elements[at + 1 :])
    return tuple(blocks for blocks in found if blocks)


def _wrapped(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the paths of modules inside of PEFT's wrappers, each with that of its outermost wrapper."""
    for path, layer in tuner_layers(model):
        yield from ((f"{path}.{name}", path) for name, _ in layer.named_modules() if name)
    for path, module in model.named_modules():
        yield from ((f"{path}.{name}", path) for name, _ in saved_copies(module))


def _entries_of(plan: Plan, blocks: Sequence[str], wrapped: Mapping[str, str]) -> tuple[set[str], set[str]]:
    """Return the modules at which rows must become whole: those that a region begins in, and those that mix rows.

    A column-parallel layer begins a region in the module that holds it, whose code reads the length of the sequence;
    where that is the block itself, in the layer. ``wrapped`` leads from a layer to what PEFT has put around it.
    """
    entries, wholes = set[str](), set[str]()
    for block in blocks:
        for inner, rule in _inside(plan, block):
            path = inner
            while path in wrapped:
                path = wrapped[path]
            parent = path.rpartition(".")[0]
            place = path if parent == block or path == block else parent
            if rule.rule in _WHOLE or rule.gather_output:
                wholes.add(place)
            elif (rule.rule == "column" and not rule.inside) or (rule.rule == "row" and rule.split_input):
                entries.add(place)
    return _outermost(entries, wholes), _outermost(wholes)


_WHOLE = ("region", "experts", "expert_modules", "calls_experts", "embedding", "gathered")


def _outermost(paths: set[str], others: AbstractSet[str] = frozenset()) -> set[str]:
    """Return the paths that do not lie below another one of them, nor below or among the others."""
    return {path for path in paths - others if not any(path.startswith(f"{other}.") for other in paths | others)}


def _inside(plan: Plan, block: str) -> Iterator[tuple[str, ModulePlan]]:
    return ((path, rule) for path, rule in plan.modules.items() if path == block or path.startswith(f"{block}."))


def _longest(model: PreTrainedModel, lists: Sequence[Sequence[str]]) -> int | None:
    """Return the longest sequence that the models next around the blocks take, as far as their configs say."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found = []
    for blocks in lists:
        inner = (blocks[0], *around(blocks[0]))
        path = next((path for path in inner if isinstance(modules[path], PreTrainedModel)), "")
        found.append(getattr(modules[path].config, "max_position_embeddings", None))
    return min((value for value in found if type(value) is int and value > 0), default=None)


class _Found(NamedTuple):
    """Findings of a run: the parameters of each block that work on rows, the blocks that had rows,
    paths of the modules that ran in each, and names of arguments that the models in it and the blocks got."""

    parameters: dict[str, tuple[str, ...]]
    worked: set[str]
    ran: dict[str, set[str]]
    seen: tuple[str, ...]
    given: tuple[str, ...]


class _Problem(Exception):
    def __init__(self, path: str, text: str, inputs: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.path, self.text, self.inputs = path, text, inputs
