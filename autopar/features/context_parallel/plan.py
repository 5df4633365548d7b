"""The rehearsal of context parallelism: how a model runs over rows of the sequence, found out on the meta device.

The model's own forward runs with boundaries around its blocks (:mod:`.block_boundary`) while
:mod:`~autopar.dry_run.row_tracking` follows the rows. A module that mixes them is made to run with all rows: the
innermost one, then the one around it, up to a block. If rows do not get through to the head, they are joined behind the
last block. Anything left after that is refused, with the module and the operation, before the model is changed.
"""

from __future__ import annotations

import inspect
import warnings
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
from autopar.dry_run.row_tracking import Misfit, MixedRows, RowSearch, RowTracking, longest_of, prime_beside
from autopar.errors import ConfigError, first_line
from autopar.features.context_parallel.block_boundary import may_own_rows
from autopar.features.context_parallel.plan_states import Call, hand_on_states
from autopar.features.context_parallel.setup import apply
from autopar.features.context_parallel.state import RowPlan, WholeModule, refused_hook
from autopar.plan.stages import Blocks, StagePlan, lies_in
from autopar.policy.match import Described
from autopar.policy.schema import Policy
from autopar.swap import argument_names


def plan_rows(model: nn.Module, policy: Policy, prefix: str, ranks: int) -> RowPlan:
    """Return how ``model`` runs over rows on ``ranks`` ranks; names begin at ``model``. It is only read.

    Args:
        model: the Hugging Face model, not yet sharded.
        prefix: its path in the names of the policy.

    Raises:
        ConfigError: it does not, with what mixes rows.
    """
    if not isinstance(model, PreTrainedModel):
        raise _refusal(model, ranks, "it is no Hugging Face model, whose attention can be exchanged")
    for path, hook in hooks_below(model):
        raise ConfigError(refused_hook(path, hook, ranks))
    blocks = Blocks(Described(model, prefix, model, policy))
    paths = [path.removeprefix(f"{prefix}.") if prefix else path for path in blocks.paths]
    place = blocks.encoder_place or 0
    lists = tuple(tuple(each) for each in (paths[:place], paths[place:]) if each)
    if not lists:
        raise _refusal(model, ranks, f"its policy names no list of blocks ({policy.where})")
    with kept():
        search = _Search(model, lists, ranks)
        search.run()
        hand_on_states(model, search.copied, search.plan, search.calls, search.prime * ranks, ranks + 1)
        return search.plan


def rows(plans: ModelPlans, cp: int) -> RowPlan:
    """Return the plan of a model for ``cp`` ranks, made once."""
    return plans.once(("rows", cp), lambda: plan_rows(plans.inner, plans.policy, plans.prefix, cp))


def make(plans: ModelPlans, config: ParallelConfig, stages: StagePlan) -> RowPlan | None:
    """Return the plan of a configuration; None without context parallelism.

    Raises:
        ConfigError: the model does not fit, or not together with sequence parallelism.
    """
    cp = config.context_parallel_size
    if cp == 1:
        return None
    plan = rows(plans, cp)
    if config.sequence_parallel and config.tensor_parallel_size > 1:
        check_beside_sequence(plans.inner, plan, cp)
    return plan


def check_beside_sequence(model: nn.Module, plan: RowPlan, ranks: int) -> None:
    """Check that a block's rows can be cut once more over the tensor-parallel ranks, between its regions.

    Raises:
        ConfigError: a module needs all rows, of which each rank would gather those of its tensor-parallel rank only.
    """
    reason = ""
    if plan.whole:
        path = min(plan.whole)
        reason = f"{path} mixes rows, so it runs with all of them: of {len(plan.whole)} modules the first"
    elif plan.between:
        reason = "what runs its blocks may mix rows between them, so each block's are joined"
    if reason:
        raise _refusal(model, ranks, f"beside sequence_parallel: {reason}.\n  Leave sequence_parallel out")


def _refusal(model: nn.Module, ranks: int, reason: str) -> ConfigError:
    return ConfigError(f"context_parallel_size={ranks} does not fit {type(model).__name__}: {reason}")


