"""The dry run of sequence parallelism: which modules of a model's blocks work on rows of the sequence.

The shard of one rank runs on the meta device with rows between its regions, as it will, and every operation on rows is
looked at. Where one mixes rows, or shapes do not fit, the innermost module around it is made whole (it computes with
whole sequences, as without sequence parallelism), then what is around that; where that is the block itself, the model
is refused. Parameters that rows were computed with have their gradients summed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence, Set as AbstractSet
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autopar.compat.peft import enable_all, saved_copies, tuner_layers
from autopar.compat.tensors import tree_leaves
from autopar.config import ParallelConfig
from autopar.distributed.axis import Axis
from autopar.distributed.rng import kept
from autopar.dry_run.activation_tracking import (
    ActivationTracking,
    Kind,
    tracking_hooks,
)
from autopar.dry_run.inputs import meta_copy
from autopar.dry_run.plan_model import ModelPlans
from autopar.dry_run.row_tracking import LENGTHS, Misfit, MixedRows, RowSearch, RowTracking, longest_of, prime_beside
from autopar.dry_run.tensor_parallel import below, different_ranks, run, shapes_of
from autopar.errors import ConfigError, first_line
from autopar.features.sequence_parallel.rows import rows_of
from autopar.features.sequence_parallel.setup import RowsOfList, SequencePlan, SequenceState, apply
from autopar.layout import Layout
from autopar.plan.matching import around
from autopar.plan.plan import Plan
from autopar.plan.stages import StagePlan, lies_in
from autopar.swap import argument_names
from autopar.tensor_parallel import parallelize
from autopar.tensor_parallel.regions import Region
from autopar.tensor_tracking import tensors_in


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
    at = stages.encoder
    lists = (stages.elements,) if at is None else (stages.elements[:at], stages.elements[at + 1 :])
    if not any(lists):
        raise _refused(model, f"the policy {plan.policy} names no blocks, at whose boundary sequences are sharded")
    if not isinstance(model, PreTrainedModel):
        raise _refused(model, "a module without a config has no dry run before its first forward")
    with kept():
        return _Search(model, prefix, plan, [blocks for blocks in lists if blocks], routers).plan()


def _refused(model: nn.Module, reason: str) -> ConfigError:
    return ConfigError(
        f"sequence_parallel does not fit {type(model).__name__}: {reason}.\n"
        "  Leave it out: tensor parallelism alone keeps whole sequences between the regions."
    )


def sequence(plans: ModelPlans, tp: int, stages: StagePlan, *, experts: int = 1, routers: bool = True) -> SequencePlan:
    """Return the plan of a model for ``tp`` ranks, made once; ``routers``: see :func:`plan_sequence`."""
    tensors = plans.tensors(tp, experts=experts)
    key = ("sequence", tp, experts, stages.bounds, routers)
    return plans.once(key, lambda: plan_sequence(plans.inner, plans.prefix, tensors, stages, routers=routers))


def make(plans: ModelPlans, config: ParallelConfig, stages: StagePlan) -> SequencePlan | None:
    """Return the plan of a configuration; None without sequence parallelism."""
    tp, experts = config.tensor_parallel_size, config.expert_parallel_size
    return sequence(plans, tp, stages, experts=experts) if config.sequence_parallel and tp > 1 else None


class _Search(RowSearch):
    """The search for what runs over rows, between the regions of one model's shards.

    Attributes:
        entries, wholes, inputs: as in :class:`SequencePlan`, as far as they are known.
        chosen: the plan of the run that held.
    """

    def __init__(
        self, model: PreTrainedModel, prefix: str, plan: Plan, lists: Sequence[Sequence[str]], try_routers: bool
    ) -> None:
        self.start = f"{prefix}." if prefix else ""
        inside = tuple(tuple(path.removeprefix(self.start) for path in blocks) for blocks in lists)
        super().__init__(model, plan.tp, inside)
        self.try_routers, self.plan_inside = try_routers, below(plan, prefix)
        self.batch = 3 if self.ranks != 3 else 2  # no multiple of the ranks
        self.prime = 0
        self.routers = False  # whether the model returns what its routers make

    def refusal(self, reason: str) -> ConfigError:
        return _refused(self.model, reason)

    def plan(self) -> SequencePlan:
        """Return what was found out, with a sequence as long as the model takes if it fits with no other."""
        modules, lengths = dict(self.model.named_modules(remove_duplicate=False)), []
        for blocks in self.lists:
            near = (modules[path] for path in (blocks[0], *around(blocks[0])))
            around_it: Any = next((module for module in near if isinstance(module, PreTrainedModel)), self.model)
            lengths.append(longest_of(around_it.config, LENGTHS[:1]))
        longest = min((length for length in lengths if length is not None), default=None)
        inside = nn.ModuleList([self.model.get_submodule(path) for path in self.blocks])
        problem = self.refusal(f"no length of a sequence up to {longest} tells its rows from other sizes")
        for limit in dict.fromkeys((None, longest)):
            prime = prime_beside(inside, self.ranks, limit)
            if prime is not None and prime != self.prime:
                self.prime, self.routers = prime, False
                try:
                    return self._plan()
                except ConfigError as error:
                    problem = error
        raise problem

    def _plan(self) -> SequencePlan:
        self.expected = self._expected()
        layers = ((path, name) for path, layer in tuner_layers(self.model) for name, _ in layer.named_modules())
        wrapped = {f"{path}.{name}": path for path, name in layers if name}
        copies = ((path, saved_copies(module)) for path, module in self.model.named_modules())
        wrapped |= {f"{path}.{name}": path for path, listed in copies for name, _ in listed}
        self.entries, self.wholes = _entries_of(self.plan_inside, self.blocks, wrapped)
        inside = [path for path in self.kinds if self.block_of(path) not in ("", path)]
        # Of modules that draw one number for a sample: whether to drop its path around a layer.
        drawn = {path for path in inside if vars(self.model.get_submodule(path)).get("drop_prob")}
        self.inputs: tuple[str, ...] = ()
        self.wholes |= _outermost(drawn)
        self.entries = _outermost(self.entries, self.wholes)
        self.settle()
        if self.wholes.issuperset(self.blocks):
            raise self.refusal("none of its blocks ran with rows of a sequence")

        def named(paths: Sequence[str]) -> tuple[str, ...]:
            return tuple(f"{self.start}{path}" for path in paths)

        found = self.chosen
        return replace(
            found,
            lists=tuple(map(named, found.lists)),
            entries=named(found.entries),
            wholes=named(found.wholes),
            parameters={f"{self.start}{block}": named(names) for block, names in found.parameters.items()},
            routers_whole=self._routers_are_whole(found),
        )

    def attempt(self) -> None:
        while True:
            chosen = SequencePlan(self.lists, tuple(sorted(self.entries)), tuple(sorted(self.wholes)), self.inputs)
            (self.chosen, worked, ran), *_ = [self._run(chosen, rank) for rank in different_ranks(self.plan_inside)]
            idle = {block for block in self.blocks if block not in worked}  # nothing ran with rows
            for block in self.blocks:
                above = {name[:end] for name in ran[block] for end, letter in enumerate(name) if letter == "."}
                inside = (path for path in self.kinds if path.startswith(f"{block}."))
                idle |= {path for path in inside if path not in ran[block] and path not in above}
            known = self.entries | self.wholes
            idle = {path for path in _outermost(idle) if not any(lies_in(path, k) for k in known)}
            if not idle:
                break
            self._make_whole(idle)

    def change(self, failure: Misfit) -> bool:
        path, block = failure.path, self.block_of(failure.path)
        while block and path != block:
            if not any(lies_in(path, whole) for whole in self.wholes) and not any(
                path.startswith(f"{entry}.") for entry in self.entries
            ):
                self._make_whole(set(self.alike(path, self.blocks)))
                return True
            path = path.rpartition(".")[0]
        if not failure.inputs or self.inputs:
            return False
        self.inputs = failure.inputs
        return True

    def _make_whole(self, paths: set[str]) -> None:
        self.wholes = _outermost(self.wholes | paths)
        self.entries = _outermost(self.entries, self.wholes)

    def _routers_are_whole(self, chosen: SequencePlan) -> bool:
        """Check whether the model can return its routers' logits; ConfigError if it does and routers work on rows."""
        name = "output_router_logits"
        owners = {id(m.config): m.config for m in self.model.modules() if isinstance(m, PreTrainedModel)}.values()
        asked = any(getattr(config, name, False) for config in owners)
        if not (asked or (self.try_routers and any(hasattr(config, name) for config in owners))):
            return True
        self.routers = True
        try:
            self.expected = self._expected()
            self._run(chosen, 0)
        except (Misfit, ConfigError) as problem:
            if asked:
                raise _refused(self.model, f"{name}=True: {str(problem).splitlines()[0]}") from None
            return False
        return True

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
                return shapes_of(run(plain, (), self.sample(self.batch)))
        except ConfigError:
            raise
        except Exception as error:
            reason = f"it does not run without data, so nothing is known of its blocks ({first_line(error)})"
            raise _refused(self.model, reason) from None

    def _run(self, chosen: SequencePlan, rank: int) -> tuple[SequencePlan, set[str], dict[str, set[str]]]:
        """Run the shard of a rank. Raises Misfit.

        Returns:
            The plan with what was seen, the blocks that computed with rows, and the modules that ran in each block.
        """
        shard = self._copy()
        region = Region(Axis("tp", None, range(self.ranks), rank))
        parallelize.apply(shard, self.plan_inside, region.axis, region)
        length = self.ranks * self.prime
        state = SequenceState(region)
        apply(shard, chosen, state, functools.partial(SampleRows, self.batch, length))
        stack: list[str] = []
        rows = RowTracking(self.prime, self.ranks)
        tracking = SequenceTracking(rows, self.blocks, stack)
        tracking.mark_parameters(shard, self.plan_inside)
        inputs = self.sample(self.batch)
        tracking.mark_inputs(inputs)
        region.tracking = tracking
        hooks = list(tracking_hooks(shard, self.plan_inside, tracking, stack))
        notes = ModuleNotes(shard, tracking, length)
        hooks += notes.hooks
        for module in shard.modules():
            if isinstance(module, PreTrainedModel):
                hooks.append(module.register_forward_hook(lambda _, args, out: state.gathered(out)))
        try:
            with tracking:
                out = run(shard, (), inputs)
        except Exception as error:
            at = stack[-1] if stack else ""
            raise Misfit(at, f"{first_line(error)}, in {self.start}{at}", inputs=tuple(sorted(notes.beside))) from error
        finally:
            for hook in hooks:
                hook.remove()
        if rows.holds_rows(out) or shapes_of(out) != self.expected:
            raise Misfit("", f"its outputs have shapes {shapes_of(out)}, those of the full model {self.expected}")
        named = {block: self._parameters(block, tracking, notes.ran) for block in tracking.on_rows}
        seen, given = tuple(sorted(notes.seen)), tuple(sorted(notes.given))
        return replace(chosen, parameters=named, seen=seen, given=given), tracking.worked, notes.ran

    def _parameters(self, block: str, tracking: SequenceTracking, ran: dict[str, set[str]]) -> tuple[str, ...]:
        names = tracking.on_rows[block]
        for name in sorted(names):
            owner = name.rpartition(".")[0]
            if name in tracking.on_whole:
                raise Misfit(owner, f"{self.start}{name} works on rows and on whole sequences")
            if owner not in ran[block]:
                raise Misfit("", f"rows of {self.start}{block} meet what was made of {self.start}{name} outside")
        found = set(names)
        for path, module in self.model.named_modules():
            copies = {f"{path}.{inside}.": copied for inside, copied in saved_copies(module)}  # may run in its place
            own = {name.removeprefix(start) for start in copies for name in names if name.startswith(start)}
            found |= {start + name for start, copied in copies.items() for name, _ in copied.named_parameters()
                      if name in own}  # fmt: skip
        return tuple(sorted(found))


