"""The dry run of sequence parallelism: find the modules of each block that can work on rows of the sequence.

The shard of one rank runs on the meta device with rows between its regions, and every operation on rows is checked. If
an operation mixes rows, or shapes do not fit, the innermost module around it runs on full sequences instead, then the
next module outward. If only the block is left, the model is refused. Gradients of parameters used with rows are summed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autopar import registry
from autopar.compat.peft import enable_all, saved_copies, tuner_layers
from autopar.compat.tensors import tree_leaves
from autopar.config import ParallelConfig
from autopar.distributed.axis import Axis
from autopar.distributed.rng import kept
from autopar.dry_run.activation_tracking import ActivationTracking, Kind, track_modules
from autopar.dry_run.inputs import meta_copy
from autopar.dry_run.plan_model import ModelPlans
from autopar.dry_run.row_tracking import Misfit, MixedRows, RowSearch, RowTracking, distinct_prime, outermost
from autopar.dry_run.tensor_parallel import below, different_ranks, run, shapes_of
from autopar.errors import ConfigError, first_line
from autopar.features.sequence_parallel.rows import Rows
from autopar.features.sequence_parallel.setup import RowsOfList, SequencePlan, SequenceState, apply
from autopar.layout import rows_layout
from autopar.plan.plan import Plan
from autopar.plan.stages import StagePlan, lies_in
from autopar.policy.match import is_hugging_face_model
from autopar.swap import given_by_name
from autopar.tensor_parallel import parallelize
from autopar.tensor_parallel.regions import Region
from autopar.tensor_tracking import tensors_in


def plan_sequence(
    model: nn.Module, prefix: str, plan: Plan, stages: StagePlan, *, routers: bool = True
) -> SequencePlan:
    """Find the modules of each block that can work on rows of the sequence.

    Args:
        model: Hugging Face model, not yet sharded; stays unchanged.
        prefix: Path of the model in the plan's names.
        routers: Flag for a trial with router outputs; if False, the trial runs only if the model's config asks for it.

    Raises:
        ConfigError: The model does not support sequence parallelism; names the module and the reason.
    """
    with kept():
        return _Search(model, prefix, plan, stages, routers).plan()


def sequence(plans: ModelPlans, tp: int, stages: StagePlan, *, experts: int = 1, routers: bool = True) -> SequencePlan:
    """Return the cached plan of a model for ``tp`` ranks; ``routers``: see :func:`plan_sequence`."""
    tensors = plans.tensors(tp, experts=experts)
    key = ("sequence", tp, experts, stages.bounds, routers)
    return plans.once(key, lambda: plan_sequence(plans.inner, plans.prefix, tensors, stages, routers=routers))


def make(plans: ModelPlans, config: ParallelConfig, stages: StagePlan) -> SequencePlan | None:
    """Return the plan for a configuration; None without sequence parallelism."""
    tp, experts = config.tensor_parallel_size, config.expert_parallel_size
    return sequence(plans, tp, stages, experts=experts) if config.sequence_parallel and tp > 1 else None


class _Search(RowSearch):
    """The search for the modules of one model that can run on rows.

    Attributes:
        inputs, streams, summed: Values of ``SequencePlan``, as found so far.
        before: ``entries`` and ``wholes`` before the first failure.
        notes: Notes of the last run.
        chosen: Plan of the last run.
    """

    def __init__(self, model: nn.Module, prefix: str, plan: Plan, stages: StagePlan, try_routers: bool) -> None:
        super().__init__(model, prefix, stages.elements, stages.encoder, plan.tp)
        self.batch = 3 if self.ranks != 3 else 2
        self.try_routers, self.plan_inside = try_routers, below(plan, prefix)

    def refusal(self, reason: str) -> ConfigError:
        return ConfigError(
            f"sequence_parallel does not fit {type(self.model).__name__}: {reason}.\n"
            "  Set sequence_parallel: false. Tensor parallelism alone supports the model."
        )

    def plan(self) -> SequencePlan:
        """Return the plan; if the search fails, repeat it with a sequence longer than the model's maximum."""
        try:
            return self._plan()
        except ConfigError:
            longer = distinct_prime(self.sized, self.ranks)
            if longer == self.prime:
                raise
        self.prime = longer
        return self._plan()

    def _plan(self) -> SequencePlan:
        self.inputs: tuple[str, ...] = ()
        self.streams: tuple[str, ...] = ()
        self.summed: dict[str, tuple[int, ...]] = {}
        self.routers = False  # whether the copies return router outputs
        self.expected = self._expected()
        layers = ((path, name) for path, layer in tuner_layers(self.model) for name, _ in layer.named_modules())
        wrapped = {f"{path}.{name}": path for path, name in layers if name}
        copies = ((path, saved_copies(module)) for path, module in self.model.named_modules())
        wrapped |= {f"{path}.{name}": path for path, listed in copies for name, _ in listed}
        self.entries, self.wholes = _entries_of(self.plan_inside, self.blocks, wrapped)
        # Stochastic depth draws one number per sample, not per row.
        inside = (path for path in self.kinds if self.block_of(path) not in ("", path))
        self.run_in_full(path for path in inside if vars(self.model.get_submodule(path)).get("drop_prob"))
        self.before = self.entries, self.wholes
        self.settle()
        if set(self.wholes).issuperset(self.blocks):
            raise self.refusal("none of its blocks can run on rows of the sequence")

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
            entries, wholes = tuple(sorted(self.entries)), tuple(sorted(self.wholes))
            chosen = SequencePlan(self.lists, entries, wholes, self.inputs, self.streams, self.summed)
            (self.chosen, worked, ran), *_ = [self._run(chosen, rank) for rank in different_ranks(self.plan_inside)]
            idle = {block for block in self.blocks if block not in worked}  # no operation used rows
            for block in self.blocks:
                above = {name[:end] for name in ran[block] for end, letter in enumerate(name) if letter == "."}
                inside = (path for path in self.kinds if path.startswith(f"{block}."))
                idle |= {path for path in inside if path not in ran[block] and path not in above}
            known = (*self.entries, *self.wholes)
            idle = {path for path in outermost(idle) if not any(lies_in(path, k) for k in known)}
            if not idle:
                break
            self.run_in_full(idle)

    def otherwise(self, failure: Misfit) -> bool:
        notes = self.notes
        if notes.sequences and not self.inputs:
            self.inputs = tuple(sorted(notes.sequences))
        elif notes.summed and not self.summed:
            self.summed, (self.entries, self.wholes) = notes.summed, self.before
        elif notes.streams and not self.streams:
            self.streams, (self.entries, self.wholes) = tuple(sorted(notes.streams)), self.before
        else:
            return False
        return True

    def _routers_are_whole(self, chosen: SequencePlan) -> bool:
        """Return whether router logits have all rows; if not, raise ConfigError if the model's config asks for them."""
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
                raise self.refusal(f"{name}=True: {str(problem).splitlines()[0]}") from None
            return False
        return True

    def _copy(self) -> PreTrainedModel:
        copied = meta_copy(self.model)
        if isinstance(copied, PreTrainedModel):
            copied.config.use_cache = False
        enable_all(copied)
        for module in copied.modules():
            if isinstance(module, PreTrainedModel) and hasattr(module.config, "output_router_logits"):
                module.config.output_router_logits = self.routers
        return copied

    def _expected(self) -> list[tuple[int, ...]]:
        plain, inputs = self._copy(), self.sample()
        try:
            with ActivationTracking():
                return shapes_of(run(plain, (), inputs))
        except Exception as error:
            reason = f"its forward does not run without data ({first_line(error)})"
            raise self.refusal(reason) from None

    def _run(self, chosen: SequencePlan, rank: int) -> tuple[SequencePlan, set[str], dict[str, set[str]]]:
        """Run the shard of a rank; raise Misfit if rows do not fit.

        Returns:
            The plan with all fields, the blocks that used rows, and the modules that ran in each block.
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
        inputs = self.sample()
        tracking.mark_inputs(inputs)
        region.tracking = tracking
        track_modules(shard, self.plan_inside, tracking, stack)
        self.notes = notes = ModuleNotes(shard, tracking, length)
        for module in shard.modules():
            if is_hugging_face_model(module):
                module.register_forward_hook(lambda _, args, out: state.gathered(out))
        out = self.run(shard, inputs, tracking, stack)
        if rows.holds_rows(out) or shapes_of(out) != self.expected:
            raise Misfit("", f"expected outputs of shapes {self.expected}, got {shapes_of(out)}")
        named = {block: self._parameters(block, tracking, notes.ran) for block in tracking.on_rows}
        seen, given = tuple(sorted(notes.seen)), tuple(sorted(notes.given))
        return replace(chosen, parameters=named, seen=seen, given=given), tracking.worked, notes.ran

    def _parameters(self, block: str, tracking: SequenceTracking, ran: dict[str, set[str]]) -> tuple[str, ...]:
        names = tracking.on_rows[block]
        for name in sorted(names):
            owner = name.rpartition(".")[0]
            if name in tracking.on_full:
                raise Misfit(owner, f"{name.rpartition('.')[2]} works both on rows and on full sequences")
            if owner not in ran[block]:
                raise Misfit("", f"rows of {self.start}{block} use a result of {self.start}{name} from outside")
        found = set(names)
        for path, module in self.model.named_modules():
            copies = {f"{path}.{inside}.": copied for inside, copied in saved_copies(module)}  # may run instead
            own = {name.removeprefix(start) for start in copies for name in names if name.startswith(start)}
            found |= {start + name for start, copied in copies.items() for name, _ in copied.named_parameters()
                      if name in own}  # fmt: skip
        return tuple(sorted(found))


def _entries_of(
    plan: Plan, blocks: Sequence[str], wrapped: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the modules that gather rows: modules where a region begins, and modules that mix rows.

    A region begins in the parent of a column-parallel layer, whose code reads the sequence length. If this parent is
    the block, the region begins in the layer. ``wrapped`` maps the path of a layer to PEFT's wrapper around it.
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
    return outermost(entries, wholes), outermost(wholes)


_WHOLE = {"region", "embedding", "gathered", *registry.RULES}  # rules of other features may mix rows


_ROWS, _PARTIAL = Kind("rows"), Kind("partial")


class SequenceTracking(ActivationTracking):
    """A dispatch mode that follows rows and gives each tensor a kind: rows, replicated or sharded.

    A replicated parameter that is combined with rows has a partial gradient. An operation must not combine rows with a
    sharded activation, or with a replicated activation that has a gradient. An argument whose gradients are summed is
    *partial* inside the block, as is each result without rows; it must meet rows only.

    Args:
        stack: Paths of the running modules.

    Attributes:
        on_rows: Block -> names of parameters that work on rows in it.
        on_full: Names of parameters that work on full sequences.
        worked: Blocks that used rows.
    """

    def __init__(self, rows: RowTracking, blocks: Sequence[str], stack: list[str]) -> None:
        def mixed() -> None:
            raise MixedRows("combines a replicated activation with sharded activations")

        super().__init__(mixed)
        self.rows, self.stack = rows, stack
        self.on_rows: dict[str, set[str]] = {block: set() for block in blocks}
        self.on_full: set[str] = set()
        self.worked: set[str] = set()

    @property
    def block(self) -> str:
        """The path of the running block; empty outside blocks."""
        return next((path for path in self.stack if path in self.on_rows), "")

    def mark(self, value: Any, kind: Kind) -> Any:
        if any(self._kinds.get(tensor) == _PARTIAL for tensor in tensors_in(value)):
            raise MixedRows("uses an argument with partial gradients outside rows")
        return super().mark(value, kind)

    def mark_partial(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor for a block's argument whose gradients are summed over the ranks."""
        return self.mark(torch.empty_like(x), _PARTIAL)

    def mark_rows(self, value: Any) -> Any:
        """Mark every tensor in ``value`` as rows; returns ``value``."""
        return self.mark(self.rows.mark_rows(value), _ROWS)

    def mark_replicated(self, value: Any) -> Any:
        """Mark every tensor in ``value`` without rows as replicated; returns ``value``."""
        super().mark_replicated([tensor for tensor in tensors_in(value) if not self.rows.holds_rows(tensor)])
        return value

    def mark_sharded(self, value: Any) -> Any:
        """Mark every tensor in ``value`` as sharded; returns ``value``."""
        if self.rows.holds_rows(value):
            raise MixedRows("rows enter a sharded region")
        return super().mark_sharded(value)

    def alias(self, x: torch.Tensor) -> torch.Tensor:
        """Return an alias of ``x``, marked as sharded."""
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
        if not names & {"rows", "partial"}:
            if names & {"replicated", "sharded"}:
                self.on_full |= parameters
            return super()._combine(kinds)
        if "sharded" in names:
            raise MixedRows("combines rows with a sharded activation")
        if "replicated" in names and "rows" not in names:
            raise MixedRows("combines a full activation that requires a gradient with an argument of rows")
        if "replicated" in names:
            raise MixedRows("combines rows with a full activation that requires a gradient")
        inside = sorted(name[1:] for name in parameters if name.startswith("+"))
        if inside:
            raise MixedRows(f"combines rows with {inside[0]}, which works inside a sharded region")
        if self.block:
            self.worked |= {self.block} if "rows" in names else set()
            self.on_rows[self.block] |= parameters
        elif parameters or "rows" not in names:
            raise MixedRows(f"combines rows with {min(parameters, default='an argument')} outside the blocks")
        return _ROWS if "rows" in names else _PARTIAL