class _Search(RowSearch):
    """The search for the plan of one model.

    Attributes:
        plan: how the model runs, as far as it is known.
        copied, calls: the copy without memory that ran last, and the arguments of its modules with all rows.
    """

    copied: PreTrainedModel
    calls: dict[str, Call]

    def __init__(self, model: PreTrainedModel, lists: tuple[tuple[str, ...], ...], ranks: int) -> None:
        super().__init__(model, ranks, lists)
        words = model.get_output_embeddings()
        # What runs the blocks may add images to all rows between blocks (deepstack). Text alone does not come there.
        runner = model.get_submodule(lists[-1][0].rpartition(".")[0].rpartition(".")[0])
        names = inspect.signature(type(runner).forward).parameters
        between = any(part in name for name in names for part in ("deepstack", "visual", "vision", "image"))
        head = None if words is None else next((path for path, m in model.named_modules() if m is words), None)
        self.plan = RowPlan(lists, head=head, through=head is not None and not between, between=between)
        longest = longest_of(model.config.get_text_config(decoder=True))  # an encoder may have another
        prime = prime_beside(model, ranks, None if longest is None else longest - 2)
        self.beyond = longest if prime is None else None  # without data many models take longer sequences, too
        self.prime = prime or prime_beside(model, ranks) or 0
        if not self.prime:
            raise self.refusal("no length tells rows from other sizes")
        self.inputs = self.sample(ranks + 1)
        taken = inspect.signature(model.forward).parameters
        for ids, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
            if ids in self.inputs and mask in taken and self.inputs[ids].ndim == 2:
                self.inputs[mask] = torch.ones_like(self.inputs[ids])

    def refusal(self, reason: str) -> ConfigError:
        return _refusal(self.model, self.ranks, reason)

    def run(self) -> None:
        """Find the plan that holds."""
        if not self._runs_with_own():
            self.settle()
            self._runs_with_own()

    def _runs_with_own(self) -> bool:
        """Try the plan with embeddings that look up own rows in front of the blocks; without them, if that fails."""
        before, whole = self.plan, {path: WholeModule() for path in self.plan.whole}
        outside = ((path, module) for path, module in self.model.named_modules() if not self.block_of(path))
        own = tuple(path for path, module in outside if may_own_rows(module))
        self.plan = replace(before, whole=whole, own=own, arguments={}, numbers={}, crosses={})
        if own and self.runs():
            return True
        self.plan = before
        return False

    def words(self, failure: Misfit) -> str:
        if self.beyond is not None:
            return f"no length up to {self.beyond} tells rows from other sizes"
        where = f"in {failure.path} " if failure.path else ""
        return f"{where}{failure}.\n  Rows of the sequence lie on different ranks there. Leave it out, or use tp"

    def change(self, failure: Misfit) -> bool:
        plan, block = self.plan, self.block_of(failure.path)
        whole, lists = {path: WholeModule() for path in plan.whole}, plan.lists
        head, through, between = plan.head, plan.through, plan.between
        if block:
            inner, blocks = failure.path, next(each for each in lists if block in each)
            while inner in whole:
                inner = inner.rpartition(".")[0]
            if not lies_in(inner, block):
                return False
            for path in self.alike(inner, blocks):
                whole = {known: where for known, where in whole.items() if not lies_in(known, path)}
                whole[path] = WholeModule()
        elif failure.between and not plan.between:
            between = True
        elif through:
            through = False
        elif head is not None:
            head = None
        elif len(lists) > 1:
            lists = lists[1:]
            self.blocks = list(lists[0])
            whole = {path: where for path, where in whole.items() if self.block_of(path)}
        else:
            return False
        self.plan = RowPlan(lists, whole=whole, head=head, through=through and not between, between=between)
        return True

    def attempt(self) -> None:
        model = meta_copy(self.model)
        state = apply(model, self.plan, Axis("cp", None, range(self.ranks), 0), "auto")
        tracking = RowTracking(self.prime, self.ranks)
        state.tracking, state.watch = tracking, _Watch(self.plan, tracking)
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
                module.forward = experts  # a token in, a token out, whatever experts were chosen for it
        try:
            with torch.no_grad(), warnings.catch_warnings(), tracking:
                warnings.simplefilter("ignore")
                out = model(**self.inputs)
        except Exception as error:
            main = self.plan.lists[-1]
            between = bool(done) and done[-1] in main[:-1]
            between = between and not any(lies_in(path, block) for path in stack for block in main)
            reason = f"{type(error).__name__}: {first_line(error)}"
            if isinstance(error, MixedRows):
                reason, between = str(error), between or error.between
            raise Misfit(stack[-1] if stack else "", reason, between) from error
        self.plan.own = tuple(path for path in self.plan.own if path in state.opened - state.spoiled)
        if rows := [name for name, value in out.items() if tracking.holds_rows(value)]:
            raise Misfit("", f"{rows[0]} is made of rows")
        if missing := [each[0] for number, each in enumerate(self.plan.lists) if number not in state.entered]:
            raise Misfit("", f"{missing[0]} does not run over words")


class _Watch:
    """Takes the place of attention: notes whose keys they are, and answers with rows."""

    def __init__(self, plan: RowPlan, tracking: RowTracking) -> None:
        self.plan, self.tracking = plan, tracking

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, given: dict[str, Any]
    ) -> torch.Tensor:
        tracking = self.tracking
        if not tracking.holds_rows(query):
            raise MixedRows("attention of queries that are no rows")
        if tracking.holds_rows(mask):
            raise MixedRows("attention whose mask was cut")
        floats = {name: x for name, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
        if cut := next((name for name, x in floats.items() if tracking.holds_rows(x)), None):
            raise MixedRows(f"attention with {cut} of each row")
        crosses = not tracking.holds_rows(key)
        if self.plan.crosses.setdefault(module._autopar_path, crosses) != crosses:
            raise MixedRows("attention of its own rows one time and of another sequence the other time")
        with tracking.paused():
            made = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
        return tracking.mark_rows(made)
