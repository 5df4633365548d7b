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

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel

from autopar.collectives import Axis
from autopar.errors import PolicyError
from autopar.policy.plan import ModulePlan, Plan
from autopar.tensor_parallel.parallelize import apply
from autopar.tensor_parallel.regions import Region

__all__ = ["rehearse"]


def rehearse(model: PreTrainedModel, prefix: str, plan: Plan) -> bool:
    """Run the shares of the first and the last tp rank on the meta device; False if the model cannot be rehearsed.

    Args:
        model: the Hugging Face model, still whole; only read.
        prefix: its path in the plan's names.

    Raises:
        PolicyError: the share fails where the whole model does not, or mixes whole and shared-out activations.
    """
    if plan.tp == 1:
        return False
    plan = _without_prefix(plan, prefix)
    try:
        whole = _meta_copy(model)
        inputs = _inputs(model)
        with _Follow():
            expected = _shapes(_run(whole, inputs))
    except Exception:  # the plain model does not run on the meta device, which says nothing about the policy
        return False
    for rank in sorted({0, plan.tp - 1}):
        share = _meta_copy(model)
        axis = Axis("tp", None, range(plan.tp), rank)
        apply(share, plan, axis, Region(axis))
        _rehearse_share(share, plan, inputs, expected)
    return True


def _rehearse_share(share: nn.Module, plan: Plan, inputs: dict[str, Any], expected: list[tuple[int, ...]]) -> None:
    follow = _Follow()
    stack: list[str] = []
    hooks = list(_watch(share, plan, follow, stack))
    try:
        with follow:
            out = _run(share, inputs)
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
    last = _where(plan, "")
    for name, value in out.items() if isinstance(out, dict) else enumerate(tree_leaves(out)):
        if isinstance(value, torch.Tensor) and follow.shared(value):
            raise PolicyError(f"output '{name}' is still shared out: some row or gather_output is missing", last)
    if _shapes(out) != expected:
        raise PolicyError(f"outputs have shapes {_shapes(out)}, those of the whole model {expected}", last)


class _Follow(TorchDispatchMode):
    """Marks what is computed from a shared-out tensor as shared out."""

    def __init__(self) -> None:
        super().__init__()
        self._shared = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:  # "is anything padded?": some branch has to be taken
            return {torch.bool: True}.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 1)
        out = func(*args, **(kwargs or {}))
        if any(self.shared(leaf) for leaf in tree_leaves((args, kwargs))):
            self.mark(out, True)
        return out

    def shared(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and self._shared.get(value, False)

    def mark(self, value: Any, shared: bool) -> None:
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                self._shared[leaf] = shared


def _watch(share: nn.Module, plan: Plan, follow: _Follow, stack: list[str]) -> Iterator[Any]:
    """Hooks that keep the stack of running modules, check what goes into layers and mark what comes out."""
    for path, module in share.named_modules():

        def before(_: nn.Module, args: Any, kwargs: Any, path: str = path, module: nn.Module = module) -> None:
            stack.append(path)
            shared = any(follow.shared(leaf) for leaf in tree_leaves((args, kwargs)))
            _check_input(path, module, plan, shared)

        def after(_: nn.Module, args: Any, out: Any, path: str = path) -> None:
            stack.pop()
            rule = plan.modules.get(path)
            if rule is not None and rule.rule != "replicated":
                follow.mark(out, _opens(rule))

        yield module.register_forward_pre_hook(before, with_kwargs=True)
        yield module.register_forward_hook(after)


def _opens(rule: ModulePlan) -> bool:
    return rule.rule == "column" and not rule.gather_output


def _check_input(path: str, module: nn.Module, plan: Plan, shared: bool) -> None:
    rule = plan.modules.get(path)
    if rule is None or rule.rule == "replicated":
        own = [name for name, parameter in module._parameters.items() if parameter is not None]
        summed = rule is not None and rule.sum_gradients
        if own and shared and not summed:
            raise PolicyError(
                f"{path} works on activations that are shared out, but its rule leaves its gradient partial: "
                f"write {{replicated: UNIT}} to have it summed, or cut it",
                _where(plan, path),
            )
        if summed and own and not shared:
            raise PolicyError(
                f"{path} works on whole activations: its gradient must not be summed, write 'replicated'",
                _where(plan, path),
            )
        return
    closes = rule.rule == "row" and not rule.split_input
    if closes and not shared:
        raise PolicyError(f"{path} is a row, but what it reads is whole: no column feeds it", rule.where)
    if not closes and shared:
        raise PolicyError(f"{path} is a {rule.rule}, but what it reads is shared out already", rule.where)


def _where(plan: Plan, path: str) -> str:
    """file:line of the rule that is nearest to a module: its own, one inside it, one beside it."""
    while True:
        for other, rule in plan.modules.items():
            if other == path or not path or other.startswith(path + "."):
                return rule.where
        path = path.rpartition(".")[0]


def _meta_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with shapes but without data; never holds memory for weights."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    copied = copy.deepcopy(model, memo).eval()
    copied.config._attn_implementation = "eager"  # every model has it, it runs without data, and it reads every count
    for module in copied.modules():  # the user's hooks have no part in this
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.clear()
    return copied


def _inputs(model: PreTrainedModel) -> dict[str, Any]:
    """The smallest input that exercises the model: two sequences of five tokens, or what transformers proposes."""
    if model.main_input_name != "input_ids":
        return {key: value.to("meta") for key, value in model.dummy_inputs.items()}
    shape = (2, 3, 5) if "MultipleChoice" in type(model).__name__ else (2, 5)
    ids = torch.zeros(shape, dtype=torch.long, device="meta")
    inputs: dict[str, Any] = {"input_ids": ids}
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    elif getattr(config, "add_cross_attention", False):
        inputs["encoder_hidden_states"] = torch.empty(2, 5, config.hidden_size, device="meta", dtype=model.dtype)
    return inputs


def _run(model: Any, inputs: dict[str, Any]) -> Any:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.config.use_cache = False
        return model(**inputs)


def _shapes(out: Any) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in tree_leaves(dict(out)) if isinstance(leaf, torch.Tensor)]


def _without_prefix(plan: Plan, prefix: str) -> Plan:
    if not prefix:
        return plan
    from dataclasses import replace

    cut = len(prefix) + 1
    return replace(
        plan,
        modules={path[cut:]: replace(rule, path=path[cut:]) for path, rule in plan.modules.items()},
        attributes=tuple(replace(a, path=a.path[cut:]) for a in plan.attributes),
    )