class ModuleNotes:
    """Records of the modules and arguments in a run of a shard over ``length`` positions.

    Attributes:
        ran: Block -> paths of the modules that ran in it.
        seen, given: Names of tensor arguments: of the models around the blocks, and of the blocks.
        sequences: Names of block arguments ``[batch, seq, features]`` other than the hidden states.
        streams: Names of such arguments with gradients and another length.
        summed: Name of an argument with gradients and without rows -> its shape without the batch.
    """

    def __init__(self, shard: nn.Module, tracking: SequenceTracking, length: int) -> None:
        self.ran: dict[str, set[str]] = {block: set() for block in tracking.on_rows}
        self.seen, self.given, self.sequences = set[str](), set[str](), set[str]()
        self.streams, self.summed = set[str](), dict[str, tuple[int, ...]]()
        self._tracking, self._length = tracking, length
        blocks = {id(shard.get_submodule(path)) for path in self.ran}
        for path, module in shard.named_modules():
            note = functools.partial(self._note, path, id(module) in blocks)
            module.register_forward_pre_hook(note, with_kwargs=True)

    def _note(
        self, path: str, is_block: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._tracking.block:
            self.ran[self._tracking.block].add(path)
        is_model = is_hugging_face_model(module)
        if not is_block and not is_model:
            return
        given = given_by_name(module, args, kwargs)
        held = {name for name, value in given if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))}
        counts = {name for name, value in given if any(type(leaf) is int for leaf in tree_leaves(value))}
        self.seen |= held if is_model else set()
        self.seen |= counts if is_model and not path else set()  # of the sample, such as the height of an image
        if is_block:
            self.given |= held
            self.sequences |= {name for name, value in given[1:] if isinstance(value, torch.Tensor)
                            and value.ndim == 3 and value.shape[1] == self._length}  # fmt: skip
            for name, value in given[1:]:
                if isinstance(value, torch.Tensor) and self._tracking.is_replicated(value):
                    if all(size % self._tracking.rows.prime for size in value.shape):
                        self.summed[name] = tuple(value.shape[1:])
                    elif value.ndim == 3 and value.shape[1] != self._length:
                        self.streams.add(name)


