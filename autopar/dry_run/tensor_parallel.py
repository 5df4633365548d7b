"""The dry run of a plan: run the forward of one shard on the meta device, before the real model is changed.

A policy can be complete and still wrong: a query projection stays replicated next to sharded keys, ``forward`` reads a
head count that is not scaled, or the gradient of a norm between column and row is not summed. Names and shapes of
parameters do not show this, and sometimes even the logits do not. So the plan is applied to a copy of the model without
data. Its ``forward`` runs while every tensor is tracked: *sharded* after a column-parallel layer, *replicated* after a
row-parallel layer or a gather. Outputs must be replicated and have the shapes of the full model. A dry run takes about
50 ms, no memory and no communication, and has the same result on every rank.

A model whose forward does not run on the meta device (attention kernels without shapes, values read in Python) has no
dry run, only the checks of the plan. The dry run of a plain module happens at its first forward
(:class:`FirstForward`), because its arguments are unknown before.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autopar import registry
from autopar.compat.tensors import tree_leaves, tree_map_only
from autopar.distributed.axis import Axis
from autopar.distributed.rng import kept
from autopar.dry_run.activation_tracking import ActivationTracking, line_of, made_by, track_modules
from autopar.dry_run.inputs import meta_copy, sample_inputs
from autopar.dry_run.plan_model import warn_no_dry_run
from autopar.errors import PolicyError, first_line
from autopar.plan.matching import around
from autopar.plan.plan import Plan
from autopar.plan.stages import lies_in
from autopar.policy.match import base_of, is_hugging_face_model
from autopar.tensor_parallel.hooks import Hook
from autopar.tensor_parallel.parallelize import apply
from autopar.tensor_parallel.regions import Region


def check_plan(model: nn.Module, prefix: str, plan: Plan) -> bool:
    """Run shards of ``model``, at ``prefix``, on the meta device; return False if the model does not run there.

    The first tp rank runs, and the last rank if its sizes differ. A task model that reads values (the end of each
    sequence) runs without its head. Models inside the model run separately too, because text alone does not reach an
    image encoder. ``model`` stays unchanged.

    Raises:
        PolicyError: The shard fails where the full model runs, or mixes replicated and sharded activations.
    """
    if plan.tp == 1 or not is_hugging_face_model(model):
        return False
    with kept():  # some models draw from numpy
        done = _check_model(model, prefix, plan)
        name, base = base_of(model)
        if not done and base is not model and isinstance(base, PreTrainedModel):
            done = _check_model(base, ".".join(filter(None, (prefix, name))), plan)
        for path, inside in model.named_modules():
            if isinstance(inside, PreTrainedModel) and inside.config is not model.config and path:
                _check_model(inside, f"{prefix}.{path}" if prefix else path, plan)
    return done


def _check_model(model: Any, prefix: str, plan: Plan) -> bool:
    plan = below(plan, prefix)
    try:
        inputs = sample_inputs(model)
    except ValueError:
        return False
    return check_plan_with(model, plan, (), inputs)


def check_plan_with(model: nn.Module, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Try a plan with these arguments, like :func:`check_plan`; return whether the full model runs without data."""
    try:
        plain = meta_copy(model)
        with ActivationTracking():
            expected = shapes_of(run(plain, args, kwargs))
    except Exception:  # the full model does not run on the meta device, regardless of the policy
        return False
    for rank in different_ranks(plan):
        _check_shard(model, plan, rank, expected, args, kwargs)
    return True


def different_ranks(plan: Plan) -> list[int]:
    """Return the first and the last rank, or only the first if the last rank has identical sizes.

    Ranks differ with uneven shards, with units that several ranks hold, and with rules of features.
    """
    last = plan.tp - 1
    layouts = [tensor.layout for tensor in plan.tensors.values()]
    for rule in plan.modules.values():
        layouts += [rule.layout, rule.groups, *rule.layouts.values(), *(sliced.layout for sliced in rule.inputs)]
    identical = (
        all(a.values[0] == a.values[last] for a in plan.attributes)
        and not any(rule.rule in registry.RULES for rule in plan.modules.values())
        and all(x is None or (x.local_size(0) == x.local_size(last) and not x.replicated) for x in layouts)
    )
    return [0] if identical else [0, last]


