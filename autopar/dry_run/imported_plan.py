"""The rehearsal of a plan that was not written for this library: units are followed (:mod:`.unit_tracking`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from autopar.distributed.axis import Axis
from autopar.distributed.rng import kept
from autopar.dry_run.inputs import meta_copy, sample_inputs
from autopar.dry_run.tensor_parallel import below, check_plan, different_ranks, run
from autopar.dry_run.unit_tracking import SplitUnits, Step, UnitTracking, differing
from autopar.errors import UnsupportedModelError
from autopar.plan.plan import ModulePlan, Plan
from autopar.policy.tp_plan import is_imported
from autopar.tensor_parallel.parallelize import apply
from autopar.tensor_parallel.regions import Region
from autopar.tensor_tracking import tensors_in

__all__ = ["rehearse"]

_LAYERS = ("column", "row", "embedding", "region", "experts", "enter_output")


def rehearse(model: nn.Module, prefix: str, plan: Plan) -> bool:
    """Run :func:`check_plan`, and for what came of a ``tp_plan`` also follow the units.

    Returns:
        whether the model runs on the meta device. With an imported plan it must.

    Raises:
        PolicyError: as :func:`check_plan`.
        UnsupportedModelError: the imported plan splits units, or is not reached by the rehearsal.
    """
    done = check_plan(model, prefix, plan)
    inside = below(plan, prefix)
    imported = {path for path, rule in inside.modules.items() if is_imported(rule.where)}
    if plan.tp == 1 or not imported or not isinstance(model, PreTrainedModel):
        return done
    if not done:
        raise _refused(model, "the model does not run without data, so nothing shows that it is right")
    with kept():
        reached = _follow(model, inside)
        left = {path for path in imported if _needs_proof(inside.modules[path])} - reached
        for path, other in model.named_modules():
            if left and path and isinstance(other, PreTrainedModel) and any(p.startswith(f"{path}.") for p in left):
                left -= {f"{path}.{name}" for name in _follow(other, below(inside, path))}
    if left:
        raise _refused(model, f"the rehearsal does not reach {sorted(left)[0]}, so nothing shows that it is right")
    return done


def _refused(model: nn.Module, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the tp_plan of {type(model).__name__} cannot be used: {reason}.\n"
        "  A policy of your own says what its features are made of: docs/policies.md."
    )


def _needs_proof(rule: ModulePlan) -> bool:
    """Whether what a rule makes of a module depends on what is made of its features."""
    return (rule.rule == "column" and not rule.gather_output) or (rule.rule == "row" and not rule.split_input)


def _follow(model: PreTrainedModel, plan: Plan) -> set[str]:
    """Follow units through the plain model and through the shards; return the layers that were reached."""
    try:
        inputs = sample_inputs(model)
        plain, tracking = meta_copy(model), UnitTracking(None)
        reached = _run(plain, plan, tracking, inputs)
    except SplitUnits as error:
        raise _refused(model, f"in {tracking.place or 'the model'} {error}") from error
    except Exception:  # it does not run without data
        return set()
    for rank in different_ranks(plan):
        shard = meta_copy(model)
        axis = Axis("tp", None, range(plan.tp), rank)
        apply(shard, plan, axis, Region(axis))
        local = UnitTracking(rank, tracking.steps)
        try:
            _run(shard, plan, local, inputs)
        except SplitUnits as error:
            raise _refused(model, f"on a shard, in {local.place or 'the model'} {error}") from error
        found = _first_difference(tracking.steps, local.steps)
        if found:
            raise _refused(model, found)
    return reached


def _first_difference(plain: list[Step], shard: list[Step]) -> str:
    found = differing(plain, shard)
    return f"in {found[0] or 'the model'} {found[1]}" if found else ""


def _run(model: PreTrainedModel, plan: Plan, tracking: UnitTracking, inputs: dict[str, Any]) -> set[str]:
    reached: set[str] = set()
    for path, module in model.named_modules():
        _attach(path, module, plan.modules.get(path), tracking, reached)
        rule = plan.modules.get(path)
        if rule is None or rule.rule not in _LAYERS:
            for name, parameter in module.named_parameters(recurse=False):
                tensor = plan.tensors[plan.canonical(f"{path}.{name}".lstrip("."))]
                if tensor.layout is not None:
                    tracking.mark(parameter, tensor.layout, tensor.layout.dim)
    with tracking:
        run(model, (), inputs)
    return reached


def _attach(path: str, module: nn.Module, rule: ModulePlan | None, tracking: UnitTracking, reached: set[str]) -> None:
    stack: list[str] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        stack.append(tracking.place)
        tracking.place = path
        if rule is None or rule.rule not in _LAYERS:
            return
        if rule.rule == "row" and not rule.split_input:
            _check_row(path, rule, tracking, (args, kwargs))
        tracking.pause(1)

    def after(_: nn.Module, args: Any, out: Any) -> None:
        tracking.place = stack.pop()
        if rule is None or rule.rule not in _LAYERS:
            return
        tracking.pause(-1)
        reached.add(path)
        for tensor in tensors_in(out):
            if rule.rule == "column" and not rule.gather_output and rule.layout is not None:
                tracking.mark(tensor, rule.layout, -1)
            else:
                tracking.forget(tensor)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def _check_row(path: str, rule: ModulePlan, tracking: UnitTracking, values: Any) -> None:
    for tensor, followed in _followed(tracking, values):
        layout = rule.layout
        assert layout is not None
        parts = len(layout.blocks)
        in_order = followed.dim == tensor.ndim - 1 and followed.run is None and followed.parts in (parts, 0)
        if not in_order:
            raise SplitUnits(f"{path} reads sharded features along another dim, or in another order")
        return
    raise SplitUnits(f"{path} reads features that no column has sharded")


def _followed(tracking: UnitTracking, values: Any) -> Iterator[Any]:
    for tensor in tensors_in(values):
        followed = tracking.of(tensor)
        if followed is not None:
            yield tensor, followed