def _entries_of(plan: Plan, blocks: Sequence[str], wrapped: Mapping[str, str]) -> tuple[set[str], set[str]]:
    """Return the modules at which rows must become whole: those that a region begins in, and those that mix rows.

    A column-parallel layer begins a region in the module that holds it, whose code reads the length of the sequence;
    where that is the block itself, in the layer. ``wrapped`` leads from a layer to what PEFT has put around it.
    """
    entries, wholes = set[str](), set[str]()
    for block in blocks:
        for inner, rule in ((path, rule) for path, rule in plan.modules.items() if lies_in(path, block)):
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


_ROWS = Kind("rows")


class SequenceTracking(ActivationTracking):
    """A dispatch mode that follows rows, and gives each tensor its kind.

    Those of which this rank has some rows have a kind of their own. A replicated parameter that meets them has a
    partial gradient. Rows must not meet a sharded activation, nor a full one with a gradient of its own.

    Args:
        rows: follows the dims of rows.
        blocks: paths of the blocks.
        stack: paths of the modules that run.

    Attributes:
        on_rows: block -> parameters that work on rows in it.
        on_whole: parameters that work on whole sequences.
        worked: blocks that computed with rows.
    """

    def __init__(self, rows: RowTracking, blocks: Sequence[str], stack: list[str]) -> None:
        def mixed() -> None:
            raise MixedRows("a replicated activation meets sharded ones")

        super().__init__(mixed)
        self.rows, self.stack = rows, stack
        self.on_rows: dict[str, set[str]] = {block: set() for block in blocks}
        self.on_whole: set[str] = set()
        self.worked: set[str] = set()

    @property
    def block(self) -> str:
        """The block that runs; empty outside of blocks."""
        return next((path for path in self.stack if path in self.on_rows), "")

    def mark_rows(self, value: Any) -> Any:
        """Mark every tensor in ``value`` as rows; returns ``value``."""
        return self.mark(self.rows.mark_rows(value), _ROWS)

    def mark_replicated(self, value: Any) -> Any:
        """Mark every tensor in ``value`` that holds no rows as replicated; returns ``value``."""
        super().mark_replicated([tensor for tensor in tensors_in(value) if not self.rows.holds_rows(tensor)])
        return value

    def mark_sharded(self, value: Any) -> Any:
        """Mark every tensor in ``value`` as sharded; returns ``value``."""
        if self.rows.holds_rows(value):
            raise MixedRows("rows enter a sharded region")
        return super().mark_sharded(value)

    def alias(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` as another tensor, marked as sharded."""
        if self.rows.holds_rows(x):
            raise MixedRows("rows enter a sharded region")
        return super().alias(x)

    def track(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self.block or self.rows.holds_rows((args, kwargs)):
            self.rows.track(func, args, kwargs, result)
        super().track(func, args, kwargs, result)

    def _combine(self, kinds: list[Kind]) -> Kind:
        names = {kind.name for kind in kinds}
        parameters = {name for kind in kinds for name in kind.parameters}
        if "rows" not in names:
            if names & {"replicated", "sharded"}:
                self.on_whole |= parameters
            return super()._combine(kinds)
        if "sharded" in names:
            raise MixedRows("rows meet what a sharded region has made")
        if "replicated" in names:
            raise MixedRows("rows meet a whole activation that has a gradient")
        inside = sorted(name[1:] for name in parameters if name.startswith("+"))
        if inside:
            raise MixedRows(f"rows meet {inside[0]}, which works inside a sharded region")
        if self.block:
            self.worked.add(self.block)
            self.on_rows[self.block] |= parameters
        elif parameters:
            raise MixedRows(f"rows meet {min(parameters)} outside of blocks")
        return _ROWS


class ModuleNotes:
    """Notes on the modules of a shard, and on their arguments, made while it runs.

    Args:
        length: of the sequence.

    Attributes:
        ran: block -> paths of the modules that run in it.
        seen, given: names of arguments that hold tensors, of the models around the blocks and of the blocks.
        beside: names of arguments of blocks, ``[batch, seq, features]``, besides hidden states.
    """

    def __init__(self, shard: nn.Module, tracking: SequenceTracking, length: int) -> None:
        self.ran: dict[str, set[str]] = {block: set() for block in tracking.on_rows}
        self.seen, self.given, self.beside = set[str](), set[str](), set[str]()
        self._tracking, self._length = tracking, length
        self.hooks = []
        blocks = {id(shard.get_submodule(path)) for path in self.ran}
        for path, module in shard.named_modules():
            note = functools.partial(self._note, path, id(module) in blocks)
            self.hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))

    def _note(
        self, path: str, is_block: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._tracking.block:
            self.ran[self._tracking.block].add(path)
        if not is_block and not isinstance(module, PreTrainedModel):
            return
        given = [*zip(argument_names(module), args, strict=False), *kwargs.items()]
        held = {name for name, value in given if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))}
        self.seen |= held if isinstance(module, PreTrainedModel) else set()
        if is_block:
            self.given |= held
            self.beside |= {name for name, value in given[1:] if isinstance(value, torch.Tensor)
                            and value.ndim == 3 and value.shape[1] == self._length}  # fmt: skip


class SampleRows(RowsOfList):
    """Rows of a sequence of one length, whatever the model makes of its sample (the patches of an image)."""

    def __init__(self, batch: int, length: int, state: SequenceState, plan: SequencePlan) -> None:
        super().__init__(state, plan)
        self.batch, self.length = batch, length
        self.known = _Everything()
        self.whole: list[int] = []

    def note_length(self, x: torch.Tensor) -> torch.Tensor:
        """Note the length of the sample."""
        natural = x.ndim > 2 and x.shape[1] == self.length
        if x.shape[0] % self.batch or not (natural or x.ndim == 3):
            raise MixedRows(f"hidden states have the shape {list(x.shape)}, not that of [batch, seq, hidden]")
        self.whole = list(x.shape)
        self.rows = rows_of(self.length, self.region.axis.size)
        return x

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows of the sample."""
        return super().enter(self.region.mark_replicated(x.new_empty(x.shape[0], self.length, *x.shape[2:])))

    def leave(self, x: torch.Tensor, rows: Layout | None = None) -> torch.Tensor:
        """Return whole hidden states, as long as they were."""
        y = super().leave(x, rows)
        return self.region.mark_replicated(y.new_empty(*self.whole[:2], *y.shape[2:]))


class _Everything(frozenset[str]):
    """All names: nothing is unknown to a dry run."""

    def __contains__(self, name: object) -> bool:
        return True