def _check_shard(
    model: nn.Module,
    plan: Plan,
    rank: int,
    expected: list[tuple[int, ...]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Run the shard of a rank; raise PolicyError if it fails, is wrong, or its outputs have wrong shapes."""
    shard, region = meta_copy(model), Region(Axis("tp", None, range(plan.tp), rank))
    apply(shard, plan, region.axis, region)
    stack: list[str] = []

    def mixed() -> None:
        makers, met = tracking.makers_of(tracking.operands), stack[-1]
        inside = bool(makers) and lies_in(makers[0], met)
        raise PolicyError(
            f"in {met or 'the model'} a replicated activation meets sharded ones: its gradient would be "
            "partial.\n  The module that made it needs {enter_output: UNIT}, or a rule that shards it."
            f"{made_by(plan, makers)}",
            (line_of(plan, makers[0]) if inside else "") or _where(plan, met),
        )

    tracking = ActivationTracking(mixed)
    tracking.mark_parameters(shard, plan)
    tracking.mark_inputs((args, kwargs))
    region.tracking = tracking
    track_modules(shard, plan, tracking, stack)
    try:
        with tracking:
            out = run(shard, args, kwargs)
    except PolicyError:
        raise
    except Exception as error:
        raise PolicyError(
            f"the shard of one of {plan.tp} ranks fails in {stack[-1] or 'the model'}, where the full model does "
            f"not: {first_line(error)}\n  A neighboring layer may lack its rule, or an attribute that forward() "
            "reads may not be scaled (attributes).",
            _where(plan, stack[-1]),
        ) from error
    _check_sums(plan, tracking)
    last = _where(plan, "")
    for output, value in _entries(out):
        if isinstance(value, torch.Tensor) and tracking.is_sharded(value):
            raise PolicyError(f"output '{output}' is still sharded: a row rule or gather_output is missing", last)
    if shapes_of(out) != expected:
        raise PolicyError(f"expected outputs with shapes {expected}, as the full model has, got {shapes_of(out)}", last)


def _check_sums(plan: Plan, tracking: ActivationTracking) -> None:
    """Raise PolicyError unless exactly the replicated parameters inside regions have summed gradients."""
    if tracking.partial:
        name = min(tracking.partial)
        path, _, own = name.rpartition(".")
        rule = plan.modules.get(path)
        if rule is not None and own in rule.summed:
            text = f"outside the forward of {path or 'the model'}, where its gradient is not summed"
            raise PolicyError(f"{name} works on sharded activations {text}", rule.where)
        text = "its rule leaves its gradient partial\n  Write {replicated: UNIT} to sum it, or shard the parameter."
        raise PolicyError(f"{name} works on sharded activations, but {text}", _where(plan, path))
    if others := tracking.summed_outside - tracking.summed_inside:
        name = min(others)
        raise PolicyError(
            f"{name} works on replicated activations: its gradient must not be summed\n  Write 'replicated'.",
            _where(plan, name.rpartition(".")[0]),
        )


def _where(plan: Plan, path: str) -> str:
    """Return ``file:line`` of the nearest rule: of the module, inside it, or around it."""
    for outer in (path, *around(path)):
        for other, rule in plan.modules.items():
            if lies_in(other, outer):
                return rule.where
    return plan.policy  # the plan has no rule that shards


def run(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a model on the meta device, without gradients and caches."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if isinstance(model, PreTrainedModel):
            model.config.use_cache = False
            return model(*args, **kwargs)
        with torch.device("meta"):  # for tensors that forward creates without a device
            return model(*args, **kwargs)


def _entries(out: Any) -> list[tuple[Any, Any]]:
    """Return the outputs of a model, by name or by index."""
    if is_dataclass(out) and not isinstance(out, Mapping | type):
        return [(field.name, getattr(out, field.name)) for field in fields(out)]
    return list(out.items()) if isinstance(out, Mapping) else list(enumerate(tree_leaves(out)))


def shapes_of(out: Any) -> list[tuple[int, ...]]:
    """Return the shapes of outputs, except attention maps, which a forward hook gathers on the real model."""
    others = [value for name, value in _entries(out) if "attentions" not in str(name)]
    return [tuple(leaf.shape) for leaf in tree_leaves(others) if isinstance(leaf, torch.Tensor)]


def below(plan: Plan, prefix: str) -> Plan:
    """Return the plan of the model at ``prefix``, with names relative to it."""
    if not prefix:
        return plan
    start = f"{prefix}."

    def relative(path: str) -> str:
        return path[len(start) :]

    tensors = {
        relative(name): replace(tensor, name=relative(name), aliases=())
        for tensor in plan.tensors.values()
        for name in (tensor.name, *tensor.aliases)
        if name.startswith(start)
    }
    inside = {relative(path): rule for path, rule in plan.modules.items() if lies_in(path, prefix)}
    modules = {path: replace(rule, path=path) for path, rule in inside.items()}
    attributes = tuple(replace(a, path=relative(a.path)) for a in plan.attributes if lies_in(a.path, prefix))
    return replace(plan, tensors=tensors, modules=modules, attributes=attributes)


class FirstForward(Hook):
    """Forward pre-hook of a plain module that makes the dry run before the first forward."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.plan = plan
        self.plain: nn.Module | None = None
        if plan.tp > 1:
            try:
                self.plain = meta_copy(model)
            except Exception:  # an attribute cannot be copied
                warn_no_dry_run(model)
        self._handle: Any = None

    def attach(self, model: nn.Module) -> None:
        """Register the hook on ``model``, after the plan was applied to it."""
        if self.plain is not None:
            self._handle = model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        plain = self.plain
        if plain is None:
            return
        with kept():
            args, kwargs = tree_map_only(torch.Tensor, lambda x: torch.empty_like(x, device="meta"), (args, kwargs))
            done = check_plan_with(plain, self.plan, args, kwargs)
        if not done:
            warn_no_dry_run(model)
        self.plain = None
        if self._handle is not None:
            self._handle.remove()
