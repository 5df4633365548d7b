"""A rehearsal: the forward of one rank's share, on the meta device, before the real model is touched.

A policy can be complete and still wrong: a query projection left whole beside shared-out keys, a head count that
``forward`` reads and nobody scaled, a norm between column and row whose gradient nobody sums. None of that shows in
names and shapes of parameters, and some of it not even in logits. So the plan is applied to a copy of the model that
has shapes but no data, and the copy's own ``forward`` is run while every tensor is followed: *shared out* from a
column-parallel layer on, *whole* from a row-parallel layer or a gather on. What comes out must be whole and of the
plain model's shape. Costs some 50 ms, no memory, no communication, and gives every rank the same verdict.

A model whose plain forward does not run on the meta device (attention kernels without shapes, values read in Python)
is not rehearsed; then only the checks of the plan hold.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from autopar.distributed.axis import Axis
from autopar.distributed.rng import kept
from autopar.dry_run.activation_tracking import Follow
from autopar.dry_run.inputs import meta_copy, sample_inputs
from autopar.errors import PolicyError
from autopar.plan.plan import ModulePlan, Plan
from autopar.tensor_parallel.parallelize import apply
from autopar.tensor_parallel.regions import Region

__all__ = ["rehearse", "rehearse_with"]


def rehearse(model: nn.Module, prefix: str, plan: Plan) -> bool:
    """Run the shares of the first and the last tp rank on the meta device; False if the model cannot be rehearsed.

    A task model that looks at values (the end of each sequence) is rehearsed without its head. Models inside the model
    are rehearsed by themselves too: text alone does not wake an image encoder.

    Args:
        model: the Hugging Face model, still whole; only read. What a plain module takes is not known before its first
            forward (:mod:`autopar.dry_run.first_call`).
        prefix: its path in the plan's names.

    Raises:
        PolicyError: the share fails where the whole model does not, or mixes whole and shared-out activations.
    """
    if plan.tp == 1 or not isinstance(model, PreTrainedModel):
        return False
    with kept():  # some models draw from numpy
        done = _rehearse(model, prefix, plan)
        base = model.base_model
        if not done and base is not model and isinstance(base, PreTrainedModel):
            done = _rehearse(base, _join(prefix, model.base_model_prefix), plan)
        for path, inside in model.named_modules():
            if isinstance(inside, PreTrainedModel) and inside.config is not model.config and path:
                _rehearse(inside, _join(prefix, path), plan)
    return done


def _rehearse(model: PreTrainedModel, prefix: str, plan: Plan) -> bool:
    plan = _below(plan, prefix)
    try:
        inputs = sample_inputs(model)
    except ValueError:
        return False
    return rehearse_with(model, plan, (), inputs)


def rehearse_with(model: nn.Module, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Run the shares of the first and the last tp rank with these arguments, on the meta device.

    Returns:
        whether the whole model runs there.

    Raises:
        PolicyError: as :func:`rehearse`.
    """
    try:
        with Follow():
            expected = _shapes(_run(meta_copy(model), args, kwargs))
    except Exception:  # the plain model does not run on the meta device, which says nothing about the policy
        return False
    for rank in sorted({0, plan.tp - 1}):
        share = meta_copy(model)
        axis = Axis("tp", None, range(plan.tp), rank)
        region = Region(axis)
        apply(share, plan, axis, region)
        _rehearse_share(share, plan, region, args, kwargs, expected)
    return True