class SampleRows(RowsOfList):
    """Rows of a sequence with a fixed length, whatever length the sample has (such as the patches of an image)."""

    def __init__(self, batch: int, length: int, state: SequenceState, plan: SequencePlan) -> None:
        super().__init__(state, plan)
        self.batch, self.length = batch, length
        self.shape: list[int] = []

    def note_length(self, x: torch.Tensor) -> torch.Tensor:
        """Record the shape of the sample."""
        natural = x.ndim > 2 and x.shape[1] == self.length
        if x.shape[0] % self.batch or not (natural or x.ndim == 3):
            raise MixedRows(f"expected hidden states [batch, seq, hidden], got shape {list(x.shape)}")
        self.shape = list(x.shape)
        layout = rows_layout(self.length, self.region.axis.size)
        assert layout is not None
        self.rows = Rows(self.region.axis, (layout,))
        return x

    def take(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return a further argument of a block."""
        return self.region.tracking.mark_partial(x) if name in self.summed else super().take(name, x)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows of the sample."""
        if self.rows is not None and x.shape[1] in [each.size for each in self.rows.layouts[1:]]:
            return super().enter(x)
        return super().enter(self.region.mark_replicated(x.new_empty(x.shape[0], self.length, *x.shape[2:])))

    def leave(self, x: torch.Tensor, rows: Rows | None = None) -> torch.Tensor:
        """Return full hidden states with the original length."""
        y = super().leave(x, rows)
        if self.streams and y.shape[1] != self.length:
            return y
        return self.region.mark_replicated(y.new_empty(*self.shape[:2], *y.shape[2:]))

    def has_new_arguments(self, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return False: a dry run knows all arguments."""
        return False

    def is_changed_between(self, others: Any) -> bool:
        """Return False: a dry run knows all arguments."""
        return False
