"""The dry run of context parallelism: find on the meta device how a model can run over rows of the sequence.

The model's forward runs with boundaries around its blocks (:mod:`.setup`), while :mod:`~autopar.dry_run.row_tracking`
follows the rows. If a module mixes rows, the innermost module there runs with all rows instead, then the next module
outward, up to the block. If the head cannot get rows, they are gathered after the last block. If this does not suffice,
the model is refused before it is changed; the error names the module and the operation.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autopar.call_site import hooks_below
from autopar.config import ParallelConfig
from autopar.distributed.axis import Axis
from autopar.distributed.rng import kept
from autopar.dry_run.inputs import meta_copy
from autopar.dry_run.plan_model import ModelPlans
from autopar.dry_run.row_tracking import Misfit, MixedRows, RowSearch, RowTracking
from autopar.errors import ConfigError
from autopar.features.context_parallel.lazy_rows import may_own_rows
from autopar.features.context_parallel.recurrent.plan import Call, hand_on_states
from autopar.features.context_parallel.setup import apply
from autopar.features.context_parallel.state import GatheredModule, RowPlan, refused_hook
from autopar.plan.stages import StagePlan, elements_of, lies_in
from autopar.policy.match import Described, library_of
from autopar.policy.schema import Policy
from autopar.swap import argument_names


def plan_rows(model: nn.Module, policy: Policy, prefix: str, ranks: int) -> RowPlan:
    """Return the plan for ``model`` over rows on ``ranks`` ranks; its names are relative to ``model``.

    Args:
        model: Hugging Face model, not yet sharded; stays unchanged.
        prefix: Path of the model in the names of the policy.

    Raises:
        ConfigError: The model does not support context parallelism; names the module that mixes rows.
    """
    library = library_of(model)
    if library is not None:
        return library.rows(model, ranks)
    with kept():
        if not isinstance(model, PreTrainedModel):
            needed = "the model must be a Hugging Face model of transformers, whose attention is replaced"
            raise _refusal(model, ranks, f"{needed}\n  Use tensor_parallel_size.")
        elements = elements_of(model, Described(model, prefix, model, policy))
        search = _Search(model, prefix, *elements, ranks)
        search.find()
        hand_on_states(model, search.copied, search.plan, search.calls, search.prime * ranks, search.batch)
        return search.plan


def rows(plans: ModelPlans, cp: int) -> RowPlan:
    """Return the cached plan of a model for ``cp`` ranks."""
    return plans.once(("rows", cp), lambda: plan_rows(plans.inner, plans.policy, plans.prefix, cp))


def make(plans: ModelPlans, config: ParallelConfig, stages: StagePlan) -> RowPlan:
    """Return the plan for a configuration; raise ConfigError if the model does not support it."""
    cp = config.context_parallel_size
    plan = rows(plans, cp)
    plan.check(plans.inner, config)
    if config.sequence_parallel and config.tensor_parallel_size > 1:
        check_sequence_parallel(plans.inner, plan, cp)
    return plan


def check_sequence_parallel(model: nn.Module, plan: RowPlan, ranks: int) -> None:
    """Check that tensor-parallel ranks can shard a block's rows once more, between its regions.

    Raises:
        ConfigError: A module needs all rows, but would gather them from ranks with the same tensor-parallel rank only.
    """
    reason = ""
    if plan.whole:
        path = min(plan.whole)
        reason = f"{path} needs all rows (the first of {len(plan.whole)} such modules)"
    elif plan.between:
        reason = "its code between the blocks may mix rows"
    if reason:
        raise _refusal(model, ranks, f"with sequence_parallel, {reason}\n  Set sequence_parallel: false.")


def _refusal(model: nn.Module, ranks: int, reason: str) -> ConfigError:
    return ConfigError(f"context_parallel_size={ranks} does not fit {type(model).__name__}: {reason}")


class _Search(RowSearch):
    """The search for the plan of one model.

    Attributes:
        copied, calls: Meta copy of the last run, and the arguments of its modules that run with all rows.
    """

    copied: PreTrainedModel
    calls: dict[str, Call]
    full_blocks = outside = True

    def __init__(self, model: nn.Module, prefix: str, elements: Sequence[str], encoder: int | None, ranks: int) -> None:
        super().__init__(model, prefix, elements, encoder, ranks)
        for path, hook in hooks_below(model):
            raise ConfigError(refused_hook(path, hook, ranks))
        words = self.model.get_output_embeddings()
        # The caller of the blocks may add images to rows between blocks (deepstack); the text-only dry run misses this.
        runner = model.get_submodule(self.lists[-1][0].rpartition(".")[0].rpartition(".")[0])
        names = inspect.signature(type(runner).forward).parameters
        between = any(part in name for name in names for part in ("deepstack", "visual", "vision", "image"))
        head = None if words is None else next((path for path, m in model.named_modules() if m is words), None)
        self.plan = RowPlan(self.lists, head=head, through=head is not None and not between, between=between)
        self.inputs = self.sample()
        taken = inspect.signature(model.forward).parameters
        for ids, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
            if ids in self.inputs and mask in taken and self.inputs[ids].ndim == 2:
                self.inputs[mask] = torch.ones_like(self.inputs[ids])

    def refusal(self, reason: str) -> ConfigError:
        return _refusal(self.model, self.ranks, reason)

    def words(self, failure: Misfit) -> str:
        return f"{super().words(failure)}\n  Use tensor_parallel_size instead of context_parallel_size."

    def find(self) -> None:
        """Find the plan; if possible, embeddings before the blocks look up this rank's rows only."""
        if not self._runs_with_own():
            self.settle()
            self._runs_with_own()

    def _runs_with_own(self) -> bool:
        outside = ((path, module) for path, module in self.model.named_modules() if not self.block_of(path))
        own, before = tuple(path for path, module in outside if may_own_rows(module)), self.plan
        if own:
            self.plan = replace(before, own=own)
            try:
                self.attempt()
                return True
            except Misfit:
                self.plan = before
        return False

    def otherwise(self, failure: Misfit) -> bool:
        plan = self.plan
        if self.block_of(failure.path):
            return False
        if failure.between and not plan.between:
            self.plan = replace(plan, between=True, through=False)
        elif plan.through:
            self.plan = replace(plan, through=False)
        elif plan.head is not None:
            self.plan = replace(plan, head=None)
        elif len(plan.lists) > 1:
            self.lists = self.lists[1:]
            self.blocks = list(self.lists[0])
            self.wholes = tuple(path for path in self.wholes if self.block_of(path))
            self.plan = replace(plan, lists=self.lists)
        else:
            return False
        return True

    def attempt(self) -> None:
        whole = {path: GatheredModule() for path in self.wholes}
        self.plan = replace(self.plan, whole=whole, arguments={}, numbers={}, crosses={})
        model = meta_copy(self.model)
        state = apply(model, self.plan, Axis("cp", None, range(self.ranks), 0), "auto")
        tracking = RowTracking(self.prime, self.ranks)
        state.tracking, state.watch = tracking, functools.partial(self._attend, tracking)
        stack: list[str] = []
        done: list[str] = []
        self.copied, self.calls = model, {}
        for path, module in model.named_modules():

            def before(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
                stack.append(path)
                if path in self.plan.whole:
                    self.calls[path] = (args, kwargs)

            def after(_: nn.Module, args: Any, out: Any, path: str = path) -> None:
                stack.pop()
                done.extend([path] if path in self.blocks else [])

            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(after)

        def experts(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            with tracking.paused():
                made = torch.empty_like(hidden_states)
            return tracking.mark_rows(made) if tracking.holds_rows(hidden_states) else made

        for module in model.modules():
            names = () if isinstance(module, nn.ModuleList | nn.ModuleDict) else argument_names(module)
            if names[:1] == ("hidden_states",) and {"top_k_index", "top_k_weights"} <= set(names):
                module.forward = experts  # works on each token separately, whatever the chosen experts
        try:
            out = self.run(model, self.inputs, tracking, stack)
        except Misfit as failure:
            main = self.plan.lists[-1]
            inside = any(lies_in(path, block) for path in stack for block in main)
            failure.between |= not inside and bool(done) and done[-1] in main[:-1]
            raise
        self.plan.own = tuple(path for path in self.plan.own if path in state.opened - state.spoiled)
        if rows := [name for name, value in out.items() if tracking.holds_rows(value)]:
            raise Misfit("", f"{rows[0]} is made of rows")
        if missing := [each[0] for number, each in enumerate(self.plan.lists) if number not in state.entered]:
            raise Misfit("", f"{missing[0]} does not run over tokens")

    def _attend(
        self, tracking: RowTracking, module: Any, query: Any, key: Any, value: Any, mask: Any, given: dict[str, Any]
    ) -> torch.Tensor:
        """Replace attention: record whether the keys are from another sequence, and return rows."""
        if not tracking.holds_rows(query):
            raise MixedRows("attention with queries that are not rows")
        if tracking.holds_rows(mask):
            raise MixedRows("attention with a mask sharded by rows")
        floats = {name: x for name, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
        if cut := next((name for name, x in floats.items() if tracking.holds_rows(x)), None):
            raise MixedRows(f"attention with argument {cut} sharded by rows")
        crosses = not tracking.holds_rows(key)
        if self.plan.crosses.setdefault(module._autopar_path, crosses) != crosses:
            raise MixedRows("attention once to the same sequence and once to another sequence")
        with tracking.paused():
            made = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
        return tracking.mark_rows(made)