def _rehearse_share(
    share: nn.Module,
    plan: Plan,
    region: Region,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    expected: list[tuple[int, ...]],
) -> None:
    stack: list[str] = []

    def mixed() -> None:
        raise PolicyError(
            f"in {stack[-1] or 'the model'} an activation that is whole meets shared-out ones: its gradient would be "
            "partial. The module that made it needs {enter_output: UNIT}, or a rule that cuts it",
            _where(plan, stack[-1]),
        )

    follow = Follow(mixed)
    for name, parameter in share.named_parameters():
        if plan.tensors[plan.canonical(name)].layout is None:
            follow.parameter(name, parameter)
        else:
            follow.mark(parameter, True)
    follow.inputs((args, kwargs))
    region.follow = follow
    hooks = list(_watch(share, plan, follow, stack))
    try:
        with follow:
            out = _run(share, args, kwargs)
    except PolicyError:
        raise
    except Exception as error:
        raise PolicyError(
            f"the share of one of {plan.tp} ranks fails in {stack[-1] or 'the model'}, where the whole model does not: "
            f"{str(error).splitlines()[0]}\n  A layer beside it may lack its rule, or an attribute that forward() "
            "reads may not be scaled (attributes).",
            _where(plan, stack[-1]),
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    _check_sums(plan, follow)
    last = _where(plan, "")
    for output, value in _entries(out):
        if isinstance(value, torch.Tensor) and follow.shared(value):
            raise PolicyError(f"output '{output}' is still shared out: some row or gather_output is missing", last)
    if _shapes(out) != expected:
        raise PolicyError(f"outputs have shapes {_shapes(out)}, those of the whole model {expected}", last)


def _check_sums(plan: Plan, follow: Follow) -> None:
    """Whole parameters inside the region have their gradients summed, and only those."""
    for name in sorted(follow.inside):
        path, _, own = name.rpartition(".")
        rule = plan.modules.get(path)
        if rule is None or own not in rule.summed:
            raise PolicyError(
                f"{name} works on activations that are shared out, but its rule leaves its gradient partial: "
                "write {replicated: UNIT} to have it summed, or cut it",
                _where(plan, path),
            )
        raise PolicyError(
            f"{name} works on shared-out activations outside the forward of {path or 'the model'}, where its gradient "
            "is not summed",
            rule.where,
        )
    for name in sorted(follow.summed_outside - follow.summed_inside):
        path = name.rpartition(".")[0]
        raise PolicyError(
            f"{name} works on whole activations: its gradient must not be summed, write 'replicated'",
            _where(plan, path),
        )


def _watch(share: nn.Module, plan: Plan, follow: Follow, stack: list[str]) -> Iterator[Any]:
    """Hooks that keep the stack of running modules, check what goes into layers and mark what comes out."""
    for path, module in share.named_modules():

        def before(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            stack.append(path)
            rule = plan.modules.get(path)
            if rule is not None:
                _check_input(rule, tree_leaves((args, kwargs)), follow)

        def after(_: nn.Module, args: Any, out: Any, path: str = path) -> None:
            stack.pop()
            rule = plan.modules.get(path)
            if rule is None:
                return
            if rule.rule in ("column", "row", "embedding"):
                follow.mark(out, rule.enter_output or (rule.rule == "column" and not rule.gather_output))
            elif rule.rule in ("cut", "norm_over"):
                follow.mark(out, True)
            elif rule.rule == "experts":
                follow.mark(out, False)

        yield module.register_forward_pre_hook(before, with_kwargs=True)
        yield module.register_forward_hook(after)


def _check_input(rule: ModulePlan, leaves: list[Any], follow: Follow) -> None:
    shared = any(follow.shared(leaf) for leaf in leaves)
    path, kind = rule.path, rule.rule
    if kind == "row" and not rule.split_input and not shared:
        raise PolicyError(f"{path} is a row, but what it reads is whole: no column feeds it", rule.where)
    if rule.closes:
        if not shared:
            raise PolicyError(f"{path} closes a region, but what it reads is whole", rule.where)
    elif kind == "column" and rule.inside:
        if not shared:
            raise PolicyError(f"{path} is a column inside a region, but what it reads is whole", rule.where)
    elif shared and (kind in ("column", "embedding", "region", "experts") or rule.split_input):
        raise PolicyError(f"{path} is a {kind}, but what it reads is shared out already", rule.where)
    if kind in ("norm_over", "gathered") and not shared:
        raise PolicyError(f"{path} is {kind}, but what it reads is whole", rule.where)
    if kind == "cut" and not shared and any(follow.carries_gradient(leaf) for leaf in leaves):
        raise PolicyError(
            f"{path} is cut, but what it reads is whole and needs a gradient: make it a column, or feed it by one",
            rule.where,
        )


def _where(plan: Plan, path: str) -> str:
    """file:line of the rule that is nearest to a module: its own, one inside it, one beside it."""
    while True:
        for other, rule in plan.modules.items():
            if other == path or not path or other.startswith(path + "."):
                return rule.where
        if not path:
            return plan.policy  # nothing is shared out
        path = path.rpartition(".")[0]


def _run(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if isinstance(model, PreTrainedModel):
            model.config.use_cache = False
            return model(*args, **kwargs)
        with torch.device("meta"):  # what its forward makes without a word about the device
            return model(*args, **kwargs)


def _entries(out: Any) -> list[tuple[Any, Any]]:
    """What a model returns, by name or by number."""
    if is_dataclass(out) and not isinstance(out, Mapping | type):
        return [(field.name, getattr(out, field.name)) for field in fields(out)]
    return list(out.items()) if isinstance(out, Mapping) else list(enumerate(tree_leaves(out)))


def _shapes(out: Any) -> list[tuple[int, ...]]:
    """But for attention maps, which some models always return: a hook of the real model makes them whole."""
    kept = {name: value for name, value in _entries(out) if "attentions" not in str(name)}
    return [tuple(leaf.shape) for leaf in tree_leaves(kept) if isinstance(leaf, torch.Tensor)]


def _below(plan: Plan, prefix: str) -> Plan:
    """The part of a plan that concerns the model at ``prefix``, with names from there."""
    if not prefix:
        return plan
    start = prefix + "."

    def own(path: str) -> bool:
        return path.startswith(start) or path == prefix

    def cut(path: str) -> str:
        return path[len(start) :]

    tensors = {}
    for tensor in plan.tensors.values():
        for name in (tensor.name, *tensor.aliases):
            if name.startswith(start):
                tensors[cut(name)] = replace(tensor, name=cut(name), aliases=())
    return replace(
        plan,
        tensors=tensors,
        modules={cut(path): replace(rule, path=cut(path)) for path, rule in plan.modules.items() if own(path)},
        attributes=tuple(replace(a, path=cut(a.path)) for a in plan.attributes if own(a.path)),
    )


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
